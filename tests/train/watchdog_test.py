"""A process that stands still ends itself and says where it stood."""

import subprocess
import sys

HANG = """
import time
from deepinit.train.watchdog import Watchdog

def waits_for_a_collective():
    time.sleep(600)

with Watchdog(1.0, "process 1 of 2") as dog:
    for i in range(4):
        dog.beat(f"step {i}")
        time.sleep(0.4)
    waits_for_a_collective()
"""
MOVES = """
import time
from deepinit.train.watchdog import Watchdog
with Watchdog(0.5, "it") as dog:
    for i in range(20):
        dog.beat("step")
        time.sleep(0.1)
time.sleep(1)
print("done")
"""


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


# case B79
def test_a_stuck_process_ends_with_its_stack():
    got = run(HANG)
    assert got.returncode == 75
    assert "process 1 of 2 on " in got.stderr
    assert "has not moved for 1 s since step 3" in got.stderr
    assert "in waits_for_a_collective" in got.stderr


def test_a_moving_one_is_left_alone():
    got = run(MOVES)
    assert (got.returncode, got.stdout) == (0, "done\n")
