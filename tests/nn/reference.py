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

    def __init__(self, geometry: Geometry, residual: Residual, multipliers: Any, gains: Any = None, **options: Any):
        self.g, self.rule, self.factors, self.gains = geometry, residual, dict(multipliers), dict(gains or {})
        self.options = {"norm": "rmsnorm", "norm_offset": False, "positions": "rope", "qk_norm": False} | options

    def option(self, name: str) -> Any:
        return self.options.get(name)

    def gain(self, p: Any, place: str) -> Array:
        """What is stored there, times its scale; 1 where there is none."""
        gain = self.gains.get(place)
        return p[f"{place}_{gain.role}"] * gain.scale if gain else np.ones(())

    def unit(self, x: Array) -> Array:
        return x / np.sqrt((x**2).sum(-1, keepdims=True))

    def norm(self, p: Any, x: Array) -> Array:
        if self.options["norm"] == "layernorm":
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        if self.option("norm_gain") is False:
            return x
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

    def attention(self, p: Any, x: Array, mask: Array | None, values: Any = 0.0) -> Array:
        g = self.g
        x = x + p.get("in_branch_shift", 0.0)
        q, k, v = (
            np.einsum("btd,dnh->btnh", x, p[r]) * self.factor(r) + p.get(f"{r}_bias", 0.0)
            for r in ("attn_q", "attn_k", "attn_v")
        )
        v = v + np.reshape(values, v.shape) if np.ndim(values) else v
        if self.options["qk_norm"]:
            q, k = (self.norm(p.get(f"{name}_norm"), x) for name, x in (("q", q), ("k", k)))
        v = self.norm(p["v_norm"], v) if self.option("v_norm") else v
        if self.options["positions"] == "rope":
            q, k = self.rotate(q), self.rotate(k)
        if "s_qk" in self.gains:
            gain = self.gain(p, "s_qk")
            q, k = self.unit(q) * np.repeat(gain, g.num_heads // g.num_kv_heads, 0), self.unit(k) * gain
        out = np.zeros_like(q)
        for head in range(g.num_heads):
            kv = head // (g.num_heads // g.num_kv_heads)
            scores = np.einsum("bth,bsh->bts", q[:, :, head], k[:, :, kv]) * self.factors["attention"]
            seen = np.tril(np.ones(scores.shape[1:], bool))[None]
            seen = seen if mask is None else seen & mask[:, None, :]
            out[:, :, head] = softmax(np.where(seen, scores, -1e30)) @ v[:, :, kv]
        out = out * self.gain(p, "head")
        if self.rule.placement("attn") == "sub":
            out = self.norm(p["inner_norm"], out.reshape(*out.shape[:2], -1)).reshape(out.shape)
        out = out + p.get("out_branch_shift", 0.0)
        return np.einsum("btnh,nhd->btd", out, p["attn_out"]) * self.factor("attn_out") + p.get("attn_out_bias", 0.0)

    def mlp(self, p: Any, x: Array, name: str = "mlp") -> Array:
        """One MLP, or one expert."""
        x, act = x + p.get("in_branch_shift", 0.0), ACT[self.g.mlp]
        gain = self.gain(p, "s_uv") if "s_uv" in self.gains else np.ones((2, 1))
        up = (x @ p[f"{name}_up"]) * self.factor(f"{name}_up") + p.get(f"{name}_up_bias", 0.0)
        if self.g.gated:
            gate = (x @ p[f"{name}_gate"]) * self.factor(f"{name}_gate") + p.get(f"{name}_gate_bias", 0.0)
            y = act(gate * gain[0] + p.get("act_branch_shift", 0.0)) * up * gain[1]
        else:
            y = act(up * gain[0] + p.get("act_branch_shift", 0.0))
        if self.rule.placement("mlp") == "sub":
            y = self.norm(p["inner_norm"], y)
        y = y + p.get("out_branch_shift", 0.0)
        return (y @ p[f"{name}_down"]) * self.factor(f"{name}_down") + p.get(f"{name}_down_bias", 0.0)

    def experts(self, p: Any, x: Array) -> Array:
        """Token by token, one expert after the other."""
        k = self.option("experts_per_token") or 2
        stacked = {name: v for name, v in p.items() if name.startswith("expert_")}
        out = np.zeros_like(x)
        for at in np.ndindex(*x.shape[:2]):
            scores = softmax(x[at] @ p["router"] + p.get("router_bias", 0.0))
            chosen = np.argsort(-scores)[:k]
            shares = scores[chosen] / (scores[chosen].sum() if k > 1 else 1.0)
            for e, share in zip(chosen, shares):
                own = p | {name: v[e] for name, v in stacked.items()}
                out[at] += share * self.mlp(own, x[at], "expert")
        return out

    def number(self, numbers: Any, layer: int, sublayer: int) -> float:
        """One number, one per layer, or one per addition."""
        if not isinstance(numbers, tuple):
            return numbers
        return numbers[layer] if len(numbers) == self.g.num_layers else numbers[layer * self.g.sublayers + sublayer]

    def add(self, p: Any, x: Array, f: Any, layer: int, sublayer: int, shared_gate: Any, kind: str) -> Array:
        rule, at, place = self.rule, (layer, sublayer), self.rule.placement(kind)
        h = self.norm((p or {}).get("norm"), x) if place in ("pre", "sandwich", "sub") else x
        h = self.norm(p["inner_norm"], x) if rule.inner_norm else h
        y = f(self.number(rule.scale_in, *at) * h)
        y = self.norm(p["post_norm"], y) if place in ("sandwich", "reordered") else y
        if rule.sphere:
            return self.unit(x + abs(p[rule.gate.role] * rule.gate.scale) * (self.unit(y) - x))
        if rule.gate:
            y = y * (shared_gate if rule.gate.share == "layer" else p[rule.gate.role])
        if rule.inner_norm and layer == 0:
            return x + y
        gate = rule.skip_gate
        kept = x * p[f"skip_{gate.role}"] if gate and gate.share in ("sublayer", kind) else x
        total = self.number(rule.skip, *at) * kept + self.number(rule.branch, *at) * y
        return self.norm(p["norm"], total) if place == "post" else total

    def forward(self, params: Any, tokens: Array, mask: Array | None = None) -> Array:
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        x = params["token_embed"][tokens] * self.factor("embed")
        if self.options["positions"] == "learned":
            x = x + params["pos_embed"][: tokens.shape[1]]
        if self.option("embed_norm"):
            x = self.norm(params.get("embed_norm"), x)
        if "smear" in self.gains:
            x = x + self.gain(params, "smear") * np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], 1)
        self.embedded, self.stream = x, []
        rule, depth, x0, middle = self.rule, self.g.num_layers, x, None
        for layer in range(depth):
            p = jax.tree.map(lambda a: a[layer], params["layers"])  # noqa: B023
            values = 0.0
            if self.option("value_embed") and layer % 2 == (depth - 1) % 2:
                values = params["value_token_embed"][tokens][:, :, layer // 2]
            if rule.skip_gate and rule.skip_gate.share == "layer":
                x = x * p[f"skip_{rule.skip_gate.role}"]
            if rule.x0_gate:
                x = x + x0 * p[f"x0_{rule.x0_gate.role}"]
            branches = {
                "attn": lambda h: self.attention(p["attention"], h, mask, values),  # noqa: B023
                "mlp": lambda h: (self.experts if self.g.num_experts else self.mlp)(p["mlp"], h),  # noqa: B023
            }
            if self.g.parallel:
                both = tuple(branches.values())
                branches = {"block": lambda h: both[0](h) + both[1](h)}  # noqa: B023
            shared = p.get(self.rule.gate.role) if self.rule.gate else None
            for i, (name, f) in enumerate(branches.items()):
                x = self.add(p.get(f"{name}_residual"), x, f, layer, i, shared, name)
                self.stream.append(x)
            middle = x if layer == depth // 2 else middle
        if "backout" in self.gains:
            x = x - self.gain(params, "backout") * middle
        if rule.norm != "none" and rule.placement("mlp") != "post":
            x = self.norm(params.get("final_norm"), x)
        table = params["token_embed" if self.g.tied_embeddings else "lm_head"]
        logits = x @ table.T * self.factor("logits") * self.gain(params, "s_z")
        if cap := self.option("logit_softcap"):
            logits = cap * np.tanh(logits / cap)
        return logits[..., : self.g.vocab_size]
