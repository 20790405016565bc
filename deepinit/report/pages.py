"""Pages of documentation made from the data: one for each scheme, their overview, and where the literature disagrees.

`python -m deepinit.report.pages docs` writes them.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from deepinit.geometry import VECTORS, Geometry
from deepinit.laws import Constant, Distribution
from deepinit.recipe import GAINS, Recipe, Update
from deepinit.report.tables import number
from deepinit.schemes import disputes
from deepinit.schemes.disputes import Dispute
from deepinit.schemes.registry import Scheme, recipe, schemes, undecided, word

GEOMETRIES = {
    "12 layers, d 768": Geometry(12, 768, 12, 3072, 50257, mlp="gelu"),
    "80 layers, d 8192": Geometry(80, 8192, 64, 28672, 128256, num_kv_heads=8),
}
SIZES = {
    "12 layers, d 768": "12 layers, d_model 768, 12 heads of 64, GELU MLP of 3072, vocabulary 50257 (GPT-2 124M)",
    "80 layers, d 8192": "80 layers, d_model 8192, 64 heads of 128 on 8 key heads, SwiGLU MLP of 28672, "
    "vocabulary 128256 (Llama 3 70B)",
}
BASE = {"base_width": 256, "base_depth": 2}
TINY_BASE = {"base_width": 64, "base_depth": 2}  # half the width and depth of configs/tiny.yaml
MADE = "<!-- made by `python -m deepinit.report.pages docs`; do not edit -->"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def at_both(scheme: Scheme) -> dict[str, Recipe]:
    """The recipe at both geometries; bases as in the golden table."""
    args: dict[str, Any] = {k: BASE[k] for k in undecided(scheme.name, ())}
    return {label: recipe(scheme.name, g, **args) for label, g in GEOMETRIES.items()}


# --- one scheme --------------------------------------------------------------------------------------------------


def page(scheme: Scheme) -> str:
    """The page of one scheme."""
    made = at_both(scheme)
    first = next(iter(made.values()))
    summary, _, more = scheme.doc.partition("\n")
    aliases = ", ".join(f"`{a}`{given(preset)}" for a, preset in scheme.aliases.items())
    facts = [
        f"- Source: {scheme.source}",
        "- Confirmed by a second source" if scheme.verified else "- **No second source confirms these numbers**",
        f"- Family: {scheme.family}; version {scheme.version}",
        *([f"- Other names: {aliases}"] if aliases else []),
        f"- Norms: {', '.join(scheme.norms)}" + (" (the first by default)" if len(scheme.norms) > 1 else ""),
        *([f"- Needs: {requirements(first)}"] if first.requires else []),
        *([f"- Projection: {PROJECTIONS[first.project]}"] if first.project else []),
    ]
    parts = [f"# {scheme.name}", MADE, code(summary), "\n".join(facts), code(" ".join(more.split()), "\n\n", more)]
    parts += ["## Residual rule", residual(made), "## Weights", weights(made)]
    if factors := updates(made):
        parts += ["## Optimizer", factors]
    if scheme.hyperparameters:
        parts += ["## Options", options(scheme)]
    if said := disputes.about(scheme.name):
        parts += ["## What is disputed", "\n\n".join(f"**{d.title}.** {d.text}" for d in said)]
    parts += ["## Use", use(scheme)]
    return "\n\n".join(p for p in parts if p) + "\n"


PROJECTIONS = {
    "rows": "every matrix to vectors of length 1 along d_model, after init and after every step; the laws below are "
    "those before it, and after it every entry has std 1/sqrt(d)"
}


def code(text: str, between: str = "", whole: str = "") -> str:
    """A docstring as Markdown: its paragraphs; what Markdown would take for emphasis or a tag is escaped."""
    paragraphs = [" ".join(p.split()) for p in (whole.split(between) if between else [text])]
    return "\n\n".join(re.sub(r"(\*|<(?=[\w/!?]))", r"\\\1", p) for p in paragraphs if p)


def given(preset: object) -> str:
    """The hyperparameters that an alias presets."""
    items = dict(preset)  # type: ignore[call-overload]
    return f" ({', '.join(f'{k} {v}' for k, v in items.items())})" if items else ""


def requirements(r: Recipe) -> str:
    """What it needs of a model."""
    wanted = {k: v if isinstance(v, tuple) else (v,) for k, v in r.requires.items()}
    return ", ".join(f"`model.{k}: {' or '.join(str(x).lower() for x in v)}`" for k, v in wanted.items())


def residual(made: dict[str, Recipe]) -> str:
    """The rule, its forward factors and learnable factors, at both geometries."""
    rows = [["rule", *(f"`{r.residual.formula}`" for r in made.values())]]
    first = next(iter(made.values()))
    for name in first.multipliers:
        if name in ("embed", "logits", "attention") or any(r.multipliers[name] != 1 for r in made.values()):
            label = {"embed": "embedding times", "logits": "logits times", "attention": "scores times"}
            cells = [number(r.multipliers[name]) if name in r.multipliers else "-" for r in made.values()]
            rows.append([label.get(name, f"{name} times"), *cells])
    for name, gain in first.gains.items():
        shown = [f"{number(r.gains[name].value)}, acting as {number(acting(r, name))}" for r in made.values()]
        rows.append([f"`{name}`: learnable, {GAINS[name]} (one per {per(gain.shape)})", *shown])
    return table(["", *made], rows)


def acting(r: Recipe, name: str) -> float:
    """The factor that acts at first."""
    gain = r.gains[name]
    assert not isinstance(gain.value, tuple)
    return gain.value * gain.scale


def per(shape: str) -> str:
    """What there is one of."""
    return {"scalar": "model", "key": "feature of a key head", "hidden": "hidden feature", "vocab": "token"}.get(
        shape, shape
    )


def weights(made: dict[str, Recipe]) -> str:
    """One row a role that either model may hold, and one a leaf with a law of its own."""
    columns = ["role", "law", "formula"]
    for label in made:
        columns += [f"std or value at {label}", "bound"]
    rows = []
    recipes = list(made.values())
    for role in recipes[0].weights:
        holds = [r.geometry.count(role) or role in (*VECTORS, "pos_embed") for r in recipes]
        if any(holds) and not (role in VECTORS and not interesting(recipes[0], role)):
            rows.append(row(f"`{role}`", [r.weights[role] for r in recipes], holds))
    for leaf in recipes[0].leaves:
        if leaf != (recipes[0].residual.gate.name if recipes[0].residual.gate else ""):
            rows.append(row(f"`{leaf}` alone", [r.leaves[leaf] for r in recipes], [True, True]))
    return table(columns, rows)


def interesting(r: Recipe, role: str) -> bool:
    """Whether a vector is there in a plain model, or in this scheme's."""
    gate = r.residual.gate
    if role == "norm_scale":
        return r.residual.norm != "none" and r.requires.get("norm_gain", True) is not False
    if role == "bias":
        return r.requires.get("bias", True) is not False
    return bool(gate and gate.role == role) or (role == "branch_shift" and r.residual.shift)


