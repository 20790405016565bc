"""The token Gram matrix on its way through the residual additions of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinit.errors import ConfigError
from deepinit.signal import gram
from deepinit.signal.forward import Addition, Forward, mean_square
from deepinit.signal.gaussian import Array

SEQ_LEN = 256
"""Positions of a prediction where no tokens are given: attention's share of the variance falls with their number."""
LIMIT = 1e80
"""A variance above this is reported as it stands and not followed further: every format has overflowed."""


@dataclass
class States:
    """What is met on the way up: an entry before the first addition where a list is of the stream."""

    variance: list[float]
    correlation: list[float]
    kept: list[float]
    branch: list[float]
    hidden: list[float]
    share: list[float]
    """Of the branch in the sum."""
    scores: list[float]


def follow(forward: Forward, start: Array, same: Array) -> States:
    """Take a Gram matrix (B, T, T) through all additions, or up to the one that overflows everything.

    `same` says which positions hold the same token.
    """
    eps, each = forward.options.norm_eps, forward.recipe.geometry.sublayers
    branches = Branches(forward, same)
    kinds = {a.kind for a in forward.additions}
    read = {k: forward.read_gain(k) for k in kinds}
    outer = {k: forward.norm_gain(f"layers/{k}_residual/norm") for k in kinds}
    after = {k: forward.norm_gain(f"layers/{k}_residual/post_norm") for k in kinds}
    x, kept = start, 1.0
    out = States([gram.power(x)], [gram.correlation(x)], [1.0], [], [], [], [])
    for s, a in enumerate(forward.additions):
        w, u = forward.heads[a.layer]
        if s % each == 0 and (w, u) != (1.0, 0.0):
            x = w**2 * x + (2 * w * u * kept + u**2) * start
            kept = w * kept + u
        z = gram.normalized(x, eps) * read[a.kind][a.layer] if a.reads_norm else x
        y, hidden, scores = branches(a, z if a.scale_in == 1.0 else z * a.scale_in**2)
        if a.output_normed:
            y = gram.normalized(y, eps) * after[a.kind][a.layer]
        skip, branch = a.skip, a.branch
        if a.sphere:  # both on the unit sphere, then the sum
            y = gram.normalized(y) / forward.recipe.geometry.d_model
            skip, branch = 1 - abs(branch), abs(branch)
        y *= branch**2
        x = skip**2 * x + y
        kept *= skip
        added, total = gram.power(y), gram.power(x)
        if a.norm == "post" or a.sphere:
            size = 1 / forward.recipe.geometry.d_model if a.sphere else outer[a.kind][a.layer]
            kept *= math.sqrt(size / (total + eps))
            x = gram.normalized(x, 0.0 if a.sphere else eps) * size
        out.variance.append(gram.power(x))
        out.correlation.append(gram.correlation(x))
        out.kept.append(kept)
        out.branch.append(added)
        out.hidden.append(hidden)
        out.share.append(added / max(total, 1e-300))
        out.scores.append(scores)
        if not out.variance[-1] < LIMIT:
            break
    return out


