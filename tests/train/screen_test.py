"""What is shown, on a terminal and without one."""

import io

import pytest
from rich.console import Console

from deepinit.train.screen import ASCII_BARS, BARS, Screen, clock, si, sparkline

ROW = {"step": 3, "loss": 5.25, "lr": 1e-3, "tokens_per_s": 2048.0, "step_s": 0.5}


def shown(terminal, act, encoding="utf-8"):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    screen = Screen(10, 1e6, Console(file=file, force_terminal=terminal, width=300, highlight=False))
    with screen:
        act(screen)
    file.flush()
    return raw.getvalue().decode(encoding)


def everything(screen):
    screen.header("a run", {"model": "[small]", "stream": screen.stream([0.5, 1.0])})
    screen.start(2)
    screen.step(ROW)
    screen.evaluated(3, 5.5)
    screen.say("run: runs/x")


def test_plain_lines_without_a_terminal():
    lines = shown(False, everything).splitlines()
    assert lines == [
        "a run",
        "  model    [small]",
        "  stream   ▅█  variance by layer, 0.5 to 1",
        "step 3/10  loss 5.2500  2.05 ktokens/s  2.05 GFLOP/s  lr 1.00e-03  left 0:04",
        "step 3/10  held-out loss 5.5000",
        "run: runs/x",
    ]


def test_a_bar_on_a_terminal():
    text = shown(True, everything)
    assert "\x1b[" in text
    for part in ("a run", "[small]", "3/10", "loss 5.2500", "2.05 GFLOP/s", "held-out loss 5.5000"):
        assert part in text


def test_no_bars_that_the_terminal_cannot_show():
    text = shown(False, everything, encoding="ascii")
    assert f"{ASCII_BARS[4]}{ASCII_BARS[-1]}  variance" in text


def test_long_lines_stay_whole():
    path = "run: " + "x" * 500
    assert path in shown(False, lambda s: s.say(path)).splitlines()


def test_sparkline():
    assert sparkline([1, 8]) == BARS[1] + BARS[7]
    assert sparkline([0.0, 0.0]) == BARS[0] * 2
    assert len(sparkline(range(1000), width=40)) == 40
    assert sparkline([]) == ""


@pytest.mark.parametrize(("number", "text"), [(870_400, "870 k"), (1.5e9, "1.5 G"), (12, "12"), (3.2e13, "32 T")])
def test_si(number, text):
    assert si(number).strip() == text


@pytest.mark.parametrize(("seconds", "text"), [(4.2, "0:04"), (75, "1:15"), (3700, "1:01:40")])
def test_clock(seconds, text):
    assert clock(seconds) == text
