"""Predictions, probes and coordinate checks as tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from deepinit.report.plots import Curve
from deepinit.report.tables import table
from deepinit.signal.checks import Check
from deepinit.signal.measured import Measured
from deepinit.signal.predict import Prediction

if TYPE_CHECKING:
    from deepinit.signal.coord import Outcome
    from deepinit.signal.study import Case

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
GROUPS = (("matrices", "matrices"), ("norm_gains", "norm gains"), ("gates", "gates"), ("shifts", "shifts"))


def spark(
    values: Sequence[float] | np.ndarray, width: int = 16, bars: str = BARS, like: np.ndarray | None = None
) -> str:
    """A bar for each value on a log axis that spans at least a factor of 10; evenly spaced ones of many.

    The axis also holds the values of `like`, so that two lines can be compared.
    """
    v = np.asarray(values, float)
    every = v if like is None else np.concatenate([v, like])
    good = every[np.isfinite(every) & (every > 0)]
    v = v[np.round(np.linspace(0, len(v) - 1, min(width, len(v)))).astype(int)]
    if not len(good):
        return " " * len(v)
    low, high = math.log(good.min()), math.log(good.max())
    middle, half = (low + high) / 2, max((high - low) / 2, math.log(10) / 2)

    def bar(x: float) -> str:
        if not math.isfinite(x):
            return "!"
        if x <= 0:
            return " "
        return bars[min(len(bars) - 1, int((math.log(x) - middle + half) / (2 * half) * len(bars)))]

    return "".join(map(bar, v))


def bars(out: Console) -> str:
    """Bars that the console can show."""
    return BARS if (out.encoding or "").lower().startswith("utf") else ASCII_BARS


def num(x: float | None, digits: int = 3) -> str:
    """A number, or a dash."""
    return "-" if x is None or (isinstance(x, float) and math.isnan(x)) else f"{x:.{digits}g}"


def power(x: float) -> str:
    """An exponent, signed."""
    return "-" if math.isnan(x) else f"{x:+.2f}"


def layer(x: int | None) -> str:
    """A layer that overflows."""
    return "-" if x is None else "embedding" if x == 0 else f"layer {x}"


# --- predictions -------------------------------------------------------------------------------------------------


def predictions(out: Console, curves: Sequence[Curve]) -> Table:
    """One line a scheme."""
    rows = []
    for c in curves:
        p = c.predicted
        if p is None:
            continue
        moved = next((g for g, _ in GROUPS if not math.isnan(p.exponents.get(g, (0.0, math.nan))[1])), None)
        rows.append((
            c.label, p.recipe.residual.norm, num(p.variance[0]), num(p.variance[-1]),
            spark(p.layer_variance, 12, bars(out)), num(p.correlation[-1], 2), num(p.relative_update[-1], 2),
            num(p.logit_variance), num(p.loss, 4), layer(p.overflow["float16"]), layer(p.overflow["float32"]),
            *(map(power, p.exponents[moved]) if moved else "--"), (moved or "-").replace("_", " "),
        ))  # fmt: skip
    columns = ("scheme", "norm", "Var(x_0)", "Var(x_L)", "by layer (log)", "corr. top", "rel. update", "Var(logit)",
               "loss", "fp16 over", "f32 over", "p SGD", "p Adam", "of")  # fmt: skip
    right = ("Var(x_0)", "Var(x_L)", "corr. top", "rel. update", "Var(logit)", "loss")
    return table(columns, rows, right=right, whole=("by layer (log)",))


def prediction(out: Console, p: Prediction) -> None:
    """One scheme in full."""
    g, r = p.recipe.geometry, p.recipe
    out.print(
        f"{r.name}: {g.num_layers} layers, d_model {g.d_model}, {g.mlp} {g.d_ff}, {p.seq_len} positions; "
        f"{r.residual.formula}"
    )
    each = g.sublayers
    picked = sorted({0, 1, 2, *np.unique(np.round(np.geomspace(1, g.num_layers, 8)).astype(int)).tolist()})
    rows = []
    for at in (i for i in picked if i * each < len(p.variance)):
        branch = [num(p.branch[at * each - each + i]) for i in range(each)] if at else ["-"] * each
        share = [num(p.relative_update[at * each - each + i], 2) for i in range(each)] if at else ["-"] * each
        scores = num(p.scores[at - 1], 2) if at else "-"
        rows.append((str(at), num(p.variance[at * each], 4), *branch, *share, num(p.correlation[at * each], 2), scores))
    columns = ("layer", "Var(x)", *(f"Var(F) {k}" for k in g.additions), *(f"rel. {k}" for k in g.additions),
               "correlation", "Var(score)")  # fmt: skip
    out.print(table(columns, rows, right=columns))
    out.print(f"  variance by layer   {spark(p.layer_variance, 40, bars(out))}  (log)")
    own = f", own token {p.own_logit:.3g}" if p.own_logit else ""
    out.print(f"  logits              variance {num(p.logit_variance)}{own}; loss at step 0 {p.loss:.4f} nats")
    out.print("  overflow            " + ", ".join(f"{k} {layer(v)}" for k, v in p.overflow.items()))
    for group, name in GROUPS:
        if e := p.exponents.get(group):
            out.print(f"  update, {name:11} ~ depth^{power(e.sgd)} under SGD, depth^{power(e.adam)} under Adam")
    notes(out, p)


def notes(out: Console, p: Prediction) -> None:
    """What the theory leaves out."""
    for note in p.notes:
        out.print(f"  note: {note}")


# --- measurements ------------------------------------------------------------------------------------------------


def checks(found: Sequence[Check]) -> Table:
    """Predicted and measured side by side."""
    rows = []
    for c in found:
        said = {True: "ok", False: "FAILS", None: "no verdict"}[c.ok]
        z = "-" if c.z is None else f"{c.z:+.1f}"
        rows.append((c.name, num(c.predicted, 4), num(c.measured, 4), z, said, c.note))
    columns = ("quantity", "predicted", "measured", "z", "verdict", "")
    return table(columns, rows, right=("predicted", "measured", "z"))


def by_role(out: Console, m: Measured) -> Table:
    """One line a role: gradient by layer, share of zeros, first steps."""

    def ends(v: np.ndarray) -> str:
        return num(float(v[0])) if len(v) == 1 else f"{v[0]:.2g} .. {v[-1]:.2g}"

    rows = []
    for role, s in m.roles.items():
        rows.append((
            role, num(float(s.weight_rms[0])), ends(s.gradient), spark(s.gradient, 12, bars(out)),
            f"{s.zero_gradient.mean():.0%}", ends(s.sgd_update), ends(s.update), num(s.sgd_effect), num(s.effect),
        ))  # fmt: skip
    columns = ("role", "RMS weight", "|gradient| by layer", "", "zero", "SGD step/weight", "step/weight",
               "SGD: d logits", "d logits")  # fmt: skip
    return table(columns, rows, right=("RMS weight", "zero", "SGD: d logits", "d logits"))


def measured(out: Console, p: Prediction, m: Measured, found: Sequence[Check]) -> None:
    """A probe: verdicts, then the stream and the roles."""
    out.print(checks(found))
    lines = (
        ("variance, predicted", p.layer_variance, m.layer_variance),
        ("variance, measured", m.layer_variance, p.layer_variance),
        ("gradient of stream", m.gradient, None),
    )
    for name, values, like in lines:
        drawn = spark(values, 40, bars(out), like)
        out.print(f"  {name:20}{drawn}  {num(float(values[0]))} .. {num(float(values[-1]))}")
    out.print(
        f"  attention entropy   {num(float(m.entropy.min()))} .. {num(float(m.entropy.max()))} of uniform; "
        f"logits of variance {num(float(m.scores[0]))} .. {num(float(m.scores[-1]))} "
        f"(predicted {num(float(p.scores[0]))} .. {num(float(p.scores[-1]))})"
    )
    for path, values in m.gates.items():
        out.print(f"  gate {path}: {num(float(values[0]))} .. {num(float(values[-1]))}")
    out.print(by_role(out, m))
    notes(out, p)
    out.print(f"  pass of {m.batch} x {m.seq_len} tokens: {m.seconds:.2f} s")


def compared(out: Console, cases: Sequence[Case]) -> Table:
    """One line a scheme: predicted, measured, verdict."""
    rows = []
    for case in cases:
        p, m = case.predicted, case.measured
        worst = max((abs(c.z) for c in case.checks if c.z is not None and c.ok is not None), default=math.nan)
        rows.append((
            case.label, p.recipe.residual.norm, num(float(p.variance[-1])), num(float(m.variance[-1])),
            spark(m.layer_variance, 12, bars(out)), num(float(m.correlation[-1]), 2), num(m.gradient_ratio),
            num(p.loss, 4), num(m.loss, 4), num(worst, 2), "ok" if case.ok else "FAILS",
        ))  # fmt: skip
    columns = ("scheme", "norm", "Var(x_L) predicted", "measured", "by layer (log)", "corr. top", "grad first/last",
               "loss predicted", "measured", "worst |z|", "verdict")  # fmt: skip
    right = ("Var(x_L) predicted", "measured", "corr. top", "grad first/last", "loss predicted", "worst |z|")
    return table(columns, rows, right=right, whole=("by layer (log)",))


def coordinates(out: Console, found: Outcome) -> None:
    """A coordinate check: slopes by step, verdicts."""
    for axis in ("width", "depth"):
        ok = found.ok(axis)
        if ok is None:
            continue
        along = found.grid.widths if axis == "width" else found.grid.depths
        rows = []
        for quantity in dict.fromkeys(s.quantity for s in found.slopes if s.axis == axis):
            own = {s.step: s for s in found.slopes if s.axis == axis and s.quantity == quantity}
            worst = max(own.values(), key=lambda s: (s.ok is False, s.ok is None, abs(s.slope)))
            bound = f"<= {worst.high:.2f}" if math.isinf(worst.low) else f"+-{worst.high:.2f}"
            steps = [power(own[t].slope) if t in own else "" for t in range(found.grid.steps + 1)]
            said = {True: "ok", False: "FAILS", None: "open"}[worst.ok]
            rows.append((quantity, *steps, f"{worst.half_width:.2f}", bound, said, f"{worst.confidence:.0%}"))
        names = tuple(f"t={t}" for t in range(found.grid.steps + 1))
        columns = ("slope of log size", *names, "+-", "passes", "verdict", "sure")
        out.print(f"{found.scheme} over {axis} {', '.join(map(str, along))}")
        out.print(table(columns, rows, right=(*names, "+-", "sure")))
    words = {True: "passes", False: "FAILS", None: "not run"}
    g, ends = found.grid, ", ".join(f"{axis} {words[found.ok(axis)]}" for axis in ("width", "depth"))
    out.print(f"{found.scheme}: {ends}  ({g.optimizer}, lr {g.lr:g}, {g.seeds} seeds, {found.seconds:.0f} s)")