class Branches:
    """The two kinds of branches of a model, as maps of a Gram matrix."""

    def __init__(self, forward: Forward, same: Array):
        g = forward.recipe.geometry
        self.forward, self.geometry, self.options = forward, g, forward.options
        self.attention = gram.Attention(same.shape[-1], forward.rope_theta, g.head_dim)
        self.gains = {r: forward.gain(r) for r in ("attn_q", "attn_k", "attn_v", "attn_out", "mlp_up", "mlp_down")}
        self.gains["mlp_gate"] = forward.gain("mlp_gate") if g.gated else self.gains["mlp_up"]
        self.gains["router"] = forward.gain("router") if g.num_experts else np.zeros(g.num_layers)
        self.inner = {k: forward.norm_gain(f"layers/{k}/inner_norm") for k in ("attention", "mlp")}
        self.v_norm, self.head = forward.norm_gain("layers/attention/v_norm"), forward.place_gain("head")
        self.fixed_scores = self.normed_scores()
        self.table = np.zeros(g.num_layers)  # variance of the values that a token's own table adds
        if self.options.value_embed:
            self.table[(g.num_layers - 1) % 2 :: 2] = float(mean_square(forward.recipe.weights["value_token_embed"]))
        self.same, self.routed = same, forward.routed

    def normed_scores(self) -> Array | None:
        """(L,): variance of a logit where queries and keys have a fixed size; None where the input sets it."""
        forward, scale2 = self.forward, self.forward.recipe.multipliers["attention"] ** 2
        if "s_qk" in forward.recipe.gains:  # unit vectors times a gain
            return scale2 / self.geometry.head_dim * forward.place_gain("s_qk") ** 2
        if self.options.qk_norm:
            both = forward.norm_gain("layers/attention/q_norm") * forward.norm_gain("layers/attention/k_norm")
            return scale2 * self.geometry.head_dim * both
        return None

    def __call__(self, a: Addition, z: Array) -> tuple[Array, float, float]:
        """(Gram of the branch's output, mean square of what meets its last matrix, spread of its logits)."""
        if a.kind == "mlp":
            return *self.feed(a, z), 0.0
        y, hidden, scores = self.attend(a, z)
        if a.kind == "block":
            mlp, hidden = self.feed(a, z)
            y = y + mlp
        return y, hidden, scores

    def attend(self, a: Addition, z: Array) -> tuple[Array, float, float]:
        """Attention."""
        gains, layer, eps = self.gains, a.layer, self.options.norm_eps
        scale2 = self.forward.recipe.multipliers["attention"] ** 2 * self.geometry.head_dim
        scores = scale2 * gains["attn_q"][layer] * gains["attn_k"][layer] * gram.power(z) ** 2
        if self.fixed_scores is not None:
            scores = float(self.fixed_scores[layer])
        scores *= 1 - self.attention.common(z)
        v = z * gains["attn_v"][layer]
        if self.table[layer]:
            v = v + self.table[layer] * self.same
        if self.options.v_norm:
            v = gram.normalized(v, eps) * self.v_norm[layer]
        y = self.attention(z, scores, v) * self.head[layer]
        if a.norm == "sub":
            y = gram.normalized(y, eps) * self.inner["attention"][layer]
        return y * gains["attn_out"][layer], gram.power(y), scores

    def feed(self, a: Addition, z: Array) -> tuple[Array, float]:
        """The MLP, or the experts."""
        gains, layer, g = self.gains, a.layer, self.geometry
        centered = a.norm == "sub" and self.options.norm == "layernorm"
        y = gram.mlp(z, g.mlp, gains["mlp_gate"][layer], gains["mlp_up"][layer], centered)
        if a.norm == "sub":
            y = gram.normalized(y, self.options.norm_eps) * self.inner["mlp"][layer]
        if self.routed[layer]:
            y = gram.routed(z, y, g.num_experts, self.options.experts_per_token, gains["router"][layer])
        return y * gains["mlp_down"][layer], gram.power(y)


def first_grams(
    forward: Forward, tokens: Any, seq_len: int = 0, repetition: float = 0.0, variance: float | None = None
) -> tuple[Array, Array]:
    """(Gram of the stack's input, which positions hold the same token), both (B, T, T)."""
    longest = forward.recipe.geometry.max_seq_len
    if tokens is not None:
        tokens = np.asarray(tokens)
        if tokens.ndim not in (1, 2) or tokens.dtype.kind not in "iu" or not tokens.size:
            raise ConfigError(
                f"tokens: {tokens.dtype} of shape {tokens.shape}; whole numbers (T,) or (B, T) are needed"
            )
        same = gram.of_tokens(tokens)
    else:
        if not 0 <= seq_len <= longest:
            raise ConfigError(f"seq_len: {seq_len} is not between 1 and model.max_seq_len {longest}")
        if not 0 <= repetition <= 1:
            raise ConfigError(f"repetition: {repetition} is not a rate between 0 and 1")
        same = gram.of_repetition(seq_len or min(longest, SEQ_LEN), repetition)
    start = forward.embed_variance * same + forward.position_variance * np.eye(same.shape[-1])
    if forward.options.embed_norm:
        gain = forward.norm_gain("embed_norm")[0]
        start = gram.normalized(start, forward.options.norm_eps) * gain
    if variance is not None:
        if not 0 < variance < math.inf:
            raise ConfigError(f"input_variance: {variance} is not a positive number")
        start = start * (variance / gram.power(start))
    return start, same
