"""Reports: one HTML file that stands by itself, its pictures as PNG files beside it, and its numbers as JSON."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from deepinit.errors import ConfigError
from deepinit.laws import Numbers
from deepinit.recipe import Recipe
from deepinit.report import plots
from deepinit.report.plots import Curve
from deepinit.signal.checks import Check

if TYPE_CHECKING:
    from deepinit.signal.coord import Outcome

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.lead { color: #555; margin-top: 0; } figure { margin: 1rem 0; break-inside: avoid; }
figcaption { color: #555; font-size: .9rem; } svg { width: 100%; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th { color: #555; font-weight: 600; border-bottom: 2px solid #999; }
th:first-child, td:first-child, td.text { text-align: left; }
.ok { color: #00694b; } .bad { color: #b3400a; font-weight: 600; }
@media print {
  body { max-width: none; margin: 0; font-size: 10pt; } h2 { break-after: avoid; } tr { break-inside: avoid; }
}
"""


class Page:
    """A report that is being put together."""

    def __init__(self, title: str, lead: str):
        self.title, self.lead = title, lead
        self.parts: list[str] = []
        self.figures: dict[str, Figure] = {}

    def heading(self, text: str) -> None:
        """A section."""
        self.parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str) -> None:
        """A paragraph."""
        self.parts.append(f"<p>{html.escape(text)}</p>")

    def points(self, lines: Iterable[str]) -> None:
        """A list."""
        items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
        if items:
            self.parts.append(f"<ul>{items}</ul>")

    def figure(self, name: str, figure: Figure, caption: str) -> None:
        """A picture, drawn into the page and kept as NAME.png."""
        self.figures[name] = figure
        drawn = plots.svg(figure).replace("<svg", f'<svg role="img" aria-label="{html.escape(caption)}"', 1)
        self.parts.append(f"<figure>{drawn}<figcaption>{html.escape(caption)}</figcaption></figure>")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """A table; what is not a number stands left."""
        head = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
        body = "".join("<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows)
        self.parts.append(f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>')

    def write(self, folder: str | Path, data: Any) -> Path:
        """report.html, its pictures and report.json; where the page is."""
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            page = folder / "report.html"
            page.write_text(
                f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
                f'<meta name="viewport" content="width=device-width"><title>{html.escape(self.title)}</title>'
                f"<style>{STYLE}</style></head><body><h1>{html.escape(self.title)}</h1>"
                f'<p class="lead">{html.escape(self.lead)}</p>' + "\n".join(self.parts) + "</body></html>\n",
                encoding="utf-8",
            )
            for name, figure in self.figures.items():
                (folder / f"{name}.png").write_bytes(plots.png(figure))
            (folder / "report.json").write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
        except OSError as e:
            raise ConfigError(f"--report: {str(folder)!r} cannot be written: {e.strerror}") from None
        return page


def cell(value: Any) -> str:
    """A table cell: numbers to 4 digits, verdicts in colour, the rest as text."""
    if value is True or value is False:
        return f'<td class="{"ok" if value else "bad"}">{"ok" if value else "fails"}</td>'
    if isinstance(value, float):
        return f"<td>{'-' if math.isnan(value) else f'{value:.4g}'}</td>"
    if isinstance(value, int):
        return f"<td>{value}</td>"
    return f'<td class="text">{html.escape("-" if value is None else str(value))}</td>'


def sizes(recipe: Recipe) -> str:
    """The sizes in a line."""
    g = recipe.geometry
    kind = ", parallel" if g.parallel else ""
    some = f" in {len(g.routed_layers)} of the layers" if g.mixed else ""
    experts = f", {g.num_experts} experts{some}" if g.num_experts else ""
    return (
        f"{g.num_layers} layers, d_model {g.d_model}, {g.num_heads} heads ({g.num_kv_heads} kv) of {g.head_dim}, "
        f"{g.mlp} {g.d_ff}{experts}{kind}, vocabulary {g.vocab_size}"
    )


def of_predictions(folder: str, curves: Sequence[Curve], unit: Sequence[Curve]) -> Path:
    """The report of `deepinit predict`: as the schemes' embeddings start the stream, and from a unit variance."""
    shown = [c.predicted for c in curves if c.predicted]
    page = Page("What the recipe says of the signal", f"{sizes(shown[0].recipe)}; {shown[0].seq_len} positions. "
                "Predicted: no weight was drawn.")  # fmt: skip
    page.heading("Variance by depth")
    page.figure(
        "variance", plots.variance(curves), "The stream starts at the variance that the scheme's embedding has."
    )
    page.figure(
        "variance_from_1",
        plots.variance(unit, "Variance of the residual stream, from an input of variance 1"),
        "What the layers add by themselves: linear growth, 1 + a constant, bounded by a norm, or identity.",
    )
    page.heading("What each layer adds")
    page.figure("relative_update", plots.relative_update(curves), "Layers that add little are hard to tell from none.")
    page.figure(
        "correlation", plots.correlation(curves), "Positions that all carry one vector starve queries and keys."
    )
    laws = [c for c in curves if c.predicted and c.predicted.exponents]
    if laws:
        page.heading("The first update")
        page.figure("exponents", plots.exponents(laws), "How far one step moves the output, as a power of depth.")
    page.heading("In numbers")
    page.table(
        ("scheme", "norm", "Var(x_0)", "Var(x_L)", "correlation, top", "Var(logit)", "loss at step 0",
         "float16 overflows", "p SGD", "p Adam"),
        [(c.label, p.recipe.residual.norm, float(p.variance[0]), float(p.variance[-1]), float(p.correlation[-1]),
          p.logit_variance, p.loss, p.overflow["float16"], *(p.exponents.get("matrices") or (math.nan, math.nan)))
         for c in curves if (p := c.predicted)],
    )  # fmt: skip
    for c in curves:
        if c.predicted:
            laws_of(page, c.label, c.predicted.recipe)
            page.points(c.predicted.notes)
    return page.write(folder, {"schemes": [p.to_json() for p in shown]})


def laws_of(page: Page, label: str, recipe: Recipe) -> None:
    """The per-role table of a recipe."""
    g = recipe.geometry

    def each(numbers: Numbers) -> Any:
        return f"{numbers[0]:.4g} .. {numbers[-1]:.4g}" if isinstance(numbers, tuple) else float(numbers)

    page.heading(f"{label}: {recipe.residual.formula}")
    page.table(
        ("role", "law", "std", "formula", "lr", "decay", "eps"),
        [(str(role), type(law).__name__, each(law.std), law.formula, u.lr, u.weight_decay, u.eps)
         for role, law in recipe.weights.items() if (u := recipe.updates[role]) and g.count(role)],
    )  # fmt: skip


def check_rows(found: Sequence[Check]) -> list[tuple[Any, ...]]:
    """Rows of a table of verdicts."""
    return [(c.name, c.predicted, c.measured, math.nan if c.z is None else c.z, "no verdict" if c.ok is None else c.ok,
             c.note) for c in found]  # fmt: skip


CHECK_COLUMNS = ("quantity", "predicted", "measured", "z", "verdict", "note")


def of_probes(folder: str, curves: Sequence[Curve], found: Sequence[Sequence[Check]], title: str) -> Path:
    """The report of `deepinit probe` and `deepinit compare`: predicted lines, measured points, verdicts, roles."""
    first = next(c for c in curves if c.predicted and c.measured)
    assert first.predicted
    assert first.measured
    m = first.measured
    page = Page(title, f"{sizes(first.predicted.recipe)}; measured on {m.batch} sequences of {m.seq_len} tokens.")
    page.heading("Verdicts")
    for c, checks in zip(curves, found):
        if len(curves) > 1:
            page.text(c.label)
        page.table(CHECK_COLUMNS, check_rows(checks))
    page.heading("Forward")
    page.figure("variance", plots.variance(curves), "Variance of the stream after each layer.")
    page.figure("correlation", plots.correlation(curves), "Mean cosine of two positions of one sequence.")
    page.figure("relative_update", plots.relative_update(curves), "What each layer adds, predicted.")
    page.heading("Backward")
    page.figure("gradient", plots.gradient(curves), "Gradient of the loss with respect to the stream, by layer.")
    laws = [c for c in curves if c.predicted and c.predicted.exponents]
    if laws:
        page.figure("exponents", plots.exponents(laws), "How far one step moves the output, as a power of depth.")
    for c in curves:
        if c.measured is None or c.predicted is None:
            continue
        page.heading(f"{c.label}: by role")
        page.table(
            ("role", "RMS weight", "|gradient| first", "last layer", "zero", "SGD step/weight", "step/weight",
             "SGD: d logits", "d logits"),
            [(role, float(s.weight_rms[0]), float(s.gradient[0]), float(s.gradient[-1]),
              f"{s.zero_gradient.mean():.0%}", float(s.sgd_update[0]), float(s.update[0]), s.sgd_effect, s.effect)
             for role, s in c.measured.roles.items()],
        )  # fmt: skip
        page.points(c.predicted.notes)
    data = [
        {
            "scheme": c.label,
            "predicted": c.predicted.to_json() if c.predicted else None,
            "measured": c.measured.to_json() if c.measured else None,
            "checks": [k.to_json() for k in checks],
        }
        for c, checks in zip(curves, found)
    ]
    return page.write(folder, {"schemes": data})


def of_coordinates(folder: str, found: Sequence[Outcome]) -> Path:
    """The report of `deepinit coord`: sizes over width and depth, and every slope."""
    g = found[0].grid
    page = Page(
        "Coordinate check",
        f"{g.optimizer}, learning rate {g.lr:g}, {g.steps} steps, {g.seeds} seeds, {g.batch} x {g.seq_len} tokens. "
        "Slopes are of log size against log width or depth; 0 is level.",
    )
    page.table(("scheme", "width", "depth"), [(f.scheme, f.ok("width"), f.ok("depth")) for f in found])
    for axis in ("width", "depth"):
        shown = [f for f in found if f.ok(axis) is not None]
        if not shown:
            continue
        page.heading(f"Over {axis}")
        for quantity in ("change of stream, last layer", "change of logits"):
            name = f"{axis}_{quantity.split()[2].strip(',')}"
            caption = f"RMS {quantity} from step 0 to step {g.steps}; each line carries its slope."
            page.figure(name, plots.coordinate(shown, axis, quantity, g.steps), caption)
    for f in found:
        page.heading(f.scheme)
        page.table(
            ("axis", "quantity", "step", "slope", "+-", "passes up to", "verdict", "sure"),
            [(s.axis, s.quantity, s.step, f"{s.slope:+.3f}", s.half_width, s.high, s.ok, f"{s.confidence:.0%}")
             for s in f.slopes],
        )  # fmt: skip
    return page.write(folder, {"schemes": [f.to_json() for f in found]})
