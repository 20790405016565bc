"""How near is a training step to its matrix products? 6 layers, d = 384, 6 heads, 8 sequences of 256 bytes, float32,
AdamW with clipping; against torch's eager step and nanodo's for the same block, and small and deep, scanned or not.
"""

from __future__ import annotations

import json
from typing import Any

import jax

from benchmarks import steps
from benchmarks.harness import Race, Rival

SIZES = {"layers": 6, "d": 384, "heads": 6, "seq": 256, "batch": 8}
OURS = {
    "scan, remat": {"model__remat": "full"},
    "scan, remat of all but products": {"model__remat": "dots"},
    "unrolled": {"model__scan": "false"},
    "unrolled, fused qkv": {"model__scan": "false", "model__fused_qkv": "true"},
}
LIMIT = "matrix products of as many FLOPs"


def products(flops: float, tokens: int, d: int) -> Any:
    """A program of nothing but (tokens, d) x (d, 4 d) and back, of so many FLOPs."""
    n = max(1, round(flops / (16 * tokens * d * d)))

    def run(x: Any, up: Any, down: Any) -> Any:
        return jax.lax.fori_loop(0, n, lambda _, x: (x @ up) @ down, x)

    shapes = (tokens, d), (d, 4 * d), (4 * d, d)
    arguments = [jax.random.normal(jax.random.key(i), s) * s[-1] ** -0.5 for i, s in enumerate(shapes)]
    compiled = jax.jit(run).lower(*arguments).compile()
    return lambda: jax.block_until_ready(compiled(*arguments))


def run(rounds: int, torch: str = "", nanodo: str = "", sizes: dict[str, int] = SIZES) -> Race:
    """Tokens and GFLOP per CPU-second."""
    config = steps.config(**sizes)
    tokens = sizes["batch"] * sizes["seq"]
    flops = config.geometry().flops_per_token(sizes["seq"]) * tokens
    cases: dict[str, Any] = {LIMIT: products(flops, tokens, sizes["d"])}
    cases |= {name: steps.Running(steps.config(**sizes, **more)) for name, more in OURS.items()}
    if torch:
        passive = {"OMP_WAIT_POLICY": "passive"}  # else threads that wait count as work
        cases |= Rival("benchmarks.with_torch", "train", json.dumps(sizes), python=torch, env=passive).cases
    if nanodo:
        cases |= Rival("benchmarks.with_nanodo", "train", json.dumps(sizes), env={"PYTHONPATH": nanodo}).cases
    race = Race("a training step in float32", "tokens", tokens, cases, also={"GFLOP": flops / 1e9}).run(rounds)
    best = min(OURS, key=race.median)
    for measure, what in (("cpu_s", "CPU-seconds"), ("wall_s", "wall seconds")):
        if nanodo:
            race.target(f"{best}: nanodo's {what} over ours", race.ratio("nanodo", best, measure), at_least=1.3)
        if torch:
            over = race.ratio(best, "torch, eager", measure)
            race.target(f"{best}: our {what} over those of torch, eager", over, at_most=1.35)
    race.notes.append(f"{best}: {race.ratio(LIMIT, best):.0%} of the speed of matrix products alone")
    return race
