"""The measuring pass: whole, or in pieces of a layer's rows, it sums and bounds the same numbers."""

import jax
import numpy as np
import pytest

from deepinit import measure, roles
from deepinit.interop import trees
from tests.models import SMALL, born, recipe_of


def seen(params, geometry, near):
    """(lanes, measures) of a tree."""
    tree = trees.viewed(params, geometry)
    stacked = tuple(leaf.stacked for leaf in tree.leaves)
    return jax.device_get(measure.measure(tree.arrays, tuple(tree.views), stacked, [None] * len(tree.views), near))


@pytest.mark.parametrize("changes", [{}, {"num_experts": 4}], ids=str)
@pytest.mark.parametrize("options", [{}, {"scan": False}], ids=str)
def test_pieces_measure_what_the_whole_does(monkeypatch, changes, options):
    geometry = SMALL.replace(**changes)
    params = born(recipe_of("megatron", geometry), **options)[2]
    jax.clear_caches()
    monkeypatch.setattr(measure, "PIECE", 100)
    views = trees.viewed(params, geometry).views
    assert any(measure.pieces(view.take(params_of(params, view)).shape) > 1 for view in views)
    (lanes, near), (same_lanes, whole) = (seen(params, geometry, n) for n in (True, False))
    for a, b in zip(lanes, same_lanes):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(near, whole):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(a["low"], b["low"])
        np.testing.assert_array_equal(a["high"], b["high"])


def params_of(params, view):
    """The array that a view looks at."""
    return [x for _, x in roles.leaves(params)][view.array]


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((24, 1024, 4096), 8),
        ((24, 1024, 16, 64), 2),
        ((24, 1024), 1),
        ((2, 7, 1 << 19), 7),
        ((2, 7, 1 << 20), 7),
        ((1, 5, 3), 1),
    ],
)
def test_pieces_fit_a_cache_where_rows_divide(shape, count):
    assert measure.pieces(shape) == count
