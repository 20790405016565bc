"""What may happen beside the steps: an interruption, a profiler trace, kept compilations."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import jax


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """A list that gets the signal's number when Ctrl-C or SIGTERM comes; a second one ends at once."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def catch(number: int, _: Any) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    before = {s: signal.signal(s, catch) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


class Profile:
    """A profiler trace over some steps; `steps` is empty, or the first and the last."""

    def __init__(self, folder: Path, steps: tuple[int, ...]):
        self.folder, self.steps, self.running = folder, steps, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def before(self, step: int) -> None:
        """Start with the first step."""
        if self.steps and self.steps[0] <= step <= self.steps[1] and not self.running:
            jax.profiler.start_trace(str(self.folder))
            self.running = True

    def after(self, step: int, results: Any) -> None:
        """Stop once the last step is through."""
        if self.running and step >= self.steps[1]:
            jax.block_until_ready(results)
            self.stop()

    def stop(self) -> None:
        """Write the trace, if one is running."""
        if self.running:
            jax.profiler.stop_trace()
            self.running = False
