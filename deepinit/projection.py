"""Matrices whose vectors along d_model have length 1, after init and after every step (nGPT, arXiv:2410.01131).

A sum over an axis may be split by a mesh; a float sum then depends on the split. Here it is a tree of pairs of
neighbours, whose order no mesh changes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from deepinit import roles
from deepinit.geometry import EMBEDDINGS, OUTPUTS, VECTORS, Role
from deepinit.recipe import Recipe
from deepinit.roles import Leaf

FRONT = {Role.ATTN_Q: -3, Role.ATTN_K: -3, Role.ATTN_V: -3}


def axis_of(role: Role) -> int | None:
    """The axis of a leaf of this role that is d_model, counted from the last; None for a vector."""
    if role in VECTORS:
        return None
    if role in (*EMBEDDINGS, Role.LM_HEAD, *OUTPUTS):
        return -1
    return FRONT.get(role, -2)


def project(params: Any, recipe: Recipe) -> Any:
    """The tree as the recipe's `project` has it; without one, as it is."""
    if not recipe.project:
        return params

    def place(path: Any, x: jax.Array) -> jax.Array:
        leaf: Leaf = roles.locate(path)
        axis = None if leaf.role is None else axis_of(leaf.role)
        return x if axis is None else to_unit(x, axis)

    return jax.tree.map_with_path(place, params)


def to_unit(x: jax.Array, axis: int) -> jax.Array:
    """x with length 1 along the axis, computed in float32; vectors of zeros stay so."""
    square = squares(x, axis)
    scale = 1 / jnp.sqrt(jnp.where(square > 0, square, 1))
    # behind barriers, else XLA may multiply the scale with what x was itself multiplied with, and round otherwise
    wide, scale = jax.lax.optimization_barrier((x.astype(jnp.float32), scale))
    return (wide * scale).astype(x.dtype)


def squares(x: jax.Array, axis: int) -> jax.Array:
    """Sums of squares along the axis, which stays with size 1; float32."""
    wide = x.astype(jnp.float32)
    # 12 significant bits and the rest: products are exact, so it is no matter whether a multiply-add rounds them
    bits = jax.lax.bitcast_convert_type(wide, jnp.uint32) & jnp.uint32(0xFFFFF000)
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    low = wide - high
    terms = high * high + (2 * high * low + low * low)
    while (size := terms.shape[axis]) > 1:
        even = size - size % 2
        pairs = [jax.lax.slice_in_dim(terms, i, even, 2, axis) for i in (0, 1)]
        rest = jax.lax.slice_in_dim(terms, even, size, 1, axis)
        terms = jnp.concatenate([pairs[0] + pairs[1], rest], axis) if size % 2 else pairs[0] + pairs[1]
    return terms
