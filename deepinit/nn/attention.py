"""Causal self-attention with grouped-query heads.

B batch, T time, D model, N heads, K key and value heads, G heads per key head, H head width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from deepinit.geometry import Role
from deepinit.nn.attend import attend
from deepinit.nn.norm import Norm, unit
from deepinit.nn.part import Part
from deepinit.nn.product import product
from deepinit.nn.rope import rotary
from deepinit.nn.stats import attention, collecting, keep
from deepinit.sharding import constrain


class Attention(Part):
    """softmax(scale q k^T) v W_o, the scale being `multipliers["attention"]` (1/sqrt(H) where none is given)."""

    @linen.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        mask_BT: jax.Array | None = None,
        layer: Any = None,
        values_BTF: jax.Array | None = None,
    ) -> jax.Array:
        """(B, T, D) -> (B, T, D). `mask` is True at real tokens; a row that sees none of them stays finite. Or it has
        the number of each token's document, from 1, beyond which nothing is seen; 0 is no token.

        `values`, F = K H, is added to what W_v gives.
        """
        g = self.geometry
        x_BTD = self.shifted(x_BTD, "in", layer)
        q, k, v = self.project(x_BTD, layer)
        if values_BTF is not None:
            v = v + values_BTF.reshape(v.shape)
        if self.qk_norm:
            q = Norm(**self.shared(), name="q_norm")(q, layer)
            k = Norm(**self.shared(), name="k_norm")(k, layer)
        if self.v_norm:
            v = Norm(**self.shared(), name="v_norm")(v, layer)
        if self.positions == "rope":
            at_BT = jnp.broadcast_to(jnp.arange(x_BTD.shape[1]), x_BTD.shape[:2])
            q, k = rotary(q, at_BT, self.rope_theta), rotary(k, at_BT, self.rope_theta)
        gain_KH = self.gain("s_qk", layer)
        if gain_KH is not None:  # query heads share the gain of their key head
            q = unit(q) * jnp.repeat(gain_KH, g.num_heads // g.num_kv_heads, axis=0)
            k = unit(k) * gain_KH
        # a device has its part of the sequence's queries, and all keys and values
        q = constrain(q, "batch", "seq", "heads", "head_dim")
        k, v = (constrain(x, "batch", None, "kv_heads", "head_dim") for x in (k, v))
        if q.dtype == jnp.float16 and jax.default_backend() != "gpu":  # no float16 product with float32 sums there
            q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        scale = self.multipliers.get("attention", g.head_dim**-0.5)
        if collecting(self):
            spread, entropy = attention(q, k, scale)
            keep(self, "scores", spread)
            keep(self, "entropy", entropy)
        with jax.numpy_dtype_promotion("standard"):  # jax's own code mixes bfloat16 with float32
            out = attend(q, k, v, mask_BT, scale, self.attention).astype(self.compute)
        gain_N1 = self.gain("head", layer)
        if gain_N1 is not None:
            out = out * gain_N1
        if self.residual.placement("attn") == "sub":
            flat = out.reshape(*out.shape[:2], g.num_heads * g.head_dim)
            out = Norm(**self.shared(), name="inner_norm")(flat, layer).reshape(out.shape)
        out = self.shifted(out, "out", layer)
        w_NHD = self.weight(Role.ATTN_OUT, (g.num_heads, g.head_dim, g.d_model), ("heads", "head_dim", "embed"), layer)
        y_BTD = self.scaled(product(out, w_NHD, inner=2), Role.ATTN_OUT)
        if self.bias:
            y_BTD = y_BTD + self.weight("attn_out_bias", (g.d_model,), ("features",), layer)
        return y_BTD

    def project(self, x_BTD: jax.Array, layer: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q (B, T, N, H), k and v (B, T, K, H)."""
        g = self.geometry
        n, k, h = g.num_heads, g.num_kv_heads, g.head_dim
        heads = ((Role.ATTN_Q, n, "heads"), (Role.ATTN_K, k, "kv_heads"), (Role.ATTN_V, k, "kv_heads"))
        kernels = [self.weight(r, (g.d_model, c, h), ("embed", axis, "head_dim"), layer) for r, c, axis in heads]
        if self.fused_qkv:  # side by side within each key head, so that a tensor-sharded head axis needs no exchange
            groups = [w.reshape(g.d_model, k, -1, h) for w in kernels]
            fused = product(x_BTD, jnp.concatenate(groups, axis=2))
            parts = jnp.split(fused, [n // k, n // k + 1], axis=3)
            outs = [p.reshape(*x_BTD.shape[:2], -1, h) for p in parts]
        else:
            outs = [product(x_BTD, w) for w in kernels]
        outs = [self.scaled(y, r) for y, (r, _, _) in zip(outs, heads)]
        if self.bias:
            biases = [self.weight(f"{r}_bias", (c, h), (axis, "head_dim"), layer) for r, c, axis in heads]
            outs = [y + b for y, b in zip(outs, biases)]
        return outs[0], outs[1], outs[2]
