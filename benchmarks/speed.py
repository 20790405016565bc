"""The tables of docs/speed.md, put where the page has `<!-- NAME -->` ... `<!-- end -->`, from the newest results.

`python -m benchmarks.speed docs/speed.md`
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.harness import RESULTS, Race, read
from deepinit.report import plots
from deepinit.report.pages import table


def newest() -> dict[str, Path]:
    """Benchmark -> its newest record."""
    return {path.stem: path for path in sorted(RESULTS.glob("????-??-??/*.json"))}


def block(path: Path) -> str:
    """The tables of one benchmark."""
    race, record = read(path)
    columns, lines = race.rows()
    rounds = max(len(v) for kept in race.samples.values() for v in kept.values())
    libraries = ", ".join(f"{k} {v}" for k, v in record["libraries"].items())
    parts = [
        f"{race.title}: median of {rounds} interleaved rounds. {record['machine']}, load average "
        f"{' to '.join(f'{x:.1f}' for x in race.load)}; Python {record['python']}, {libraries}; {record['date']}.",
        table(columns, lines),
    ]
    if race.targets:
        parts.append(table(("target", "bound", "seen", ""), [t.row for t in race.targets]))
    return "\n\n".join([*parts, *(["\n".join(race.notes)] if race.notes else [])])


def filled(page: str) -> str:
    """The page with its tables as the results have them."""
    found = newest()

    def put(match: re.Match[str]) -> str:
        name = match[1]
        inside = block(found[name]) if name in found else "Not measured yet."
        return f"<!-- {name} -->\n{inside}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", put, page, flags=re.DOTALL)


def picture(race: Race, path: Path) -> None:
    """Where the time of a step goes: matrix products, and the rest beside them."""
    names = list(race.samples)
    products, rest = (np.array([race.median(n, m) for n in names]) for m in ("products_ms", "rest_ms"))
    with plt.rc_context(plots.STYLE):
        figure, ax = plt.subplots(figsize=(7.5, 0.42 * len(names) + 1.1), layout="constrained")
        ax.barh(names, products, color=plots.COLORS[0], label="matrix products")
        ax.barh(names, rest, left=products, color=plots.COLORS[5], label="all else")
        ax.invert_yaxis()
        ax.set(
            xlabel="ms of one core", title=f"A step of 6 layers, d 384, 2048 tokens: {(products + rest).sum():.0f} ms"
        )
        ax.legend(frameon=False)
        figure.savefig(path, dpi=110)
        plt.close(figure)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(filled(page.read_text()))
    if "profile" in newest():
        picture(read(newest()["profile"])[0], page.parent / "images" / "step.png")
