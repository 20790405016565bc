"""L blocks in a row: scanned, so that compile time does not grow with L, or unrolled.

B batch, T time, D model, F key heads times their width, L layers, P periods, N blocks of a period.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from deepinit import stacks
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

    A scanned layer's closures get its index as a scanned-over input, so the values are the same either way. Where dense
    and routed layers take turns, a scan's body is one period of them: see `deepinit.stacks`. `values` are added to
    attention's, layer by layer.
    """
    g, shared = part.geometry, part.shared() | changes
    backout = part.gain("backout")
    x0_BTD = x_BTD if part.residual.x0_gate else None
    stream: Any = x_BTD if backout is None else (x_BTD, x_BTD)
    if part.scan:
        names = iter(stacks.named(g))
        for run in stacks.runs(g):
            block = kind(part.remat, looped=len(run[0]) > 1)
            blocks = tuple(block(**shared, routed=g.routed(layers[0]), name=next(names)) for layers in run)
            body = linen.scan(
                Period,
                variable_axes={"params": 0, "stats": 0, "losses": 0, "taps": 0, "stream": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=(0, linen.broadcast, linen.broadcast, 0),
                length=len(run[0]),
                unroll=unrolled(),
                metadata_params={linen.PARTITION_NAME: "layers"},
            )(blocks)
            first, shape = run[0].start, (len(run[0]), len(run))
            layers_PN = jnp.arange(first, first + math.prod(shape)).reshape(shape)
            values_PNBTF = None
            if values_LBTF is not None:
                values_PNBTF = values_LBTF[first : first + layers_PN.size].reshape(*shape, *values_LBTF.shape[1:])
            stream, _ = body(stream, layers_PN, mask_BT, x0_BTD, values_PNBTF)
    else:
        for layer in range(g.num_layers):
            values_BTF = None if values_LBTF is None else values_LBTF[layer]
            block = kind(part.remat, looped=False)(**shared, routed=g.routed(layer), name=f"{STACK}_{layer}")
            stream, _ = block(stream, layer, mask_BT, x0_BTD, values_BTF)
    if backout is None:
        return stream
    x_BTD, middle_BTD = stream
    return x_BTD - backout * middle_BTD


@functools.cache
def kind(remat: str, looped: bool) -> Any:
    """The class of the blocks. Outside of a loop (and one turn is none to XLA) what is computed twice must stay so."""
    return Block if remat == "none" else linen.remat(Block, prevent_cse=not looped, policy=POLICIES[remat])


class Period(linen.Module):
    """The body of a scan: one block after the other. They are not its own, so it leaves no name in the tree."""

    blocks: tuple[Block, ...]

    def __call__(
        self, stream: Any, layers_N: jax.Array, mask_BT: Any, x0_BTD: Any, values_NBTF: Any
    ) -> tuple[Any, None]:
        """(B, T, D) -> ((B, T, D), None); `layers` and `values` have an entry a block."""
        for i, block in enumerate(self.blocks):
            values_BTF = None if values_NBTF is None else values_NBTF[i]
            stream, _ = block(stream, layers_N[i], mask_BT, x0_BTD, values_BTF)
        return stream, None


class Stack(Part):
    """The blocks as a module of their own."""

    @linen.compact
    def __call__(self, x_BTD: jax.Array, mask_BT: jax.Array | None = None) -> jax.Array:
        """(B, T, D) -> (B, T, D)."""
        return run_layers(self, x_BTD, mask_BT)
