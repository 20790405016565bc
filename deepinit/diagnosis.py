"""What a wrong std looks like: the usual mistake whose factor it has."""

from __future__ import annotations

import math
from collections.abc import Iterator

from deepinit import laws
from deepinit.geometry import EXPERTS, OUTPUTS, QUERIES_KEYS, VECTORS, Role
from deepinit.laws import TruncatedNormal, Uniform
from deepinit.recipe import Recipe


def explained(ratio: float, error: float, role: Role, recipe: Recipe, layer: int | None) -> str:
    """`; as if ...`, naming the mistake whose factor is within 4 standard errors of measured std / law's std.

    Nothing, where no known mistake fits.
    """
    margin = max(4 * error, 2e-3)
    close = [(abs(math.log(ratio / factor)), text) for factor, text in mistakes(role, recipe, layer) if factor > 0]
    fits = [c for c in close if c[0] <= margin and abs(math.log(ratio)) > c[0]]
    # of mistakes with one factor the first: a missing 1/sqrt(2L) makes an output look like any input
    return f"; as if {min(fits, key=lambda c: round(c[0], 6))[1]}" if fits else ""


def mistakes(role: Role, recipe: Recipe, layer: int | None) -> Iterator[tuple[float, str]]:
    """(factor on the std, what was done) of the usual mistakes with this role."""
    g = recipe.geometry
    if role in VECTORS or role not in recipe.weights:
        return
    law = recipe.weights[role]
    fan_in, fan_out = g.matrix(role)
    if role in OUTPUTS:
        root = math.sqrt(g.num_residuals)
        yield root, f"without 1/sqrt({g.num_residuals}), the residual additions"
        yield 1 / root, f"with 1/sqrt({g.num_residuals}), the residual additions, twice"
        yield math.sqrt(g.num_residuals / g.num_layers), f"over sqrt({g.num_layers}), layers for residual additions"
    if role in EXPERTS and role is not Role.ROUTER:
        yield g.num_experts**-0.5, "the axis of the experts were among the inputs"
        yield math.sqrt(fan_in / (g.num_experts * fan_out)), "the axis of the experts were the inputs"
    yield g.num_layers**-0.5, "the axis of the layers were among the inputs"
    unit, heads = g.head_dim, g.num_heads
    if role in QUERIES_KEYS or role.endswith("_v"):
        own = heads if role.endswith("_q") else g.num_kv_heads
        yield math.sqrt(fan_in / (g.d_model * own)), "the heads' axis were among the inputs"
        yield math.sqrt(fan_in / own), "the heads' axis were the inputs"
        yield unit**-0.5, "1/sqrt(head_dim) were folded in"
    if role in OUTPUTS and role.endswith("_out"):
        yield math.sqrt(fan_in / unit), "one head's width were the inputs"
    yield math.sqrt(fan_in / fan_out), "inputs and outputs were swapped"
    if isinstance(law, TruncatedNormal):
        unit_std, _ = laws.truncated_moments(law.cut)
        yield unit_std, f"the cut at {law.cut:g} sigma were not corrected for"
        yield 1 / unit_std, f"the cut at {law.cut:g} sigma were corrected for, or not made"
    else:
        for cut in (2.0, 3.0):
            yield laws.truncated_moments(cut)[0], f"it were cut at {cut:g} sigma without correction"
    if isinstance(law, Uniform):
        yield math.sqrt(3), "the std were taken for the bound"
        yield 1 / math.sqrt(3), "the bound were taken for the std"
    own_std = at(law.std, layer)
    for other, theirs in recipe.weights.items():
        if other not in VECTORS and theirs != law and (std := at(theirs.std, layer)) and own_std:
            yield std / own_std, f"it were {other}"


def at(std: laws.Numbers, layer: int | None) -> float:
    """The std of one layer."""
    if isinstance(std, tuple):
        return std[layer] if layer is not None and layer < len(std) else 0.0
    return std if math.isfinite(std) else 0.0
