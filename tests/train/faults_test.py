"""Faults of numbers and disks in a run of one process: it stops, keeps what was good, and goes on bit for bit."""

import os
import sys

import pytest

from deepinit.train.checkpoint import Checkpoints
from deepinit.train.data import Stream
from deepinit.train.loop import train
from tests import launched

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def undisturbed(home):
    assert train(launched.config(home, "undisturbed")) == 0
    return launched.steps(home / "undisturbed")


def test_gradients_that_are_nan_for_three_steps(home, undisturbed, monkeypatch, capsys):
    real = Stream.rows

    def rows(self, step, rows):
        batch = real(self, step, rows)
        if self.limit is None and 8 <= step < 11:
            batch["weights"][0, :2] = 3e38, -3e38  # their losses overflow, to either side
        return batch

    monkeypatch.setattr(Stream, "rows", rows)
    assert train(launched.config(home, "nan", "--train.max-bad-steps 3")) == 1
    assert "3 steps in a row were not finite; the checkpoint of step 5 is kept" in capsys.readouterr().out
    assert Checkpoints(home / "nan/checkpoints").latest == 5
    monkeypatch.undo()
    assert train(launched.config(home, "nan", "--train.max-bad-steps 3")) == 0
    assert launched.steps(home / "nan") == undisturbed


def start(home, run, code):
    """The command in a process of its own, begun with `code`; (exit status, what it said)."""
    main = "import sys; from deepinit.cli import main; sys.exit(main(sys.argv[1:]))"
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []  # rights of root
    command = [*drop, sys.executable, "-c", code + main, "train", *launched.flags(home, run)]
    return launched.finish(launched.start(command, devices=8))


# case B74
def test_a_full_disk(home, undisturbed):
    """No file may grow beyond 8 kB, as where the disk is full."""
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, resource.RLIM_INFINITY)); "
    status, said = start(home, "full", code)
    assert status == 1, said
    assert "could not be written" in said
    assert Checkpoints(home / "full/checkpoints").latest is None
    assert max(launched.steps(home / "full")) < 20
    assert train(launched.config(home, "full")) == 0
    assert launched.steps(home / "full") == undisturbed


CLOSED = """
import os
from deepinit.train.checkpoint import Checkpoints
save = Checkpoints.save
def closed(self, step, *what):
    if step == 10:
        self.wait()
        os.chmod(self.folder, 0o500)
    save(self, step, *what)
Checkpoints.save = closed
"""


# case B74
def test_a_folder_becomes_read_only(home, undisturbed):
    folder = home / "closed/checkpoints"
    status, said = start(home, "closed", CLOSED)
    folder.chmod(0o700)
    assert status == 1, said
    assert "could not be written: PermissionError" in said
    assert Checkpoints(folder).latest == 5
    assert train(launched.config(home, "closed")) == 0
    assert launched.steps(home / "closed") == undisturbed
