"""Statistics that modules keep in the collection `stats` while it is mutable, and taps on the stream's gradient.

In the collection `stream`, every layer keeps the whole stream after it.

Nothing here is computed in an ordinary step. All of it is float32, whatever the model computes in.

B batch, T time, D model, N heads, K key heads, G heads per key head, H head width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

COLLECTION = "stats"
STREAM = "stream"
TAPS = "taps"
WINDOW = 256
"""Positions of the first sequence over which attention is looked at."""


def collecting(module: linen.Module, collection: str = COLLECTION) -> bool:
    """Whether statistics are wanted in this pass."""
    return module.is_mutable_collection(collection) and not module.is_initializing()


def keep(module: linen.Module, name: str, value: jax.Array, collection: str = COLLECTION) -> None:
    """Keep a value in the collection, the last one where there are several."""
    module.sow(collection, name, value, reduce_fn=lambda _, new: new, init_fn=lambda: None)


def mean_square(x: jax.Array) -> jax.Array:
    """Mean square over all axes."""
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def token_correlation(x_BTD: jax.Array) -> jax.Array:
    """Mean cosine of two different positions of a sequence, from the length of the sum of unit vectors."""
    x = x_BTD.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, -1, keepdims=True), 1e-30))
    n = x.shape[1]
    return jnp.mean((jnp.sum(jnp.square(jnp.sum(x, 1)), -1) - n) / max(n * (n - 1), 1))


def attention(q_BTNH: jax.Array, k_BTKH: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """(mean variance of a row's logits, mean entropy of a row's weights over that of uniform ones), causal.

    Of the first sequence's first positions; the first row, which sees itself alone, does not count.
    """
    q, k = (x[0, :WINDOW].astype(jnp.float32) for x in (q_BTNH, k_BTKH))
    t, n, h = q.shape
    logits = scale * jnp.einsum("TKGH,SKH->KGTS", q.reshape(t, k.shape[1], n // k.shape[1], h), k)
    seen = jnp.tril(jnp.ones((t, t), bool))
    count = jnp.arange(1, t + 1, dtype=jnp.float32)
    mean = jnp.sum(logits, -1, where=seen) / count
    square = jnp.sum(jnp.square(logits - mean[..., None]), -1, where=seen) / jnp.maximum(count - 1, 1)
    log_p = jax.nn.log_softmax(jnp.where(seen, logits, -jnp.inf))
    entropy = -jnp.sum(jnp.exp(log_p) * jnp.where(seen, log_p, 0.0), -1) / jnp.log(jnp.maximum(count, 2))
    return jnp.mean(square[..., 1:]), jnp.mean(entropy[..., 1:])


@jax.custom_vjp
def tap(x: jax.Array, at: jax.Array) -> jax.Array:
    """x; the derivative with respect to the scalar `at` is the sum of squares of the gradient that passes here."""
    return x


def _tap_forward(x: jax.Array, at: jax.Array) -> tuple[jax.Array, None]:
    return x, None


def _tap_backward(_: None, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    return g, jnp.sum(jnp.square(g.astype(jnp.float32)))


tap.defvjp(_tap_forward, _tap_backward)


def tapped(module: linen.Module, x: Any) -> Any:
    """x, or (x, middle) with x tapped, where the pass was given a tap for this module."""
    if not module.has_variable(TAPS, "gradient"):
        return x
    at: jax.Array = module.get_variable(TAPS, "gradient")
    return (tap(x[0], at), *x[1:]) if isinstance(x, tuple) else tap(x, at)
