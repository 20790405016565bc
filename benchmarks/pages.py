"""The pages of docs/ that are made from measurements: what the numbers say, and how far the prediction may be off.

`python -m benchmarks.pages docs` writes them from benchmarks/results/*.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import exponents, numbers, predictor
from benchmarks.numbers import MADE, RESULTS, Figures
from deepinit.report.pages import table


def study(rows: list[dict[str, Any]], f: Figures) -> str:
    """docs/prediction_study.md."""
    good = [r for r in predictor.judged(rows) if not r["normless"]]
    z = np.array([predictor.z_of(r) for r in good])
    error = np.abs([r["measured"] / r["variance"] - 1 for r in good])
    pairs = np.array([r["measured"] / r["variance"] - 1 for r in good]).reshape(-1, 2).mean(1)
    chance = np.abs(np.random.default_rng(0).standard_normal((400, len(good))) * [r["sd"] for r in good])
    named = sorted({r["scheme"] for r in rows})
    fixed = sorted({r["scheme"] for r in rows if r["fixed"]})
    off = max(abs(r["measured"] / r["variance"] - 1) for r in rows if r["fixed"])
    held = [(k, *v) for k, v in f.laws.items() if exponents.held(*k[:2])]
    apart = [abs(rule - measured) for _, rule, measured in held]
    scheme_rows = []
    for name in named:
        own = [r for r in rows if r["scheme"] == name]
        ratio = np.array([r["measured"] / r["variance"] for r in own])
        note = "set by a norm" if own[0]["fixed"] else "" if own[0] in predictor.judged(own) else "small branches"
        zs = "-" if own[0]["fixed"] else f"{np.mean([predictor.z_of(r) for r in own]):+.2f}"
        depths = ", ".join(str(d) for d in sorted({r["depth"] for r in own}))
        scheme_rows.append((f"`{name}`", str(len(own)), depths, f"{ratio.mean():.3f}", f"{ratio.std():.3f}", zs, note))
    parts = [
        "# How far the prediction may be off",
        MADE,
        f"`deepinit.predict` against {len(rows)} drawn models of {len(named)} schemes: 12, 80 and 200 layers, d 64 and "
        "128, GELU, ReLU and SwiGLU, with RoPE, learned or no positions, grouped-query heads, QK-norm, tied heads, "
        "parallel blocks and experts in random combination, 4 x 64 tokens, random or real text, two draws of each. "
        "Seeds are of this study alone: nothing in the prediction was fitted to them. `python -m benchmarks.predictor` "
        "repeats it in about an hour on two cores.",
        "z is (measured / predicted - 1) over its own predicted standard deviation, which is not fitted either: random "
        "inner products of stream and branch do not average out over positions that are aligned, and a frequent token "
        "has its embedding drawn once. A probe accepts |z| up to 6.",
        f"Over the {len(good)} comparisons in which branches have a share of at least 5% and no norm sets the variance "
        f"({len({r['scheme'] for r in good})} schemes): the standard deviation of z is {z.std():.2f} and "
        f"{(np.abs(z) > 4).mean():.1%} lie beyond 4. A single draw is off by {np.median(error):.1%} in the median, "
        f"where chance alone (a prediction without any error, draws that scatter as predicted) would give "
        f"{np.median(chance, 1).mean():.1%}; the mean of two draws by {np.median(np.abs(pairs)):.1%}. Where a norm "
        f"sets it ({', '.join(f'`{s}`' for s in fixed)}) the variance is off by {off:.1%} at most.",
        table(predictor.COLUMNS, predictor.summary(rows)),
        "Median error, 95% and worst are of single draws, as measured / predicted - 1 (of the loss: relative to it).",
        "## By scheme",
        table(("scheme", "draws", "layers", "measured / predicted", "its scatter", "z mean", ""), scheme_rows),
        "## Growth of the first update",
        "The rule: a parameter whose effect on the stream falls with depth as L^-a moves the output by L^(1-2a) under "
        "SGD and L^(1-a) under Adam; gates in quadrature; gains inside a branch both ways, by width and correlation of "
        "tokens (`deepinit/signal/growth.py`). Measured: one step's change of the logits to first order, d 32, 6, 24 "
        f"and 96 layers, {exponents.SEEDS} draws (`python -m benchmarks.exponents`). For "
        f"{', '.join(exponents.PROMISED)} rule and measurement differ by {max(apart):.2f} at most over {len(apart)} "
        "numbers: all matrices together, gains and gates. Fixup counts by branch: its attention shrinks as R^(-1/6), "
        "its MLP as R^(-1/2), and they mix by their sizes. The other rows are for comparison: where the stream grows, "
        "the rule is too low.",
        exponents.markdown(json.loads((RESULTS / "exponents.json").read_text())["rows"]),
        "## What it does not cover",
        "Biases, dropout, bidirectional attention, cross-attention and sliding windows. On repetitive text and "
        "widths from 2048 on a frequent token gets less attention than predicted: allow 5%. Post-norm with a skip of "
        "1: tokens align, and there is no law of the update. A prediction says in its notes which of these concern it.",
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    """Name under docs/ -> text."""
    f = Figures.read()
    rows = predictor.read(RESULTS / "predictor.json")
    return {"what_the_numbers_say.md": numbers.page(f), "prediction_study.md": study(rows, f)}


def main() -> None:
    """Write them."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    main()
