"""An audit, and the comparison of two trees, on one screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from deepinit.audits import Audit
from deepinit.report.tables import number, table


def show(out: Console, a: Audit, where: str) -> None:
    """Which scheme, which leaves do not fit it, what is unsafe."""
    g = a.geometry
    out.print(Text(f"{where}", style="bold"))
    out.print(
        f"  {len({r.path for r in a.rows})} leaves read as {a.table}; {g.num_layers} layers, d_model {g.d_model}, "
        f"{g.num_heads} heads of {g.head_dim}, {g.mlp if g.gated else 'plain MLP'} {g.d_ff}, vocabulary {g.vocab_size}"
    )
    for assumed in a.assumed:
        out.print(f"  assumed: {assumed}")
    best = a.best[0]
    if not a.initial:
        out.print(Text("this is not an initial state", style="bold"))
        for sign in a.moved:
            out.print(f"  {sign}")
    out.print(f"scheme: {best.name}" + ("" if a.initial else " (nearest)") + f"  [{best.recipe.source}]")
    if len(a.best) > 1:
        out.print("  not to be told by weights from: " + ", ".join(f.name for f in a.best[1:]))
    for conflict in best.conflicts:
        out.print(f"  but that scheme has {conflict}")
    if a.runner_up:
        margin = best.score - a.runner_up.score
        out.print(f"  runner-up: {a.runner_up.name}, by {margin:.4g} nats; {a.difference}")
    misfits = a.misfits
    out.print(f"leaves that do not fit: {len({r.path for r in misfits}) or 'none'}")
    if misfits:
        rows = [
            (r.path if r.layer is None else f"{r.path}[{r.layer}]", r.role, number(r.expected_std),
             f"{r.measured_std:.6g}", f"{r.z:+.1f}", r.test, r.reason)
            for r in misfits[:20]
        ]  # fmt: skip
        out.print(table(("leaf", "role", "std by law", "std found", "z", "test", "why"), rows, right=("z",)))
        if len(misfits) > 20:
            out.print(f"  and {len(misfits) - 20} more (--json lists all)")
    out.print(f"unsafe: {'nothing found' if not a.unsafe else ''}")
    for danger in a.unsafe[:20]:
        out.print(f"  {danger}")
    out.print(f"digest {a.digest}")


def compare(out: Console, rows: Sequence[dict[str, Any]], facts: Sequence[str]) -> None:
    """Two trees, leaf by leaf: what differs."""
    for fact in facts:
        out.print(fact)
    differing = [r for r in rows if not r["same"]]
    if differing:
        shown = [
            (r["path"], r["difference"], number(r["std"][0]), number(r["std"][1])) for r in differing[:30]
        ]  # fmt: skip
        out.print(table(("leaf", "difference", "std here", "std there"), shown, right=("std here", "std there")))
    out.print(f"{len(rows) - len(differing)} of {len(rows)} leaves are the same bits")
