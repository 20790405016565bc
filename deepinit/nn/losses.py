"""Cross-entropy, and the loss of a head that never holds the logits of a whole batch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinit.nn.product import product
from deepinit.sharding import constrain, unrolled


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """(B, T) losses in nats. Every device sums over its own part of the vocabulary: looking the target up by index
    would gather the logits of the others.
    """
    hit_BTV = jnp.arange(logits_BTV.shape[-1], dtype=targets_BT.dtype) == targets_BT[..., None]
    target_BT = jnp.sum(jnp.where(hit_BTV, logits_BTV, jnp.zeros((), logits_BTV.dtype)), axis=-1)
    return jax.nn.logsumexp(logits_BTV, axis=-1) - target_BT


@dataclass(frozen=True)
class Head:
    """From the stream to float32 logits."""

    vocab: int
    """Tokens; rows of the table from here on are padding, whose logits are the smallest float32."""
    factor: float = 1.0
    softcap: float = 0.0

    def __call__(self, weights: Any, x_BTD: jax.Array) -> jax.Array:
        """(B, T, V) of `weights`: the table (V, d), and a gain (V,) or None."""
        table_VD, gain_V = weights
        logits = product(x_BTD, table_VD.T, dtype=jnp.float32)
        if self.factor != 1.0:
            logits = logits * jnp.asarray(self.factor, logits.dtype)
        logits = constrain(logits, "batch", "seq", "vocab")
        if gain_V is not None:
            logits = logits * gain_V.astype(jnp.float32)
        if self.softcap:
            logits = self.softcap * jnp.tanh(logits / self.softcap)
        padded = table_VD.shape[0]
        return logits if padded == self.vocab else jnp.where(
            jnp.arange(padded) < self.vocab, logits, np.finfo(np.float32).min
        )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def chunked(head: Head, parts: int, weights: Any, x_BTD: jax.Array, targets_BT: jax.Array, share_BT: Any) -> jax.Array:
    """Sum of share times loss, nats in float32, from the logits of one part of every sequence at a time.

    The gradient is taken part by part in the same pass, so that no logits are kept and none are computed twice.
    Equal to the loss of the whole up to the order of the sums.
    """

    def one(total: jax.Array, piece: Any) -> tuple[jax.Array, None]:
        return total + part_loss(head, weights, *piece), None

    return jax.lax.scan(one, jnp.zeros(()), split(parts, (x_BTD, targets_BT, share_BT)), unroll=unrolled())[0]


def part_loss(head: Head, weights: Any, x: jax.Array, targets: jax.Array, share: jax.Array) -> jax.Array:
    """The loss of one part."""
    return jnp.sum(cross_entropy(head(weights, x), targets) * share)


def split(parts: int, arrays: Any) -> Any:
    """(B, T, ...) to (parts, B, T / parts, ...). A part takes every parts-th token: where devices hold ranges of a
    sequence, each has its share of every part.
    """

    def one(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, parts, *x.shape[2:]), 2, 0)

    return jax.tree.map(one, arrays)


def forward(head: Head, parts: int, weights: Any, x_BTD: jax.Array, targets_BT: jax.Array, share_BT: Any) -> Any:
    """The loss, and its gradients for the backward pass."""

    def one(carry: Any, piece: Any) -> tuple[Any, jax.Array]:
        x, targets, share = piece
        loss, (dweights, dx) = jax.value_and_grad(
            lambda w, x: part_loss(head, w, x, targets, share), argnums=(0, 1)
        )(weights, x)  # fmt: skip
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), carry, (loss, dweights)), dx

    zero = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
    pieces = split(parts, (x_BTD, targets_BT, share_BT))
    (loss, dweights), dx = jax.lax.scan(one, (jnp.zeros(()), zero), pieces, unroll=unrolled())
    dweights = jax.tree.map(lambda g, w: g.astype(w.dtype), dweights, weights)
    return loss, (dweights, jnp.moveaxis(dx, 0, 2).reshape(x_BTD.shape))


def backward(head: Head, parts: int, kept: Any, ct: jax.Array) -> Any:
    """The gradients times the cotangent of the sum; none for targets and shares."""
    dweights, dx = jax.tree.map(lambda g: g * ct.astype(g.dtype), kept)
    return dweights, dx, None, None


chunked.defvjp(forward, backward)
