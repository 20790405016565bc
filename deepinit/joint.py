"""Two matrices drawn together: the factors of a product a Z + b I (mimetic initialization, arXiv:2305.09828).

Both sides draw the same product from the same key and keep their own factor, so either can be drawn without the other.
Singular values come from LAPACK, whose bits differ between machines: like the orthogonal law, this one is not portable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinit import sampler
from deepinit.errors import ConfigError
from deepinit.geometry import OUTPUTS, QUERIES_KEYS, Geometry, Role
from deepinit.laws import Factor
from deepinit.recipe import Recipe
from deepinit.views import View


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


# --- judging -----------------------------------------------------------------------------------------------------

SIMULATED = 384
"""Width at which the spectrum of a product is computed: it depends on the width through z_std sqrt(d) alone."""


def complaints(views: Sequence[View], arrays: Sequence[Any], recipe: Recipe) -> dict[int, list[str]]:
    """View -> layer by layer, what is wrong with the factors of a product; "" where nothing is.

    A factor's columns are orthogonal and as long as its partner's, since both are singular vectors times sqrt(S); their
    mean square, and how far left and right point the same way, are those of a Z + b I, to a tenth.
    """
    g = recipe.geometry
    places = {(v.leaf.role, v.leaf.canonical.rpartition("/")[0], v.layer(0)): i for i, v in enumerate(views)}
    found: dict[int, list[str]] = {}
    for (role, parent, layer), i in places.items():
        law = recipe.weights.get(role) if role else None
        if not isinstance(law, Factor) or law.side != "left":
            continue
        j = places.get((Role(law.partner), parent, layer))
        if j is None or views[i].layers != views[j].layers:
            found[i] = [f"stands alone: {law.partner} is not beside it"] * views[i].layers
            continue
        pair = [columns(views[k].take(arrays[views[k].array]), views[k].leaf.role, g) for k in (i, j)]
        facts = jax.device_get(measured(*pair))
        ulp = max(float(jnp.finfo(arrays[views[k].array].dtype).eps) for k in (i, j))
        said = [
            complaint(law, g, pair[0].shape[-1], {k: v[n] for k, v in facts.items()}, ulp)
            for n in range(views[i].layers)
        ]
        found[i], found[j] = said, said
    return found


def columns(x: Any, role: Role | None, g: Geometry) -> Any:
    """(layers, blocks, d, rank): the factors of a layer, one for each key head, or one for all heads."""
    layers, group = x.shape[0], g.num_heads // g.num_kv_heads
    if role in OUTPUTS:  # outputs of a group share a factor, each with a part of it
        rows = x.reshape(layers, g.num_kv_heads, group, g.head_dim, g.d_model).sum(2)
        return rows.reshape(layers, 1, -1, g.d_model).swapaxes(2, 3)
    if role not in QUERIES_KEYS:
        return x.reshape(layers, 1, g.d_model, -1)
    heads = x.reshape(layers, g.d_model, g.num_kv_heads, -1, g.head_dim)[:, :, :, 0]
    return heads.swapaxes(1, 2)


@jax.jit
def measured(left: jax.Array, right: jax.Array) -> dict[str, jax.Array]:
    """Per layer: the mean square length of left columns; and in units of it, the largest product of two columns, the
    largest difference between a left and a right one's length, and the mean product of a left with its right one.
    """
    left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    grams = [jnp.einsum("lbdi,lbdj->lbij", x, x, precision="highest") for x in (left, right)]
    lengths = [jnp.diagonal(x, axis1=-2, axis2=-1) for x in grams]
    mean = lengths[0].mean((1, 2))
    eye = jnp.eye(left.shape[-1], dtype=jnp.float32)
    askew = jnp.maximum(*(jnp.abs(x * (1 - eye)).max((1, 2, 3)) for x in grams))
    return {
        "mean": mean,
        "askew": askew / mean,
        "uneven": jnp.abs(lengths[0] - lengths[1]).max((1, 2)) / mean,
        "along": jnp.sum(left * right, -2).mean((1, 2)) / mean,
    }


def complaint(law: Factor, g: Geometry, rank: int, facts: dict[str, Any], ulp: float) -> str:
    """What is wrong with one layer of a pair."""
    if facts["askew"] > 2e-3 + 2 * ulp:
        return "its columns are not orthogonal, as singular vectors are"
    if facts["uneven"] > 2e-3 + 2 * ulp:
        return "its columns are not as long as those of the matrix that it was drawn with"
    mean, along = spectrum(law.noise, law.identity, law.z_std * g.d_model**0.5, rank / g.d_model)
    if abs(facts["mean"] / mean - 1) > 0.1:
        return f"the singular values of its product are {facts['mean'] / mean:.3g} times what they should be"
    if abs(facts["along"] - along) > 0.15:
        return f"its product goes {facts['along']:+.2f} along the identity, should be {along:+.2f}"
    return ""


@functools.cache
def spectrum(noise: float, identity: float, spread: float, share: float) -> tuple[float, float]:
    """(mean, along) of a `share` of the singular values of noise Z + identity I, the largest; Z has std spread/sqrt(d).

    `along` is the sum of s u.v over that of s: 1 where the product is a multiple of I.
    """
    d = SIMULATED
    z = np.random.default_rng(0).standard_normal((d, d)) * spread / d**0.5
    u, s, vt = np.linalg.svd(noise * z + identity * np.eye(d))
    rank = max(1, round(min(share, 1.0) * d))
    u, s, vt = u[:, :rank], s[:rank], vt[:rank]
    return float(s.mean()), float(np.sum(s * np.sum(u * vt.T, 0)) / s.sum())
