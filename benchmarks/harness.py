"""Rivals in turn, A B C A B C ..., in one process: a machine whose speed drifts slows them all alike.

Process CPU-seconds (all threads) are the measure; wall seconds stand beside them. Ratios are taken round by round.
"""

from __future__ import annotations

import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any


@dataclass
class Race:
    """Cases by name, each a function that does all of its work before it returns; `work` is what one call gets done."""

    title: str
    unit: str
    work: float
    cases: dict[str, Callable[[], Any]]
    cpu: dict[str, list[float]] = field(default_factory=dict)
    wall: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def run(self, rounds: int) -> Race:
        """One round to warm up, then the rounds that count."""
        for i in range(rounds + 1):
            for name, case in self.cases.items():
                gc.collect()
                cpu, wall = time.process_time(), time.perf_counter()
                case()
                cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
                if i:
                    self.cpu.setdefault(name, []).append(cpu)
                    self.wall.setdefault(name, []).append(wall)
        return self

    def ratio(self, slow: str, fast: str) -> float:
        """How many times the CPU-seconds of `fast` does `slow` take: the median over the rounds."""
        return statistics.median(a / b for a, b in zip(self.cpu[slow], self.cpu[fast]))

    def table(self) -> str:
        """A line a case: work per CPU-second and per wall second, the spread, and the ratio to the first case."""
        first = next(iter(self.cases))
        head = f"{'':34}{self.unit + '/cpu-s':>18}{'min .. max':>20}{'per wall s':>12}{'cpu / first':>13}"
        lines = [self.title, head]
        for name in self.cases:
            rates = sorted(self.work / s for s in self.cpu[name])
            spread = f"{rates[0]:.4g} .. {rates[-1]:.4g}"
            wall = self.work / statistics.median(self.wall[name])
            middle = statistics.median(rates)
            lines.append(f"{name:34}{middle:18.4g}{spread:>20}{wall:12.4g}{self.ratio(name, first):13.3g}")
        return "\n".join([*lines, *self.notes])

    def write(self, path: str) -> None:
        """Every figure, and on what it was taken."""
        libraries = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")}
        record = {
            "title": self.title,
            "unit": self.unit,
            "work": self.work,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "libraries": libraries,
            "cpu_seconds": self.cpu,
            "wall_seconds": self.wall,
            "notes": self.notes,
        }
        Path(path).write_text(json.dumps(record, indent=1) + "\n")
