"""How the first update of a parameter group grows with depth, from the forward prediction.

With effect_l the movement of the stream, relative to its size, per unit change of a parameter of sublayer l, an SGD
step moves the output by sum_l effect_l^2 and an Adam step by sum_l effect_l: L^(1-2a) and L^(1-a) where effect = L^-a.
Scalar gates meet branches of random sign, so theirs add in quadrature. The rule presumes that a change travels up with
the stream, |dL/dx_l| ~ 1/|x_l|: it is 0.3 low for Sub-LN under SGD and says nothing of post-norm with skip 1, whose
tokens collapse.

Gains inside a branch add both ways. How the d gains of one norm move token t where token t' asks for it is a sum over
features, sum_j z_j(t) z_j(t') w_j w'_j, with backward weights w of random sign: over draws its squared mean is to its
variance as the mean square of the tokens' overlap, 1/d + correlation^2, and only the mean is alike in every layer. So
total^2 = (sum_l move_l)^2 + sum_l move_l^2 / (1/d + correlation_l^2): coherent in stacks much deeper than d, or of
tokens that are alike; in quadrature else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from deepinit.errors import ConfigError
from deepinit.geometry import Role
from deepinit.recipe import Recipe
from deepinit.signal.follow import first_grams, follow
from deepinit.signal.forward import Forward

DEPTHS = (6, 24, 96)
LENGTH = 32
MATRICES = ("attn_v", "attn_out", "mlp_gate", "mlp_up", "mlp_down")
"""Those that the rule speaks of: q and k move the stream through the softmax only."""
KINDS = {"attn": "attention", "mlp": "mlp"}
"""The groups of a branch's matrices, which may shrink by different powers (Fixup)."""


class Exponents(NamedTuple):
    """p of "change of the output ~ depth^p" after one step at one learning rate; nan: no effect at step 0."""

    sgd: float
    adam: float


def at_depths(recipe: Recipe) -> Callable[[int], Recipe]:
    """The recipe of the same scheme at another depth.

    Raises:
      ConfigError: the recipe was changed by hand, so that its name and hyperparameters do not make it again.
    """
    from deepinit.schemes import registry

    if recipe.changes:
        raise ConfigError(f"scheme {recipe.name} was changed ({'; '.join(recipe.changes)}): no recipe at other depths")
    norm = recipe.residual.norm if recipe.residual.norm in registry.entry(recipe.name).norms else None

    def at(depth: int) -> Recipe:
        g = recipe.geometry.replace(num_layers=depth)
        return registry.recipe(recipe.name, g, norm=norm, **recipe.args)

    return at


def exponents(
    recipe_at: Callable[[int], Recipe], depths: Sequence[int] = DEPTHS, options: Mapping[str, Any] | None = None
) -> dict[str, Exponents]:
    """Exponents by group: `matrices` together, those of `attention` and of the `mlp`, each role, `norm_gains`, `gates`,
    `shifts`.

    The recipe's learning-rate factors count. A group that the model does not have is left out.

    Raises:
      ConfigError: the stream overflows at one of the depths, or the recipe is outside the prediction.
    """
    moves: dict[str, list[tuple[float, float]]] = {}
    for depth in depths:
        for group, move in step_size(recipe_at(depth), options or {}).items():
            moves.setdefault(group, []).append(move)
    log_depth = np.log(depths)
    out = {}
    for group, rows in moves.items():
        sizes = np.array(rows)
        if len(rows) == len(depths) and np.all(sizes > 0):
            out[group] = Exponents(*(float(p) for p in np.polyfit(log_depth, np.log(sizes), 1)[0]))
        else:
            out[group] = Exponents(math.nan, math.nan)
    return out


def step_size(recipe: Recipe, options: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Relative movement of the output for one (SGD, Adam) step, by group, in units of the learning rate."""
    forward = Forward.of(recipe, options)
    g, additions = recipe.geometry, forward.additions
    now = follow(forward, *first_grams(forward, np.arange(LENGTH)))
    if len(now.branch) < len(additions) or not now.variance[-1] < math.inf:
        raise ConfigError(f"the stream overflows at {g.num_layers} layers: there is no law of the update")
    branch, hidden, before = np.array(now.branch), np.array(now.hidden), np.array(now.variance[:-1])
    stream = np.maximum(np.array([a.skip for a in additions]) ** 2 * before + branch, 1e-300)
    layers = [a.layer for a in additions]
    factor2 = np.array([a.branch for a in additions]) ** 2
    normed = np.array([a.output_normed or a.sphere for a in additions])
    has = {
        "attn": np.array([a.kind != "mlp" for a in additions]),
        "mlp": np.array([a.kind != "attn" for a in additions]),
    }
    gains = {role: forward.gain(role)[layers] for role in MATRICES if role != "mlp_gate" or g.gated}

    parts: dict[str, list[Part]] = {}

    def add(group: str, role: str, effect2: np.ndarray, coherent: float = 1.0, squares: Any = 0.0) -> None:
        rate = recipe.updates[role].lr if role in recipe.updates else 1.0
        parts.setdefault(group, []).append(Part(rate, effect2, coherent, squares))

    for role, gain in gains.items():
        own = np.divide(branch, gain, out=np.zeros_like(branch), where=gain > 0)
        if role in ("attn_out", "mlp_down"):  # which may be 0, and still have a gradient
            own = np.where(normed, own, factor2 * hidden)
        kind = role.partition("_")[0]
        for group in ("matrices", KINDS[kind], role):
            add(group, role, has[kind] * own / stream)
    if any(a.norm != "none" for a in additions):
        outer, alike = np.array([a.norm == "post" for a in additions]), np.array(now.correlation[:-1])
        add("norm_gains", Role.NORM_SCALE, outer * 1.0)
        add("norm_gains", Role.NORM_SCALE, ~outer * branch / stream, squares=1 / (1 / g.d_model + alike**2))
    written = np.where(has["mlp"], gains["mlp_down"], gains["attn_out"])
    if gate := recipe.residual.gate:
        constant2 = np.array([a.constant for a in additions]) ** 2
        add("gates", gate.role, constant2 * np.where(normed, 1.0, hidden * written) / stream, coherent=0, squares=1)
    if recipe.residual.shift:  # the last one, before the output matrix
        add("shifts", Role.BRANCH_SHIFT, factor2 * written / stream, coherent=0, squares=1)
    return {group: (total(own, 1.0), total(own, 0.5)) for group, own in parts.items()}


class Part(NamedTuple):
    """Parameters of one kind, by the addition that they are in."""

    rate: float
    effect2: np.ndarray
    coherent: float
    """Weight of the square of the sum over additions."""
    squares: Any
    """Weight of the sum of squares: one number, or one for each addition."""


def total(parts: Sequence[Part], power: float) -> float:
    """Movement by a step in which an addition moves the output by its effect^2 (SGD, power 1) or effect (Adam, 1/2)."""
    moves = [p.rate * p.effect2**power for p in parts]
    sums = sum(p.coherent * float(m.sum()) for p, m in zip(parts, moves))
    return math.sqrt(sums**2 + sum(float((p.squares * m**2).sum()) for p, m in zip(parts, moves)))
