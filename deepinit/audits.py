"""An audit of any parameter tree: the scheme that explains it, what does not fit, what is unsafe, is it initial."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinit import digests, likelihood
from deepinit.deviations import normal_tail
from deepinit.geometry import OUTPUTS, VECTORS, Geometry, Role
from deepinit.interop import trees
from deepinit.interop.sizes import geometry_of, table_of
from deepinit.interop.tables import OWN
from deepinit.invariants import FALSE_ALARM
from deepinit.judge import TESTS, UNMANAGED, Judge, duplicates
from deepinit.laws import Orthogonal
from deepinit.likelihood import Fit, Sums
from deepinit.measure import Measured, measured
from deepinit.recipe import Recipe
from deepinit.verdict import Row
from deepinit.views import View, on_device

MOVED = 12.0
"""Standard errors by which the rows of a matrix differ in size, from which on they were not drawn from one law."""


@dataclass(frozen=True)
class Audit:
    """What was found."""

    geometry: Geometry
    table: str
    assumed: tuple[str, ...]
    best: tuple[Fit, ...]
    """The schemes that explain it best; several where weights cannot tell them apart."""
    runner_up: Fit | None
    difference: str
    """What tells the runner-up apart."""
    rows: tuple[Row, ...]
    """Every leaf against the best scheme."""
    moved: tuple[str, ...]
    """Signs that this is no initial state."""
    unsafe: tuple[str, ...]
    digest: str

    @property
    def misfits(self) -> tuple[Row, ...]:
        """The leaves that do not fit the best scheme."""
        return tuple(r for r in self.rows if not r.ok)

    @property
    def initial(self) -> bool:
        """Whether these are initial values."""
        return not self.moved

    @property
    def ok(self) -> bool:
        """Whether it is an initial state, and every leaf fits, and nothing is unsafe."""
        return self.initial and not self.misfits and not self.unsafe

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        margin = self.best[0].score - self.runner_up.score if self.runner_up else None
        return {
            "ok": self.ok,
            "initial": self.initial,
            "not_initial_because": list(self.moved),
            "scheme": self.best[0].name,
            "recipe": self.best[0].recipe.to_json(),
            "indistinguishable_by_weights": [f.name for f in self.best[1:]],
            "runner_up": self.runner_up and self.runner_up.name,
            "log_likelihood_margin": margin,
            "difference": self.difference,
            "conflicts": list(self.best[0].conflicts),
            "geometry": dataclasses.asdict(self.geometry),
            "assumed": list(self.assumed),
            "table": self.table,
            "unsafe": list(self.unsafe),
            "misfits": [r.to_json() for r in self.misfits],
            "rows": [r.to_json() for r in self.rows],
            "digest": self.digest,
        }


def audit(
    params: Any,
    *,
    roles: Any = None,
    sizes: Mapping[str, Any] | None = None,
    recipe: Recipe | None = None,
    strict: bool = False,
    schemes: Sequence[str] = (),
) -> Audit:
    """Audit a tree of any kind (see `deepinit.verify`).

    Args:
      params: the tree.
      roles: `{regex: role}`, a table or the name of a preset; by default the leaves' own names, or the preset that
        knows them.
      sizes: fields of a Geometry, where the shapes do not show them (the number of heads of a fused kernel).
      recipe: what it is said to be; then its geometry is taken, and its scheme is judged beside all others.
      strict: leaves without a role do not fit.
      schemes: registered names to choose among; all by default.
    """
    table = table_of(params, roles)
    geometry, assumed = (recipe.geometry, []) if recipe else geometry_of(params, table, sizes)
    tree = trees.viewed(params, geometry, None if table is OWN else table)
    arrays = on_device(tree.arrays)
    lanes, measures = measured(arrays, tree.views, tuple(leaf.stacked for leaf in tree.leaves))
    found = likelihood.sums(tree.views, arrays, measures, Recipe({}, geometry=geometry))
    groups = likelihood.ranked(geometry, found, schemes)
    best = groups[0]
    if recipe and likelihood.fit(recipe, found).score > best[0].score - 3:  # what it is said to be explains it as well
        best = [likelihood.fit(recipe, found), *(f for f in best if f.recipe.name != recipe.name)]
    named = {f.recipe.name for f in best}
    other = next((g[0] for g in groups[1:] if g[0].recipe.name not in named), None)
    rows = judged(tree.views, arrays, measures, best[0].recipe, strict)
    return Audit(
        geometry=geometry,
        table=table.name or "given",
        assumed=tuple(assumed),
        best=tuple(distinct(best)),
        runner_up=other,
        difference=likelihood.tells_apart(best[0], other, found) if other else "",
        rows=rows,
        moved=tuple(signs_of_training(tree.views, measures, best[0].recipe)),
        unsafe=tuple(dangers(rows, found, best[0].recipe)),
        digest=digests.combine(list(zip(tree.leaves, arrays)), lanes),
    )


def distinct(group: Sequence[Fit]) -> list[Fit]:
    """One fit a scheme."""
    return list({f.recipe.name: f for f in reversed(group)}.values())[::-1]


def judged(
    views: Sequence[View], arrays: Sequence[Any], measures: Sequence[Measured], recipe: Recipe, strict: bool
) -> tuple[Row, ...]:
    """Every leaf against a recipe."""
    layers = sum(v.layers for v in views)
    threshold = normal_tail(FALSE_ALARM / (TESTS * max(layers, 1) + 2 * len(views) + 4))
    judge = Judge(recipe, threshold, strict, duplicates(views, measures))
    rows = [row for i, view in enumerate(views) for row in judge.rows(i, view, arrays[view.array], measures[i])]
    return (*rows, *judge.pooled())


def signs_of_training(views: Sequence[View], measures: Sequence[Measured], recipe: Recipe) -> list[str]:
    """Why this is no initial state: norms that are no longer constant, rows of matrices that differ in size."""
    norms = [(v, m) for v, m in zip(views, measures) if v.leaf.role is Role.NORM_SCALE and v.n > 1]
    learned = [v for v, m in norms if (np.asarray(m["low"]) != np.asarray(m["high"])).any()]
    said = []
    if learned:
        said.append(f"{len(learned)} of {len(norms)} norm gains are not constant, {learned[0].leaf.path} among them")
    uneven, matrices = [], 0
    for view, m in zip(views, measures):
        role = view.leaf.role
        if role is None or role in VECTORS or not np.asarray(m["square"]).any():
            continue
        if role in recipe.weights and isinstance(recipe.law_at(view.leaf.canonical, role), Orthogonal):
            continue
        matrices += 1
        if unevenness(view, m) > MOVED:
            uneven.append(view)
    if matrices and len(uneven) > max(1, matrices / 4):
        said.append(f"the rows of {len(uneven)} of {matrices} matrices differ in size, as no draw from one law does")
    return said


def unevenness(view: View, m: Measured) -> float:
    """z of the spread of the rows' mean squares, of the layer where it is largest; the law is the layer's own."""
    square, fourth = np.asarray(m["square"], np.float64), np.asarray(m["fourth"], np.float64)
    rows = square.shape[1]
    width = view.n / rows
    if rows < 16 or width < 16:
        return 0.0
    kept = square > 0  # rows of zeros are padding
    worst = 0.0
    for q, f, k in zip(square, fourth, kept):
        if k.sum() < 16:
            continue
        q, f = q[k] / width, f[k] / width
        # that of an initial law; a heavier tail is itself a sign, and signs alone have 1 and no spread
        kurtosis = float(np.clip(f.mean() / q.mean() ** 2, 1 + 1e-6, 3.5))
        spread = ((q / q.mean() - 1) ** 2).sum() / ((kurtosis - 1) / width)
        worst = max(worst, (spread - len(q)) / math.sqrt(2 * len(q)) / 1.5)
    return worst


def dangers(rows: Sequence[Row], found: Sequence[Sums], recipe: Recipe) -> list[str]:
    """What would spoil a run, whether or not a scheme is to blame."""
    g, said = recipe.geometry, []
    for row in rows:
        where = row.path if row.layer is None else f"{row.path} (layer {row.layer})"
        if row.test in ("finite", "zero", "duplicate", "precision") and not row.ok:
            said.append(f"{where}: {row.reason}")
    stds = {role: pooled_std(found, role) for role in (Role.ATTN_Q, Role.ATTN_OUT, Role.LM_HEAD, Role.TOKEN_EMBED)}
    outs = [s for s in found if s.view.leaf.role in OUTPUTS]
    same = recipe.residual.norm == "pre" and recipe.residual.branch == 1.0 and not recipe.residual.gate
    if same and g.num_layers >= 24 and stds[Role.ATTN_OUT] and stds[Role.ATTN_OUT] > 0.9 * stds[Role.ATTN_Q] and outs:
        said.append(
            f"no residual scaling: outputs have std {stds[Role.ATTN_OUT]:.4g}, inputs {stds[Role.ATTN_Q]:.4g}; the "
            f"stream's variance grows with each of the {g.num_residuals} additions"
        )
    if head := stds[Role.LM_HEAD]:
        variance = g.d_model * (head * recipe.multipliers["logits"]) ** 2
        if variance > 4 and recipe.residual.norm not in ("none",):
            said.append(
                f"head of std {head:.4g}: logits of variance {variance:.4g} on a normed stream, first loss about "
                f"{expected_loss(g.vocab_size, variance):.3g} where ln V is {math.log(g.vocab_size):.3g}"
            )
    unmanaged = [r.path for r in rows if UNMANAGED in r.reason and not r.ok]
    if unmanaged:
        said.append(f"{len(unmanaged)} leaves have no role: {', '.join(unmanaged[:4])}")
    return said


def pooled_std(found: Sequence[Sums], role: Role) -> float:
    """Root mean square over all leaves of a role; 0 if there is none."""
    own = [s for s in found if s.view.leaf.role is role]
    n = sum(s.n * s.view.layers for s in own)
    total = sum(float(s.square.sum()) for s in own)
    return math.sqrt(total / n) if n and math.isfinite(total) else 0.0


def expected_loss(vocab: int, variance: float, own: float = 0.0, draws: int = 16) -> float:
    """Mean cross-entropy against uniform targets of logits N(0, variance), one of them raised by `own`.

    ln V + variance/2 while that is small; beyond, the largest logits count, and the mean is taken over draws.
    """
    rng = np.random.default_rng(0)
    values = []
    for _ in range(draws):
        logits = rng.standard_normal(vocab) * math.sqrt(variance)
        logits[0] += own
        top = logits.max()
        values.append(top + math.log(np.exp(logits - top).sum()) - own / vocab)
    return float(np.mean(values))
