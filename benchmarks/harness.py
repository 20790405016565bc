"""Rivals in turn, A B C A B C ..., in one process tree: a machine whose speed drifts slows them all alike.

Process CPU-seconds (all threads) are the measure; wall seconds stand beside them. Ratios are taken round by round.
Whatever else is measured is a cost too: bytes, compile seconds, temporaries; less is better.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]


class Costs(dict[str, float]):
    """What a case measured itself, by name; it stands beside or instead of the times taken around the call."""


@dataclass
class Target:
    """What a figure should be."""

    claim: str
    seen: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool:
        """Whether the figure is within its bound."""
        return (self.at_least is None or self.seen >= self.at_least) and (
            self.at_most is None or self.seen <= self.at_most
        )

    @property
    def row(self) -> tuple[str, str, str, str]:
        """Claim, bound, figure, verdict."""
        bound = f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"
        return self.claim, bound, f"{self.seen:.3g}", "met" if self.met else "**not met**"


@dataclass
class Race:
    """Cases by name, each a function that does all of its work before it returns; `work` is what one call gets done.

    A case may return `Costs`.
    """

    title: str
    unit: str
    work: float
    cases: dict[str, Callable[[], Any]]
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Case -> measure -> one value a round."""
    also: dict[str, float] = field(default_factory=dict)
    """The work in other units."""
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    """Load average before and after."""

    def run(self, rounds: int, warm: int = 1) -> Race:
        """Some rounds to warm up, then the rounds that count."""
        self.load.append(os.getloadavg()[0])
        for i in range(rounds + warm):
            for name, case in self.cases.items():
                gc.collect()
                cost = costs(case)
                if i >= warm:
                    self.add(name, cost)
        self.load.append(os.getloadavg()[0])
        return self

    def add(self, name: str, cost: Mapping[str, float]) -> None:
        """Keep the costs of one call."""
        for measure, value in cost.items():
            self.samples.setdefault(name, {}).setdefault(measure, []).append(value)

    def median(self, name: str, measure: str = "cpu_s") -> float:
        """Of a case, over the rounds."""
        return statistics.median(self.samples[name][measure])

    def ratio(self, slow: str, fast: str, measure: str = "cpu_s") -> float:
        """How many times the cost of `fast` does `slow` have: the median over the rounds."""
        pairs = zip(self.samples[slow][measure], self.samples[fast][measure])
        return statistics.median(a / b for a, b in pairs)

    def target(self, claim: str, seen: float, **bound: float) -> None:
        """Say what a figure should be: `at_least` or `at_most`."""
        self.targets.append(Target(claim, seen, **bound))

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Columns and a line for each case: work by CPU-second with its spread and by wall second; other costs."""
        measures = list(dict.fromkeys(m for costs in self.samples.values() for m in costs))
        first = next(iter(self.samples))
        columns = [""]
        if self.work:
            columns += [f"{self.unit} / CPU-s", "min .. max", *(f"{unit} / CPU-s" for unit in self.also)]
            columns += [f"{self.unit} / s wall", "CPU-s / first"]
            measures = [m for m in measures if m not in ("cpu_s", "wall_s")]
        columns += [m.replace("_", " ") for m in measures]
        lines = []
        for name, kept in self.samples.items():
            line = [name]
            if self.work and "cpu_s" in kept:
                rates = sorted(self.work / s for s in kept["cpu_s"])
                line += [f"{statistics.median(rates):.4g}", f"{rates[0]:.4g} .. {rates[-1]:.4g}"]
                line += [f"{work / self.median(name):.4g}" for work in self.also.values()]
                line += [f"{self.work / self.median(name, 'wall_s'):.4g}", f"{self.ratio(name, first):.3g}"]
            elif self.work:
                line += [""] * (4 + len(self.also))
            line += [f"{self.median(name, m):.3g}" if m in kept else "" for m in measures]
            lines.append(line)
        return columns, lines

    def table(self) -> str:
        """Everything, for a terminal."""
        columns, lines = self.rows()
        parts = [self.title, aligned([columns, *lines])]
        if self.targets:
            parts.append(aligned([["target", "bound", "seen", ""], *(list(t.row) for t in self.targets)]))
        return "\n".join([*parts, *self.notes])

    def write(self, path: str | Path) -> None:
        """Every figure, and on what it was taken."""
        record = {
            "title": self.title,
            "unit": self.unit,
            "work": self.work,
            "also": self.also,
            "date": datetime.date.today().isoformat(),
            "python": platform.python_version(),
            "machine": machine(),
            "load": self.load,
            "libraries": {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")},
            "samples": {
                name: {m: [float(f"{v:.6g}") for v in values] for m, values in kept.items()}
                for name, kept in self.samples.items()
            },
            "targets": [vars(t) | {"seen": float(f"{t.seen:.6g}")} for t in self.targets],
            "notes": self.notes,
        }
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(record, indent=1) + "\n")


def read(path: str | Path) -> tuple[Race, dict[str, Any]]:
    """A race that was written, and the whole record."""
    r = json.loads(Path(path).read_text())
    targets = [Target(**t) for t in r["targets"]]
    return Race(r["title"], r["unit"], r["work"], {}, r["samples"], r["also"], targets, r["notes"], r["load"]), r


def aligned(rows: list[list[str]]) -> str:
    """Columns under one another, the first to the left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        for row in rows
    )


def costs(case: Callable[[], Any]) -> Mapping[str, float]:
    """CPU and wall seconds of a call, and what it says itself."""
    cpu, wall = time.process_time(), time.perf_counter()
    own = case()
    taken = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
    if not isinstance(own, Costs):
        return taken
    return own if "cpu_s" in own else taken | own


def machine() -> str:
    """The processor and what there is of it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), platform.machine())
    except OSError:
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


# --- processes of their own --------------------------------------------------------------------------------------


def peak_bytes() -> int:
    """Most memory that this process has held (ru_maxrss would keep that of its parent)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def forget_peak() -> int:
    """From here on, the peak is that of what follows; the bytes held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def child(*arguments: str, python: str = sys.executable, env: Mapping[str, str] | None = None) -> Any:
    """The JSON in the last line of what `python ...` prints."""
    done = subprocess.run(
        [python, *arguments], cwd=ROOT, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


class Rival:
    """Cases in one process of their own, perhaps of another Python, which waits while the others run."""

    def __init__(
        self, module: str, *arguments: str, python: str = sys.executable, env: Mapping[str, str] | None = None
    ):
        """`module` ends in `serve(cases)`."""
        self.process = subprocess.Popen(
            [python, "-m", module, *arguments],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.cases = {name: self.case(name) for name in self.answer()}

    def case(self, name: str) -> Callable[[], Costs]:
        """A case of a race."""

        def ask() -> Costs:
            assert self.process.stdin
            self.process.stdin.write(name + "\n")
            self.process.stdin.flush()
            return Costs(self.answer())

        return ask

    def answer(self) -> Any:
        """The next line of the process."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(map(str, self.process.args))}: ended with {self.process.wait()}")  # type: ignore[arg-type]
        return json.loads(line)


def serve(cases: Mapping[str, Callable[[], Any]]) -> None:
    """Say what there is, then run what is asked for, until there is nothing more."""
    print(json.dumps(list(cases)), flush=True)
    for line in sys.stdin:
        gc.collect()
        print(json.dumps(costs(cases[line.strip()])), flush=True)
