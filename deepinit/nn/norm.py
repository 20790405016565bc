"""RMSNorm and LayerNorm, in float32, with gain w, 1 + w or none; and vectors of unit length."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from deepinit.geometry import Role
from deepinit.nn.part import Part
from deepinit.nn.stats import collecting, keep, mean_square


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
        if collecting(self):
            keep(self, "in_ms", mean_square(x))
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self.norm_eps)
        if not self.norm_gain:
            return x.astype(self.compute)
        gain = self.weight(Role.NORM_SCALE, width, axes, layer).astype(jnp.float32)
        x = x * (1 + gain if self.norm_offset else gain)
        if self.norm == "layernorm":
            x = x + self.weight("norm_bias", width, axes, layer).astype(jnp.float32)
        if collecting(self):
            keep(self, "out_ms", mean_square(x))
        return x.astype(self.compute)


def unit(x: jax.Array) -> jax.Array:
    """The last axis brought to length 1, computed in float32; zero stays zero."""
    wide = x.astype(jnp.float32)
    square = jnp.sum(wide * wide, -1, keepdims=True)
    return (wide * jax.lax.rsqrt(jnp.maximum(square, 1e-30))).astype(x.dtype)
