"""One compiled pass over the parameters: partial sums, extremes, coarse entries, sampled weights and digest lanes."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinit import digests
from deepinit.geometry import EXPERTS, Role
from deepinit.views import View

COARSE_BITS = 0x1FFF  # the float32 mantissa bits that float16 and bfloat16 lack
CORNER = 1 << 12
EXPERT_KERNELS = tuple(r for r in EXPERTS if r is not Role.ROUTER)
PIECE = 1 << 19
"""Entries that are read five times while they are near."""
SAMPLED = 64
"""Weights of one layer that are drawn again."""
Measured = dict[str, np.ndarray]


def measured(
    arrays: Sequence[Any], views: Sequence[View], stacked: tuple[bool, ...], sampled: Sequence[np.ndarray | None] = ()
) -> tuple[list[np.ndarray], list[Measured]]:
    """(digest lanes of every array, measures of every view) on the host; `stacked` and lanes are `digests`' own."""
    sampled = list(sampled) or [None] * len(views)
    found = measure(list(arrays), tuple(views), stacked, sampled, digests.on_one_cpu(arrays))
    return jax.device_get(digests.replicated(arrays, found))


@functools.partial(jax.jit, static_argnames=("views", "stacked", "near"))
def measure(
    arrays: Sequence[jax.Array],
    views: tuple[View, ...],
    stacked: tuple[bool, ...],
    sampled: Sequence[Any],
    near: bool = False,
) -> tuple[list[jax.Array], list[dict[str, jax.Array]]]:
    """`measured`, on the devices. `near`: one CPU has all, and reads them in pieces that stay in its cache."""
    sums = digests.all_lanes(arrays, stacked, near)
    return sums, [measure_view(arrays[v.array], v, at, near) for v, at in zip(views, sampled)]


def measure_view(x: jax.Array, view: View, sampled: Any = None, near: bool = False) -> dict[str, jax.Array]:
    """Sums are (layers, rows): float32 within a row only, so that the host can add up in float64."""
    rows = view.take(x)
    lead = 2 + (view.leaf.role in EXPERT_KERNELS and rows.ndim > 3)  # experts are told apart, and their rows too
    count = pieces(rows.shape) if near else 1
    if count == 1:
        sums = sums_of(rows, lead)
    else:
        parts = rows.reshape(rows.shape[0] * count, rows.shape[1] // count, *rows.shape[2:])
        sums = jax.lax.map(lambda y: jax.tree.map(lambda s: s[0], sums_of(y[None], lead)), parts)
        sums = {k: s.reshape(rows.shape[0], -1) for k, s in sums.items()}
    corner = corner_of(rows)
    out = {k: sums[k] for k in ("total", "square", "fourth")}
    out |= {"low": sums["low"].min(1), "high": sums["high"].max(1)}
    if x.dtype == jnp.float32:
        word = jax.lax.bitcast_convert_type(corner, np.uint32)
        coarse = (word & np.uint32(COARSE_BITS)) == np.uint32(0)
        out["coarse"] = jnp.mean((coarse & (corner != np.float32(0))).astype(jnp.float32), 1)
    elif x.dtype.itemsize == 2:
        out["corner"] = corner.astype(jnp.float32)
    if sampled is not None:
        out["sampled"] = x[tuple(sampled[:, k] for k in range(x.ndim))]
    return out


def sums_of(rows: jax.Array, lead: int) -> dict[str, jax.Array]:
    """By layer: power sums over all axes from `lead` on, and the extremes of all."""
    wide = rows.astype(jnp.float32)
    # apart from the others: in one loop with them XLA's CPU code is four times slower
    again = jax.lax.optimization_barrier(wide)
    inner, over = tuple(range(1, rows.ndim)), tuple(range(lead, rows.ndim))

    def partial(y: jax.Array) -> jax.Array:
        return (y.sum(over) if over else y).reshape(rows.shape[0], -1)

    return {
        "total": partial(wide),
        "square": partial(jnp.square(wide)),
        "fourth": partial(jnp.square(jnp.square(again))),
        "low": rows.min(inner).astype(jnp.float32)[:, None],
        "high": rows.max(inner).astype(jnp.float32)[:, None],
    }


def pieces(shape: tuple[int, ...]) -> int:
    """Into how many equal parts of a layer's rows: at most PIECE entries each, where the rows divide."""
    size = math.prod(shape[1:])
    counts = [n for n in range(1, shape[1] + 1) if shape[1] % n == 0] if len(shape) > 2 else [1]
    return next((n for n in counts if size // n <= PIECE), counts[-1]) if size > PIECE else 1


def corner_of(rows: jax.Array) -> jax.Array:
    """(layers, at most CORNER entries): whole last axes from the beginning of every layer."""
    take, room = [], CORNER
    for size in reversed(rows.shape[1:]):
        take.append(slice(0, min(size, max(room, 1))))
        room //= max(size, 1)
    return rows[(slice(None), *reversed(take))].reshape(rows.shape[0], -1)


def sample(view: View) -> tuple[np.ndarray, np.ndarray]:
    """(layer, flat canonical index) of the weights that are drawn again: the ends of each layer and some between."""
    rng = np.random.default_rng(zlib.crc32(view.leaf.slot.encode()))
    if view.n <= SAMPLED:
        index = np.tile(np.arange(view.n), (view.layers, 1))
    else:
        index = rng.integers(0, view.n, (view.layers, SAMPLED))
        index[:, 0], index[:, 1] = 0, view.n - 1
    return np.repeat(np.arange(view.layers), index.shape[1]), index.reshape(-1)
