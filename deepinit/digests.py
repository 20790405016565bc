"""The digest of a parameter tree: one for every layout, scanned or unrolled, on any mesh and any jax.

Integer arithmetic in one pass on the devices. Along the last axis, every 32 entries' mixed bits are summed modulo 2^32
with an odd multiplier each; these sums are mixed again and summed per layer in four lanes, with odd hashes of their
position. The host hashes the lanes with the leaves' canonical paths. A row of zeros adds nothing, so padding a
vocabulary does not change the digest.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from deepinit import roles, sampler
from deepinit.certificate import digest_rows
from deepinit.roles import Leaf

LANES = 4
BLOCK = 32  # a sum this short stays in vector registers: 8 times faster here than one over the whole axis


def mix(x: Any) -> Any:
    """The 32-bit finalizer of murmur3, a bijection that leaves 0 at 0."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def bits(x: jax.Array) -> jax.Array:
    """The values' bits as uint32; a 64-bit value becomes two, side by side."""
    size = x.dtype.itemsize
    if size == 1 and jnp.issubdtype(x.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(x, np.uint8).astype(np.uint32)
    if size == 1:
        return x.astype(np.uint32)
    if size == 2:
        return jax.lax.bitcast_convert_type(x, np.uint16).astype(np.uint32)
    word = jax.lax.bitcast_convert_type(x, np.uint32)
    return word if size == 4 else word.reshape(*x.shape[:-1], -1)


def lanes(x: jax.Array, stacked: bool, near: bool = False) -> jax.Array:
    """(layers, 4) sums of a leaf; one row where the leaf is not stacked. `near`: one CPU has the whole leaf."""
    word = bits(x)
    word = word if stacked else word[None]
    word = word[:, None] if word.ndim == 1 else word
    width = math.gcd(word.shape[-1], BLOCK)
    # behind a barrier the multipliers stay a vector in memory; in front of it XLA would hash anew at every entry
    inner = jax.lax.optimization_barrier(mix(jnp.arange(1, width + 1, dtype=np.uint32)) | np.uint32(1))
    blocks = word.reshape(*word.shape[:-1], word.shape[-1] // width, width)
    sums = mix(jnp.sum(mix(blocks) * inner, -1, dtype=np.uint32))
    high, low = sampler.counters(sums.shape[1:])
    a = (low * np.uint32(0x9E3779B1) + high * np.uint32(0x632BE5AB)) | np.uint32(1)
    b = mix(low ^ mix(high + np.uint32(0x27D4EB2F))) | np.uint32(1)
    terms = tuple(sums * f for f in (a, b, a * b, (a ^ (b << np.uint32(7))) | np.uint32(1)))
    if near:  # one pass for four sums, twice as quick in XLA's CPU code; on a mesh it would gather for them
        zeros = (np.uint32(0),) * LANES
        terms = jax.lax.reduce(terms, zeros, lambda x, y: tuple(p + q for p, q in zip(x, y)), (sums.ndim - 1,))
    return jnp.stack([jnp.sum(t, tuple(range(1, t.ndim)), dtype=np.uint32) for t in terms], axis=-1)


@functools.partial(jax.jit, static_argnames=("stacked", "near"))
def all_lanes(arrays: Sequence[jax.Array], stacked: tuple[bool, ...], near: bool) -> list[jax.Array]:
    """`lanes` of every leaf, in one compiled pass."""
    return [lanes(x, s, near) for x, s in zip(arrays, stacked)]


def on_one_cpu(arrays: Sequence[Any]) -> bool:
    """Whether one CPU has all of them, each whole."""
    whole = all(isinstance(x, jax.Array) and len(x.devices()) == 1 for x in arrays)
    return whole and jax.default_backend() == "cpu"


def summed(leaves: Sequence[Leaf], arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    """`lanes` of every leaf, on the host of every process."""
    sums = all_lanes(list(arrays), tuple(leaf.stacked for leaf in leaves), on_one_cpu(arrays))
    return jax.device_get(replicated(arrays, sums))


def combine(leaves: Sequence[tuple[Leaf, Any]], sums: Sequence[np.ndarray]) -> str:
    """32 hexadecimal digits from the sums of all leaves, the same for scanned and unrolled stacks."""
    rows: list[str] = []
    for (leaf, x), leaf_sums in zip(leaves, sums):
        rows += digest_rows(leaf, str(x.dtype), leaf_sums)
    return hashlib.sha256("\n".join(sorted(rows)).encode()).hexdigest()[:32]


def digest(params: Any) -> str:
    """The digest of a parameter tree (boxed or not): 32 hexadecimal digits."""
    leaves = roles.leaves(params)
    arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for _, x in leaves]
    return combine(leaves, summed([leaf for leaf, _ in leaves], arrays))


def replicated(arrays: Sequence[jax.Array], results: Any) -> Any:
    """The results on every process, where the arrays live on a mesh of several."""
    layout = arrays[0].sharding if arrays else None
    if jax.process_count() == 1 or not isinstance(layout, NamedSharding):
        return results
    return jax.jit(lambda r: r, out_shardings=NamedSharding(layout.mesh, PartitionSpec()))(results)
