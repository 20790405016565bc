"""Laws of whole matrices: orthogonal, normalized row by row, or drawn in pairs."""

from __future__ import annotations

import math
from typing import Literal

from deepinit.geometry import EMBEDDINGS, LAYER_MATRICES, Geometry, Role
from deepinit.laws import Factor, Orthogonal, Sign
from deepinit.recipe import Gate, Recipe, Residual, Update
from deepinit.schemes.common import MATRICES, Std, divided, fixed, roles_of, tied_logits, zeros
from deepinit.schemes.registry import register


@register("ngpt", source="arXiv:2410.01131, section 2; ngpt ed19eb2 model.py:85-177,230-292", norm="none")
def ngpt(g: Geometry) -> Recipe:
    """h <- Norm(h + a (Norm(F(h)) - h)): the stream lives on the unit sphere, and so do the rows of every matrix.

    N(0, 1/d), outputs over sqrt(2L), then each row to unit length, after init and after every step. The learnable
    vectors a, s_qk and s_z are stored as 1/sqrt(d) and act as 0.05, 1 and 1; s_uv is stored as 1 and acts as sqrt(d).
    Scores times sqrt(h); no decay, no warm-up.
    """
    stored, root = g.d_model**-0.5, g.d_model**0.5
    laws = fixed(g, "1/sqrt(d)")
    return Recipe(
        laws | divided(g, laws, "total"),
        Residual(norm="none", gate=Gate(stored, "channel", "sublayer", scale=0.05 * root), sphere=True),
        multipliers={"attention": g.head_dim**0.5},
        updates={r: Update(weight_decay=0.0) for r in MATRICES},
        gains={
            "s_qk": Gate(stored, "key", "layer", role=Role.BRANCH_SCALE, scale=root),
            "s_uv": Gate(1.0, "hidden", "layer", role=Role.BRANCH_SCALE, scale=root),
            "s_z": Gate(stored, "vocab", "model", role=Role.BRANCH_SCALE, scale=root),
        },
        project="rows",
    )


@register("mimetic", source="arXiv:2305.09828", norm="pre", verified=False)
def mimetic(
    g: Geometry,
    *,
    qk_noise: float = 0.7,
    qk_identity: float = 0.7,
    vo_noise: float = 0.4,
    vo_identity: float = -0.4,
    z: Literal["1/sqrt(d)", "1/sqrt(h)"] = "1/sqrt(d)",
    std: Std = 0.02,
) -> Recipe:
    """W_q W_k^T = 0.7 Z + 0.7 I in each head, W_v W_o = 0.4 Z - 0.4 I over all heads, each split by singular values.

    Of the first a head keeps the h largest. Z has std 1/sqrt(d); one text has 1/sqrt(h) for q and k (`z`). The sign of
    the second was found on images, and may be the other for language. Rotary positions or a norm on q and k void the
    first. Where query heads share a key, each has the best fit to a product of its own. The rest is fixed_normal.
    """
    d, h = g.d_model**-0.5, g.head_dim**-0.5
    scores = h if z == "1/sqrt(h)" else d
    pairs = [
        (Role.ATTN_Q, Role.ATTN_K, qk_noise, qk_identity, scores),
        (Role.ATTN_V, Role.ATTN_OUT, vo_noise, vo_identity, d),
        (Role.CROSS_Q, Role.CROSS_K, qk_noise, qk_identity, scores),
        (Role.CROSS_V, Role.CROSS_OUT, vo_noise, vo_identity, d),
    ]
    laws = fixed(g, std)
    for left, right, noise, identity, z_std in pairs:
        formula = f"{noise:g} Z {'-' if identity < 0 else '+'} {abs(identity):g} I"
        for side, role, partner in (("left", left, right), ("right", right, left)):
            if role in laws:
                laws[role] = Factor(noise, identity, z_std, partner, side, formula)
    return Recipe(laws)


@register(
    "scion_spectral", aliases=("scion",), source="arXiv:2502.07529; scion f58a393 scion.py", norm="pre", verified=False
)
def scion_spectral(
    g: Geometry, *, rho: float = 1.0, head_rho: float = 1.0, embed_rho: float = 1.0, zero_head: bool = False
) -> Recipe:
    """Layers rho sqrt(fan_out/fan_in) Q, Q semi-orthogonal; head entries +-rho/fan_in or 0; embedding rows of RMS rho.

    All singular values are sqrt(fan_out/fan_in), the spectral form of muP's target (arXiv:2310.17813), and what Muon's
    and Scion's updates are measured in. The authors train nanoGPT with rho 50 and head_rho 3000. Their embedding rows
    are brought to that RMS exactly; here they have it up to a part in sqrt(2d).
    """

    def spectral(role: Role) -> Orthogonal:
        fan_in, fan_out = g.matrix(role)
        return Orthogonal(rho * math.sqrt(fan_out / fan_in), max(fan_in, fan_out), "rho sqrt(fan_out/fan_in) Q")

    head = {Role.LM_HEAD: Sign(head_rho / g.d_model, "+-rho/fan_in")}
    return Recipe(
        {r: spectral(r) for r in roles_of(g, LAYER_MATRICES)}
        | fixed(g, embed_rho, EMBEDDINGS)
        | (zeros(g, head) if zero_head else head),
        multipliers=tied_logits(g),
        requires={"tied_embeddings": False} if zero_head else {},
    )
