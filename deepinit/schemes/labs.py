"""What the public training codes of the labs draw, quirks included: OLMo, OLMo-core, torchtitan, lingua."""

from __future__ import annotations

from typing import Literal

from deepinit.geometry import EMBEDDINGS, EXPERTS, OUTPUTS, UPS, Geometry, Role
from deepinit.laws import TruncatedNormal, truncated_moments
from deepinit.recipe import Recipe, Residual
from deepinit.schemes.common import (
    Divisor,
    Laws,
    Std,
    base_std,
    divided,
    fan_in,
    fixed,
    roles_of,
    tied_logits,
    truncated,
)
from deepinit.schemes.registry import register

CUT3 = truncated(3.0, corrected=False)
"""Cut at 3 sigma, not corrected: the real std is 0.986578 of the one stated."""
PRE = ("pre", "sandwich", "reordered")


# --- OLMo --------------------------------------------------------------------------------------------------------

OLMO = "OLMo 59a53e3 olmo/model.py:493-506,716-886,1183-1225"


@register("olmo2", source="arXiv:2501.00656; OLMo 59a53e3 configs/official-1124", norm="reordered", verified=False)
def olmo2(g: Geometry, *, std: Std = 0.02) -> Recipe:
    """x <- x + N(F(x)); every matrix 0.02, cut at 3 sigma, no factor for depth. The models have a norm on q and k too.

    Norm gains and biases are weight-decayed there, embeddings are not.
    """
    return Recipe(fixed(g, std, draw=CUT3), Residual(norm="reordered"))


@register("olmo_mitchell", source=OLMO, norm=PRE)
def olmo_mitchell(g: Geometry) -> Recipe:
    """1/sqrt(d), cut at 3 sigma; outputs of layer l = 1..L 1/sqrt(2 fan_in l), by their own fan-in.

    By layer: the first layer's output is sqrt(L) times that of the last.
    """
    laws = fixed(g, "1/sqrt(d)", draw=CUT3) | fan_in(g, OUTPUTS, draw=CUT3)
    return Recipe(laws | divided(g, laws, "layer"))


@register("olmo_full_megatron", source=OLMO, norm=PRE)
def olmo_full_megatron(g: Geometry, *, std: Std = 0.02) -> Recipe:
    """megatron cut at 3 sigma, with the head at 1/sqrt(d)."""
    laws = fixed(g, std, draw=CUT3)
    return Recipe(laws | fixed(g, "1/sqrt(d)", (Role.LM_HEAD,), draw=CUT3) | divided(g, laws, "total"))


CORE = "OLMo-core fa6c501 nn/transformer/init.py"
CORE_SCALED = (*OUTPUTS, *UPS, *EXPERTS)


def olmo_core(g: Geometry, std: Std, divisor: Divisor) -> Recipe:
    """Embeddings N(0, 1), head 1/sqrt(d), `std` for the rest; output, up, router and all expert matrices divided."""
    laws = fixed(g, std, draw=CUT3)
    return Recipe(
        laws
        | fixed(g, 1.0, EMBEDDINGS)
        | fixed(g, "1/sqrt(d)", (Role.LM_HEAD,), draw=CUT3)
        | divided(g, laws, divisor, CORE_SCALED),
        multipliers=tied_logits(g),
    )


@register("olmo_core_llama", source=CORE, norm=PRE)
def olmo_core_llama(g: Geometry, *, std: Std = 0.02) -> Recipe:
    """0.02 cut at 3 sigma, over sqrt(2L) not in the outputs alone but in the up matrix too, and in all of an expert."""
    return olmo_core(g, std, "total")


@register("olmo_core_llama_depth", source=CORE, norm=PRE)
def olmo_core_llama_depth(g: Geometry, *, std: Std = 0.02) -> Recipe:
    """olmo_core_llama, divided by layer index: over sqrt(2l), l = 1..L."""
    return olmo_core(g, std, "layer")


@register("olmo_core_fan_in", source=CORE, norm=PRE)
def olmo_core_fan_in(g: Geometry) -> Recipe:
    """1/sqrt(fan_in) cut at 3 sigma, embeddings N(0, 1); no factor for depth."""
    return Recipe(fan_in(g, draw=CUT3) | fixed(g, 1.0, EMBEDDINGS), multipliers=tied_logits(g))


# --- torchtitan --------------------------------------------------------------------------------------------------


