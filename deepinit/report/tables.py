"""Tables of schemes, recipes and verdicts for the terminal, made from the data so that they cannot drift."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepinit import laws
from deepinit.geometry import VECTORS, Geometry
from deepinit.recipe import Recipe, Update
from deepinit.schemes.registry import Scheme, recipe

if TYPE_CHECKING:
    from deepinit.invariants import Row, Verdict

# GPT-2 124M: where a scheme is shown without a model, its formula is shown at this size.
EXAMPLE = Geometry(12, 768, 12, 3072, 50257, mlp="gelu")


def console(**options: Any) -> Console:
    """Where tables go: no markup, no emoji, and whole lines where the output is not a terminal."""
    made = Console(highlight=False, markup=False, emoji=False, **options)
    if not made.is_terminal:
        made = Console(highlight=False, markup=False, emoji=False, width=160, **options)
    return made


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Sequence[str] = (),
    title: str = "",
    whole: Sequence[str] = (),
) -> Table:
    """A table without vertical lines; columns in `right` are aligned to the right, those in `whole` never folded."""
    made = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
    for name in columns:
        kept = name in (columns[0], *whole)
        made.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=kept)
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def number(value: laws.Numbers | None, digits: int = 6) -> str:
    """A number, or the ends of one per layer; a dash for none."""
    if value is None:
        return "-"
    if isinstance(value, tuple) and len(set(value)) == 1:
        value = value[0]
    if isinstance(value, tuple):
        return f"{value[0]:.{digits}g} .. {value[-1]:.{digits}g}"
    return "none" if value == float("inf") else f"{value:.{digits}g}"


def plain(value: Any) -> Any:
    """A default as JSON has it; null where there is none."""
    return value if isinstance(value, int | float | str | bool) else None


def scheme_facts(scheme: Scheme) -> dict[str, Any]:
    """What `schemes` says of one scheme."""
    from deepinit.errors import ConfigError

    try:
        formula = recipe(scheme.name, EXAMPLE).residual.formula
    except ConfigError:  # it needs sizes or options that no example has
        formula = "-"
    return {
        "name": scheme.name,
        "aliases": list(scheme.aliases),
        "family": scheme.family,
        "norm": list(scheme.norms),
        "residual": formula,
        "source": scheme.source,
        "verified": scheme.verified,
        "version": scheme.version,
        "hyperparameters": {k: plain(v) for k, v in scheme.hyperparameters.items()},
        "summary": scheme.summary,
    }


def schemes_table(schemes: Iterable[Scheme]) -> Table:
    """One line a scheme."""
    rows = []
    for s in schemes:
        facts = scheme_facts(s)
        norm = facts["norm"][0] if len(facts["norm"]) == 1 else f"any ({facts['norm'][0]})"
        mark = "" if s.verified else " (unverified)"
        rows.append((s.name, ", ".join(facts["aliases"]), s.family, norm, facts["residual"], s.source + mark))
    return table(("scheme", "also", "family", "norm", f"residual at L = {EXAMPLE.num_layers}", "source"), rows)


def law_rows(r: Recipe) -> list[tuple[str, ...]]:
    """One line a role that a model of this geometry may hold."""
    g = r.geometry
    rows: list[tuple[str, ...]] = []
    for role, law in r.weights.items():
        if role not in VECTORS and not g.count(role) and role != "pos_embed":
            continue
        fans = "" if role in VECTORS else "{} -> {}".format(*g.matrix(role))
        u = r.updates[role]
        rows.append((role, fans, type(law).__name__, number(law.std), number(law.bound), law.formula, *factors(u)))
    return rows


def factors(u: Update) -> tuple[str, str, str]:
    """The optimizer's factors."""
    return f"{u.lr:g}", f"{u.weight_decay:g}", f"{u.eps:g}"


def explain(out: Console, r: Recipe, scheme: Scheme) -> None:
    """The resolved numbers of a scheme at one geometry."""
    g = r.geometry
    out.print(Text(f"{r.name}@{r.version}", style="bold"), Text(scheme.summary))
    out.print(
        f"  at {g.num_layers} layers, d_model {g.d_model}, {g.num_heads} heads ({g.num_kv_heads} kv) of {g.head_dim}, "
        f"{g.mlp} {g.d_ff}, vocabulary {g.vocab_size}: {g.num_parameters:,} parameters, {g.num_residuals} residuals"
    )
    out.print(f"  residual     {r.residual.formula}  (norm {r.residual.norm})")
    out.print("  multipliers  " + ", ".join(f"{k} {v:.6g}" for k, v in r.multipliers.items()))
    if r.requires:
        out.print("  requires     " + ", ".join(f"model.{k} {str(v).lower()}" for k, v in r.requires.items()))
    out.print(f"  source       {r.source}" + ("" if scheme.verified else "  (no second source confirms these numbers)"))
    if scheme.make.__module__.startswith("deepinit."):
        out.print(f"  page         docs/schemes/{scheme.name}.md: options, what is disputed, numbers at two more sizes")
    columns = ("role", "matrix", "law", "std", "max |w|", "formula", "lr", "decay", "eps")
    out.print(table(columns, law_rows(r), right=("std", "max |w|", "lr", "decay", "eps")))


def verdict_rows(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """One line a leaf; of a law that differs from layer to layer, its ends and its worst layer."""
    grouped: dict[str, list[Row]] = {}
    for r in rows:
        if r.dtype:  # a row on the model as a whole is no leaf
            grouped.setdefault(r.path, []).append(r)
    lines: list[tuple[str, ...]] = []
    for path, of_leaf in grouped.items():
        worst = max(of_leaf, key=lambda r: (not r.ok, abs(r.z)))
        picked = [of_leaf[0], of_leaf[-1], worst] if len(of_leaf) > 1 else of_leaf
        for r in sorted({r.layer: r for r in picked}.values(), key=lambda r: r.layer or 0):
            where = path if len(of_leaf) == 1 else f"{path}[{r.layer}]"
            said = "ok" if r.ok and not r.reason else r.reason.strip("()") if r.ok else f"FAILS: {r.reason}"
            lines.append((where, r.role, r.law, "x".join(map(str, r.shape)), r.dtype, number(r.expected_std),
                          f"{r.measured_std:.6g}", f"{r.max_abs:.4g}", f"{r.z:+.1f}", r.test, said))  # fmt: skip
    return lines


def verdict(out: Console, v: Verdict) -> None:
    """The init table and what it comes to."""
    columns = ("leaf", "role", "law", "shape", "dtype", "std by law", "std found", "max |w|", "z", "test", "verdict")
    out.print(table(columns, verdict_rows(v.rows), right=("std by law", "std found", "max |w|", "z")))
    for r in (r for r in v.rows if not r.dtype):
        where = "" if r.path == "(model)" else f" {r.path}" + ("" if r.layer is None else f"[{r.layer}]")
        out.print(f"  {r.test}{where}: " + (r.reason.strip("()") if r.ok else f"FAILS: {r.reason}"))
    out.print(f"init {'ok' if v.ok else 'WRONG'}: {v.summary()} (|z| up to {v.threshold:.1f} passes)")
    out.print(f"digest {v.digest}")
