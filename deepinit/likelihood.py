"""Which registered scheme explains the numbers of a parameter tree best.

Every layer of every leaf gets the log-likelihood of its values under the scheme's law, less that under a normal law of
free std, and no less than -50: one faulty leaf must not rule out the right scheme. A normal, a cut normal and a uniform
law need no more of the values than their number, squares and largest entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinit import laws
from deepinit.errors import ConfigError
from deepinit.geometry import VECTORS, Geometry, Role
from deepinit.judge import drawn, epsilon, independent
from deepinit.laws import Constant, Distribution, External, Factor, Orthogonal, Sign, TruncatedNormal, Uniform
from deepinit.measure import Measured
from deepinit.recipe import Recipe
from deepinit.schemes import registry
from deepinit.views import View

FLOOR = -50.0
CONFLICT = -20.0
"""For a part that the scheme's structure has and the tree lacks, or the reverse."""
NORMS = {"pre": 2, "post": 2, "none": 0, "sandwich": 4, "sub": 4, "reordered": 2}
"""Norms of one sequential layer by their placement."""


@dataclass(frozen=True)
class Sums:
    """What is needed of the values of one view: (layers,) each."""

    view: View
    n: int
    square: np.ndarray
    low: np.ndarray
    high: np.ndarray
    ulp: float

    @property
    def constant(self) -> np.ndarray:
        """Whether all values of a layer are one."""
        return self.low == self.high

    @property
    def free(self) -> np.ndarray:
        """Log-likelihood under a normal law of the layer's own mean square."""
        with np.errstate(divide="ignore"):
            return -self.n / 2 * (np.log(2 * math.pi * self.square / self.n) + 1)


@dataclass(frozen=True)
class Fit:
    """One scheme, and how well it explains the tree."""

    recipe: Recipe
    score: float
    """Log-likelihood over that of free normals; of two schemes, the difference is what the numbers say."""
    by_role: dict[Role, float] = field(compare=False)
    conflicts: tuple[str, ...] = ()
    """What the scheme's structure has and the tree lacks, or the reverse."""
    fitted: bool = False
    """Whether its base std was taken from the tree."""

    @property
    def name(self) -> str:
        """The scheme, with the hyperparameters that are not its defaults."""
        args = ", ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in self.recipe.args.items())
        return f"{self.recipe.name}({args})" if args else self.recipe.name


def sums(views: Sequence[View], arrays: Sequence[Any], measures: Sequence[Measured], recipe: Recipe) -> list[Sums]:
    """What the fits need, of every view with a role."""
    found = []
    for view, m in zip(views, measures):
        if view.leaf.role:
            square = np.asarray(m["square"], np.float64)
            n, _ = drawn(view, recipe, square)
            low, high = np.asarray(m["low"], np.float64), np.asarray(m["high"], np.float64)
            if n < view.n:  # padding is zero and no draw
                low, high = np.where(low == 0, high, low), np.where(high == 0, low, high)
            found.append(Sums(view, n, square.sum(1), low, high, epsilon(arrays[view.array].dtype)))
    return found


def log_likelihood(law: Distribution, s: Sums) -> np.ndarray:
    """(layers,) log-likelihood of the values under a law at each layer's own number."""
    layers = [s.view.layer(i) or 0 for i in range(s.view.layers)]
    number = np.asarray([law.at(i).parameter if law.layered else law.parameter for i in layers], np.float64)
    peak, slack = np.maximum(np.abs(s.low), np.abs(s.high)), (1 + s.ulp) * (1 + 1e-6)
    if isinstance(law, Constant):
        near = np.maximum(np.abs(number) * 2 * s.ulp, 1e-12)
        return np.where(s.constant & (np.abs(s.low - number) <= near), 0.0, -np.inf)
    two = ~s.constant & (np.abs(np.abs(s.low) - s.high) <= s.high * 4 * s.ulp)
    two &= np.abs(s.square / s.n - s.high**2) <= s.high**2 * 1e-5
    if isinstance(law, Sign):
        std = number
        return np.where(two & (np.abs(s.high - std) <= std * (1e-4 + s.ulp)), 0.0, -np.inf)
    if isinstance(law, Factor | External):  # a law of another kind: as good as a std that had to be fitted
        return np.where(s.constant, -np.inf, s.free - math.log(s.n) / 2)
    std = number / math.sqrt(law.size) if isinstance(law, Orthogonal) else number
    match law:
        case Uniform():
            bound = std * math.sqrt(3)
            found = np.where(peak <= bound * slack, -s.n * np.log(2 * bound), -np.inf)
        case TruncatedNormal():
            unit, _ = laws.truncated_moments(law.cut)
            sigma = std / unit
            inside = math.log(math.erf(law.cut / math.sqrt(2)))
            found = gaussian(sigma, s) - s.n * inside
            found = np.where(peak <= law.cut * sigma * slack, found, -np.inf)
        case Orthogonal():  # the mean square is no random number: a narrow density in place of the normal's
            z = (s.square / s.n / std**2 - 1) / math.sqrt(2 / s.n)
            narrow = math.log(math.sqrt(2 * math.pi) * math.sqrt(2 / s.n) / 4e-3) + z**2 / 2
            found = np.where(np.abs(s.square / s.n / std**2 - 1) < 2e-3 + 2 * s.ulp, gaussian(std, s) + narrow, -np.inf)
        case _:
            found = gaussian(std, s)
    return np.where(s.constant | (two & (s.n > 8)), -np.inf, found)


