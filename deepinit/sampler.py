"""Draws whose bits are the same everywhere: any mesh, scan or loop, eager or jit, any jax, and plain NumPy.

XLA promises no equal bits of log or erf_inv between two compiled programs; integers and one float multiply cannot
differ.

    bits      threefry2x32-13 (Salmon et al. 2011) over the flat index, rounds unrolled so that they fuse
    quantile  octaves of the tail probability in 2^SUB equal pieces, linear inside a piece, in integers; one look-up
    value     float32(integer) * float32(sigma * 2^-SCALE): one rounding

Summed over the whole table the law is exact to 9e-7 in std and 1.5e-6 in kurtosis. Every function takes `xp`,
jax.numpy or numpy, so the NumPy replay is the same code.
"""

from __future__ import annotations

import functools
import math
import zlib
from typing import Any

import numpy as np

SUB, FRAC, SCALE, SLOPE = 7, 12, 18, 11
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
ROUNDS = 13  # the fewest that are Crush-resistant (Salmon et al. 2011; Random123 offers the same); keys take all 20
Words = tuple[Any, Any]


def threefry(key: Words, x0: Any, x1: Any, rounds: int = 20) -> Words:
    """Rounds of threefry2x32 on uint32 arrays; with 20, `jax.random`'s threefry2x32 block."""
    k0, k1 = key
    ks = (k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA))
    x0, x1 = x0 + ks[0], x1 + ks[1]
    for i in range(rounds):
        x0, r = x0 + x1, ROTATIONS[i % 8]
        x1 = ((x1 << np.uint32(r)) | (x1 >> np.uint32(32 - r))) ^ x0
        if i % 4 == 3:
            j = i // 4 + 1
            x0, x1 = x0 + ks[j % 3], x1 + ks[(j + 1) % 3] + np.uint32(j)
    return x0, x1


def seed_words(seed: int) -> Words:
    """The key of a seed, as `jax.random.key(seed, impl="threefry2x32")` has it."""
    return np.uint32((seed >> 32) & 0xFFFFFFFF), np.uint32(seed & 0xFFFFFFFF)


def fold(key: Words, data: Any, xp: Any = np) -> Words:
    """A new key from a key and a uint32, as `jax.random.fold_in` makes it for threefry2x32."""
    with np.errstate(over="ignore"):
        return threefry(key, xp.zeros_like(data), data)


def slot_words(seed: int, slot: str) -> Words:
    """The key of one leaf, before its layer is folded in."""
    return fold(seed_words(seed), np.uint32(zlib.crc32(slot.encode())))


@functools.cache
def quantile_table(cut: float) -> np.ndarray:
    """int32: base << SLOPE | slope of the upper quantile, for each piece of the tail probability.

    Both ends of a piece are rounded down, since the line between them is rounded up; half a step of the fraction is
    what the bits that it drops add in the mean.
    """
    from scipy import special

    below = special.ndtr(-cut) if cut else 0.0
    octave, piece = np.divmod((np.arange(32 << SUB) - 2**SUB) % (32 << SUB), 2**SUB)  # an index has the leading bit
    dropped = np.where(octave < 31 - SUB - FRAC, 2.0 ** -(FRAC + 1), 0)

    def quantile(end: int) -> np.ndarray:
        p = 2.0 ** -(octave + 2) * (1 + (piece + end + dropped) / 2**SUB)
        return np.floor(-special.ndtri(below + p * (1 - 2 * below)) * 2**SCALE).astype(np.int64)

    base, end = quantile(0), quantile(1)
    return (base << SLOPE | base - end).astype(np.uint32).view(np.int32)


def leading_zeros(m: Any, xp: Any) -> Any:
    """Leading zero bits of uint32 m >= 1."""
    if xp is np:
        return np.uint32(32) - np.frexp(m.astype(np.float64))[1].astype(np.uint32)
    from jax import lax

    return lax.clz(m)


