"""What does the loss cost at a vocabulary of 128k? Loss and gradient of two layers, d = 128, 4 sequences of 256, with
the logits of a whole batch held at once, or of a part of every sequence at a time.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np

from benchmarks import steps
from benchmarks.harness import Costs, Race, child, forget_peak, peak_bytes
from deepinit.train import step

SIZES = {"layers": 2, "d": 128, "heads": 2, "seq": 256, "batch": 4, "model__vocab_size": 131072}
PARTS = (1, 4, 8, 16)


def made(chunks: int, sizes: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The compiled (params, batch) -> (loss, targets, gradients), and both."""
    parts = steps.Parts(steps.config(**sizes, model__loss_chunks=chunks))
    with jax.set_mesh(parts.mesh):
        init, keys = parts.init()
        params, batch = init(keys), parts.batch()
        program = jax.jit(lambda p, b: step.gradients(parts.model, p, b)).lower(params, batch).compile()
    return program, params, batch


def memory(chunks: int, sizes: dict[str, Any]) -> dict[str, float]:
    """Temporaries of the program, and the peak over parameters and program, in MB."""
    program, params, batch = made(chunks, sizes)
    base = forget_peak()
    jax.block_until_ready(program(params, batch))
    temporary = program.memory_analysis().temp_size_in_bytes
    return {"temporaries_MB": temporary / 1e6, "peak_MB": (peak_bytes() - base) / 1e6}


def run(rounds: int, sizes: dict[str, Any] = SIZES) -> Race:
    """Tokens per CPU-second; memory in a process of its own."""
    names = {f"{n} parts" if n > 1 else "whole": n for n in PARTS}
    programs = {name: made(n, sizes) for name, n in names.items()}
    outs = {name: jax.device_get(f(*x)) for name, (f, *x) in programs.items()}
    cases = {name: lambda f=f, x=x: jax.block_until_ready(f(*x)) for name, (f, *x) in programs.items()}
    vocab, tokens = sizes["model__vocab_size"], sizes["batch"] * sizes["seq"]
    race = Race(f"loss and gradient at a vocabulary of {vocab}", "tokens", tokens, cases).run(rounds)
    for name, n in names.items():
        race.add(name, Costs(child("-m", "benchmarks.loss", str(n), json.dumps(sizes))))
    whole, best = outs.pop("whole"), "8 parts"
    for name, (loss, _, gradient) in outs.items():
        race.add(name, {"loss_apart": abs(float(loss / whole[0]) - 1), "gradient_apart": apart(gradient, whole[2])})
    for measure, what in (("temporaries_MB", "temporaries"), ("peak_MB", "peak memory")):
        race.target(f"{best}: {what} over that of the whole", race.ratio(best, "whole", measure), at_most=1 / 3)
    race.target("relative difference of the loss", max(race.median(n, "loss_apart") for n in outs), at_most=1e-6)
    return race


def apart(a: Any, b: Any) -> float:
    """The norm of the difference over the norm."""
    x, y = (np.concatenate([np.ravel(v) for v in jax.tree.leaves(t)]).astype(np.float64) for t in (a, b))
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


if __name__ == "__main__":
    print("\n" + json.dumps(memory(int(sys.argv[1]), json.loads(sys.argv[2]))))
