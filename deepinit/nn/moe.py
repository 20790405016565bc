"""A mixture of experts in the place of the MLP: each token goes to the k experts that its router likes best.

B batch, T time, D model, F inside an expert, E experts, K experts of a token, R rows: a token once for each of its
experts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from deepinit.errors import ConfigError
from deepinit.geometry import Role
from deepinit.nn.mlp import feed_forward
from deepinit.nn.part import Part


class Moe(Part):
    """sum_k p_k F_k(x), p the router's softmax over its K choices (with K = 1, its probability; Fedus et al. 2021).

    No token is dropped. `dispatch` sorts the rows by expert and takes one ragged product over them, or takes every
    expert on every token and forgets what was not chosen: more arithmetic, and no exchange between devices.
    """

    @linen.compact
    def __call__(self, x_BTD: jax.Array, layer: Any = None) -> jax.Array:
        """(B, T, D) -> (B, T, D)."""
        g = self.geometry
        if self.fused_gate_up:
            raise ConfigError("model.fused_gate_up: true is for a dense MLP; experts have no fused product")
        weights_BTK, chosen_BTK = self.route(x_BTD, layer)
        roles = (Role.EXPERT_GATE, Role.EXPERT_UP) if g.gated else (Role.EXPERT_UP,)
        axes = ("experts", "embed", "mlp")
        kernels = {r: self.weight(r, (g.num_experts, g.d_model, g.d_ff), axes, layer) for r in roles}
        kernels[Role.EXPERT_DOWN] = self.weight(
            Role.EXPERT_DOWN, (g.num_experts, g.d_ff, g.d_model), ("experts", "mlp", "embed"), layer
        )
        biases = {}
        if self.bias:
            for r, w in kernels.items():
                wide = ("experts", "features" if r is Role.EXPERT_DOWN else "mlp")
                biases[r] = self.weight(f"{r}_bias", (g.num_experts, w.shape[-1]), wide, layer)
        if self.dispatch == "dense":

            def product(x: jax.Array, r: Role) -> jax.Array:
                spec = "...D,EDF->...EF" if r in roles else "...ED,EDF->...EF"
                y = self.scaled(jnp.einsum(spec, x, kernels[r]), r)
                return y + biases[r] if self.bias else y

            y_BTED = feed_forward(
                self, x_BTD, lambda x: [product(x, r) for r in roles], lambda y: product(y, Role.EXPERT_DOWN), layer
            )
            share_BTE = jnp.sum(jax.nn.one_hot(chosen_BTK, g.num_experts) * weights_BTK[..., None], -2)
            return jnp.einsum("BTED,BTE->BTD", y_BTED, share_BTE.astype(y_BTED.dtype))

        k = self.experts_per_token
        expert_R = chosen_BTK.reshape(-1)
        order_R = jnp.argsort(expert_R, stable=True)
        sizes_E = jnp.bincount(expert_R, length=g.num_experts)
        sorted_R = expert_R[order_R]

        def ragged(x: jax.Array, r: Role) -> jax.Array:
            y = self.scaled(jax.lax.ragged_dot(x, kernels[r], sizes_E), r)
            return y + biases[r][sorted_R] if self.bias else y

        rows_RD = x_BTD.reshape(-1, g.d_model)[order_R // k]
        y_RD = feed_forward(
            self, rows_RD, lambda x: [ragged(x, r) for r in roles], lambda y: ragged(y, Role.EXPERT_DOWN), layer
        )
        back_BTKD = jnp.zeros_like(y_RD).at[order_R].set(y_RD).reshape(*chosen_BTK.shape, g.d_model)
        return jnp.einsum("BTKD,BTK->BTD", back_BTKD, weights_BTK.astype(back_BTKD.dtype))

    def route(self, x_BTD: jax.Array, layer: Any) -> tuple[jax.Array, jax.Array]:
        """(B, T, K) float32 weights and int32 choices. Keeps the loss that evens out the load, where losses are kept.

        That loss is E sum_e f_e P_e, f_e the share of rows that e gets and P_e its mean probability: 1 where even
        (Fedus et al. 2021, eq. 4).
        """
        g, k = self.geometry, self.experts_per_token
        w_DE = self.weight(Role.ROUTER, (g.d_model, g.num_experts), ("embed", "experts"), layer)
        logits_BTE = self.scaled(x_BTD.astype(jnp.float32) @ w_DE.astype(jnp.float32), Role.ROUTER)
        if self.bias:
            bias_E = self.weight("router_bias", (g.num_experts,), ("experts",), layer)
            logits_BTE = logits_BTE + bias_E.astype(jnp.float32)
        probs_BTE = jax.nn.softmax(logits_BTE)
        weights_BTK, chosen_BTK = jax.lax.top_k(probs_BTE, k)
        share_E = jax.nn.one_hot(chosen_BTK, g.num_experts).mean((0, 1, 2))
        loss = g.num_experts * jnp.sum(share_E * probs_BTE.mean((0, 1)))
        self.sow("losses", "balance", self.balance_loss * loss, reduce_fn=jnp.add, init_fn=lambda: jnp.zeros(()))
        if k > 1:
            weights_BTK = weights_BTK / weights_BTK.sum(-1, keepdims=True)
        return weights_BTK, chosen_BTK
