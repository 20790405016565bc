"""Parametrizations: laws, forward multipliers and optimizer factors that belong together, so that rates transfer.

m = d_model / base_width and m_L = num_layers / base_depth compare the model with the one on which the rates were found.
A scheme at base width and depth is the standard scheme, bit for bit. Factors are for Adam unless said otherwise, and
weight decay is AdamW's, which multiplies it by the rate: where lr has 1/m, decay has m.
"""

from __future__ import annotations

import math
from typing import Literal

from deepinit.errors import ConfigError
from deepinit.geometry import EMBEDDINGS, LAYER_MATRICES, VECTORS, Geometry, Role
from deepinit.laws import Normal
from deepinit.recipe import Recipe, Residual, Update
from deepinit.schemes.common import FINAL_NORM, Laws, divided, fixed, roles_of, zeros
from deepinit.schemes.registry import register

Decay = Literal["scaled", "plain"]
Updates = dict[str, Update]


# --- what the members share --------------------------------------------------------------------------------------


def width_ratio(g: Geometry, base_width: int, base_d_ff: int) -> float:
    """m; refuses a width that is no width, and an MLP that has not grown along."""
    if base_width < 1:
        raise ConfigError(f"base_width: {base_width} is not the width of a model")
    m = g.d_model / base_width
    if base_d_ff and g.d_ff != base_d_ff * m:
        raise ConfigError(
            f"model.d_ff: {g.d_ff} is {g.d_ff / base_d_ff:g} times base_d_ff {base_d_ff}, but d_model {g.d_model} is "
            f"{m:g} times base_width {base_width}: all widths must grow together; nearest: {round(base_d_ff * m)}"
        )
    return m


def depth_ratio(g: Geometry, base_depth: int) -> float:
    """m_L."""
    if base_depth < 1:
        raise ConfigError(f"base_depth: {base_depth} is not the depth of a model")
    return g.num_layers / base_depth


def attention(g: Geometry, m: float, base_head_dim: int) -> float:
    """1/h for wider heads (definition 4.1 of arXiv:2203.03466), times sqrt(base h) where that is given.

    Without `base_head_dim` the model at base width has the standard 1/sqrt(h), a wider one 1/h. Heads that stay as wide
    as the base's should say so: then the factor is 1/sqrt(h) at every width.
    """
    if base_head_dim:
        return g.head_dim**-0.5 * (base_head_dim / g.head_dim) ** 0.5
    return g.head_dim**-0.5 if m == 1 else 1 / g.head_dim


def hidden(g: Geometry, std: float, m: float) -> Laws:
    """Tables and head `std`, matrices of the layers std/sqrt(m)."""
    return fixed(g, std) | fixed(g, std / math.sqrt(m), LAYER_MATRICES, formula=f"{std:g}/sqrt(m)")


def each(update: Update, roles: tuple[Role, ...] = LAYER_MATRICES) -> Updates:
    """One update for all `roles`."""
    return {str(r): update for r in roles}


# --- width -------------------------------------------------------------------------------------------------------

MUP = "arXiv:2203.03466, table 8; mup 1981497 init.py, optim.py"


@register("mup", source=MUP, norm="pre", choose=("base_width",))
def mup(
    g: Geometry,
    *,
    base_width: int = 256,
    base_head_dim: int = 0,
    base_d_ff: int = 0,
    std: float = 0.02,
    embed_multiplier: float = 1.0,
    output_multiplier: float = 1.0,
    zero_readout: bool = False,
    zero_query: bool = False,
    optimizer: Literal["adam", "sgd"] = "adam",
    decay: Decay = "scaled",
    scale_eps: bool = False,
) -> Recipe:
    """Hidden matrices std/sqrt(m) at rate 1/m, logits times 1/m, scores times 1/h; tables and head as they are.

    The form of table 8: other tables of the paper are equivalent, their rows must not be mixed. Decay: the package's
    default multiplies it by m (`scaled`), so that lr times decay knows no width. `scale_eps` gives Adam's eps 1/m,
    which the package omits (arXiv:2505.01618, table 1). `zero_readout` and `zero_query` are what the paper advises.
    SGD has the rate of tables, gains, biases and head times m, and hidden matrices at 1.
    """
    m = width_ratio(g, base_width, base_d_ff)
    laws = hidden(g, std, m)
    laws |= zeros(g, (Role.LM_HEAD,)) if zero_readout else {}
    laws |= zeros(g, (Role.ATTN_Q, Role.CROSS_Q)) if zero_query else {}
    if optimizer == "sgd":
        updates = each(Update(lr=m), (*EMBEDDINGS, Role.LM_HEAD, *VECTORS))
    else:
        updates = each(Update(lr=1 / m, weight_decay=m if decay == "scaled" else 1.0, eps=1 / m if scale_eps else 1.0))
    return Recipe(
        laws,
        multipliers={
            "embed": embed_multiplier,
            "logits": output_multiplier / m,
            "attention": attention(g, m, base_head_dim),
        },
        updates=updates,
        requires={"tied_embeddings": False} if zero_readout else {},
    )


