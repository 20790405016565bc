"""How fast is a model born? GPT-2 124M's tree, compiled once, against stock draws of the same shapes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import deepinit
from benchmarks.harness import Race
from deepinit import measure, roles, sharded_init
from deepinit.interop import trees
from deepinit.train.config import load


def run(rounds: int) -> Race:
    """M values per CPU-second."""
    config = load(["configs/gpt2_124m.yaml"], ["--scheme.args.cut", "2"])
    recipe = config.recipe()
    model = deepinit.nn.Decoder.from_recipe(recipe, **config.model_options())
    shapes = roles.unboxed(sharded_init.abstract_params(model))
    draw, keys = sharded_init.plan(model, shapes, 0)
    ours = jax.jit(draw).lower(keys).compile()
    leaves = [leaf for leaf, _ in roles.leaves(shapes)]
    matrix = [leaf.role is not None and recipe.law_at(leaf.path, leaf.role).parameter != 0 for leaf in leaves]

    def stock(key: Any) -> Any:
        def one(i: int, x: Any) -> Any:
            if not (matrix[i] and len(x.shape) > 1):
                return jnp.zeros(x.shape, x.dtype)
            return jax.random.truncated_normal(jax.random.fold_in(key, i), -2, 2, x.shape, x.dtype) * np.float32(0.02)

        return [one(i, x) for i, x in enumerate(jax.tree.leaves(shapes))]

    def fill(value: Any) -> Any:
        return jax.tree.map(lambda x: jnp.full(x.shape, value, x.dtype), shapes)

    key = jax.random.key(0)
    theirs, floor = jax.jit(stock).lower(key).compile(), jax.jit(fill).lower(np.float32(1)).compile()
    params = ours(keys)
    tree = trees.viewed(params, recipe.geometry)
    stacked = tuple(leaf.stacked for leaf in tree.leaves)
    count = sum(x.size for x in tree.arrays)
    race = Race(
        f"{count / 1e6:.1f} M parameters, truncated at 2 sigmas",
        "M",
        count / 1e6,
        {
            "deepinit": lambda: jax.block_until_ready(ours(keys)),
            "jax.random.truncated_normal, jit": lambda: jax.block_until_ready(theirs(key)),
            "constant fill (write floor)": lambda: jax.block_until_ready(floor(np.float32(1))),
            "verify (the measuring pass)": lambda: jax.block_until_ready(
                measure.measure(tree.arrays, tuple(tree.views), stacked, [None] * len(tree.views))
            ),
        },
    ).run(rounds)
    temporary = ours.memory_analysis().temp_size_in_bytes
    race.notes.append(f"temporaries of the compiled init: {temporary} bytes")
    return race
