"""Our Linen modules inside NNX models, through `flax.nnx.bridge`, with its traps taken care of.

A Linen parameter with logical axes becomes an NNX variable that wants a mesh at once, on which those axes mean nothing:
the bridge raises without a mesh, and with one. So the variables are made with eager sharding off, and get their real
layout with their values.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from deepinit.recipe import Recipe
from deepinit.sharded_init import init_sharded


def bridged(module: linen.Module, *inputs: Any, seed: int = 0, **options: Any) -> Any:
    """The NNX module of a Linen module, initialized by the module's own closures on these inputs.

    Every leaf keeps its name, so `deepinit.reinit`, `verify` and `digest` take the result as it is. `options` go to the
    module's call.
    """
    with nnx.use_eager_sharding(False):
        return nnx.bridge.lazy_init(nnx.bridge.ToNNX(module, rngs=nnx.Rngs(seed)), *inputs, **options)


def twin(model: linen.Module, recipe: Recipe, mesh: Any = None, seed: int = 0) -> Any:
    """The NNX module of one of our decoders, with the values and the layout of `init_sharded`."""
    values = init_sharded(model, recipe, mesh, seed)
    rows = 1 if mesh is None else mesh.size
    made = bridged(model, jnp.zeros((rows, 1), jnp.int32), seed=seed)
    with nnx.use_eager_sharding(False):
        state = nnx.state(made, nnx.Param)
        leaves = jax.tree.leaves(values)
        nnx.update(made, jax.tree.unflatten(jax.tree.structure(state), leaves))
    return made
