"""Two runs of the benchmarks on one machine side by side: what has become slower or larger is marked."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Race, aligned, read

SLOWER = 1.1
"""Factor from which on a cost has grown, if its rounds do not overlap either."""
IGNORED = ("wall_s",)
"""Measures that say more of what else ran on the machine."""


def main(old: str, new: str) -> int:
    """Print the ratios; the exit status: 1 where a cost has grown or a target is met no more."""
    rows = [row for name, before, after in pairs(Path(old), Path(new)) for row in changes(name, before, after)]
    if not rows:
        raise SystemExit(f"{old} and {new} have no benchmark in common")
    print(aligned([["", "measure", "before", "after", "after / before", ""], *rows]))
    return int(any(row[-1] for row in rows if row[-1] != "less"))


def pairs(old: Path, new: Path) -> Iterator[tuple[str, Race, Race]]:
    """The benchmarks of which there are figures in both."""
    if old.is_file() != new.is_file():
        raise SystemExit("two files, or two folders")
    names = (
        [""] if old.is_file() else sorted({p.name for p in old.glob("*.json")} & {p.name for p in new.glob("*.json")})
    )
    for name in names:
        yield Path(name).stem or old.stem, read(old / name)[0], read(new / name)[0]


def changes(name: str, before: Race, after: Race) -> Iterator[list[str]]:
    """A row for each cost of each case, and for targets that have been met and are not."""
    for case in [c for c in before.samples if c in after.samples]:
        for measure, olds in before.samples[case].items():
            news = after.samples[case].get(measure)
            if not news or measure in IGNORED:
                continue
            a, b = statistics.median(olds), statistics.median(news)
            ratio = b / a if a else (1.0 if not b else float("inf"))
            apart = min(news) > max(olds) if ratio > 1 else max(news) < min(olds)
            mark = "REGRESSION" if ratio > SLOWER and apart else "less" if ratio < 1 / SLOWER and apart else ""
            yield [f"{name}: {case}", measure, f"{a:.4g}", f"{b:.4g}", f"{ratio:.3f}", mark]
    held = {t.claim for t in before.targets if t.met}
    for t in after.targets:
        if t.claim in held and not t.met:
            yield [f"{name}: {t.claim}", "target", "met", f"{t.seen:.4g}", "", "REGRESSION"]
