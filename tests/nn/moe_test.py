"""Mixtures of experts: the same function by sorting and by taking all, against NumPy; the router learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinit
from deepinit.nn import Decoder, Moe
from tests.models import SMALL, born, flat, forward, loss_of, mesh_of, noise, own_recipe, recipe_of, refused, tokens
from tests.nn.reference import Reference

G = SMALL.replace(num_experts=4)
RECIPE = own_recipe(geometry=G, router=deepinit.laws.Normal(0.3))
CASES = {
    "two of four": (G, {}),
    "one of four": (G, {"experts_per_token": 1}),
    "all": (G, {"experts_per_token": 4}),
    "plain, biases": (G.replace(mlp="gelu"), {"bias": True}),
    "biases": (G, {"bias": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_against_numpy(case):
    g, options = CASES[case]
    recipe = own_recipe(geometry=g)
    model = Decoder.from_recipe(recipe, **options)
    params = noise(model)
    expected = Reference(g, recipe.residual, recipe.multipliers, **options).forward(params, tokens(time=8))
    for dispatch in ("sorted", "dense"):
        got = forward(Decoder.from_recipe(recipe, dispatch=dispatch, **options))(params, tokens(time=8))
        assert np.allclose(got, expected, rtol=3e-4, atol=3e-5 * np.abs(expected).max()), dispatch


@pytest.mark.parametrize("dispatch", ["sorted", "dense"])
@pytest.mark.parametrize("k", [1, 2])
def test_every_expert_and_the_router_learn(dispatch, k):
    model = Decoder.from_recipe(RECIPE, dispatch=dispatch, experts_per_token=k)
    gradient = loss_of(model)(deepinit.init_sharded(model, RECIPE), tokens(4, 16))[1]["layers"]["mlp"]
    assert np.abs(gradient["router"]).max() > 0
    for role in ("expert_gate", "expert_up", "expert_down"):
        assert (np.abs(gradient[role]).max((2, 3)) > 0).all()


def test_on_a_mesh():
    model, _, params = born(RECIPE)
    mesh = mesh_of((2, 2, 2))
    with jax.set_mesh(mesh):
        spread = deepinit.init_sharded(model, RECIPE, mesh)
        logits = forward(model)(spread, tokens())
    assert deepinit.digest(spread) == deepinit.digest(params)
    assert np.allclose(logits, forward(model)(params, tokens()), rtol=1e-4, atol=1e-5)


# The loss is 1 where the load is even, E where one expert gets all.
def test_the_loss_of_the_load():
    model = Moe.from_recipe(RECIPE, balance_loss=0.5, experts_per_token=1)
    x = jax.random.normal(jax.random.key(0), (2, 16, G.d_model))
    params = deepinit.roles.unboxed(model.init(jax.random.key(0), x)["params"])

    even = params | {"router": jnp.zeros_like(params["router"])}
    kept = model.apply({"params": even}, x, mutable=["losses"])[1]
    assert float(kept["losses"]["balance"]) == pytest.approx(0.5)
    biased = Moe.from_recipe(RECIPE, balance_loss=0.5, experts_per_token=1, bias=True)
    params = deepinit.roles.unboxed(biased.init(jax.random.key(0), x)["params"])
    params["router_bias"] = jnp.asarray([50.0, 0, 0, 0])
    kept = biased.apply({"params": params}, x, mutable=["losses"])[1]
    assert float(kept["losses"]["balance"]) == pytest.approx(0.5 * G.num_experts)


def test_laws_of_experts():
    _, recipe, params = born(recipe_of("megatron", G))
    deepinit.verify(params, recipe)
    assert {p: x.shape for p, x in flat(params).items() if "/mlp/" in p} == {
        "layers/mlp/router": (3, 64, 4),
        "layers/mlp/expert_gate": (3, 4, 64, 160),
        "layers/mlp/expert_up": (3, 4, 64, 160),
        "layers/mlp/expert_down": (3, 4, 160, 64),
    }


def test_experts_have_no_fused_product():
    model = Decoder.from_recipe(RECIPE, fused_gate_up=True)
    assert "fused_gate_up" in refused(model.init, jax.random.key(0), tokens())
