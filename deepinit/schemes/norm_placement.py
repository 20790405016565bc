"""Schemes that belong to a place of the norms: on the sum, at both ends of a branch, in its middle."""

from __future__ import annotations

import math
from typing import Literal

from deepinit.errors import ConfigError
from deepinit.geometry import LAYER_MATRICES, OUTPUTS, QUERIES_KEYS, UPS, VALUES, Geometry, Role
from deepinit.laws import Constant
from deepinit.recipe import Gate, Recipe, Residual
from deepinit.schemes.common import (
    Divisor,
    Std,
    divided,
    fixed,
    truncated,
    unit_tables,
    xavier,
    xavier_uniform,
)
from deepinit.schemes.registry import register

QKV = (*QUERIES_KEYS, *VALUES)


# --- on the sum --------------------------------------------------------------------------------------------------


@register(
    "post_ln",
    aliases=("post_ln_fairseq", "vaswani"),
    source="arXiv:1706.03762, section 3.4; fairseq modules/multihead_attention.py",
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


def by_layer(g: Geometry, alpha: float, power: float) -> Recipe:
    """Xavier uniform times alpha l^power in every matrix of layer l = 1..L, on a post-norm stream."""
    factor = tuple(alpha * layer**power for layer in range(1, g.num_layers + 1))
    lead = "" if alpha == 1 else f"{alpha:g} "
    layers = {
        r: law.scaled(factor, f"{lead}l^({power:g}) sqrt(2/(fan_in+fan_out))")
        for r, law in xavier_uniform(g, LAYER_MATRICES).items()
    }
    return Recipe(layers | unit_tables(g), Residual(norm="post"), multipliers={"embed": math.sqrt(g.d_model)})


@register("ds_init", source="Zhang, Titov & Sennrich 2019 (D19-1083)", norm="post")
def ds_init(g: Geometry, *, alpha: float = 1.0) -> Recipe:
    """x <- LN(x + F(x)); every matrix of layer l uniform on +-gamma alpha/sqrt(l), gamma = sqrt(6/(fan_in+fan_out)).

    Depth-scaled: layer l has 1/sqrt(l) of the first layer's std, in all matrices and not in the output ones alone. The
    authors' code has l^(-1/4): see ds_init_code.
    """
    return by_layer(g, alpha, -0.5)


@register("ds_init_code", source="code of D19-1083, models/transformer.py:38-45", norm="post")
def ds_init_code(g: Geometry) -> Recipe:
    """ds_init as its code runs: l^(-1/2) is passed as a scale of the variance, so the std falls with l^(-1/4)."""
    return by_layer(g, 1.0, -0.25)


@register("admin", source="arXiv:2004.08249; microsoft/admin-torch 08b6605 admin.py", norm="post")
def admin(g: Geometry, *, growth: Literal["log n", "1", "n", "measured"] = "log n", learnable: bool = True) -> Recipe:
    """x <- LN(w x + F(x)), w one per feature, learnable, at first sqrt((R+1)/ln(R+1) - 1); Xavier uniform.

    R counts residual additions. `growth` is how far the output may move with the number n of them: w = sqrt(R) for "1",
    1 for "n". The paper measures w on data instead, w_(i+1)^2 = Var(w_i x) + Var(F_i) from w_1 = 1 (`measured`), which
    must be done for the very stack that is trained: what was measured is kept with the run and refused elsewhere. The
    closed form is its authors' later one. `learnable=False` keeps w constant.
    """
    r = g.num_residuals
    omega = {"log n": math.sqrt((r + 1) / math.log(r + 1) - 1), "1": math.sqrt(r)}.get(growth, 1.0)
    if growth == "measured" and not learnable:
        raise ConfigError("scheme admin: growth 'measured' gives learnable factors; got learnable false")
    rule = Residual(norm="post", skip=omega)
    if learnable:
        rule = Residual(norm="post", skip_gate=Gate(omega, "channel"))
    return Recipe(
        xavier_uniform(g) | unit_tables(g),
        rule,
        multipliers={"embed": math.sqrt(g.d_model)},
        calibrate="skip" if growth == "measured" else "",
    )


@register("keel", source="arXiv:2601.19895", norm="post")
def keel(g: Geometry, *, std: Std = 0.02, divisor: Divisor = "total") -> Recipe:
    """x <- LN(alpha x + F(LN(x))), alpha = 2L; the first block is plain pre-norm, without alpha and outer norm.

    It claims to need no weights of its own: those of megatron are a choice.
    """
    laws = fixed(g, std)
    return Recipe(
        laws | divided(g, laws, divisor),
        Residual(norm="post", skip=float(g.num_residuals), inner_norm=True),
    )


@register(
    "hybridnorm",
    source="arXiv:2503.04598; its code dense_model/olmo/model.py:800-891",
    norm="post",
    verified=False,
)
def hybridnorm(g: Geometry, *, std: Std = "sqrt(2/(5d))", cut: float = 3.0, corrected: bool = False) -> Recipe:
    """h = x + attention of normed q, k, v; y = N(h); x <- y + F(y).

    Weights sqrt(2/(5d)), outputs over sqrt(2L), cut at 3 sigma and not corrected. No norm stands before attention; the
    MLP's is on the sum that it reads.
    """
    laws = fixed(g, std, draw=truncated(cut, corrected))
    return Recipe(
        laws | divided(g, laws, "total"),
        Residual(norm="post", placements=("post", "none")),
        requires={"qk_norm": True, "v_norm": True, "parallel": False},
    )


# --- at both ends of a branch ------------------------------------------------------------------------------------


@register(
    "sandwich_ln",
    aliases=("cogview",),
    source="arXiv:2105.13290; CogView 189a12b mpu/sparse_transformer.py:302-360",
    norm="sandwich",
)
def sandwich_ln(g: Geometry, *, std: Std = 0.02, divisor: Divisor = "total") -> Recipe:
    """x <- x + LN(F(LN(x))); weights of megatron.

    With a norm on the branch's output the std of its last matrix no longer sets the size of the branch, only how fast
    it turns: the 1/sqrt(2L) is kept as the authors have it.
    """
    laws = fixed(g, std)
    return Recipe(laws | divided(g, laws, divisor), Residual(norm="sandwich"))


@register("peri_ln", source="arXiv:2502.02732", norm="sandwich")
def peri_ln(g: Geometry, *, std: Std = 0.02) -> Recipe:
    """x <- x + N(F(N(x))), a norm around every branch and at the end: Var(x) grows by about 1 with each addition.

    No law is prescribed for the weights; 0.02 is a choice.
    """
    return Recipe(fixed(g, std), Residual(norm="sandwich"))


@register("depth_scaled_sandwich", aliases=("pangu_ultra",), source="arXiv:2504.07866; AFMoE", norm="sandwich")
def depth_scaled_sandwich(g: Geometry, *, c: float = 1.0, std: Std = 0.02) -> Recipe:
    """x <- x + N2(F(N1(x))), the gain of N2 learnable and c/sqrt(L) at first: c = 1 in AFMoE, 0.283 in Pangu Ultra.

    The base std is a choice: the paper's TinyInit is not known well enough to be given here.
    """
    gain = Constant(c * g.num_layers**-0.5, "c/sqrt(L)")
    return Recipe(
        fixed(g, std),
        Residual(norm="sandwich"),
        leaves={"post_norm/norm_scale": gain},
    )


# --- in the middle, and elsewhere --------------------------------------------------------------------------------


def sub(g: Geometry, gamma: float) -> Recipe:
    """Xavier normal, gain gamma on v, the output and the MLP, 1 on q, k and on cross-attention."""
    own = tuple(r for r in (*VALUES, *OUTPUTS, *UPS) if not r.startswith("cross"))
    return Recipe(xavier(g) | xavier(g, own, gain=gamma, name="gamma") | unit_tables(g), Residual(norm="sub"))


MAGNETO = "arXiv:2210.06423; torchscale 4d1e0e8 architecture/decoder.py:300-314"


def sub_gamma(g: Geometry, stack: str) -> float:
    """sqrt(ln 2L) in one stack; sqrt(ln 3M) in a decoder, sqrt(ln(3M) ln(2N)/3) in its encoder."""
    n, m = g.encoder_layers or g.num_layers, g.decoder_layers or g.num_layers
    match stack:
        case "encoder":
            return math.sqrt(math.log(3 * m) * math.log(2 * n) / 3)
        case "decoder":
            return math.sqrt(math.log(3 * m))
    return math.sqrt(math.log(2 * g.num_layers))


@register("subln", aliases=("magneto", "foundation_transformer"), source=MAGNETO, norm="sub", verified=False)
def subln(g: Geometry) -> Recipe:
    """x <- x + W N(G(N(x))): a second norm before each output matrix; Xavier, gain sqrt(ln 2L) on v, out and the MLP.

    The gain is above 1, where DeepNorm's is below: the inner norm has made the branch blind to it, and a larger matrix
    turns more slowly. In an encoder-decoder the geometry's `stack` chooses the paper's constants for two depths.
    """
    return sub(g, sub_gamma(g, g.stack))


@register("subln_encdec_decoder", source=MAGNETO, norm="sub")
def subln_encdec_decoder(g: Geometry) -> Recipe:
    """The decoder's gain sqrt(ln 3M), whatever stack the geometry says it is; cross-attention keeps gain 1."""
    return sub(g, sub_gamma(g, "decoder"))


@register("subln_encdec_encoder", source=MAGNETO, norm="sub")
def subln_encdec_encoder(g: Geometry) -> Recipe:
    """The encoder's gain sqrt(ln(3M) ln(2N)/3), whatever stack; N = M = L where the geometry has one depth only."""
    return sub(g, sub_gamma(g, "encoder"))


@register("normformer", source="arXiv:2110.09456", norm="pre", verified=False)
def normformer(g: Geometry, *, std: Std = 0.02, divisor: Divisor = "total", residual_scale: bool = False) -> Recipe:
    """Pre-norm with a norm after attention, one after the first MLP matrix, and a learnable gain per head, 1 at first.

    A learnable scale on the skip of the MLP, one per feature and 1 at first, is optional there (`residual_scale`). The
    paper does not state the base weights: those of megatron are a choice.
    """
    laws = fixed(g, std)
    scale = Gate(1.0, "channel", "mlp", name="residual_scale") if residual_scale else None
    return Recipe(
        laws | divided(g, laws, divisor),
        Residual(norm="pre", placements=("sandwich", "sub"), skip_gate=scale),
        gains={"head": Gate(1.0, "head", role=Role.BRANCH_SCALE, name="head_scale")},
        leaves={"residual_scale": Constant(1.0)},  # where there is one
        requires={"parallel": False},
    )


@register(
    "layernorm_scaling",
    aliases=("lns", "curse_of_depth"),
    source="arXiv:2502.05795; OLMo-core fa6c501 block.py:272-273",
    norm="pre",
)
def layernorm_scaling(g: Geometry, *, std: Std = 0.02) -> Recipe:
    """x <- x + F(LN(x) / sqrt(l)) in layer l = 1..L, attention and MLP alike; plain 0.02, the final norm unscaled.

    The authors advise against 1/sqrt(2L) on top of it: it has no `divisor`.
    """
    scale_in = tuple(layer**-0.5 for layer in range(1, g.num_layers + 1))
    return Recipe(fixed(g, std), Residual(norm="pre", scale_in=scale_in))
