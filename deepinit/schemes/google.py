"""The fan-in schemes of PaLM, T5X, Gemma and nanodo, and what each does about a table of unit std."""

from __future__ import annotations

from deepinit.geometry import EMBEDDINGS, EXPERTS, QUERIES_KEYS, Geometry, Role
from deepinit.laws import Constant, Normal
from deepinit.recipe import Recipe
from deepinit.schemes.common import (
    EMBEDDINGS_AND_HEAD,
    fan_in,
    fixed,
    roles_of,
    tied_logits,
    truncated,
    unit_tables,
    xavier_uniform,
)
from deepinit.schemes.registry import register

FLAX = truncated(2.0)
"""Cut at 2 sigma and corrected: variance_scaling's truncated normal."""


@register("palm", source="arXiv:2204.02311, section 5", norm="pre")
def palm(g: Geometry) -> Recipe:
    """N(0, 1/fan_in), embeddings N(0, 1) and, for they are the head too, logits times 1/sqrt(d). No biases.

    The model's block is parallel. A head of its own takes the table's law, so that the factor stays right.
    """
    return Recipe(fan_in(g) | fixed(g, 1.0, EMBEDDINGS_AND_HEAD), multipliers={"logits": g.d_model**-0.5})


@register("t5x", source="t5x cc342d4 examples/t5/layers.py:155-215, network.py:199-307", norm="pre")
def t5x(g: Geometry) -> Recipe:
    """q N(0, 1/(d h)), scores not divided by sqrt(h); k, v, out N(0, 1/fan_in); MLP and head the same cut at 2 sigma.

    Embeddings N(0, 1), so a tied head has logits times 1/sqrt(d); a head of its own has 1/sqrt(d) and no factor. The
    1/sqrt(h) folded into q is equal to the run-time one at step 0, and under Adafactor; under Adam q learns faster.
    """
    query = tuple(r for r in QUERIES_KEYS if r.endswith("_q"))
    folded = {r: Normal((g.fan_in(r) * g.head_dim) ** -0.5, "1/sqrt(fan_in h)") for r in roles_of(g, query)}
    dense = (Role.MLP_GATE, Role.MLP_UP, Role.MLP_DOWN, Role.LM_HEAD, *EXPERTS)
    return Recipe(
        fan_in(g) | fan_in(g, dense, draw=FLAX) | folded | fixed(g, 1.0, EMBEDDINGS),
        multipliers={"attention": 1.0, **tied_logits(g)},
    )


@register(
    "gemma",
    source="arXiv:2403.08295; big_vision 0127fb6 models/ppp/gemma.py:199-235,345-358",
    norm=("pre", "sandwich"),
    verified=False,
)
def gemma(g: Geometry) -> Recipe:
    """1/sqrt(fan_in) cut at 2 sigma; the tied table N(0, 1/d), times sqrt(d) as an embedding, bare as a head.

    Norms multiply by 1 + w, w = 0 at first: with a plain gain a w of 0 would silence the model. Gemma 2 and 3 have the
    norms at both ends of a branch.
    """
    return Recipe(
        fan_in(g, draw=FLAX) | unit_tables(g) | {Role.NORM_SCALE: Constant(0.0, "0, in 1 + w")},
        multipliers={"embed": g.d_model**0.5},
        requires={"norm_offset": True},
    )


@register("nanodo", source="nanodo 10aefde model.py:38-40", norm="pre")
def nanodo(g: Geometry) -> Recipe:
    """Xavier uniform; the table N(0, 1/d), head and embedding in one, with no factor on either side."""
    return Recipe(xavier_uniform(g) | unit_tables(g))
