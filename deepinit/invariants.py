"""What every parameter received against what its law says: measured on the mesh, judged on the host.

One compiled pass takes from every leaf partial sums, extremes and digest lanes. The tolerances follow from the number
of entries, the law's kurtosis and a false-alarm rate below 1e-6 a model. Where the seed is known, weights at sampled
indices are drawn again in NumPy and compared bit for bit, which is no matter of chance at all.
"""

from __future__ import annotations

import time
from typing import Any

import chex
import numpy as np

from deepinit import digests, joint, measure, replays
from deepinit.deviations import normal_tail, std_deviation
from deepinit.errors import unknown
from deepinit.interop import trees
from deepinit.judge import TESTS, Judge, count_matrices, duplicates
from deepinit.recipe import Recipe
from deepinit.verdict import Row, Verdict
from deepinit.views import on_device

__all__ = ["FALSE_ALARM", "Row", "Verdict", "inspect", "normal_tail", "std_deviation", "verify"]

FALSE_ALARM = 1e-6
REPLAYS = ("sample", "full")


def verify(
    params: Any,
    recipe: Recipe,
    *,
    roles: Any = None,
    strict: bool = False,
    raises: bool = True,
    seed: int | None = None,
    replay: str | None = "sample",
    model: Any = None,
) -> tuple[Row, ...]:
    """Check every leaf of a parameter tree against the recipe.

    Args:
      params: the tree: our modules' or any other, Linen (boxed or not, scanned or not), an `nnx.State`, a module or a
        pure dict; sharded or not.
      recipe: what the leaves should hold.
      roles: of a tree whose leaves are not named by their roles: `{regex: role}`, or a `deepinit.interop.Table`.
      strict: leaves without a role, whose own initializer is out of our hands, and warnings fail too.
      raises: False returns the rows also where some fail.
      seed: of the initialization. Given, weights are drawn again and compared bit for bit.
      replay: `sample`: 64 weights of each layer of each leaf; `full`: every one; None: none.
      model: the Linen module of these parameters. Given, the laws of its structure are checked by one forward and one
        backward pass over a few tokens.

    Raises:
      AssertionError: some leaf is not what its law says; the message is the table of those.
      ConfigError: a leaf that no rule of `roles` matches, or a rule that matches none.
    """
    verdict = inspect(params, recipe, roles=roles, strict=strict, seed=seed, replay=replay)
    if model is not None:
        from deepinit import structure

        verdict = verdict.joined(structure.check(model, recipe, params, strict=strict))
    if raises:
        chex.assert_equal(len(verdict.bad), 0, custom_message=verdict.table())
    return verdict.rows


def inspect(
    params: Any,
    recipe: Recipe,
    *,
    roles: Any = None,
    strict: bool = False,
    seed: int | None = None,
    replay: str | None = "sample",
) -> Verdict:
    """The verdict on a parameter tree, its digest included, in one pass over the parameters. See `verify`."""
    if replay is not None and replay not in REPLAYS:
        raise unknown("replay", replay, REPLAYS)
    began = time.perf_counter()
    tree = trees.viewed(params, recipe.geometry, roles)
    seen, arrays = tree.views, on_device(tree.arrays)
    stacked = tuple(leaf.stacked for leaf in tree.leaves)
    drawable = [seed is not None and replay == "sample" and replays.drawable(v, recipe) for v in seen]
    samples = [measure.sample(v) if d else None for v, d in zip(seen, drawable)]
    at = [None if s is None else np.asarray(v.positions(*s), np.int32) for v, s in zip(seen, samples)]
    lanes, measures = measure.measured(arrays, seen, stacked, at)
    layers = sum(v.layers for v in seen)
    threshold = normal_tail(FALSE_ALARM / (TESTS * max(layers, 1) + 2 * len(seen) + 4))
    judge = Judge(
        recipe, threshold, strict, duplicates(seen, measures), products=joint.complaints(seen, arrays, recipe)
    )
    replayed = 0
    if seed is not None and replay == "full":
        judge.replays, replayed = replays.compare_all(seen, arrays, recipe, seed)
    elif seed is not None and replay == "sample":
        judge.replays, replayed = replays.compare(seen, measures, samples, arrays, recipe, seed)
    rows: list[Row] = []
    for i, view in enumerate(seen):
        rows += judge.rows(i, view, arrays[view.array], measures[i])
    rows += judge.pooled()
    rows += count_matrices(seen, recipe)
    digest = digests.combine(list(zip(tree.leaves, arrays)), lanes)
    return Verdict(tuple(rows), digest, recipe.name, threshold, time.perf_counter() - began, replayed)
