"""Gated and plain MLPs; one product for gate and up changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinit.nn import Mlp
from deepinit.roles import unboxed
from tests.models import SMALL, assert_same, own_recipe

X = jax.random.normal(jax.random.key(0), (2, 5, SMALL.d_model))


@pytest.mark.parametrize(
    ("mlp", "act"),
    [("swiglu", jax.nn.silu), ("geglu", jax.nn.gelu), ("gelu", jax.nn.gelu), ("relu", lambda x: jnp.maximum(x, 0))],
)
def test_formula(mlp, act):
    module = Mlp.from_recipe(own_recipe(SMALL.replace(mlp=mlp)))
    params = unboxed(module.init(jax.random.key(1), X)["params"])
    if mlp in ("swiglu", "geglu"):
        hidden = act(X @ params["mlp_gate"]) * (X @ params["mlp_up"])
    else:
        assert "mlp_gate" not in params
        hidden = act(X @ params["mlp_up"])
    assert np.allclose(module.apply({"params": params}, X), hidden @ params["mlp_down"], rtol=1e-5, atol=1e-7)


# The leaves stay apart, so that every law, checkpoint and optimizer mask stays as it is.
@pytest.mark.parametrize(("mlp", "bias"), [("swiglu", True), ("geglu", False), ("gelu", True)])
def test_fused(mlp, bias):
    recipe = own_recipe(SMALL.replace(mlp=mlp))
    apart, fused = (Mlp.from_recipe(recipe, bias=bias, fused_gate_up=f) for f in (False, True))
    params = apart.init(jax.random.key(1), X)
    assert_same(unboxed(params), unboxed(fused.init(jax.random.key(1), X)))

    def grad(module):
        return jax.value_and_grad(lambda p: jnp.square(module.apply(p, X)).sum())(params)

    (a, grad_a), (b, grad_b) = grad(apart), grad(fused)
    assert np.allclose(a, b, rtol=1e-5)
    assert jax.tree.all(jax.tree.map(lambda x, y: np.allclose(x, y, rtol=1e-4, atol=1e-6), grad_a, grad_b))