@register("mup_nanogpt", source="nanoGPT-mup b2a5e60 model.py, train.py", norm="pre", choose=("base_width",))
def mup_nanogpt(
    g: Geometry, *, base_width: int = 256, base_head_dim: int = 0, base_d_ff: int = 0, std: float = 0.02
) -> Recipe:
    """mup with nanogpt's 1/sqrt(2L) kept on the output matrices; decay and eps are not scaled."""
    m = width_ratio(g, base_width, base_d_ff)
    laws = hidden(g, std, m)
    return Recipe(
        laws | divided(g, laws, "total"),
        multipliers={"logits": 1 / m, "attention": attention(g, m, base_head_dim)},
        updates=each(Update(lr=1 / m)),
    )


@register(
    "megatron_mup",
    source="Megatron-LM d98e8a6 transformer_config.py:2530-2610, optimizer/__init__.py:132-298",
    norm="pre",
    choose=("base_width",),
)
def megatron_mup(
    g: Geometry, *, base_width: int = 256, base_head_dim: int = 0, base_d_ff: int = 0, std: float = 0.02
) -> Recipe:
    """mup_nanogpt with Adam's eps of the hidden matrices times 1/m; tables and head keep rate and eps.

    A predicate in that code is named as if the output layer's rate were scaled; it is not, as table 8 wants it.
    """
    m = width_ratio(g, base_width, base_d_ff)
    laws = hidden(g, std, m)
    return Recipe(
        laws | divided(g, laws, "total"),
        multipliers={"logits": 1 / m, "attention": attention(g, m, base_head_dim)},
        updates=each(Update(lr=1 / m, eps=1 / m)),
    )


@register("minicpm", source="arXiv:2404.06395", norm="pre")
def minicpm(
    g: Geometry,
    *,
    base_width: int = 256,
    std: float = 0.1,
    scale_embed: float = 12.0,
    scale_depth: float = 1.4,
) -> Recipe:
    """Embedding times 12, x <- x + 1.4/sqrt(L) F(N(x)), logits over m = d/256; matrices 0.1/sqrt(m) at rate 1/m.

    Made for d well above 256: in a narrower model the division enlarges the logits.
    """
    m = width_ratio(g, base_width, 0)
    return Recipe(
        hidden(g, std, m),
        Residual(norm="pre", branch=scale_depth / math.sqrt(g.num_layers)),
        multipliers={"embed": scale_embed, "logits": 1 / m},
        updates=each(Update(lr=1 / m)),
    )


# --- width and depth ---------------------------------------------------------------------------------------------


def deep(g: Geometry, m: float, m_l: float, alpha: float, std: float, base_head_dim: int) -> Recipe:
    """Table 1 of arXiv:2505.01618 at this alpha."""
    lr, eps = m_l ** (alpha - 1), m_l**-alpha / m
    within = Update(lr=lr, eps=eps)  # norms and biases of the blocks
    return Recipe(
        hidden(g, std, m),
        Residual(norm="pre", branch=m_l**-alpha),
        multipliers={"logits": 1 / m, "attention": attention(g, m, base_head_dim)},
        updates=each(Update(lr=lr / m, weight_decay=m, eps=eps))
        | each(within, (Role.NORM_SCALE, Role.BIAS))
        | dict.fromkeys(FINAL_NORM, Update()),
    )


@register(
    "depth_mup",
    source="arXiv:2310.02244; norms, biases, decay and eps: arXiv:2505.01618, table 1 at alpha = 1/2",
    norm="pre",
    choose=("base_width", "base_depth"),
)
def depth_mup(
    g: Geometry,
    *,
    base_width: int = 256,
    base_depth: int = 2,
    base_head_dim: int = 0,
    base_d_ff: int = 0,
    std: float = 0.02,
) -> Recipe:
    """mup, with x <- x + F(N(x))/sqrt(m_L) and hidden matrices at rate 1/(m sqrt(m_L)).

    The paper proves it for branches of one layer and shows its limits for deeper ones: see completep.
    """
    m, m_l = width_ratio(g, base_width, base_d_ff), depth_ratio(g, base_depth)
    return deep(g, m, m_l, 0.5, std, base_head_dim)


