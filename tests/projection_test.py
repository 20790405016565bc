"""Matrices of unit vectors: after init, on every mesh, and after every step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import deepinit
from deepinit import projection
from deepinit.geometry import VECTORS
from deepinit.recipe import Recipe
from deepinit.roles import role_of
from tests.models import MESHES, SMALL, assert_same, born, flat, recipe_of, stacked

MATRICES = [path for path in flat(born("ngpt")[2]) if role_of(path) not in VECTORS]
# d_model is the axis of these matrices along which a vector lies.
AXES = {"attn_q": 1, "attn_k": 1, "attn_v": 1, "mlp_gate": 1, "mlp_up": 1}


def lengths(params):
    return {
        path: np.linalg.norm(np.asarray(x, np.float64), axis=AXES.get(path.rpartition("/")[2], -1))
        for path, x in flat(params).items()
        if path in MATRICES
    }


def test_vectors_along_d_model_have_length_one():
    _, recipe, params = born("ngpt")
    for path, length in lengths(params).items():
        assert np.abs(length - 1).max() < 1e-6, path
    deepinit.verify(params, recipe)
    assert params["layers"]["attn_residual"]["residual_gate"].max() == np.float32(SMALL.d_model**-0.5)


@pytest.mark.parametrize(("mesh", "options"), [*((sizes, {}) for sizes in MESHES), (None, {"scan": False})], ids=str)
def test_same_bits_everywhere(mesh, options):
    params = born("ngpt", mesh=mesh, **options)[2]
    assert_same(stacked(params) if options else params, born("ngpt")[2])


@pytest.mark.parametrize("size", [1, 2, 7, 64, 100])
@pytest.mark.parametrize("axis", [-1, -2])
def test_sums_by_pairs(size, axis):
    x = np.random.default_rng(0).standard_normal((3, size, size)).astype(np.float32)
    got = projection.squares(jnp.asarray(x), axis)
    assert np.allclose(got, (x.astype(np.float64) ** 2).sum(axis, keepdims=True), rtol=1e-6)


def test_zeros_stay_zeros_and_types_stay():
    x = jnp.zeros((4, 8), jnp.bfloat16).at[0].set(3.0)
    y = projection.to_unit(x, -1)
    assert y.dtype == jnp.bfloat16
    assert (y[1:] == 0).all()
    assert np.allclose(np.float32(y[0]), 8**-0.5, rtol=1e-2)


def test_padded_rows():
    params = born("ngpt", vocab_multiple=64)[2]
    assert (np.asarray(params["lm_head"][SMALL.vocab_size :]) == 0).all()
    deepinit.verify(params, recipe_of("ngpt"))


def test_a_recipe_without_projection_changes_nothing():
    _, recipe, params = born("megatron")
    assert projection.project(params, recipe) is params
    assert isinstance(recipe, Recipe)


def test_verify_sees_a_vector_that_is_too_long():
    _, recipe, params = born("ngpt")
    wrong = jax.tree.map(lambda x: x, params)
    wrong["layers"]["mlp"]["mlp_up"] = params["layers"]["mlp"]["mlp_up"] * 1.001
    bad = [r for r in deepinit.verify(wrong, recipe, raises=False) if not r.ok]
    assert [r.path for r in bad] == ["layers/mlp/mlp_up"]
    assert "1.001" in bad[0].reason


def test_after_a_step():
    _, recipe, params = born("ngpt")
    moved = optax.apply_updates(
        params, jax.tree.map(lambda x: 0.01 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params)
    )
    assert max(np.abs(length - 1).max() for length in lengths(moved).values()) > 1e-3
    for path, length in lengths(projection.project(moved, recipe)).items():
        assert np.abs(length - 1).max() < 1e-6, path
