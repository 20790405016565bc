"""Faults on purpose: after each, the same command goes on and ends as an undisturbed run does: docs/fault_drills.md."""

import os
import signal
import time

import pytest

from deepinit.train import metrics
from deepinit.train.checkpoint import Checkpoints
from tests import launched

pytestmark = pytest.mark.slow
# one device each; wider than the shared model, so that a step takes long enough to be struck
MORE = "--mesh.data 1 --mesh.fsdp 2 --model.d-model 64 --data.seq-len 64"


def local(home, run, more=MORE, launch=""):
    return launched.local(home, run, more, launch, devices=1)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("drills")


@pytest.fixture(scope="module")
def undisturbed(home):
    status, said = launched.finish(local(home, "undisturbed", MORE))
    assert status == 0, said
    return home / "undisturbed"


def ended_alike(folder, undisturbed):
    """To the last bit: the number of processes was the same."""
    assert launched.steps(folder) == launched.steps(undisturbed)
    assert launched.samples(folder) == launched.samples(undisturbed)
    last = [metrics.read(f / "metrics.jsonl")[-1]["eval_loss"] for f in (folder, undisturbed)]
    assert last[0] == last[1]


def test_one_of_two_killed_at_a_step(home, undisturbed):
    """The launcher notices, starts both again, and the run goes on by itself."""
    run = local(home, "killed", MORE, launch="--retries 1")
    launched.wait_for(run, home / "killed", 7)
    os.kill(launched.children(run)[1], signal.SIGKILL)
    status, said = launched.finish(run)
    assert status == 0, said
    assert "start 2 of 2" in said
    assert "resumed after step" in said
    ended_alike(home / "killed", undisturbed)


# case B74
def test_killed_while_a_checkpoint_is_written(home, undisturbed):
    folder = home / "saving"
    run = local(home, "saving", MORE)
    deadline = time.monotonic() + 1200
    while (
        not list((folder / "checkpoints").glob("5.orbax-checkpoint-tmp*")) and not (folder / "checkpoints/5").exists()
    ):
        assert run.poll() is None, launched.finish(run)
        assert time.monotonic() < deadline
        time.sleep(0.001)
    for pid in launched.children(run):
        os.kill(pid, signal.SIGKILL)
    assert launched.finish(run)[0] == 128 + signal.SIGKILL
    status, said = launched.finish(local(home, "saving", MORE))
    assert status == 0, said
    ended_alike(folder, undisturbed)


def test_a_truncated_newest_checkpoint(home, undisturbed):
    folder = home / "truncated"
    status, said = launched.finish(local(home, "truncated", f"{MORE} --train.stop-at 12"))
    assert status == 0, said
    largest = max((f for f in (folder / "checkpoints/12").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    status, said = launched.finish(local(home, "truncated", MORE))
    assert status == 0, said
    assert "checkpoints/12 is damaged" in said
    assert "going on from step 10" in said
    ended_alike(folder, undisturbed)


# case B74
def test_sigterm_to_one_of_two_stops_both_with_a_checkpoint(home, undisturbed):
    folder = home / "preempted"
    run = local(home, "preempted", MORE)
    launched.wait_for(run, folder, 6)
    os.kill(launched.children(run)[1], signal.SIGTERM)
    status, said = launched.finish(run)
    assert status == 75, said
    assert "saved after step" in said
    stopped = max(launched.steps(folder))
    assert Checkpoints(folder / "checkpoints").latest == stopped
    status, said = launched.finish(local(home, "preempted", MORE))
    assert status == 0, said
    assert f"resumed after step {stopped}" in said
    ended_alike(folder, undisturbed)


# case B79
def test_one_process_stands_still(home, undisturbed, monkeypatch):
    """One is stopped like a machine that hangs: the other waits in a collective, says so, ends; both start again."""
    folder = home / "stuck"
    monkeypatch.setenv("GRACE", "2")  # seconds until the launcher ends those that remain
    run = local(home, "stuck", f"{MORE} --stuck-timeout 40", launch="--retries 3")
    launched.wait_for(run, folder, 6)
    os.kill(launched.children(run)[1], signal.SIGSTOP)
    status, said = launched.finish(run)
    assert status == 0, said
    assert "process 0 of 2 on " in said
    assert "has not moved for 40 s since step" in said
    assert 'File "' in said
    assert "ended with status 75; start" in said
    ended_alike(folder, undisturbed)


def test_one_process_starts_late(home, undisturbed):
    address, both = launched.address(), []
    for i in (0, 1):
        both.append(launched.one_of_two(i, address, home, "late", *MORE.split(), devices=1))
        time.sleep(10)
    for process in both:
        status, said = launched.finish(process)
        assert status == 0, said
    ended_alike(home / "late", undisturbed)


# case B79
def test_the_coordinator_is_absent(home):
    alone = launched.one_of_two(1, launched.address(), home, "absent", "--start-timeout", 5)
    status, said = launched.finish(alone)
    assert status == 75
    assert "process 0 of 2 was not at 127.0.0.1" in said
