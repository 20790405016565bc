"""RMSNorm and LayerNorm, in float32, with gain w or 1 + w."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from deepinit.geometry import Role
from deepinit.nn.part import Part


class Norm(Part):
    """Normalizes the last axis.

    LayerNorm takes the mean off first and has a bias (Ba et al. 2016); RMSNorm has neither (Zhang & Sennrich 2019).
    """

    @linen.compact
    def __call__(self, x: jax.Array, layer: Any = None) -> jax.Array:
        """x of any shape, last axis normalized; computed in float32, returned in the compute dtype."""
        width, axes = x.shape[-1:], ("features",)
        x = x.astype(jnp.float32)
        if self.norm == "layernorm":
            x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self.norm_eps)
        gain = self.weight(Role.NORM_SCALE, width, axes, layer).astype(jnp.float32)
        x = x * (1 + gain if self.norm_offset else gain)
        if self.norm == "layernorm":
            x = x + self.weight("norm_bias", width, axes, layer).astype(jnp.float32)
        return x.astype(self.compute)
