"""Attention: grouped heads, fused projections, laws by slice."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinit
from deepinit.geometry import Geometry
from deepinit.nn import Attention, Decoder
from deepinit.roles import unboxed
from tests.models import SMALL, assert_same, born, loss_of, noise, own_recipe, tokens

X = jax.random.normal(jax.random.key(0), (2, 6, SMALL.d_model))


# Grouped-query heads are full heads whose keys and values are repeated.
def test_grouped_heads_are_repeated_heads():
    full = SMALL.replace(num_kv_heads=SMALL.num_heads)
    grouped, repeated = (Attention.from_recipe(own_recipe(g), bias=True) for g in (SMALL, full))
    boxed = jax.eval_shape(grouped.init, jax.random.key(0), X)["params"]
    rng = np.random.default_rng(0)
    params = {k: jnp.asarray(rng.standard_normal(b.value.shape), jnp.float32) for k, b in boxed.items()}
    times = SMALL.num_heads // SMALL.num_kv_heads
    more = {k: jnp.repeat(v, times, axis=-2) if k[:6] in ("attn_k", "attn_v") else v for k, v in params.items()}
    assert more["attn_k"].shape == (64, 8, 8)
    assert np.allclose(grouped.apply({"params": params}, X), repeated.apply({"params": more}, X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"bias": True, "qk_norm": True, "positions": "learned"}])
def test_fused_qkv(options):
    recipe = own_recipe(multipliers={"attn_q": 0.5, "attn_v": 2.0})
    apart, fused = (Attention.from_recipe(recipe, fused_qkv=f, **options) for f in (False, True))
    boxed = [jax.eval_shape(m.init, jax.random.key(0), X)["params"] for m in (apart, fused)]
    assert jax.tree.structure(boxed[0]) == jax.tree.structure(boxed[1])
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32), unboxed(boxed[0]))

    def run(module):
        return jax.jit(jax.value_and_grad(lambda p: jnp.square(module.apply({"params": p}, X)).mean()))(params)

    (a, grad_a), (b, grad_b) = run(apart), run(fused)
    assert np.isclose(a, b, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(grad_a), jax.tree.leaves(grad_b)):
        assert np.allclose(x, y, rtol=1e-3, atol=1e-4 * np.abs(x).max())


def test_fused_models_are_born_equal():
    assert_same(born("deepnorm")[2], born("deepnorm", fused_qkv=True, fused_gate_up=True)[2])


# case B18: beta on values, outputs and the MLP, gain 1 on queries and keys, fused or not
@pytest.mark.parametrize("fused", [False, True])
def test_deepnorm_by_slice(fused):
    g = Geometry(num_layers=12, d_model=64, num_heads=4, d_ff=256, vocab_size=64, mlp="relu")
    _, recipe, params = born(deepinit.recipe("deepnorm", g), fused_qkv=fused)
    beta = 96 ** (-1 / 4)
    assert beta == pytest.approx(0.3195, abs=5e-5)
    for role, gain in {
        "attn_q": 1,
        "attn_k": 1,
        "attn_v": beta,
        "attn_out": beta,
        "mlp_up": beta,
        "mlp_down": beta,
    }.items():
        leaf = np.asarray(params["layers"]["mlp" if "mlp" in role else "attention"][role], np.float64)
        std = gain * math.sqrt(2 / sum(g.matrix(role)))
        assert recipe.weights[role].std == pytest.approx(std)
        assert abs(leaf.std() / std - 1) < 5 / math.sqrt(2 * leaf.size)


def test_large_scores_are_finite():
    model = Decoder.from_recipe(own_recipe())
    params = jax.tree.map(lambda x: 50 * x, noise(model))
    loss, gradient = loss_of(model)(params, tokens())
    assert np.isfinite(loss)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
