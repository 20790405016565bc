"""DeepNorm: a post-norm stream that is scaled up, with branches that are scaled down."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from deepinit.geometry import GATES, OUTPUTS, UPS, VALUES, Geometry
from deepinit.recipe import Recipe, Residual
from deepinit.schemes.common import DepthUpdates, depth_updates, unit_tables, xavier
from deepinit.schemes.registry import register

PAPER = "arXiv:2203.00555, section 4.3 and appendix B"
Stack = Literal["single", "encoder", "decoder"]
BRANCH = (*VALUES, *OUTPUTS, *UPS)


def deep(g: Geometry, alpha: float, beta: float, scale_gate: bool = False) -> Recipe:
    """Skip alpha; Xavier normal, gain beta on v, the output and the MLP, 1 on q and k, which do not move the bound."""
    roles = (*BRANCH, *GATES) if scale_gate else BRANCH
    return Recipe(
        xavier(g) | xavier(g, roles, gain=beta, name="beta") | unit_tables(g), Residual(norm="post", skip=alpha)
    )


def depths(g: Geometry) -> tuple[int, int]:
    """Encoder and decoder layers N and M; a stack by itself stands for both."""
    return g.encoder_layers or g.num_layers, g.decoder_layers or g.num_layers


def constants(g: Geometry, stack: Stack, exact: bool = False) -> tuple[float, float]:
    """alpha, beta of the paper's table; `exact` takes 27^(-1/16), 27^(1/16)/sqrt(2) where it prints 0.81 and 0.87."""
    n, m = depths(g)
    match stack:
        case "single":
            return (2 * g.num_layers) ** 0.25, (8 * g.num_layers) ** -0.25
        case "decoder":
            return (3 * m) ** 0.25, (12 * m) ** -0.25
        case "encoder":
            depth = (n**4 * m) ** (1 / 16)
            a, b = (27 ** (-1 / 16), 27 ** (1 / 16) / 2**0.5) if exact else (0.81, 0.87)
            return a * depth, b / depth


@register("deepnorm", aliases=("deepnet",), source=PAPER, norm="post")
def deepnorm(
    g: Geometry,
    *,
    exact: bool = False,
    scale_gate: bool = False,
    updates: DepthUpdates = "none",
    base_depth: int = 0,
) -> Recipe:
    """x <- LN(alpha x + F(x)); Xavier normal, gain beta on v, out and the MLP, 1 on q and k.

    One stack: alpha = (2L)^(1/4), beta = (8L)^(-1/4). In an encoder-decoder the decoder's M layers have three
    sublayers, (3M)^(1/4) and (12M)^(-1/4), and the encoder 0.81 (N^4 M)^(1/16) and 0.87 (N^4 M)^(-1/16). They bound
    the expected first SGD update: 2L (v^2 + w^2) / alpha^2 = 4 L beta^2 / alpha^2 = 1. beta is a gain on Xavier, not a
    std, and alpha multiplies the skip, not the branch. A gate matrix is outside the paper and keeps gain 1, unless
    `scale_gate`.

    The bound is of SGD's first update. Under Adam the update still grows with depth: `updates="depth"` takes the
    layers' matrices at sqrt(L0/L) and their norm gains at L0/L of the rate, L0 = `base_depth`. At 96 layers it trained
    0.12 to 0.14 nats lower; the best rate still moves with depth.
    """
    made = deep(g, *constants(g, g.stack, exact), scale_gate)  # type: ignore[arg-type]
    bounded = not g.parallel and (g.stack == "single" or (g.stack == "decoder" and g.num_layers == g.decoder_layers))
    return replace(
        made,
        updates=depth_updates(g, updates, base_depth, power=0.5),
        invariants=("update_bound",) if bounded else (),  # the encoder's printed constants give 1.012
    )


@register("deepnorm_encdec_decoder", source=PAPER, norm="post")
def deepnorm_encdec_decoder(g: Geometry, *, scale_gate: bool = False) -> Recipe:
    """The decoder's constants (3M)^(1/4) and (12M)^(-1/4), whatever stack the geometry says it is."""
    return deep(g, *constants(g, "decoder"), scale_gate)


@register("deepnorm_encdec_encoder", source=PAPER, norm="post")
def deepnorm_encdec_encoder(g: Geometry, *, exact: bool = False, scale_gate: bool = False) -> Recipe:
    """The encoder's constants 0.81 (N^4 M)^(1/16), 0.87 (N^4 M)^(-1/16), whatever stack the geometry says it is.

    N = M = L where the geometry has one depth only.
    """
    return deep(g, *constants(g, "encoder", exact), scale_gate)


@register("deepnorm_per_stack", source="secondary texts; not the paper's", norm="post")
def deepnorm_per_stack(g: Geometry, *, scale_gate: bool = False) -> Recipe:
    """The single-stack constants applied to each stack of an encoder-decoder, as some articles give them.

    It forgets the third sublayer of the decoder and what the encoder's depth does to it: use `deepnorm`.
    """
    return deep(g, *constants(g, "single"), scale_gate)


@register(
    "deepnorm_encdec_encoder_torchscale", source="torchscale 4d1e0e8 architecture/encoder.py:236-252", norm="post"
)
def deepnorm_encdec_encoder_torchscale(g: Geometry, *, scale_gate: bool = False) -> Recipe:
    """The encoder as that code has it: beta = 1.15 (N^4 M)^(-1/16), where the paper has 0.87.

    0.87 is about 1/1.15, so the constant looks inverted; the update bound is then 1.77 instead of 1. For parity only.
    """
    alpha, beta = constants(g, "encoder")
    return deep(g, alpha, beta * 1.15 / 0.87, scale_gate)


@register("deepnorm_glm130b", source="arXiv:2210.02414", norm="post")
def deepnorm_glm130b(g: Geometry) -> Recipe:
    """x <- LN(alpha x + F(x)), alpha = (2L)^(1/2), beta = (2L)^(-1/2) on v, out and the whole MLP, its gate too."""
    alpha = (2 * g.num_layers) ** 0.5
    return deep(g, alpha, 1 / alpha, scale_gate=True)
