"""Schemes that need no normalization because every update of the function they compute is bounded."""

from __future__ import annotations

import math

from deepinit.geometry import EMBEDDINGS, OUTPUTS, QUERIES_KEYS, UPS, VALUES, Geometry, Role
from deepinit.recipe import Gate, Recipe, Residual, Update
from deepinit.schemes.common import unit_tables, xavier_uniform, zeros
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
    )
