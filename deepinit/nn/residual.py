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
from deepinit.nn.norm import Norm, unit
from deepinit.nn.part import Part
from deepinit.nn.stats import collecting, keep, mean_square
from deepinit.recipe import Gate


class ResidualAdd(Part):
    """One residual addition: of `kind` attn, mlp, or block for both in one; `sublayer` counts it within its layer."""

    kind: str = "attn"
    sublayer: int = 0

    @linen.compact
    def __call__(
        self, x: jax.Array, f: Callable[[jax.Array], jax.Array], layer: Any = None, gate: jax.Array | None = None
    ) -> jax.Array:
        """x and f(x) of one shape. `gate` is given where all additions of a layer share one."""
        rule, place = self.residual, self.residual.placement(self.kind)
        h = x
        if rule.inner_norm:
            h = self.normed("inner_norm", h, layer)
        elif place in ("pre", "sandwich", "sub"):
            h = self.normed("norm", h, layer)
        h = times(h, self.constant(rule.scale_in, layer))
        y = f(h)
        if place in ("sandwich", "reordered"):
            y = self.normed("post_norm", y, layer)
        if rule.gate and gate is None:
            gate = make_gate(self, rule.gate, layer)
        if gate is not None and not rule.sphere:
            y = y * gate
        y = linen.Dropout(self.dropout, deterministic=self.deterministic)(y)
        if rule.sphere:
            y, share = unit(y), 1.0 if gate is None else jnp.abs(gate)
            if collecting(self):
                keep(self, "branch_ms", mean_square(share * y))
            return unit(x + share * (y - x))
        kept = x
        if rule.skip_gate and rule.skip_gate.share in ("sublayer", self.kind):
            self.measure("skip_var", x)
            self.measure("branch_var", y)
            kept = times(x, make_gate(self, rule.skip_gate, layer, "skip"))
        y = times(y, self.constant(rule.branch, layer))
        if collecting(self):
            keep(self, "branch_ms", mean_square(y))
        total = times(kept, self.constant(rule.skip, layer)) + y
        if place != "post":
            return total
        total = self.normed("norm", total, layer)
        if rule.inner_norm:  # its first layer has neither skip nor outer norm; the norm's leaf is there for every layer
            total = jnp.where(jnp.asarray(self.known(layer)) == 0, x + y, total)
        return total

    def normed(self, name: str, x: jax.Array, layer: Any) -> jax.Array:
        """x through the norm of this name."""
        return Norm(**self.shared(), name=name)(x, layer)

    def known(self, layer: Any) -> Any:
        """The layer, which must be given."""
        if layer is None:
            raise ConfigError(f"the residual rule {self.residual.formula} differs by layer: say which layer")
        return layer

    def constant(self, numbers: Numbers, layer: Any) -> Any:
        """The number of this addition, where there is one per layer or one per addition."""
        if not isinstance(numbers, tuple):
            return numbers
        layer = self.known(layer)
        table = jnp.asarray(np.asarray(numbers, np.float32))
        per_layer = len(numbers) == self.geometry.num_layers
        return table[layer if per_layer else layer * self.geometry.sublayers + self.sublayer]

    def measure(self, name: str, x: jax.Array) -> None:
        """Keep the variance of x, where statistics are collected."""
        wide = x.astype(jnp.float32)
        self.sow("stats", name, jnp.var(wide), reduce_fn=lambda _, new: new, init_fn=lambda: None)


def make_gate(part: Part, gate: Gate, layer: Any, qualifier: str = "") -> jax.Array:
    """A learnable factor of the rule: a scalar, or one per feature; times its `scale`, in float32."""
    channel = gate.shape == "channel"
    name = f"{qualifier}_{gate.role}".lstrip("_")
    stored = part.weight(name, (part.geometry.d_model,) if channel else (), ("features",) if channel else (), layer)
    return stored if gate.scale == 1.0 else stored * jnp.asarray(gate.scale, stored.dtype)


def times(x: jax.Array, number: Any) -> jax.Array:
    """x times a constant, multiplied in float32: a skip of 2.213 must not be rounded to bfloat16."""
    if isinstance(number, float) and number == 1.0:
        return x
    return (x.astype(jnp.float32) * jnp.asarray(number, jnp.float32)).astype(x.dtype)
