"""The feed-forward branch: gated (SwiGLU, GEGLU; Shazeer 2020) or plain (GELU, ReLU)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from deepinit.geometry import Role
from deepinit.nn.norm import Norm
from deepinit.nn.part import Part
from deepinit.nn.product import product

ACTIVATIONS = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}


class Mlp(Part):
    """W_down (act(W_gate x) * W_up x), or W_down act(W_up x)."""

    @linen.compact
    def __call__(self, x: jax.Array, layer: Any = None) -> jax.Array:
        """(..., D) -> (..., D)."""
        g = self.geometry
        roles = (Role.MLP_GATE, Role.MLP_UP) if g.gated else (Role.MLP_UP,)
        kernels = [self.weight(r, (g.d_model, g.d_ff), ("embed", "mlp"), layer) for r in roles]

        def up(x: jax.Array) -> list[jax.Array]:
            if self.fused_gate_up and g.gated:
                both = product(x, jnp.stack(kernels, axis=1))
                hidden = [both[..., 0, :], both[..., 1, :]]
            else:
                hidden = [product(x, w) for w in kernels]
            hidden = [self.scaled(y, r) for y, r in zip(hidden, roles)]
            if self.bias:
                hidden = [y + self.weight(f"{r}_bias", (g.d_ff,), ("mlp",), layer) for y, r in zip(hidden, roles)]
            return hidden

        def down(y: jax.Array) -> jax.Array:
            w_FD = self.weight(Role.MLP_DOWN, (g.d_ff, g.d_model), ("mlp", "embed"), layer)
            y = self.scaled(product(y, w_FD), Role.MLP_DOWN)
            return y + self.weight("mlp_down_bias", (g.d_model,), ("features",), layer) if self.bias else y

        return feed_forward(self, x, up, down, layer)


def feed_forward(
    part: Part,
    x: jax.Array,
    up: Callable[[jax.Array], list[jax.Array]],
    down: Callable[[jax.Array], jax.Array],
    layer: Any,
) -> jax.Array:
    """What stands around the matrices of an MLP or an expert: activation, and norm, gains and shifts by the rule.

    `up` gives the gate's and the up matrix's product (..., F), or the one of a plain MLP; `down` takes (..., F).
    """
    x = part.shifted(x, "in", layer)
    hidden = up(x)
    gain = part.gain("s_uv", layer)
    if gain is not None:
        hidden = [y * gain[i] for i, y in enumerate(hidden)]
    hidden[0] = part.shifted(hidden[0], "act", layer)
    y = ACTIVATIONS[part.geometry.mlp](hidden[0])
    y = y * hidden[1] if part.geometry.gated else y
    if part.residual.placement("mlp") == "sub":
        y = Norm(**part.shared(), name="inner_norm")(y, layer)
    return down(part.shifted(y, "out", layer))