def row(name: str, laws: Sequence[Distribution], holds: Sequence[object]) -> list[str]:
    """One line of the table of weights: of a constant its value."""
    cells = [name, type(laws[0]).__name__, laws[0].formula or "-"]
    for law, held in zip(laws, holds):
        shown = law.mean if isinstance(law, Constant) else law.std
        cells += [number(shown), number(law.bound)] if held else ["-", "-"]
    return [c.replace("nan", "-") for c in cells]


def updates(made: dict[str, Recipe]) -> str:
    """Factors on lr, weight_decay and eps that are not all 1."""
    alike: dict[tuple[str, ...], list[str]] = {}  # roles with the same factors share a line
    recipes = list(made.values())
    for name in recipes[0].updates:
        found = [r.updates[name] for r in recipes]
        held = name in VECTORS or "/" in name or any(r.geometry.count(name) or name == "pos_embed" for r in recipes)
        if held and (any(u != Update() for u in found) or name not in recipes[0].weights):
            cells = tuple(f"{number(getattr(u, f.name))}" for u in found for f in dataclasses.fields(Update))
            alike.setdefault(cells, []).append(f"`{name}`")
    if not any(cell != "1" for cells in alike for cell in cells):
        return ""
    heads = [f"{what}, {label}" for label in made for what in ("lr", "decay", "eps")]
    rows = [[" ".join(names), *cells] for cells, names in alike.items()]
    return "Factors on the optimizer's settings; 1 for every role that is not named.\n\n" + table(["", *heads], rows)


