"""What does it cost to prove an init? A tree of 335 M parameters: its init, its verification, and one read of it."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

import deepinit
from benchmarks.harness import Race
from deepinit import Geometry, digests, measure, roles, sharded_init
from deepinit.interop import trees
from deepinit.invariants import inspect

SIZES = Geometry(
    num_layers=24, d_model=1024, num_heads=16, d_ff=4096, vocab_size=32768, mlp="gelu", tied_embeddings=True
)


def run(rounds: int, geometry: Geometry = SIZES) -> Race:
    """M parameters per CPU-second; the ratio is to the init's own CPU-seconds."""
    recipe = deepinit.recipe("megatron", geometry)
    model = deepinit.nn.Decoder.from_recipe(recipe)
    shapes = roles.unboxed(sharded_init.abstract_params(model))
    draw, keys = sharded_init.plan(model, shapes, 0)
    init = sharded_init.jitted(draw).lower(keys).compile()
    params = init(keys)
    count = sum(x.size for x in jax.tree.leaves(params))

    def read(params: Any) -> Any:
        return [jnp.max(x) for x in jax.tree.leaves(params)]

    once = jax.jit(read).lower(params).compile()
    race = Race(
        f"{count / 1e6:.1f} M parameters of {recipe.name}",
        "M",
        count / 1e6,
        {
            "init": lambda: jax.block_until_ready(init(keys)),
            "verify: laws and digest": lambda: proven(inspect(params, recipe)),
            "verify, and weights drawn again": lambda: proven(inspect(params, recipe, seed=0)),
            "digest alone": lambda: deepinit.digest(params),
            "the largest of each leaf (one read)": lambda: jax.block_until_ready(once(params)),
        },
    ).run(rounds)
    cost = race.ratio("verify: laws and digest", "init")
    race.target("laws and digest: CPU-seconds over the init's", cost, at_most=0.5)
    tree = trees.viewed(params, geometry)
    stacked = tuple(leaf.stacked for leaf in tree.leaves)
    sampled, near = [None] * len(tree.views), digests.on_one_cpu(tree.arrays)
    program = measure.measure.lower(tree.arrays, tuple(tree.views), stacked, sampled, near).compile()
    memory = program.memory_analysis()
    if memory is not None:
        share = memory.temp_size_in_bytes / sum(math.prod(x.shape) * x.dtype.itemsize for x in tree.arrays)
        race.notes.append(f"temporaries of the measuring pass: {share:.3%} of the parameters")
    return race


def proven(verdict: Any) -> None:
    """The verdict is that of a healthy tree."""
    if not verdict.ok:
        raise AssertionError(verdict.table())
