"""What a check says: a row for every leaf, and a verdict over all of them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """The verdict on one leaf, on one layer of it where the law differs from layer to layer, or on the whole model."""

    path: str
    role: str
    law: str
    shape: tuple[int, ...]
    dtype: str
    layer: int | None
    n: int
    expected_std: float | None
    measured_std: float
    measured_mean: float
    max_abs: float
    z: float
    """Standard errors between measured and expected, of the test that is furthest off."""
    ok: bool
    reason: str = ""
    """Why it fails; in parentheses: a remark on a row that is ok."""
    formula: str = ""
    test: str = ""
    """The test that spoke: the one that fails, or the one that is furthest off."""

    @property
    def unsafe(self) -> bool:
        """Whether it is as the recipe says, and the recipe is better not used like this."""
        return self.ok and self.reason.startswith("(unsafe")

    def to_json(self) -> dict[str, Any]:
        """Plain data; numbers that are not finite become null."""
        plain = dataclasses.asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in plain.items()}


def whole(role: str, test: str, reason: str, *, ok: bool = False, z: float = math.inf, n: int = 0, **more: Any) -> Row:
    """A row on the model as a whole; `more` are fields of Row."""
    facts = {"law": test, "expected_std": None, "measured_std": 0.0} | more
    place = facts.pop("path", "(model)")
    return Row(place, role, facts.pop("law"), (), "", facts.pop("layer", None), n, facts.pop("expected_std"),
               facts.pop("measured_std"), 0.0, 0.0, z, ok, reason, facts.pop("formula", ""), test)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """All rows, the digest, and whether every row is ok."""

    rows: tuple[Row, ...]
    digest: str
    scheme: str
    threshold: float
    """Largest |z| that passes."""
    wall_seconds: float = field(default=0.0, compare=False)
    replayed: int = 0
    """Weights that were drawn again and compared bit for bit."""

    @property
    def ok(self) -> bool:
        """Whether every leaf holds what its law says."""
        return all(r.ok for r in self.rows)

    @property
    def bad(self) -> tuple[Row, ...]:
        """The rows that fail."""
        return tuple(r for r in self.rows if not r.ok)

    @property
    def unsafe(self) -> tuple[Row, ...]:
        """The rows that are as the recipe says, and carry a warning."""
        return tuple(r for r in self.rows if r.unsafe)

    def joined(self, rows: tuple[Row, ...]) -> Verdict:
        """The verdict with more rows."""
        return dataclasses.replace(self, rows=(*self.rows, *rows))

    def summary(self) -> str:
        """One line."""
        leaves = {r.path for r in self.rows if not r.path.startswith("(")}
        if self.ok:
            worst = max((abs(r.z) for r in self.rows if math.isfinite(r.z)), default=0.0)
            drawn = f"; {self.replayed} weights drawn again, all the same" if self.replayed else ""
            return f"{len(leaves)} leaves as {self.scheme} says; largest deviation {worst:.1f} standard errors{drawn}"
        bad = {r.path for r in self.bad}
        if not bad & leaves:
            return f"{len(leaves)} leaves, and {len(bad)} of the laws of {self.scheme} as a whole are broken"
        return f"{len(bad & leaves)} of {len(leaves)} leaves are not what {self.scheme} says"

    def table(self) -> str:
        """The rows that fail, a line each."""
        lines = [self.summary()]
        for r in self.bad:
            where = r.path if r.layer is None else f"{r.path}[layer {r.layer}]"
            expected = "?" if r.expected_std is None else f"{r.expected_std:.6g}"
            lines.append(
                f"  {where} ({r.role}, {r.law}): expected std {expected}, found {r.measured_std:.6g}, "
                f"z {r.z:+.1f}: {r.reason}"
            )
        return "\n".join(lines)
