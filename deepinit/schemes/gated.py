"""Schemes with a learnable factor on each branch that starts at or near zero."""

from __future__ import annotations

from typing import Literal

from deepinit.geometry import EMBEDDINGS, Geometry
from deepinit.recipe import Gate, Recipe, Residual
from deepinit.schemes.common import fan_in, fixed, tied_logits, xavier, xavier_uniform
from deepinit.schemes.registry import register

Base = Literal["xavier_uniform", "xavier_normal", "he_normal", "lecun_normal"]


@register("rezero", source="arXiv:2003.04887, eq. 1; rezero e2c94a8 rztx.py:47", norm="none")
def rezero(g: Geometry, *, share: Literal["layer", "sublayer"] = "layer", base: Base = "xavier_uniform") -> Recipe:
    """x <- x + a F(x), a = 0: the stack is exactly the identity. No norm: after a zero branch it would not be one.

    The authors' Transformer has one a per layer, shared by attention and MLP. At step 0 only a has a gradient; the
    branch weights are still. Embeddings N(0, 1): no norm sets the size of the stream, the tables do.
    """
    bases = {
        "xavier_uniform": xavier_uniform(g),
        "xavier_normal": xavier(g),
        "he_normal": fan_in(g, scale=2.0),
        "lecun_normal": fan_in(g),
    }
    return Recipe(
        bases[base] | fixed(g, 1.0, EMBEDDINGS),
        Residual(norm="none", gate=Gate(0.0, "scalar", share)),
        multipliers=tied_logits(g),
    )