@register(
    "torchtitan_llama3",
    aliases=("torchtitan_deepseek_v3",),
    source="torchtitan b5bcd76 models/llama3/__init__.py:46-106, models/deepseek_v3",
    norm="pre",
)
def torchtitan_llama3(g: Geometry, *, divisor: Divisor = "layer") -> Recipe:
    """q, k, v and gate 0.02; output, up and router 0.02/sqrt(2l); embeddings N(0, 1); head 1/sqrt(d) cut at 3 sigma.

    "Truncated" is nominal there: torch cuts at the absolute +-2, which is 100 sigma. Only the head is really cut.
    """
    laws = fixed(g, 0.02)
    return Recipe(
        laws
        | fixed(g, 1.0, EMBEDDINGS)
        | fixed(g, "1/sqrt(d)", (Role.LM_HEAD,), draw=CUT3)
        | divided(g, laws, divisor, (*OUTPUTS, *UPS, Role.ROUTER)),
        multipliers=tied_logits(g),
    )


@register("torchtitan_qwen3", source="torchtitan b5bcd76 models/qwen3/__init__.py:52-83", norm="pre")
def torchtitan_qwen3(g: Geometry) -> Recipe:
    """The dense model: every matrix N(0, 0.02^2), outputs too."""
    return Recipe(fixed(g, 0.02))


@register("torchtitan_qwen3_moe", source="torchtitan b5bcd76 models/qwen3/__init__.py:152-185", norm="pre")
def torchtitan_qwen3_moe(g: Geometry) -> Recipe:
    """The mixture of experts, unlike its dense sibling, divides attention and expert outputs by sqrt(2L)."""
    laws = fixed(g, 0.02)
    return Recipe(laws | divided(g, laws, "total"))


# --- lingua ------------------------------------------------------------------------------------------------------

LINGUA = "lingua 437d680 lingua/transformer.py:410-493,591-598"
Scaling = Literal["disabled", "current_depth", "global_depth"]


def lingua(g: Geometry, scaling: Scaling) -> Recipe:
    """1/sqrt(d), the down matrix 1/sqrt(f), both outputs over a factor by depth; cut at 3 sigma of the unscaled std."""
    depth = range(1, g.num_layers + 1)
    factor, name = {
        "disabled": (1.0, ""),
        "current_depth": (tuple((2 * layer) ** -0.5 for layer in depth), "/sqrt(2l)"),
        "global_depth": ((2 * (g.num_layers + 1)) ** -0.5, "/sqrt(2(L+1))"),
    }[scaling]
    laws = fixed(g, "1/sqrt(d)", draw=CUT3) | fan_in(g, (Role.MLP_DOWN, Role.EXPERT_DOWN), draw=CUT3)
    scaled: Laws = {r: laws[r].scaled(factor, laws[r].formula + name) for r in roles_of(g, OUTPUTS)}
    return Recipe(laws | scaled | {r: late_cut(g, factor, name) for r in roles_of(g, (Role.ATTN_OUT, Role.CROSS_OUT))})


def late_cut(g: Geometry, factor: float | tuple[float, ...], name: str) -> TruncatedNormal:
    """The attention output's law: its sigma is divided, its bounds are those of 3 undivided sigmas.

    So layer l is cut at 3 sqrt(2l) of its own sigmas. The real std is that; the cut given is the first layer's, beyond
    which a later layer would have two values in a hundred thousand.
    """
    sigma, _ = base_std(g, "1/sqrt(d)")
    factors = factor if isinstance(factor, tuple) else (factor,)
    stds = tuple(sigma * f * truncated_moments(3 / f)[0] for f in factors)
    return TruncatedNormal(stds if isinstance(factor, tuple) else stds[0], 3 / factors[0], f"1/sqrt(d){name}")


@register("lingua_disabled", aliases=("lingua",), source=LINGUA, norm="pre")
def lingua_disabled(g: Geometry) -> Recipe:
    """1/sqrt(d), the down matrix 1/sqrt(f), cut at 3 sigma; no factor for depth, which is the code's default."""
    return lingua(g, "disabled")


@register("lingua_current_depth", source=LINGUA, norm="pre")
def lingua_current_depth(g: Geometry) -> Recipe:
    """lingua_disabled with both outputs over sqrt(2l), l = 1..L; attention's bounds are those of the undivided std."""
    return lingua(g, "current_depth")


@register("lingua_global_depth", source=LINGUA, norm="pre")
def lingua_global_depth(g: Geometry) -> Recipe:
    """lingua_disabled with both outputs over sqrt(2(L+1)): its documentation says L, its code has L + 1."""
    return lingua(g, "global_depth")