def gaussian(std: np.ndarray, s: Sums) -> np.ndarray:
    """Log-likelihood under a normal law."""
    return -s.n / 2 * np.log(2 * math.pi * std**2) - s.square / (2 * std**2)


def fit(recipe: Recipe, found: Sequence[Sums], fitted: bool = False) -> Fit:
    """How well one recipe explains a tree."""
    by_role: dict[Role, float] = {}
    for s in found:
        role, leaf = s.view.leaf.role, s.view.leaf
        if role is None or role not in recipe.weights:
            continue
        law = recipe.law_at(leaf.canonical, role)
        depth = len(law.parameter) if isinstance(law.parameter, tuple) else math.inf
        if s.view.depth > depth:
            value = np.full(s.view.layers, FLOOR)
        else:
            with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
                better = np.where(s.constant, log_likelihood(law, s), log_likelihood(law, s) - s.free)
            value = np.where(np.isnan(better), FLOOR, np.maximum(better, FLOOR))
        by_role[role] = by_role.get(role, 0.0) + float(value.sum())
    conflicts = tuple(conflicting(recipe, found))
    penalty = CONFLICT * len(conflicts) - (math.log(sum(s.n for s in found)) / 2 if fitted else 0.0)
    return Fit(recipe, sum(by_role.values()) + penalty, by_role, conflicts, fitted)


def conflicting(recipe: Recipe, found: Sequence[Sums]) -> Iterator[str]:
    """Parts of the structure that a scheme has and the tree lacks, or the reverse."""
    present = {s.view.leaf.role for s in found}
    gate = recipe.residual.gate
    if gate and gate.role not in present:
        yield f"a learnable {gate.role}, which the tree lacks"
    if Role.RESIDUAL_GATE in present and not gate and not recipe.residual.skip_gate and not recipe.residual.x0_gate:
        yield "no learnable gates, which the tree has"
    depth = recipe.geometry.num_layers
    norms = [s.view for s in found if s.view.leaf.role is Role.NORM_SCALE and not per_head(s.view)]
    inside = sum(v.layers for v in norms if v.layer(0) is not None) / depth
    if norms or Role.TOKEN_EMBED in present:
        accepted = {NORMS[place] for place in registry.entry(recipe.name).norms}
        if round(inside) not in accepted and not (recipe.geometry.parallel and round(inside) == 1):
            yield f"{' or '.join(map(str, sorted(accepted)))} norms a layer, the tree {inside:g}"


def per_head(view: View) -> bool:
    """Whether a norm acts on queries or keys."""
    return any(part.strip("_") in ("q_norm", "k_norm", "query_norm", "key_norm") for part in
               view.leaf.path.replace(".", "/").split("/"))  # fmt: skip


def candidates(geometry: Geometry, found: Sequence[Sums], names: Sequence[str] = ()) -> Iterator[tuple[Recipe, bool]]:
    """(recipe, whether its std was fitted) of every registered scheme, its aliases, and a std of the tree's own."""
    base = base_std(found)
    for scheme in registry.schemes():
        if scheme.name == "external" or (names and scheme.name not in names):
            continue
        presets = [{}, *(dict(args) for args in scheme.aliases.values() if args)]
        for args in presets:
            if made := recipe_or_none(scheme.name, geometry, args):
                yield made, False
        if base and "std" in scheme.hyperparameters:
            near, twice = (recipe_or_none(scheme.name, geometry, {"std": k * base}) for k in (1.0, 2.0))
            own = refined(base, near, twice, found) if near and twice else base
            if made := recipe_or_none(scheme.name, geometry, {"std": own}):
                yield made, True


