"""Pictures of predictions and measurements: lines are predicted, points are measured.

Colours of Okabe & Ito, told apart by colour-blind eyes; every line carries its name at its end.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from deepinit.signal.measured import Measured
from deepinit.signal.predict import Prediction

if TYPE_CHECKING:
    from deepinit.signal.coord import Outcome

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1.5, 1.5)))
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "svg.fonttype": "none",
    "svg.hashsalt": "deepinit",
    "lines.linewidth": 1.8,
}
End = tuple[float, float, str, str]
"""x, y, name and colour of a line's last point."""
POINTS = 48
"""Measured points drawn along a line."""


@dataclass(frozen=True, eq=False)
class Curve:
    """One scheme in a picture."""

    label: str
    predicted: Prediction | None = None
    measured: Measured | None = None


def variance(curves: Sequence[Curve], title: str = "Variance of the residual stream at step 0") -> Figure:
    """Var(x) after each layer, log axis."""

    def draw(ax: Axes) -> list[End]:
        ends = lines(ax, curves, lambda p: p.layer_variance, lambda m: m.layer_variance)
        ax.set(xlabel="layer", ylabel="Var(x), mean square of an entry")
        return ends

    return figure(draw, title)


def relative_update(curves: Sequence[Curve]) -> Figure:
    """What each layer adds, as a share of the stream."""

    def by_layer(share: np.ndarray, layers: int) -> np.ndarray:
        kept = 1 - np.square(share).reshape(layers, -1)
        return np.sqrt(1 - kept.prod(1))

    def predicted(p: Prediction) -> np.ndarray:
        return by_layer(p.relative_update[: whole(p)], whole(p) // p.recipe.geometry.sublayers)

    def draw(ax: Axes) -> list[End]:
        ends = lines(ax, curves, predicted, None, first=1)
        ax.set(xlabel="layer", ylabel="RMS of what the layer adds / RMS of the sum")
        return ends

    return figure(draw, "Relative update of the stream by each layer")


def correlation(curves: Sequence[Curve]) -> Figure:
    """Mean cosine of two positions."""

    def draw(ax: Axes) -> list[End]:
        ends = lines(ax, curves, lambda p: p.layer_correlation, lambda m: m.layer_correlation, log=False)
        ax.set(xlabel="layer", ylabel="mean cosine of two positions", ylim=(-0.03, 1.03))
        return ends

    return figure(draw, "Token correlation: at 1 all positions carry one vector")


def gradient(curves: Sequence[Curve]) -> Figure:
    """|dL/dx| after each layer over that after the last."""

    def draw(ax: Axes) -> list[End]:
        ends = lines(ax, curves, None, lambda m: m.gradient[1:] / m.gradient[-1], first=1, joined=True)
        ax.axhspan(0.8, 1.25, color="#999999", alpha=0.15, lw=0)
        ax.set(xlabel="layer", ylabel="|dL/dx| / that after the last layer")
        return ends

    return figure(draw, "Gradient of the loss with respect to the stream (band: 0.8 to 1.25)")


def exponents(curves: Sequence[Curve]) -> Figure:
    """Growth of the one-step update with depth, by group of parameters."""
    rows = [(c.label, c.predicted.exponents) for c in curves if c.predicted and c.predicted.exponents]
    groups = [g for g in ("matrices", "norm_gains", "gates", "shifts") if any(g in e for _, e in rows)]

    def draw(ax: Axes) -> None:
        names: list[str] = []
        for label, laws in rows:
            for group in groups:
                if group not in laws or not math.isfinite(laws[group].adam):
                    continue
                y = len(names)
                names.append(f"{label}: {group.replace('_', ' ')}")
                sgd, adam = laws[group]
                ax.plot([sgd, adam], [y, y], color="#bbbbbb", lw=1.5, zorder=1)
                ax.plot(sgd, y, "o", color=COLORS[0], ms=9, mfc="none", mew=2, label="SGD" if y == 0 else None)
                ax.plot(adam, y, "D", color=COLORS[1], ms=5, label="Adam" if y == 0 else None)
        ax.axvline(0, color="black", lw=1)
        ax.set_yticks(range(len(names)), names)
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.set_xlabel("p in: change of the output after one step ~ depth^p (0: level)")
        if names:
            ax.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))

    count = sum(1 for _, laws in rows for g in groups if g in laws and math.isfinite(laws[g].adam))
    return figure(draw, "Growth of the first update with depth", height=max(2.4, 1.2 + 0.3 * count))


def coordinate(found: Sequence[Outcome], axis: str, quantity: str, step: int) -> Figure:
    """Sizes of one quantity over width or depth, each line with its slope."""

    def draw(ax: Axes) -> list[End]:
        ends: list[End] = []
        ticks: set[int] = set()
        for i, f in enumerate(found):
            s = next((s for s in f.slopes if (s.axis, s.quantity, s.step) == (axis, quantity, step)), None)
            if s is None:
                continue
            along = f.grid.widths if axis == "width" else f.grid.depths
            color, dash = COLORS[i % len(COLORS)], DASHES[i % len(DASHES)]
            ax.plot(along, s.sizes, color=color, ls=dash, marker="o", ms=4.5, mfc="white")
            ends.append((along[-1], s.sizes[-1], f"{f.scheme} {s.slope:+.2f}", color))
            ticks |= set(along)
        ax.set_xscale("log")
        ax.set_xticks(sorted(ticks), [str(t) for t in sorted(ticks)])
        ax.minorticks_off()
        set_log(ax)
        ax.set(xlabel="d_model" if axis == "width" else "layers", ylabel="RMS")
        return ends

    return figure(draw, f"{quantity[0].upper()}{quantity[1:]} after {step} steps")


