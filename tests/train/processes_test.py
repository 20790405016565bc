"""Runs of two real processes with four devices each, against one process with eight: digests, losses, checkpoints."""

import json
import shutil
import subprocess

import pytest

from deepinit.train.loop import train
from tests import launched

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def alone(home):
    """20 steps of one process."""
    assert train(launched.config(home, "alone")) == 0
    return home / "alone"


def same_run(folder, other):
    """The same start, the same losses to 1e-5, and each sample once."""
    digests = [json.loads((f / "init.json").read_text())["digest"] for f in (folder, other)]
    assert digests[0] == digests[1]
    assert list(launched.steps(folder)) == list(range(1, 21))
    assert launched.steps(folder) == pytest.approx(launched.steps(other), rel=1e-5)
    assert launched.samples(folder) == launched.samples(other)


# case B75: samples by step, whatever the number of processes
def test_what_two_began_one_ends(home, alone):
    status, said = launched.finish(launched.local(home, "two-one", "--train.stop-at 10"))
    assert status == 0, said
    assert said.splitlines()[-1] == f"run: {home / 'two-one'}"
    assert sorted(path.name for path in (home / "two-one/samples").iterdir()) == ["00000.jsonl", "00001.jsonl"]
    assert train(launched.config(home, "two-one")) == 0
    same_run(home / "two-one", alone)


def test_what_one_began_two_end(home, alone):
    assert train(launched.config(home, "one-two", "--train.stop-at 10")) == 0
    status, said = launched.finish(launched.local(home, "one-two"))
    assert status == 0, said
    assert "resumed after step 10" in said
    same_run(home / "one-two", alone)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (Debian: openmpi-bin)")
def test_open_mpi(home, alone):
    env = {**launched.environment(), "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [launched.ROOT / "scripts/launch_mpi.sh", "2", *launched.flags(home, "mpi")]
    got = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200)
    assert got.returncode == 0, got.stderr[-3000:]
    same_run(home / "mpi", alone)


@pytest.mark.skipif(bool(launched.why_no_slurm()), reason=launched.why_no_slurm() or "-")
def test_slurm(home, alone):
    with launched.slurm() as env:
        log = home / "slurm.out"
        command = ["sbatch", "--wait", "--ntasks", "2", "--output", str(log)]
        script = [str(launched.ROOT / "scripts/launch_slurm.sbatch"), *launched.flags(home, "slurm")]
        env = {**env, "DEEPINIT_ROOT": str(launched.ROOT)}
        got = subprocess.run([*command, *script], env=env, capture_output=True, text=True, timeout=1200)
        assert got.returncode == 0, got.stderr + log.read_text()[-3000:]
    same_run(home / "slurm", alone)


# case B50
def test_another_seed_on_one_process_stops_both_before_the_init(home):
    address = launched.address()
    for process in [launched.one_of_two(i, address, home, "seeds", "--train.seed", i) for i in (0, 1)]:
        status, said = launched.finish(process)
        assert status == 2
        assert "train.seed: process 0 has 0, process 1 on" in said
    assert not (home / "seeds").exists()


# case B79
def test_a_process_that_does_not_come_is_named_in_time(home):
    alone = launched.one_of_two(0, launched.address(), home, "absent", "--start-timeout", 20)
    status, said = launched.finish(alone)
    assert status == 75
    assert "process 1 of 2 did not come" in said
    assert "within 20 s" in said
