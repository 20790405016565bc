"""Faults of numbers and disks in a run of one process: it stops, keeps what was good, and goes on bit for bit."""

import subprocess
import sys

import numpy as np
import pytest

from deepinit.train.checkpoint import Checkpoints
from deepinit.train.data import Stream
from deepinit.train.loop import train
from tests import launched

pytestmark = pytest.mark.slow
LIMITED = """
import resource, sys
from deepinit.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, resource.RLIM_INFINITY))
sys.exit(main(sys.argv[1:]))
"""


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
            batch["weights"] = np.full_like(batch["weights"], np.nan)
        return batch

    monkeypatch.setattr(Stream, "rows", rows)
    assert train(launched.config(home, "nan", "--train.max-bad-steps 3")) == 1
    assert "3 steps in a row were not finite; the checkpoint of step 5 is kept" in capsys.readouterr().out
    assert Checkpoints(home / "nan/checkpoints").latest == 5
    monkeypatch.undo()
    assert train(launched.config(home, "nan", "--train.max-bad-steps 3")) == 0
    assert launched.steps(home / "nan") == undisturbed


# case B74
def test_a_full_disk(home, undisturbed):
    """No file may grow beyond 8 kB, as where the disk is full."""
    command = [sys.executable, "-c", LIMITED, "train", *launched.flags(home, "full", "--model.d-model 128")]
    env = launched.environment(devices=8)
    got = subprocess.run(command, capture_output=True, text=True, env=env, timeout=420, cwd=launched.ROOT)
    assert got.returncode == 1, got.stderr[-2000:]
    assert "could not be written" in got.stdout
    assert Checkpoints(home / "full/checkpoints").latest is None
    assert max(launched.steps(home / "full")) < 20
    assert train(launched.config(home, "full", "--model.d-model 128")) == 0
    assert list(launched.steps(home / "full")) == list(range(1, 21))
