"""What a compiled program moves between devices, read from its text."""

from __future__ import annotations

import math
import re
from collections import Counter

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
Moved = tuple[str, tuple[int, ...]]
"""A kind of collective and a shape, that of its result on each device."""


def moved(text: str) -> Counter[Moved]:
    """How often `compiled.as_text()` moves each shape; a collective of several arrays counts for each of them.

    Instructions are counted, not their runs: one inside the layers' scan runs once a layer.
    """
    found: Counter[Moved] = Counter()
    for line in text.splitlines():
        if match := re.search(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\(", line):
            for shape in re.findall(r"\w+\[([\d,]*)\]", match[1]):
                found[match[2], tuple(map(int, shape.split(","))) if shape else ()] += 1
    return found


def listed(found: Counter[Moved], least: int = 2) -> list[tuple[str, str, int]]:
    """(kind, shape, how often), the largest first, of those with at least so many entries."""
    largest = sorted(found.items(), key=lambda item: (-math.prod(item[0][1]), item[0]))
    return [(kind, " x ".join(map(str, shape)), n) for (kind, shape), n in largest if math.prod(shape) >= least]
