"""L blocks in a row: one scanned body whose compile time does not grow with L, or unrolled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from deepinit.nn.block import Block
from deepinit.nn.part import Part
from deepinit.roles import STACK
from deepinit.sharding import unrolled

POLICIES = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}


def run_layers(
    part: Part,
    x_BTD: jax.Array,
    mask_BT: jax.Array | None = None,
    values_LBTF: jax.Array | None = None,
    **changes: Any,
) -> jax.Array:
    """(B, T, D) -> (B, T, D) through the blocks, made inside `part` as `layers`, or as `layers_0`, `layers_1`, ...

    A scanned layer's closures get its index as a scanned-over input, so the values are the same either way. `values`
    are added to attention's, layer by layer.
    """
    shared = part.shared() | changes
    block, num_layers = Block, part.geometry.num_layers
    if part.remat != "none":
        block = linen.remat(Block, prevent_cse=not part.scan, policy=POLICIES[part.remat])
    backout = part.gain("backout")
    x0_BTD = x_BTD if part.residual.x0_gate else None
    stream: Any = x_BTD if backout is None else (x_BTD, x_BTD)
    if part.scan:
        block = linen.scan(
            block,
            variable_axes={"params": 0, "stats": 0, "losses": 0, "taps": 0, "stream": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(0, linen.broadcast, linen.broadcast, 0),
            length=num_layers,
            unroll=unrolled(),
            metadata_params={linen.PARTITION_NAME: "layers"},
        )
        stream, _ = block(**shared, name=STACK)(stream, jnp.arange(num_layers), mask_BT, x0_BTD, values_LBTF)
    else:
        for layer in range(num_layers):
            values_BTF = None if values_LBTF is None else values_LBTF[layer]
            stream, _ = block(**shared, name=f"{STACK}_{layer}")(stream, layer, mask_BT, x0_BTD, values_BTF)
    if backout is None:
        return stream
    x_BTD, middle_BTD = stream
    return x_BTD - backout * middle_BTD


class Stack(Part):
    """The blocks as a module of their own."""

    @linen.compact
    def __call__(self, x_BTD: jax.Array, mask_BT: jax.Array | None = None) -> jax.Array:
        """(B, T, D) -> (B, T, D)."""
        return run_layers(self, x_BTD, mask_BT)
