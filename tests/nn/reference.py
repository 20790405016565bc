"""A decoder written out in NumPy, in float64, from the formulas alone: what the modules are compared with.

It reads the tree of `deepinit.nn.Decoder`, scanned, and takes the residual rule's numbers one addition at a time.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from scipy import special

from deepinit.geometry import Geometry
from deepinit.recipe import Residual

Array = np.ndarray


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def silu(x: Array) -> Array:
    return x * special.expit(x)


def gelu(x: Array) -> Array:
    """The tanh form (Hendrycks & Gimpel 2016), jax's default."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACT = {"swiglu": silu, "geglu": gelu, "gelu": gelu, "relu": lambda x: np.maximum(x, 0)}


class Reference:
    """Logits of a decoder; `forward` keeps the stream after every residual addition in `stream`."""

    def __init__(self, geometry: Geometry, residual: Residual, multipliers: Any, **options: Any):
        self.g, self.rule, self.factors = geometry, residual, dict(multipliers)
        self.options = {"norm": "rmsnorm", "norm_offset": False, "positions": "rope", "qk_norm": False} | options

    def norm(self, p: Any, x: Array) -> Array:
        if self.options["norm"] == "layernorm":
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        x = x * (p["norm_scale"] + self.options["norm_offset"])
        return x + p.get("norm_bias", 0.0)

    def rotate(self, x: Array) -> Array:
        """Complex multiplication of the pairs (i, i + H/2)."""
        half = x.shape[-1] // 2
        turn = np.exp(1j * np.arange(x.shape[1])[:, None] * 10_000.0 ** (-np.arange(half) / half))
        z = (x[..., :half] + 1j * x[..., half:]) * turn[None, :, None, :]
        return np.concatenate([z.real, z.imag], -1)

    def factor(self, name: str) -> float:
        return self.factors.get(name, 1.0)

    def attention(self, p: Any, x: Array, mask: Array | None) -> Array:
        g = self.g
        x = x + p.get("in_branch_shift", 0.0)
        q, k, v = (
            np.einsum("btd,dnh->btnh", x, p[r]) * self.factor(r) + p.get(f"{r}_bias", 0.0)
            for r in ("attn_q", "attn_k", "attn_v")
        )
        if self.options["qk_norm"]:
            q, k = self.norm(p["q_norm"], q), self.norm(p["k_norm"], k)
        if self.options["positions"] == "rope":
            q, k = self.rotate(q), self.rotate(k)
        out = np.zeros_like(q)
        for head in range(g.num_heads):
            kv = head // (g.num_heads // g.num_kv_heads)
            scores = np.einsum("bth,bsh->bts", q[:, :, head], k[:, :, kv]) * self.factors["attention"]
            seen = np.tril(np.ones(scores.shape[1:], bool))[None]
            seen = seen if mask is None else seen & mask[:, None, :]
            out[:, :, head] = softmax(np.where(seen, scores, -1e30)) @ v[:, :, kv]
        if self.rule.norm == "sub":
            out = self.norm(p["inner_norm"], out.reshape(*out.shape[:2], -1)).reshape(out.shape)
        out = out + p.get("out_branch_shift", 0.0)
        return np.einsum("btnh,nhd->btd", out, p["attn_out"]) * self.factor("attn_out") + p.get("attn_out_bias", 0.0)

    def mlp(self, p: Any, x: Array) -> Array:
        x, act = x + p.get("in_branch_shift", 0.0), ACT[self.g.mlp]
        up = (x @ p["mlp_up"]) * self.factor("mlp_up") + p.get("mlp_up_bias", 0.0)
        if self.g.gated:
            gate = (x @ p["mlp_gate"]) * self.factor("mlp_gate") + p.get("mlp_gate_bias", 0.0)
            y = act(gate + p.get("act_branch_shift", 0.0)) * up
        else:
            y = act(up + p.get("act_branch_shift", 0.0))
        if self.rule.norm == "sub":
            y = self.norm(p["inner_norm"], y)
        y = y + p.get("out_branch_shift", 0.0)
        return (y @ p["mlp_down"]) * self.factor("mlp_down") + p.get("mlp_down_bias", 0.0)

    def number(self, numbers: Any, layer: int, sublayer: int) -> float:
        """One number, one per layer, or one per addition."""
        if not isinstance(numbers, tuple):
            return numbers
        return numbers[layer] if len(numbers) == self.g.num_layers else numbers[layer * self.g.sublayers + sublayer]

    def add(self, p: Any, x: Array, f: Any, layer: int, sublayer: int, shared_gate: Any) -> Array:
        rule, at = self.rule, (layer, sublayer)
        h = self.norm(p["norm"], x) if rule.norm in ("pre", "sandwich", "sub") else x
        y = f(self.number(rule.scale_in, *at) * h)
        y = self.norm(p["post_norm"], y) if rule.norm in ("sandwich", "reordered") else y
        if rule.gate:
            y = y * (shared_gate if rule.gate.share == "layer" else p[rule.gate.role])
        x = self.number(rule.skip, *at) * x + self.number(rule.branch, *at) * y
        return self.norm(p["norm"], x) if rule.norm == "post" else x

    def forward(self, params: Any, tokens: Array, mask: Array | None = None) -> Array:
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        x = params["token_embed"][tokens] * self.factor("embed")
        if self.options["positions"] == "learned":
            x = x + params["pos_embed"][: tokens.shape[1]]
        self.embedded, self.stream = x, []
        for layer in range(self.g.num_layers):
            p = jax.tree.map(lambda a: a[layer], params["layers"])  # noqa: B023
            branches = {
                "attn": lambda h: self.attention(p["attention"], h, mask),  # noqa: B023
                "mlp": lambda h: self.mlp(p["mlp"], h),  # noqa: B023
            }
            if self.g.parallel:
                both = tuple(branches.values())
                branches = {"block": lambda h: both[0](h) + both[1](h)}  # noqa: B023
            shared = p.get(self.rule.gate.role) if self.rule.gate else None
            for i, (name, f) in enumerate(branches.items()):
                x = self.add(p.get(f"{name}_residual"), x, f, layer, i, shared)
                self.stream.append(x)
        if self.rule.norm not in ("post", "none"):
            x = self.norm(params["final_norm"], x)
        table = params["token_embed" if self.g.tied_embeddings else "lm_head"]
        logits = x @ table.T * self.factor("logits")
        return logits[..., : self.g.vocab_size]