# --- how ---------------------------------------------------------------------------------------------------------


def figure(draw: Callable[[Axes], Any], title: str, height: float = 4.2) -> Figure:
    """One picture, 8 inches wide. `draw` may return the ends of its lines, which then get their names."""
    with mpl.rc_context(STYLE):
        fig = Figure(figsize=(8, height), layout="constrained")
        ax = fig.subplots()
        ax.set_title(title)
        label_ends(ax, draw(ax) or [])
        return fig


def lines(
    ax: Axes,
    curves: Sequence[Curve],
    predicted: Callable[[Prediction], np.ndarray] | None,
    measured: Callable[[Measured], np.ndarray] | None,
    *,
    first: int = 0,
    log: bool = True,
    joined: bool = False,
) -> list[End]:
    """Predicted lines and measured points; where they end. `first` is the layer of the first value."""
    ends: list[End] = []
    still = []
    both = False
    for i, curve in enumerate(curves):
        color, dash = COLORS[i % len(COLORS)], DASHES[i % len(DASHES)]  # lines that lie on each other both show
        drawn: list[np.ndarray] = []
        if predicted and curve.predicted is not None:
            drawn.append(clean(predicted(curve.predicted), log))
            x = np.arange(first, first + len(drawn[-1]))
            ax.plot(x, drawn[-1], color=color, ls=dash, zorder=2)
        if measured and curve.measured is not None:
            drawn.append(clean(measured(curve.measured), log))
            x = np.arange(first, first + len(drawn[-1]))
            every = max(1, math.ceil(len(x) / POINTS))
            style = {"ls": dash, "lw": 1.2, "marker": "o", "markevery": every} if joined else {"ls": "", "marker": "o"}
            picked = slice(None) if joined else slice(None, None, every)
            ax.plot(x[picked], drawn[-1][picked], color=color, ms=3.5, mfc="white", mew=1.1, zorder=3, **style)
            both |= len(drawn) == 2
        if log and drawn and all(np.isnan(d).all() for d in drawn):
            still.append(curve.label)
        shown = next((d[np.isfinite(d)] for d in drawn if np.isfinite(d).any()), None)
        if shown is not None:
            end = first + int(np.flatnonzero(np.isfinite(drawn[0]))[-1]) if np.isfinite(drawn[0]).any() else first
            ends.append((end, float(shown[-1]), curve.label, color))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if log:
        set_log(ax)
    ax.margins(x=0.01)
    aside = [*(["line: predicted   circle: measured"] if both else []),
             *([f"0 throughout: {', '.join(still)}"] if still else [])]  # fmt: skip
    if aside:
        ax.text(1, 1.02, "   ".join(aside), transform=ax.transAxes, ha="right", fontsize=8.5, color="#555555")
    return ends


def set_log(ax: Axes) -> None:
    """A log axis that spans at least a factor of 4, so that level looks level."""
    ax.set_yscale("log")
    low, high = ax.dataLim.intervaly
    if not (0 < low <= high < math.inf):
        return
    pad = max(0.04 * math.log(high / low), (math.log(4) - math.log(high / low)) / 2)
    ax.set_ylim(low * math.exp(-pad), high * math.exp(pad))
    if high / low < 30:  # too few powers of ten to read by
        ax.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def label_ends(ax: Axes, ends: Sequence[End]) -> None:
    """Names at the right of the axes, at the height of their line's end, pushed apart where they would meet."""
    if not ends:
        return
    to_axes = ax.transData + ax.transAxes.inverted()
    at = [float(np.clip(to_axes.transform((x, y))[1], 0, 1)) for x, y, _, _ in ends]
    gap = 0.055
    order = sorted(range(len(ends)), key=lambda i: at[i])
    place = [at[i] for i in order]
    for _ in range(200):  # relax
        moved = False
        for a in range(len(place) - 1):
            if (short := gap - (place[a + 1] - place[a])) > 1e-6:
                place[a], place[a + 1], moved = place[a] - short / 2, place[a + 1] + short / 2, True
        if not moved:
            break
    over = max(0.0, place[-1] - 1) or min(0.0, place[0])
    for i, y in zip(order, (y - over for y in place)):
        _, _, label, color = ends[i]
        ax.annotate(
            label,
            xy=(1, at[i]),
            xytext=(1.035, y),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=color,
            va="center",
            fontsize=9.5,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "lw": 0.7, "shrinkA": 1, "shrinkB": 1},
        )


def clean(values: np.ndarray, log: bool) -> np.ndarray:
    """Values that the axis can show, the others nan."""
    values = np.asarray(values, float)
    keep = np.isfinite(values) & (np.abs(values) < 1e300)
    return np.where(keep & (values > 0) if log else keep, values, np.nan)


def whole(p: Prediction) -> int:
    """Additions that a prediction has followed, in whole layers."""
    each = p.recipe.geometry.sublayers
    return len(p.branch) // each * each


def png(fig: Figure, dpi: int = 144) -> bytes:
    """The picture as a PNG."""
    out = io.BytesIO()
    with mpl.rc_context(STYLE):
        fig.savefig(out, format="png", dpi=dpi, metadata={"Software": None})
    return out.getvalue()


def svg(fig: Figure) -> str:
    """The picture as an SVG element, text as text."""
    out = io.StringIO()
    with mpl.rc_context(STYLE):
        fig.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
