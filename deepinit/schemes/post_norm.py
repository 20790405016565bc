"""Schemes for x <- LN(x + F(x)), the norm on the sum."""

from __future__ import annotations

import math

from deepinit.geometry import QUERIES_KEYS, VALUES, Geometry
from deepinit.recipe import Recipe, Residual
from deepinit.schemes.common import unit_tables, xavier_uniform
from deepinit.schemes.registry import register

QKV = (*QUERIES_KEYS, *VALUES)


@register(
    "post_ln",
    aliases=("post_ln_fairseq", "vaswani"),
    source="arXiv:1706.03762, section 3.4; fairseq multihead_attention.py",
    norm="post",
)
def post_ln(g: Geometry) -> Recipe:
    """x <- LN(x + F(x)); Xavier uniform, q, k and v with gain 1/sqrt(2); embeddings N(0, 1/d) times sqrt(d).

    The gain is that of a fused (d, 3d) Xavier matrix. The multiplier and the std of the embedding belong together:
    either alone is wrong by sqrt(d). Trains with warm-up: gradients near the output are large (arXiv:2002.04745,
    theorem 1).
    """
    return Recipe(
        xavier_uniform(g) | xavier_uniform(g, QKV, gain=0.5**0.5, name="1/sqrt(2)") | unit_tables(g),
        Residual(norm="post"),
        multipliers={"embed": math.sqrt(g.d_model)},
    )
