"""The residual rule as a module: x <- norm_post(skip x + branch gate F(scale_in norm_pre(x)))."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from deepinit.errors import ConfigError
from deepinit.laws import Numbers
from deepinit.nn.norm import Norm
from deepinit.nn.part import Part


class ResidualAdd(Part):
    """One residual addition; `sublayer` counts it within its layer."""

    sublayer: int = 0

    @linen.compact
    def __call__(
        self, x: jax.Array, f: Callable[[jax.Array], jax.Array], layer: Any = None, gate: jax.Array | None = None
    ) -> jax.Array:
        """x and f(x) of one shape. `gate` is given where all additions of a layer share one."""
        rule = self.residual
        h = x
        if rule.norm in ("pre", "sandwich", "sub"):
            h = self.normed("norm", h, layer)
        h = times(h, self.constant(rule.scale_in, layer))
        y = f(h)
        if rule.norm in ("sandwich", "reordered"):
            y = self.normed("post_norm", y, layer)
        if rule.gate and gate is None:
            gate = make_gate(self, rule.gate.role, layer)
        if gate is not None:
            y = y * gate
        y = linen.Dropout(self.dropout, deterministic=self.deterministic)(y)
        x = times(x, self.constant(rule.skip, layer)) + times(y, self.constant(rule.branch, layer))
        return self.normed("norm", x, layer) if rule.norm == "post" else x

    def normed(self, name: str, x: jax.Array, layer: Any) -> jax.Array:
        """x through the norm of this name."""
        return Norm(**self.shared(), name=name)(x, layer)

    def constant(self, numbers: Numbers, layer: Any) -> Any:
        """The number of this addition, where there is one per layer or one per addition."""
        if not isinstance(numbers, tuple):
            return numbers
        if layer is None:
            raise ConfigError(f"the residual rule {self.residual.formula} has one constant per layer: say which layer")
        table = jnp.asarray(np.asarray(numbers, np.float32))
        per_layer = len(numbers) == self.geometry.num_layers
        return table[layer if per_layer else layer * self.geometry.sublayers + self.sublayer]


def make_gate(part: Part, name: str, layer: Any) -> jax.Array:
    """The learnable factor of the rule: a scalar, or one per feature."""
    gate = part.residual.gate
    assert gate is not None
    channel = gate.shape == "channel"
    return part.weight(name, (part.geometry.d_model,) if channel else (), ("features",) if channel else (), layer)


def times(x: jax.Array, number: Any) -> jax.Array:
    """x times a constant, multiplied in float32: a skip of 2.213 must not be rounded to bfloat16."""
    if isinstance(number, float) and number == 1.0:
        return x
    return (x.astype(jnp.float32) * jnp.asarray(number, jnp.float32)).astype(x.dtype)
