"""The building blocks that schemes share: laws by fan, by a fixed std, and the division of what writes into the stream.

Each returns a plain dict from role to law, so that a scheme is a union of them: `fixed(g, 0.02) | outputs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from deepinit.errors import ConfigError
from deepinit.geometry import LAYER_MATRICES, OUTPUTS, Geometry, Role
from deepinit.laws import Constant, Distribution, Normal, Numbers, TruncatedNormal, Uniform
from deepinit.recipe import Update

Laws = dict[str, Distribution]
Draw = Callable[[Numbers, str], Distribution]
"""Makes a law from the std that its source states, and the formula of that std."""

Divisor = Literal["total", "layer", "none"]
StdRule = Literal["sqrt(2/d)", "sqrt(2/(5d))", "1/sqrt(d)", "he", "small", "fan_in"]
Std = float | StdRule
"""A std, or a rule that gives it from d_model."""
DepthUpdates = Literal["none", "depth"]

EMBEDDINGS_AND_HEAD = (Role.TOKEN_EMBED, Role.POS_EMBED, Role.LM_HEAD)
MATRICES = (*EMBEDDINGS_AND_HEAD, *LAYER_MATRICES)


def truncated(cut: float, corrected: bool = True) -> Draw:
    """A normal cut off at +-cut sigma; cut 0 leaves it whole.

    `corrected`: the std that the source states is that of the values drawn. Not corrected: it is that of the normal
    before the cut, and the values drawn have 0.986578 of it at cut 3 and 0.879626 at cut 2.
    """
    if cut < 0:
        raise ConfigError(f"cut: {cut} is negative; give the sigmas at which to cut, or 0 for none")
    if not cut:
        return Normal

    def draw(std: Numbers, formula: str) -> Distribution:
        make = TruncatedNormal if corrected else TruncatedNormal.from_sigma
        return make(std, cut, formula)

    return draw


def base_std(g: Geometry, std: Std) -> tuple[float, str]:
    """The number and the formula of a base std."""
    match std:
        case "sqrt(2/d)" | "he":  # He et al. 2015, with d_model for the fan
            return math.sqrt(2 / g.d_model), "sqrt(2/d)"
        case "sqrt(2/(5d))" | "small":  # Nguyen & Salazar 2019: Xavier of a (d, 4d) matrix
            return math.sqrt(2 / (5 * g.d_model)), "sqrt(2/(5d))"
        case "1/sqrt(d)" | "fan_in":
            return g.d_model**-0.5, "1/sqrt(d)"
    return float(std), f"{std:g}"


def roles_of(g: Geometry, roles: Iterable[Role]) -> tuple[Role, ...]:
    """Those of `roles` that a model of these sizes may hold."""
    return tuple(r for r in roles if r in g.roles)


def fixed(g: Geometry, std: Std, roles: Iterable[Role] = MATRICES, *, draw: Draw = Normal, formula: str = "") -> Laws:
    """One std for all `roles`, whatever their fans."""
    value, text = base_std(g, std)
    return {r: draw(value, formula or text) for r in roles_of(g, roles)}


def xavier(
    g: Geometry, roles: Iterable[Role] = MATRICES, *, gain: float = 1.0, draw: Draw = Normal, name: str = ""
) -> Laws:
    """Std gain sqrt(2 / (fan_in + fan_out)); `name` is how the formula writes the gain."""
    formula = f"{name} sqrt(2/(fan_in+fan_out))".strip()
    return {r: draw(gain * math.sqrt(2 / sum(g.matrix(r))), formula) for r in roles_of(g, roles)}


def fan_in(g: Geometry, roles: Iterable[Role] = MATRICES, *, scale: float = 1.0, draw: Draw = Normal) -> Laws:
    """Std sqrt(scale / fan_in); an embedding is a look-up, a sum of one term, and takes 1/sqrt(d) as Flax has it."""
    laws: Laws = {}
    for r in roles_of(g, roles):
        if r in (Role.TOKEN_EMBED, Role.POS_EMBED):
            laws[r] = Normal(g.d_model**-0.5, "1/sqrt(d)")
        else:
            laws[r] = draw(math.sqrt(scale / g.fan_in(r)), f"sqrt({scale:g}/fan_in)")
    return laws


def xavier_uniform(g: Geometry, roles: Iterable[Role] = MATRICES, *, gain: float = 1.0, name: str = "") -> Laws:
    """`xavier` drawn uniformly: the bound is sqrt(3) std."""
    return xavier(g, roles, gain=gain, draw=Uniform, name=name)


def unit_tables(g: Geometry, roles: Iterable[Role] = EMBEDDINGS_AND_HEAD) -> Laws:
    """N(0, 1/d): rows of unit length."""
    return fixed(g, "1/sqrt(d)", roles)


def zeros(g: Geometry, roles: Iterable[Role]) -> Laws:
    """Exactly zero."""
    return {r: Constant(0.0, "0") for r in roles_of(g, roles)}


def tied_logits(g: Geometry) -> dict[str, float]:
    """Logits times 1/sqrt(d) where the head is a table of unit std (as T5 and PaLM have it): one table has one std."""
    return {"logits": g.d_model**-0.5} if g.tied_embeddings else {}


def divided(g: Geometry, laws: Mapping[str, Distribution], divisor: Divisor, roles: Iterable[Role] = OUTPUTS) -> Laws:
    """The laws of `roles` (what writes into the stream) over the root of the number of residual additions.

    `total`: all additions of the stack (2L in a sequential block, L in a parallel one, 3L with cross-attention).
    `layer`: those up to and with layer l = 1..L (2l). `none`: not divided.
    """
    each = g.sublayers
    name = "" if each == 1 else str(each)
    match divisor:
        case "none":
            return {}
        case "total":
            factor: Numbers = g.num_residuals**-0.5
            tail = f"/sqrt({name}L)"
        case "layer":
            factor = tuple((each * layer) ** -0.5 for layer in range(1, g.num_layers + 1))
            tail = f"/sqrt({name}l)"
    return {r: laws[r].scaled(factor, laws[r].formula + tail) for r in roles_of(g, roles)}


FINAL_NORM = ("final_norm/norm_scale", "final_norm/norm_bias")
"""Ends of the paths of the last norm's leaves: it stands outside the stack, and learns at the base rate."""


def depth_updates(g: Geometry, which: DepthUpdates, base_depth: int, power: float) -> dict[str, Update]:
    """Adam's rates by depth: the layers' matrices at (L0/L)^power, their norm gains at L0/L, all else as it was.

    L0 is the depth at which the rate was found. The update of a post-norm stack is then level in depth, and a 96-layer
    DeepNorm trained 0.12 to 0.14 nats lower than without; the best rate still moves, now upwards.
    """
    if which == "none":
        return {}
    if base_depth < 1:
        raise ConfigError(f"base_depth: updates='depth' needs the depth at which the rate was found; got {base_depth}")
    ratio = base_depth / g.num_layers
    matrices: dict[str, Update] = {r: Update(lr=ratio**power) for r in roles_of(g, LAYER_MATRICES)}
    return {**matrices, Role.NORM_SCALE: Update(lr=ratio), **dict.fromkeys(FINAL_NORM, Update())}
