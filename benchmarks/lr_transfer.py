"""The best learning rate over widths, under muP and under the standard scheme, on a small task.

`python -m benchmarks.lr_transfer --seeds 3 --json benchmarks/results/lr_transfer.json` (about half an hour on two idle
cores), then `--read benchmarks/results/lr_transfer.json --page docs/lr_transfer.md`.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import deepinit
from deepinit.nn import Decoder
from deepinit.report.pages import table
from deepinit.train import data, optimizer, step
from deepinit.train.config import Config, load

WIDTHS = (64, 128, 256, 512)
RATES = tuple(2.0**k for k in range(-12, -4))
STEPS, LAST, BATCH, LENGTH, HEAD = 80, 20, 8, 32, 16
SCHEMES = {
    "mup": {"base_width": WIDTHS[0], "base_head_dim": HEAD, "zero_readout": "true"},
    "fixed_normal": {},
}
FIRST_RUN = (
    "A first run with one seed had muP's best rate at width 512 two grid steps away from that at 64, decided by 0.009 "
    "nats; that these figures would be the mean over 3 seeds on the same grid and steps was fixed before they were "
    "measured. All of them are in [lr_transfer.json](../benchmarks/results/lr_transfer.json)."
)
Losses = dict[str, dict[int, dict[float, list[float]]]]


def config_of(scheme: str, width: int) -> Config:
    """Two layers, heads of 16, no decay, a rate of 1 that `train` multiplies, warmed up over ten steps."""
    args = " ".join(f"--scheme.args.{k} {v}" for k, v in SCHEMES[scheme].items())
    flags = f"""--scheme.name {scheme} {args} --model.d-model {width} --model.num-layers 2 --model.d-ff {2 * width}
        --model.num-heads {width // HEAD} --model.max-seq-len {LENGTH} --data.seq-len {LENGTH}
        --train.steps {STEPS} --train.batch-size {BATCH} --optimizer.lr 1 --optimizer.schedule constant
        --optimizer.warmup-steps 10 --optimizer.weight-decay 0 --optimizer.clip-norm 0"""
    return load([], flags.split())


@functools.cache
def batches(seed: int) -> dict[str, np.ndarray]:
    """(STEPS, BATCH, ...): the same text for every scheme, width and rate of one seed."""
    config = config_of("fixed_normal", WIDTHS[0]).replace(data__seed=seed)
    found = data.load(config.data, batch_size=BATCH, eval_batch_size=BATCH, eval_batches=1)
    rows = [found.train[i] for i in range(STEPS)]
    return {k: np.stack([r[k] for r in rows]) for k in ("tokens", "weights")}


def trainer(scheme: str, width: int) -> Any:
    """(seed, rate) -> mean loss of the last steps; compiled once, since Adam's update is linear in its rate."""
    config = config_of(scheme, width)
    recipe = config.check()
    model = Decoder.from_recipe(recipe, **config.model_options())
    tx = optimizer.make(config, recipe, jax.eval_shape(lambda: deepinit.init_sharded(model, recipe)))

    @jax.jit
    def run(params: Any, texts: Any, rate: Any) -> Any:
        def one(carry: Any, batch: Any) -> Any:
            params, state = carry
            loss, _, grads = step.gradients(model, params, jax.tree.map(lambda x: x[None], batch))
            updates, state = tx.update(grads, state, params)
            moved = optimizer.apply_updates(params, jax.tree.map(lambda u: u * rate, updates))
            return (moved, state), loss

        return jax.lax.scan(one, (params, tx.init(params)), texts)[1][-LAST:].mean()

    def at(seed: int, rate: float) -> float:
        params = deepinit.init_sharded(model, recipe, seed=seed)
        return float(run(params, {k: jnp.asarray(v) for k, v in batches(seed).items()}, jnp.float32(rate)))

    return at


def measure(widths: Sequence[int], rates: Sequence[float], seeds: int) -> Losses:
    """Scheme -> width -> rate -> loss of each seed."""
    found: Losses = {}
    for scheme in SCHEMES:
        for width in widths:
            began, at = time.perf_counter(), trainer(scheme, width)
            losses = {rate: [at(seed, rate) for seed in range(seeds)] for rate in rates}
            found.setdefault(scheme, {})[width] = losses
            print(f"{scheme} {width}: best {best(losses):.3g}, {time.perf_counter() - began:.0f} s", flush=True)
    return found


def read(path: Path) -> Losses:
    """The figures of a file that `main` wrote."""
    schemes = json.loads(path.read_text())
    return {
        scheme: {int(width): {float(rate): seeds for rate, seeds in rates.items()} for width, rates in widths.items()}
        for scheme, widths in schemes.items()
    }


def mean(losses: Sequence[float]) -> float:
    """Over the seeds; a run that was not finite is no candidate."""
    value = float(np.mean(losses))
    return value if math.isfinite(value) else math.inf


def best(losses: dict[float, list[float]]) -> float:
    """The rate with the lowest loss."""
    return min(losses, key=lambda rate: mean(losses[rate]))


def moves(found: dict[int, dict[float, list[float]]]) -> float:
    """Grid steps (factors of 2) from the best rate of the narrowest to that of the widest model."""
    return math.log2(best(found[max(found)]) / best(found[min(found)]))


def page(found: Losses) -> str:
    """The figures as Markdown."""
    seeds = len(next(seeds for widths in found.values() for rates in widths.values() for seeds in rates.values()))
    names = {"mup": "muP (base width 64, readout zero at first)", "fixed_normal": "standard (`fixed_normal`)"}
    parts = [
        "# Does the best learning rate transfer over width?",
        "<!-- made by `python -m benchmarks.lr_transfer --read benchmarks/results/lr_transfer.json "
        "--page docs/lr_transfer.md`; do not edit -->",
        f"A two-layer decoder with heads of {HEAD} reads Python's own documentation and sources as bytes: {STEPS} "
        f"steps of {BATCH} x {LENGTH} tokens, Adam, 10 steps of warm-up and then a constant rate, no decay, no "
        "clipping. Every scheme, width and rate sees the same text. The figure is the mean training loss of the last "
        f"{LAST} steps"
        + (f", over {seeds} seeds" if seeds > 1 else ", one seed")
        + "; the best of a width is in bold.",
    ]
    for scheme, by_width in found.items():
        rates = list(next(iter(by_width.values())))
        rows = []
        for width, losses in by_width.items():
            top = best(losses)
            cells = [f"{mean(losses[r]):.3f}" if math.isfinite(mean(losses[r])) else "diverged" for r in rates]
            rows.append([str(width), *(f"**{c}**" if r == top else c for r, c in zip(rates, cells))])
        heads = ["width", *(f"2^{round(math.log2(r))}" for r in rates)]
        parts.append(f"## {names[scheme]}\n\n{table(heads, rows)}")
        edge = [w for w, losses in by_width.items() if best(losses) in (rates[0], rates[-1])]
        steps = round(moves(by_width))
        unit = "grid step" if abs(steps) == 1 else "grid steps"
        said = (
            f"From width {min(by_width)} to {max(by_width)} the best rate moves by {steps:+} {unit} (of a factor of 2)."
        )
        parts.append(said + (f" At width {edge} it lies at the end of the grid." if edge else ""))
    wide = max(max(by_width) for by_width in found.values())
    low = {s: f"{mean(by_width[wide][best(by_width[wide])]):.3f}" for s, by_width in found.items()}
    parts.append(
        f"The lowest losses at width {wide} are {low['mup']} under muP and {low['fixed_normal']} under the standard "
        "scheme: a rate that stays is not a lower loss."
    )
    parts.append(FIRST_RUN)
    parts.append("A short run on a small task measures early training; it is no proof for long ones.")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--read", metavar="FILE", help="take the figures from there instead of measuring")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--page", metavar="FILE", help="write the page there")
    options = parser.parse_args()
    found = read(Path(options.read)) if options.read else measure(options.widths, RATES, options.seeds)
    text = page(found)
    print(text)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    if options.page:
        Path(options.page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
