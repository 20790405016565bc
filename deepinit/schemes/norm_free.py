"""Schemes that need no normalization because every update of the function they compute is bounded."""

from __future__ import annotations

import math

from deepinit.geometry import EMBEDDINGS, OUTPUTS, QUERIES_KEYS, UPS, VALUES, Geometry, Role
from deepinit.recipe import Gate, Recipe, Residual, Update
from deepinit.schemes.common import EMBEDDINGS_AND_HEAD, fixed, unit_tables, xavier_uniform, zeros
from deepinit.schemes.registry import register

QKV = (*QUERIES_KEYS, *VALUES)


@register(
    "fixup", source="arXiv:1901.09321, section 3; Fixup f3fa449 fairseq/modules/transformer_zero.py:560", norm="none"
)
def fixup(g: Geometry, *, scalar_lr: float = 0.1) -> Recipe:
    """x <- x + s F(x + b), s = 1, b = 0, F's last matrix and the head 0, the others times R^(-1/(2m-2)); no norm.

    R counts residual additions (2L) and m the matrices in a branch: attention has m = 4, so q, k, v are Xavier uniform
    (fused, hence 1/sqrt(2)) times R^(-1/6); the MLP has m = 2, so up is Xavier uniform times R^(-1/2). Each SGD step
    then moves the function by Theta(lr). The first loss is ln(vocab) exactly. A gate matrix is outside the paper and
    keeps gain 1, so that gate times up still shrinks by R^(-1/2). Scalars learn at a tenth of the rate in the authors'
    image runs (`scalar_lr`), at the full rate in their translation runs. Shifts take the place of biases.
    """
    r = g.num_residuals
    return Recipe(
        xavier_uniform(g)
        | xavier_uniform(g, QKV, gain=r ** (-1 / 6) / math.sqrt(2), name="R^(-1/6) /sqrt(2)")
        | xavier_uniform(g, UPS, gain=r**-0.5, name="R^(-1/2)")
        | zeros(g, (*OUTPUTS, Role.LM_HEAD))
        | unit_tables(g, EMBEDDINGS),
        Residual(norm="none", gate=Gate(1.0, "scalar", "sublayer", role=Role.BRANCH_SCALE), shift=True),
        multipliers={"embed": math.sqrt(g.d_model)},
        updates={Role.BRANCH_SCALE: Update(lr=scalar_lr), Role.BRANCH_SHIFT: Update(lr=scalar_lr)},
        requires={"bias": False, "tied_embeddings": False},
        invariants=("identity",),
    )


TFIXUP = "Huang et al. 2020 (ICML); T-Fixup b17e166 fairseq/modules/transformer_layer.py:31-47,157-173"


def tfix(g: Geometry, stack: str) -> Recipe:
    """Xavier uniform; v, out and the MLP times (9M)^(-1/4) in a decoder, 0.67 N^(-1/4) in an encoder; no norm."""
    n, m = g.encoder_layers or g.num_layers, g.decoder_layers or g.num_layers
    if stack == "encoder":
        factor, name, tables = 0.67 * n**-0.25, "0.67 N^(-1/4)", (9 * n) ** -0.25
    else:
        factor, name, tables = (9 * m) ** -0.25, "(9M)^(-1/4)", (9 * m) ** -0.25
    letter = "N" if stack == "encoder" else "M"
    return Recipe(
        xavier_uniform(g)
        | xavier_uniform(g, (*VALUES, *OUTPUTS, *UPS), gain=factor, name=name)
        | fixed(g, tables * g.d_model**-0.5, EMBEDDINGS_AND_HEAD, formula=f"(9{letter})^(-1/4)/sqrt(d)"),
        Residual(norm="none"),
        multipliers={"embed": math.sqrt(g.d_model)},
    )


@register("tfixup_decoder", aliases=("tfixup",), source=TFIXUP, norm="none", verified=False)
def tfixup_decoder(g: Geometry) -> Recipe:
    """x <- x + F(x), no norm and no warm-up; Xavier uniform, v, out and MLP times (9M)^(-1/4), tables too.

    M is the depth of the decoder (a stack by itself, decoder-only, has no formula of its own and takes this one);
    the geometry's `stack="encoder"` takes the encoder's. q and k keep gain 1, and v the bare factor: the sqrt(2) on v
    in the code only undoes a fused matrix's 1/sqrt(2).
    """
    return tfix(g, g.stack)


@register("tfixup_encoder", source=TFIXUP, norm="none")
def tfixup_encoder(g: Geometry) -> Recipe:
    """The encoder's factor 0.67 N^(-1/4) on v, out and MLP, (9N)^(-1/4) on the tables, whatever stack it is."""
    return tfix(g, "encoder")
