"""Two matrices drawn together: the factors of a product a Z + b I (mimetic initialization, arXiv:2305.09828).

Both sides draw the same product from the same key and keep their own factor, so either can be drawn without the other.
Singular values come from LAPACK, whose bits differ between machines: like the orthogonal law, this one is not portable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinit import sampler
from deepinit.errors import ConfigError
from deepinit.geometry import OUTPUTS, QUERIES_KEYS, Geometry, Role
from deepinit.laws import Factor


def closure(g: Geometry, role: Role, law: Factor) -> Callable[..., jax.Array]:
    """(key, shape, dtype=None, out_sharding=None) -> the role's factor; the partner's needs the same key.

    Shapes: (d, H, h) for queries, (d, K, h) for keys and values, (H, h, d) for outputs.
    """
    heads = g.num_heads if law.side == ("left" if role in QUERIES_KEYS else "right") else g.num_kv_heads
    wanted = (heads, g.head_dim, g.d_model) if role in OUTPUTS else (g.d_model, heads, g.head_dim)

    def init(key: Any, shape: Sequence[int], dtype: Any = np.float32, out_sharding: Any = None) -> jax.Array:
        if tuple(shape) != wanted:
            raise ConfigError(f"{role}: shape {tuple(shape)} is not {wanted}, which its pair with {law.partner} needs")
        draw = scores if role in QUERIES_KEYS else values
        made = draw(g, law, sampler.key_words(key)).astype(np.float32 if dtype is None else dtype)
        return made if out_sharding is None else jax.lax.with_sharding_constraint(made, out_sharding)

    return init


def product(law: Factor, width: int, words: sampler.Words) -> jax.Array:
    """(d, d) a Z + b I."""
    z = sampler.values(words, sampler.counters((width, width)), np.float32(law.z_std * law.noise), "normal", 0.0, jnp)
    return z + np.float32(law.identity) * jnp.eye(width, dtype=np.float32)


def decomposed(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """U (d, d), singular values, V (d, d), the largest first; each column of V sums to no less than 0."""
    u, s, vt = jnp.linalg.svd(a)
    flip = jnp.where(vt.sum(1) < 0, np.float32(-1), np.float32(1))
    return u * flip, s, vt.T * flip


def scores(g: Geometry, law: Factor, words: sampler.Words) -> jax.Array:
    """Queries or keys: for each head the h largest of its product.

    Query heads that share a key: the key is that of the first one's product, U sqrt(S) and V sqrt(S); another's query
    is the best fit A V / sqrt(S) of its own product A to that key.
    """
    group = g.num_heads // g.num_kv_heads

    def of_key(k: jax.Array) -> jax.Array:
        def own(n: jax.Array) -> jax.Array:
            return product(law, g.d_model, sampler.fold(words, (k * group + n).astype(np.uint32), jnp))

        _, s, v = decomposed(own(jnp.int32(0)))
        s, v = s[: g.head_dim], v[:, : g.head_dim]
        if law.side == "right":
            return (v * jnp.sqrt(s))[None]
        return jax.lax.map(lambda n: own(n) @ v / jnp.sqrt(s), jnp.arange(group))

    heads = jax.lax.map(of_key, jnp.arange(g.num_kv_heads))  # (K, group or 1, d, h)
    return jnp.moveaxis(heads.reshape(-1, g.d_model, g.head_dim), 0, 1)


def values(g: Geometry, law: Factor, words: sampler.Words) -> jax.Array:
    """Values or outputs: the K h largest of one product for all heads; outputs that share values share their part."""
    rank, group = g.num_kv_heads * g.head_dim, g.num_heads // g.num_kv_heads
    if rank > g.d_model:
        raise ConfigError(
            f"model.num_kv_heads: {g.num_kv_heads} heads of {g.head_dim} are more than d_model {g.d_model}, "
            f"the rank of the product of values and outputs; nearest: {g.d_model // g.head_dim}"
        )
    u, s, v = decomposed(product(law, g.d_model, words))
    if law.side == "left":
        return (u * jnp.sqrt(s))[:, :rank].reshape(g.d_model, g.num_kv_heads, g.head_dim)
    rows = (v * jnp.sqrt(s))[:, :rank].T.reshape(g.num_kv_heads, 1, g.head_dim, g.d_model)
    return jnp.repeat(rows / group, group, axis=1).reshape(g.num_heads, g.head_dim, g.d_model)