def recipe_or_none(name: str, geometry: Geometry, args: dict[str, Any]) -> Recipe | None:
    """The recipe, where the scheme takes this geometry."""
    try:
        return registry.recipe(name, geometry, **args)
    except ConfigError:
        return None


def base_std(found: Sequence[Sums]) -> float:
    """The std of the tree's queries (or of what else reads the stream), to 3 digits."""
    for role in (Role.ATTN_Q, Role.ATTN_K, Role.MLP_UP, Role.EXPERT_UP):
        own = [s for s in found if s.view.leaf.role is role]
        total, n = sum(s.square.sum() for s in own), sum(s.n * s.view.layers for s in own)
        if n and math.isfinite(total) and total > 0:
            return float(f"{math.sqrt(total / n):.3g}")
    return 0.0


def refined(base: float, near: Recipe, twice: Recipe, found: Sequence[Sums]) -> float:
    """The std by all layers of all leaves that `near`, the recipe at `base`, explains to 5%, in the fewest digits.

    Only laws that `twice`, the recipe at 2 `base`, has doubled say anything. Rounding moves it by 3 standard errors at
    most.
    """
    n, total = 0, 0.0
    for s in found:
        role, leaf = s.view.leaf.role, s.view.leaf
        if role is None or role in VECTORS or role not in near.weights:
            continue
        law, other = (r.law_at(leaf.canonical, role) for r in (near, twice))
        std = np.atleast_1d(np.asarray(law.std, np.float64))
        if not independent(law) or not np.allclose(np.atleast_1d(other.std), 2 * std) or not std.all():
            continue
        if len(std) > 1:
            layers = [s.view.layer(i) or 0 for i in range(s.view.layers)]
            if max(layers) >= len(std):
                continue
            std = std[layers]
        ratio = s.square / (s.n * std**2)
        close = np.abs(np.sqrt(ratio) - 1) < 0.05
        n += s.n * int(close.sum())
        total += s.n * float(ratio[close].sum())
    if not n:
        return base
    best = base * math.sqrt(total / n)
    rounded = (float(f"{best:.{digits}g}") for digits in range(1, 9))
    return next((x for x in rounded if abs(x - best) <= 3 * best / math.sqrt(2 * n)), best)


def signature(recipe: Recipe, found: Sequence[Sums]) -> tuple[Any, ...]:
    """What a recipe says of the leaves that are there; equal for schemes that weights cannot tell apart."""
    said = []
    for s in found:
        leaf = s.view.leaf
        if leaf.role and leaf.role in recipe.weights:
            law = recipe.law_at(leaf.canonical, leaf.role)
            numbers = law.parameter if isinstance(law.parameter, tuple) else (law.parameter,)
            cut = law.cut if isinstance(law, TruncatedNormal) else 0.0
            rounded = tuple(f"{x:.7g}" for x in numbers)
            said.append((type(law).__name__, f"{cut:.6g}", rounded[:1] if len(set(rounded)) == 1 else rounded))
    return tuple(said)


def ranked(geometry: Geometry, found: Sequence[Sums], names: Sequence[str] = ()) -> list[list[Fit]]:
    """Groups of schemes that say the same of these leaves, the best explanation first.

    Within a group, those whose structure fits come first, and a scheme as registered before one that was fitted.
    """
    groups: dict[tuple[Any, ...], list[Fit]] = {}
    for recipe, fitted in candidates(geometry, found, names):
        groups.setdefault(signature(recipe, found), []).append(fit(recipe, found, fitted))
    for group in groups.values():
        group.sort(key=lambda f: (-round(f.score, 3), f.fitted, f.recipe.args != {}))
    return sorted(groups.values(), key=lambda g: -g[0].score)


def tells_apart(best: Fit, other: Fit, found: Sequence[Sums]) -> str:
    """The role on which two schemes differ most here, with both stds and the one found."""
    gain = {r: best.by_role[r] - other.by_role.get(r, 0.0) for r in best.by_role}
    role = max(gain, key=lambda r: gain[r])
    if gain[role] <= 0:
        return "; ".join(other.conflicts) or "nothing in the weights"
    own = [s for s in found if s.view.leaf.role is role]
    std = math.sqrt(sum(s.square.sum() for s in own) / sum(s.n * s.view.layers for s in own))
    here, there = best.recipe.weights[role], other.recipe.weights[role]

    def said(law: Distribution) -> str:
        return laws.show(law.parameter) if role in VECTORS or isinstance(law, Constant) else laws.show(law.std)

    kinds = "" if type(here) is type(there) else f" ({type(here).__name__}, not {type(there).__name__})"
    return f"{role}: {said(here)} against {said(there)}{kinds}, found {std:.4g}"
