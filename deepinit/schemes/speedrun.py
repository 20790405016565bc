"""The small fast trainers: nanochat and modded-nanogpt, with zero outputs and learnable factors on the stream."""

from __future__ import annotations

from deepinit.geometry import GATES, LAYER_MATRICES, OUTPUTS, UPS, Geometry, Role
from deepinit.laws import Uniform
from deepinit.recipe import Gate, Recipe, Residual, Update
from deepinit.schemes.common import (
    EMBEDDINGS_AND_HEAD,
    Laws,
    base_std,
    fixed,
    roles_of,
    zeros,
)
from deepinit.schemes.registry import register

TABLES = (Role.TOKEN_EMBED, Role.POS_EMBED)
# Both have norms without a gain, on queries, keys and the embedding too, and a head of its own.
SPEEDRUN = {"norm_gain": False, "qk_norm": True, "embed_norm": True, "tied_embeddings": False}


def along(first: float, last: float, layers: int) -> tuple[float, ...]:
    """One number per layer, linear from the first to the last."""
    return tuple(first + (last - first) * i / max(1, layers - 1) for i in range(layers))


def uniform(g: Geometry, factor: float, roles: tuple[Role, ...] = LAYER_MATRICES) -> Laws:
    """Uniform, std factor/sqrt(d)."""
    std, formula = base_std(g, "1/sqrt(d)")
    lead = "" if factor == 1 else f"{factor:g} "
    return {r: Uniform(factor * std, lead + formula) for r in roles_of(g, roles)}


@register("nanochat", source="nanochat 92d63d4 nanochat/gpt.py:204-268", norm="pre")
def nanochat(g: Geometry) -> Recipe:
    """q, k, v uniform of std 1/sqrt(d), up 0.4 of it, outputs 0; table N(0, 0.8^2), head N(0, 0.001^2).

    At the head of layer i, x <- w_i x + u_i x0, both learnable: w from 1.15 down to 1.05, u from 0.20 down to 0.05.
    Norms have no gain, one stands on the embedding, and logits are capped softly at 15. In every other layer, the last
    among them, a table of its own adds to the values; it is drawn as v. The middle of the stack times 0.2 is taken off
    its output (backout), and the token before times a learnable 0 is added to the embedding (smear); the small learned
    gates that the code puts on smear and on the tables of values are left out here. AdamW (tables and head) learns at
    (d/768)^(-1/2), the matrices by Muon. Docstrings there still say 1.0 for the table and omit the 0.4.
    """
    rate = Update(lr=(g.d_model / 768) ** -0.5)
    laws = uniform(g, 1.0)
    return Recipe(
        laws
        | uniform(g, 0.4, (*UPS, *GATES))
        | zeros(g, OUTPUTS)
        | fixed(g, 0.8, TABLES)
        | fixed(g, 0.001, (Role.LM_HEAD,)),
        Residual(
            norm="pre",
            skip_gate=Gate(along(1.15, 1.05, g.num_layers), "scalar", "layer"),
            x0_gate=Gate(along(0.20, 0.05, g.num_layers), "scalar", "layer"),
        ),
        updates=dict.fromkeys(EMBEDDINGS_AND_HEAD, rate),
        leaves={"value_token_embed": laws[Role.ATTN_V]},
        gains={
            "backout": Gate(0.2, share="model", role=Role.BRANCH_SCALE),
            "smear": Gate(0.0, share="model", role=Role.BRANCH_SCALE),
        },
        requires=SPEEDRUN | {"value_embed": True, "logit_softcap": 15.0},
    )


@register("modded_nanogpt_medium", source="modded-nanogpt f411b3d train_gpt_medium.py:944-945,1005-1006", norm="pre")
def modded_nanogpt_medium(g: Geometry) -> Recipe:
    """Uniform of std 0.5/sqrt(d), outputs 0; table N(0, 1), head N(0, 0.005^2); x <- 1.05 x + 0 x0, both learnable.

    The shorter track of the same code has since stopped setting the attention output to zero.
    """
    return Recipe(
        uniform(g, 0.5) | zeros(g, OUTPUTS) | fixed(g, 1.0, TABLES) | fixed(g, 0.005, (Role.LM_HEAD,)),
        Residual(
            norm="pre",
            skip_gate=Gate(1.05, "scalar", "layer"),
            x0_gate=Gate(0.0, "scalar", "layer"),
        ),
        requires=SPEEDRUN,
    )
