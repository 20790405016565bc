"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), halves paired as in GPT-NeoX and Llama."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotary(x_BTNH: jax.Array, positions_BT: jax.Array, theta: float = 10_000.0) -> jax.Array:
    """Rotates feature i with feature i + H/2 by the angle position * theta^(-2i/H); computed in float32."""
    half = x_BTNH.shape[-1] // 2
    rate = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions_BT.astype(jnp.float32)[:, :, None, None] * rate
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)
