"""Schemes whose branches start at or near zero: by a learnable factor, or by an output matrix of zeros."""

from __future__ import annotations

from typing import Literal

from deepinit.geometry import EMBEDDINGS, OUTPUTS, Geometry, Role
from deepinit.recipe import Gate, Recipe, Residual
from deepinit.schemes.common import Laws, Std, fan_in, fixed, tied_logits, xavier, xavier_uniform, zeros
from deepinit.schemes.registry import register

Base = Literal["xavier_uniform", "xavier_normal", "he_normal", "lecun_normal"]


def base_laws(g: Geometry, base: Base) -> Laws:
    """A classical law for every role."""
    match base:
        case "xavier_uniform":
            return xavier_uniform(g)
        case "xavier_normal":
            return xavier(g)
        case "he_normal":
            return fan_in(g, scale=2.0)
        case "lecun_normal":
            return fan_in(g)


@register("rezero", source="arXiv:2003.04887, eq. 1; rezero e2c94a8 rztx.py:47", norm="none")
def rezero(g: Geometry, *, share: Literal["layer", "sublayer"] = "layer", base: Base = "xavier_uniform") -> Recipe:
    """x <- x + a F(x), a = 0: the stack is exactly the identity. No norm: after a zero branch it would not be one.

    The authors' Transformer has one a per layer, shared by attention and MLP. At step 0 only a has a gradient; the
    branch weights are still. Embeddings N(0, 1): no norm sets the size of the stream, the tables do.
    """
    return Recipe(
        base_laws(g, base) | fixed(g, 1.0, EMBEDDINGS),
        Residual(norm="none", gate=Gate(0.0, "scalar", share, name="resweight")),
        multipliers=tied_logits(g),
        invariants=("identity",),
    )


@register("skipinit", source="arXiv:2002.10444; deepmind-research nfnets/skipinit_resnet.py", norm="none")
def skipinit(
    g: Geometry, *, start: Literal["zero", "1/sqrt(R)"] = "zero", base: Base = "he_normal", zero_head: bool = False
) -> Recipe:
    """x <- x + a F(x), one learnable scalar for each branch, 0 or 1/sqrt(R) at first (R residual additions); no norm.

    The base law and the head are choices; the reference code's classifier is zero (`zero_head`).
    """
    value = 0.0 if start == "zero" else g.num_residuals**-0.5
    return Recipe(
        base_laws(g, base) | (zeros(g, (Role.LM_HEAD,)) if zero_head else {}),
        Residual(norm="none", gate=Gate(value, "scalar", "sublayer", name="skip_scalar")),
        requires={"tied_embeddings": False} if zero_head else {},
    )


@register("layerscale", aliases=("cait",), source="arXiv:2103.17239; deit 7e160fe cait_models.py", norm="pre")
def layerscale(g: Geometry, *, value: float | None = None, std: Std = 0.02) -> Recipe:
    """x <- x + diag(a) F(N(x)), a learnable, one per feature: 0.1 up to 18 layers, 1e-5 up to 24, 1e-6 beyond.

    Near the identity, not exactly: a > 0, so every matrix learns from the start. Released models of 36 layers and more
    have 1e-5 or 1e-6, not by this rule. torch's truncation at +-2 is 100 sigma: a plain normal.
    """
    if value is None:
        value = 0.1 if g.num_layers <= 18 else 1e-5 if g.num_layers <= 24 else 1e-6
    return Recipe(fixed(g, std), Residual(norm="pre", gate=Gate(value, "channel", "sublayer", name="layer_scale")))


@register("zero_out", source="arXiv:2203.03466, appendix D.2, for the output matrices", norm=("pre", "none"))
def zero_out(g: Geometry) -> Recipe:
    """Output matrices exactly 0, the rest N(0, 1/fan_in), embeddings N(0, 1): the stack is the identity.

    At step 0 only the output matrices have a gradient. One zero a branch and no more: with a zero gate as well, neither
    would ever move.
    """
    return Recipe(
        fan_in(g) | fixed(g, 1.0, EMBEDDINGS) | zeros(g, OUTPUTS),
        multipliers=tied_logits(g),
        invariants=("identity",),
    )
