"""Ends a process that stands still, with a stack of where it stands: a job that hangs is worse than one that failed."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Self

RETRY = 75
"""EX_TEMPFAIL of sysexits.h, the exit status of what a launcher may start again: a saved interruption, a lost peer, a
process that stood still or did not come."""

Beat = Callable[[str], None]


class Watchdog:
    """A thread that ends the process if nobody calls `beat` for `limit` seconds; 0: never."""

    def __init__(self, limit: float, who: str):
        self.limit, self.who = limit, who
        self.where, self.last = "start", time.monotonic()
        self.over = threading.Event()

    def __enter__(self) -> Self:
        if self.limit:
            self.beat(self.where)
            threading.Thread(target=self.watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.over.set()

    def beat(self, where: str) -> None:
        """The process moves: it has come to `where`."""
        self.where, self.last = where, time.monotonic()

    def watch(self) -> None:
        """Sleep until the limit is over, again and again."""
        while not self.over.wait(max(self.last + self.limit - time.monotonic(), 0.01)):
            if time.monotonic() - self.last >= self.limit:
                self.bite()

    def bite(self) -> None:
        """Say where every thread stands, and end the process: a collective that hangs cannot be interrupted."""
        say(
            f"{self.who} on {socket.gethostname()} has not moved for {self.limit:g} s since {self.where}; it stands at:"
        )
        faulthandler.dump_traceback(all_threads=True)
        leave(RETRY)


def say(text: str) -> None:
    """A line on stderr, at once."""
    print(f"deepinit: {text}", file=sys.stderr, flush=True)


def leave(status: int) -> NoReturn:
    """End now, without the goodbyes that would wait for other processes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
