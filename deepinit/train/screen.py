"""What a run shows: a header, a progress bar, lines for evaluations. Without a terminal, plain lines."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
PLAIN_EVERY = 5.0  # seconds between lines without a terminal


def si(number: float, unit: str = "") -> str:
    """Three digits and a prefix: 1234567 -> 1.23 M."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= factor:
            return f"{number / factor:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def clock(seconds: float) -> str:
    """Seconds as people read them: 75 -> 1:15."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def sparkline(values: Sequence[float], width: int = 40, bars: str = BARS) -> str:
    """A bar for each value, linear from 0 to the largest; of more than `width` values, evenly spaced ones."""
    n = len(values)
    if n > width:
        values = [values[round(i * (n - 1) / (width - 1))] for i in range(width)]
    top = max(values, default=0) or 1
    return "".join(bars[min(len(bars) - 1, max(0, int(v / top * len(bars))))] for v in values)


class Screen:
    """Shows a run of `total` steps, and says things above its progress bar."""

    def __init__(self, total: int, flops_per_token: float, console: Console | None = None):
        self.console = console or Console(highlight=False, emoji=False, markup=False)
        self.total, self.flops_per_token = total, flops_per_token
        self.unicode = self.console.encoding.lower().startswith("utf")
        self.shown = 0.0
        self.progress: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def say(self, text: str) -> None:
        """A line, as it stands."""
        if not self.unicode:
            text = text.encode("ascii", "replace").decode()
        self.console.print(Text(text), soft_wrap=True)

    def header(self, title: str, facts: Mapping[str, str]) -> None:
        """What is being run, a line for each fact."""
        if not self.console.is_terminal:
            self.say(title)
            for name, fact in facts.items():
                self.say(f"  {name:9}{fact}")
            return
        grid = Table.grid(padding=(0, 2))
        for name, fact in facts.items():
            grid.add_row(Text(name, style="bold"), Text(fact))
        self.console.print(Panel(grid, title=Text(title, style="bold"), title_align="left", border_style="cyan"))

    def stream(self, variance: Sequence[float]) -> str:
        """The variance of the residual stream by layer: bars, and the two ends."""
        bars = sparkline(variance, bars=BARS if self.unicode else ASCII_BARS)
        return f"{bars}  variance by layer, {variance[0]:.3g} to {variance[-1]:.3g}"

    def start(self, step: int) -> None:
        """Show the bar from this step on."""
        if self.console.is_terminal:
            self.progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.progress.start()
            self.task = self.progress.add_task("", total=self.total, completed=step, facts="compiling")

    def step(self, row: Mapping[str, Any]) -> None:
        """The metrics of a step."""
        speed = row.get("tokens_per_s") or 0.0
        facts = f"loss {row['loss']:.4f}  {si(speed, 'tokens/s')}  {si(speed * self.flops_per_token, 'FLOP/s')}"
        if self.progress:
            self.progress.update(self.task, completed=row["step"], facts=facts)
        elif row["step"] == self.total or time.monotonic() - self.shown > PLAIN_EVERY:
            self.shown = time.monotonic()
            left = (self.total - row["step"]) * row["step_s"]
            self.say(f"step {row['step']}/{self.total}  {facts}  lr {row['lr']:.2e}  left {clock(left)}")

    def evaluated(self, step: int, loss: float) -> None:
        """The loss on held-out text."""
        self.say(f"step {step}/{self.total}  held-out loss {loss:.4f}")

    def stop(self) -> None:
        """Leave the bar as it stands."""
        if self.progress:
            self.progress.stop()
            self.progress = None