def normal_integers(word: Any, cut: float, xp: Any = np) -> Any:
    """uint32 words -> int32 quantiles of the (cut) unit normal, in units of 2^-SCALE."""
    u = np.uint32
    table = xp.asarray(quantile_table(cut))
    tail = (word << u(1)) | u(1)  # 2^33 times the tail probability: odd, so never 0
    octave = leading_zeros(tail, xp)
    lead = tail << octave
    i = (((octave << u(SUB)) + (lead >> u(31 - SUB))) & u((32 << SUB) - 1)).astype(np.int32)
    frac = (lead >> u(31 - SUB - FRAC)) & u(2**FRAC - 1)
    # i is in range by construction: no clamp. XLA fuses a look-up of two uses only behind an operation such as astype.
    entry = (table[i] if xp is np else table.at[i].get(mode="promise_in_bounds")).astype(u)
    z = (entry >> u(SLOPE)).astype(np.int32) - (((entry & u(2**SLOPE - 1)) * frac) >> u(FRAC)).astype(np.int32)
    return xp.where(word >> u(31) != 0, z, -z)


def uniform_integers(word: Any) -> Any:
    """uint32 words -> odd int32 in (-2^24, 2^24): symmetric, mean exactly 0, exact in float32."""
    return ((word >> np.uint32(8)) << np.uint32(1)).astype(np.int32) - np.int32(2**24 - 1)


def values(key: Words, index: Words, number: Any, kind: str, cut: float = 0.0, xp: Any = np) -> Any:
    """float32 values at 64-bit flat indices (high, low words).

    `number` (float32, broadcast against the index) is sigma for kind `normal`, with `cut` in sigmas or 0 for none; the
    bound for `uniform` on (-bound, bound); the upper end for `unit`, uniform on [0, end).
    """
    with np.errstate(over="ignore"):
        x0, x1 = threefry(key, *index, ROUNDS)
        word = x0 ^ x1
        if kind == "normal":
            z, unit = normal_integers(word, cut, xp), 2.0**-SCALE
        elif kind == "uniform":
            z, unit = uniform_integers(word), 2.0**-24
        else:
            z, unit = (word >> np.uint32(8)).astype(np.int32), 2.0**-24
    return z.astype(np.float32) * (xp.asarray(number, np.float32) * np.float32(unit))


# --- jax ---------------------------------------------------------------------------------------------------------


def key_words(key: Any) -> Words:
    """Two uint32 words of a jax key of any implementation, typed or legacy."""
    import jax
    import jax.numpy as jnp

    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jnp.asarray(key)
    if data.ndim != 1:
        raise ValueError(f"one key is needed, got keys of shape {data.shape[:-1]}")
    words = [data[i].astype(np.uint32) for i in range(data.shape[0])]
    if len(words) == 2:
        return words[0], words[1]
    if len(words) == 1:
        return jnp.zeros_like(words[0]), words[0]
    return threefry((words[0], words[1]), words[2], words[3])  # rbg and the like: four words, mixed into two


def counters(shape: tuple[int, ...]) -> Words:
    """Flat row-major index of every position, as (high, low) uint32 arrays of this shape."""
    import jax.numpy as jnp
    from jax import lax

    high, low = jnp.zeros(shape, np.uint32), jnp.zeros(shape, np.uint32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :])
        i = lax.broadcasted_iota(np.uint32, shape, axis)
        if math.prod(shape) <= 2**32:  # one word counts them all
            low = low + i * np.uint32(stride & 0xFFFFFFFF)
            continue
        more_high, more_low = wide_multiply(i, stride)
        low = low + more_low
        high = high + more_high + (low < more_low).astype(np.uint32)
    return high, low


def wide_multiply(i: Any, factor: int) -> Words:
    """uint32 array times a constant below 2^48, as (high, low) words, by 16-bit pieces."""
    u = np.uint32
    high, low = i * u(0), i * u(0)
    for piece in range(3):
        part = u((factor >> (16 * piece)) & 0xFFFF)
        for half, digit in enumerate((i & u(0xFFFF), i >> u(16))):
            product, shift = digit * part, 16 * (piece + half)  # below 2^32
            if shift < 32:
                add_low = product << u(shift)
                add_high = product >> u(32 - shift) if shift else product * u(0)
            else:
                add_low, add_high = product * u(0), product << u(shift - 32)
            low = low + add_low
            high = high + add_high + (low < add_low).astype(np.uint32)
    return high, low


def draw(key: Any, shape: tuple[int, ...], number: Any, kind: str, cut: float = 0.0) -> Any:
    """float32 array of this shape; see `values`."""
    import jax.numpy as jnp

    return values(key_words(key), counters(tuple(shape)), number, kind, cut, jnp)