def options(scheme: Scheme) -> str:
    """Names, defaults and types of the hyperparameters."""
    rows = [
        [f"`{name}`", "to be given" if name in scheme.choose else f"`{default}`", word(scheme.hints[name])]
        for name, default in scheme.hyperparameters.items()
    ]
    return table(["option", "default", "value"], rows)


def use(scheme: Scheme) -> str:
    """How it is named on the command line and in Python."""
    args = {k: BASE[k] for k in undecided(scheme.name, ())}
    flags, tiny = ("".join(f" --scheme.args.{k} {v[k]}" for k in args) for v in (BASE, TINY_BASE))
    words = "".join(f", {k}={v}" for k, v in args.items())
    run = f"deepinit train --config configs/tiny.yaml --scheme.name {scheme.name}{tiny}"
    if scheme.name == "external":
        run = "# from Python alone: Decoder(g, initializer=(role, layer) -> closure)"
    shell = f"deepinit explain {scheme.name} --config configs/gpt2_124m.yaml{flags}\n{run}"
    return f'```sh\n{shell}\n```\n\n```python\nr = deepinit.recipe("{scheme.name}", g{words})\n```'


# --- all of them -------------------------------------------------------------------------------------------------


def overview() -> str:
    """The table of all schemes."""
    rows = []
    for s in schemes():
        rule = next(iter(at_both(s).values())).residual.formula
        norm = s.norms[0] if len(s.norms) == 1 else "any"
        confirmed = "yes" if s.verified else "**no**"
        link = f"[{s.name}]({s.name}.md)"
        rows.append([link, ", ".join(s.aliases), s.family, norm, f"`{rule}`", s.source, confirmed])
    sizes = "; ".join(f"*{label}*: {text}" for label, text in SIZES.items())
    parts = [
        "# Schemes",
        MADE,
        f"{len(rows)} schemes, family by family; each is one flag, `--scheme.name NAME`, and one page. Residual rules "
        "are shown at 12 layers. The last column says whether a second, independent source confirms the numbers.",
        table(["scheme", "also", "family", "norm", "residual rule", "source", "confirmed"], rows),
        f"The pages show numbers at two geometries. {sizes}. Where a scheme asks for the size at which its rates were "
        "found, the pages take base_width 256 and base_depth 2.",
    ]
    return "\n\n".join(parts) + "\n"


def disagreements() -> str:
    """The page on what the literature says differently."""
    topics: dict[str, list[Dispute]] = {}
    for d in disputes.DISPUTES:
        topics.setdefault(d.topic, []).append(d)
    parts = [
        "# Where the literature disagrees",
        MADE,
        "What papers, their authors' codes and texts about them say differently, what holds, and what this library "
        "does. Each entry stands on the pages of the schemes that it is about as well.",
    ]
    for topic, found in topics.items():
        parts.append(f"## {topic}")
        for d in found:
            where = ", ".join(f"[{s}](schemes/{s}.md)" for s in d.schemes)
            parts.append(f"### {d.title}\n\n{d.text}" + (f"\n\n{where}" if where else ""))
    return "\n\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    """Path under the docs folder -> text, of all that is made."""
    made = {f"schemes/{s.name}.md": page(s) for s in schemes()}
    return {"schemes/README.md": overview(), "where_the_literature_disagrees.md": disagreements(), **made}


def write(folder: Path) -> int:
    """Write all pages, remove those of schemes that are gone; how many there are."""
    made = pages()
    for old in (folder / "schemes").glob("*.md"):
        if f"schemes/{old.name}" not in made:
            old.unlink()
    for path, text in made.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return len(made)


if __name__ == "__main__":
    print(f"{write(Path(sys.argv[1] if len(sys.argv) > 1 else 'docs'))} pages")
