"""The tables of docs/speed.md, put where the page has `<!-- NAME -->` ... `<!-- end -->`, from the newest results.

`python -m benchmarks.speed docs/speed.md`
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from benchmarks.harness import RESULTS, read
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


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(filled(page.read_text()))