@register("completep", source="arXiv:2505.01618, table 1", norm="pre", choose=("base_width", "base_depth"))
def completep(
    g: Geometry,
    *,
    base_width: int = 256,
    base_depth: int = 2,
    base_head_dim: int = 0,
    base_d_ff: int = 0,
    alpha: float = 1.0,
    std: float = 0.02,
) -> Recipe:
    """mup, with x <- x + F(N(x))/m_L^alpha, alpha = 1; hidden rate m_L^(alpha-1)/m, decay m, eps m_L^(-alpha)/m.

    Norms and biases of the blocks learn at m_L^(alpha-1) with that eps; tables, head and final norm are as they were.
    No 1/sqrt(2L) on the outputs. The authors' code scales every eps, as its AdamW takes one: the table separates them.
    alpha = 1/2 is depth_mup.
    """
    m, m_l = width_ratio(g, base_width, base_d_ff), depth_ratio(g, base_depth)
    return deep(g, m, m_l, alpha, std, base_head_dim)


@register("completed_p", source="arXiv:2512.22382", norm="pre", choose=("base_width", "base_depth"))
def completed_p(
    g: Geometry,
    *,
    base_width: int = 256,
    base_depth: int = 2,
    base_head_dim: int = 0,
    base_d_ff: int = 0,
    alpha: float = 1.0,
    std: float = 0.02,
) -> Recipe:
    """completep in other coordinates: no logit multiplier; the head has std/m, rate 1/m and decay m; embedding eps 1/m.

    The paper's factors for batch size and duration are settings of a run, not of a role: rate and decay times sqrt(B/B0
    D0/D), eps over it, 1 - beta times B/B0 D0/D.
    """
    m, m_l = width_ratio(g, base_width, base_d_ff), depth_ratio(g, base_depth)
    base = deep(g, m, m_l, alpha, std, base_head_dim)
    return Recipe(
        {**base.weights, Role.LM_HEAD: Normal(std / m, f"{std:g}/m")},
        base.residual,
        multipliers={"attention": base.multipliers["attention"]},
        updates={**base.updates, **each(Update(eps=1 / m), EMBEDDINGS), Role.LM_HEAD: Update(lr=1 / m, weight_decay=m)},
        requires={"tied_embeddings": False} if m != 1 else {},
    )


@register(
    "umup",
    source="arXiv:2407.17465, table 2; unit-scaling a7b5b3c core/functional.py:83-123, optim.py:26-90",
    norm="pre",
)
def umup(g: Geometry, *, residual_scale: float = 1.0, attention_ratio: float = 1.0) -> Recipe:
    """Every weight N(0, 1); matrices times 1/sqrt(fan_in) forward, the head 1/fan_in; x <- b_i x + a_i F(N(x)).

    tau_i = alpha/sqrt(L + what the additions before have summed), a = tau/sqrt(1+tau^2), b = 1/sqrt(1+tau^2), for
    i = 0..2L-1: embedding, attention and MLP each hold a third of the last variance. Rates 1/sqrt(fan_in L), tables
    1/sqrt(d), norms 1/sqrt(L). Decay is independent of the rate, so here it is divided by it. The code scales gradients
    apart from values; for Adam that is one factor for all. Its scaled activations and attention are modules, not
    weights.
    """
    mlp = residual_scale * math.sqrt(2 / (1 + attention_ratio**2))
    attn = attention_ratio * mlp
    taus, summed = [], float(g.num_layers)
    for i in range(2 * g.num_layers):
        alpha = mlp if i % 2 else attn
        taus.append(alpha / math.sqrt(summed))
        summed += alpha**2
    depth = g.num_layers**-0.5

    def rate(lr: float) -> Update:
        return Update(lr=lr, weight_decay=1 / lr)

    layers = roles_of(g, LAYER_MATRICES)
    forward = {str(r): g.fan_in(r) ** -0.5 for r in layers}
    return Recipe(
        fixed(g, 1.0),
        Residual(
            norm="pre",
            skip=tuple((1 + t * t) ** -0.5 for t in taus),
            branch=tuple(t * (1 + t * t) ** -0.5 for t in taus),
        ),
        multipliers={**forward, "logits": 1 / g.d_model, "attention": 1 / g.head_dim},
        updates={r: rate(forward[r] * depth) for r in layers}
        | each(rate(g.d_model**-0.5), EMBEDDINGS)
        | each(rate(depth), (Role.NORM_SCALE, Role.BIAS))
        | dict.fromkeys(FINAL_NORM, Update()),
        requires={"parallel": False, "stack": ("single", "encoder")},
    )
