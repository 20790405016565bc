"""The feed-forward branch: gated (SwiGLU, GEGLU; Shazeer 2020) or plain (GELU, ReLU)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from deepinit.geometry import Role
from deepinit.nn.norm import Norm
from deepinit.nn.part import Part

ACTIVATIONS = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}


class Mlp(Part):
    """W_down (act(W_gate x) * W_up x), or W_down act(W_up x)."""

    @linen.compact
    def __call__(self, x: jax.Array, layer: Any = None) -> jax.Array:
        """(..., D) -> (..., D)."""
        g = self.geometry
        act = ACTIVATIONS[g.mlp]
        x = self.shifted(x, "in", layer)
        roles = (Role.MLP_GATE, Role.MLP_UP) if g.gated else (Role.MLP_UP,)
        kernels = [self.weight(r, (g.d_model, g.d_ff), ("embed", "mlp"), layer) for r in roles]
        if self.fused_gate_up and g.gated:
            both = jnp.einsum("...D,DCF->...CF", x, jnp.stack(kernels, axis=1))
            hidden = [both[..., 0, :], both[..., 1, :]]
        else:
            hidden = [x @ w for w in kernels]
        hidden = [self.scaled(y, r) for y, r in zip(hidden, roles)]
        if self.bias:
            hidden = [y + self.weight(f"{r}_bias", (g.d_ff,), ("mlp",), layer) for y, r in zip(hidden, roles)]
        hidden[0] = self.shifted(hidden[0], "act", layer)
        y = act(hidden[0]) * hidden[1] if g.gated else act(hidden[0])
        if self.residual.norm == "sub":
            y = Norm(**self.shared(), name="inner_norm")(y, layer)
        y = self.shifted(y, "out", layer)
        y = self.scaled(y @ self.weight(Role.MLP_DOWN, (g.d_ff, g.d_model), ("mlp", "embed"), layer), Role.MLP_DOWN)
        if self.bias:
            y = y + self.weight("mlp_down_bias", (g.d_model,), ("features",), layer)
        return y
