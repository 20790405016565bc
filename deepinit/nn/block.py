"""A transformer block: attention and MLP, one after the other or side by side."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from deepinit.nn.attention import Attention
from deepinit.nn.mlp import Mlp
from deepinit.nn.part import Part
from deepinit.nn.residual import ResidualAdd, make_gate
from deepinit.sharding import constrain


class Block(Part):
    """x -> x with one residual addition for each branch, or one for both where the geometry is `parallel`."""

    @linen.compact
    def __call__(self, x_BTD: jax.Array, layer: Any = None, mask_BT: jax.Array | None = None) -> tuple[jax.Array, None]:
        """(B, T, D) -> ((B, T, D), None), the form that a scan wants. `layer` (0-based) may be traced."""
        attention = Attention(**self.shared(), name="attention")
        mlp = Mlp(**self.shared(), name="mlp")
        branches = {
            "attn": lambda h: attention(h, mask_BT, layer),
            "mlp": lambda h: mlp(h, layer),
        }
        if self.geometry.parallel:
            branches = {"block": lambda h: attention(h, mask_BT, layer) + mlp(h, layer)}
        rule, gate = self.residual.gate, None
        if rule and rule.share == "layer":
            gate = make_gate(self, rule.role, layer)
        stream_ms = []
        for i, (name, branch) in enumerate(branches.items()):
            add = ResidualAdd(**self.shared(), sublayer=i, name=f"{name}_residual")
            x_BTD = constrain(add(x_BTD, branch, layer, gate), "batch", "seq", "features")
            stream_ms.append(mean_square(x_BTD))
        self.sow("stats", "stream_ms", jnp.stack(stream_ms), reduce_fn=lambda _, new: new, init_fn=lambda: None)
        return x_BTD, None


def mean_square(x: jax.Array) -> jax.Array:
    """Mean square over all axes, in float32."""
    return jnp.mean(jnp.square(x.astype(jnp.float32)))
