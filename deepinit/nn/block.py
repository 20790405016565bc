"""A transformer block: attention and MLP (or experts), one after the other or side by side."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from deepinit.nn.attention import Attention
from deepinit.nn.mlp import Mlp
from deepinit.nn.moe import Moe
from deepinit.nn.part import Part
from deepinit.nn.residual import ResidualAdd, make_gate, times
from deepinit.nn.stats import STREAM, collecting, keep, mean_square, tapped, token_correlation
from deepinit.sharding import constrain


class Block(Part):
    """x -> x with one residual addition for each branch, or one for both where the geometry is `parallel`."""

    routed: bool | None = None
    """Whether the MLP is a mixture of experts; None: wherever the geometry has experts."""

    @linen.compact
    def __call__(
        self,
        stream: Any,
        layer: Any = None,
        mask_BT: jax.Array | None = None,
        x0_BTD: jax.Array | None = None,
        values_BTF: jax.Array | None = None,
    ) -> tuple[Any, None]:
        """(B, T, D) -> ((B, T, D), None), the form that a scan wants. `layer` (0-based) may be traced.

        The stream may also be a pair of it and of what the middle layer gave, which that layer sets. `x0` is the
        stack's input, where the residual rule comes back to it; `values` are added to attention's.
        """
        x_BTD, middle_BTD = stream if isinstance(stream, tuple) else (stream, None)
        x_BTD = self.head(x_BTD, x0_BTD, layer)
        attention = Attention(**self.shared(), name="attention")
        routed = self.geometry.num_experts > 0 if self.routed is None else self.routed
        mlp = (Moe if routed else Mlp)(**self.shared(), name="mlp")
        branches = {
            "attn": lambda h: attention(h, mask_BT, layer, values_BTF),
            "mlp": lambda h: mlp(h, layer),
        }
        if self.geometry.parallel:
            branches = {"block": lambda h: attention(h, mask_BT, layer, values_BTF) + mlp(h, layer)}
        rule = self.residual.gate
        gate = make_gate(self, rule, layer) if rule and rule.share == "layer" else None
        stream_ms, stream_corr = [], []
        for i, (kind, branch) in enumerate(branches.items()):
            add = ResidualAdd(**self.shared(), kind=kind, sublayer=i, name=f"{kind}_residual")
            x_BTD = constrain(add(x_BTD, branch, layer, gate), "batch", "seq", "features")
            if collecting(self):
                stream_ms.append(mean_square(x_BTD))
                stream_corr.append(token_correlation(x_BTD))
        if stream_ms:
            keep(self, "stream_ms", jnp.stack(stream_ms))
            keep(self, "stream_corr", jnp.stack(stream_corr))
        if collecting(self, STREAM):
            keep(self, "x", x_BTD, STREAM)
        x_BTD = tapped(self, x_BTD)
        if middle_BTD is None:
            return x_BTD, None
        return (x_BTD, jnp.where(jnp.asarray(layer) == self.geometry.num_layers // 2, x_BTD, middle_BTD)), None

    def head(self, x_BTD: jax.Array, x0_BTD: jax.Array | None, layer: Any) -> jax.Array:
        """w x + u x0, where the rule has such factors at the head of a layer."""
        rule = self.residual
        if rule.skip_gate and rule.skip_gate.share == "layer":
            x_BTD = times(x_BTD, make_gate(self, rule.skip_gate, layer, "skip"))
        if rule.x0_gate and x0_BTD is not None:
            x_BTD = x_BTD + times(x0_BTD, make_gate(self, rule.x0_gate, layer, "x0"))
        return x_BTD
