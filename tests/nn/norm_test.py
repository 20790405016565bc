"""RMSNorm and LayerNorm against NumPy, in every precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinit.nn import Norm
from tests.models import SMALL, recipe_of

RECIPE = recipe_of("megatron")
rng = np.random.default_rng(0)
X, GAIN, BIAS = rng.standard_normal((2, 5, 24)) * 3 + 1, rng.standard_normal(24), rng.standard_normal(24)


def made(**options):
    return Norm(SMALL, initializer=RECIPE.initializer, **options)


def expected(norm, offset=False):
    """In float64."""
    x = X - X.mean(-1, keepdims=True) if norm == "layernorm" else X
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (GAIN + offset)
    return y + BIAS if norm == "layernorm" else y


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_formula(norm, offset):
    params = {"norm_scale": jnp.asarray(GAIN, jnp.float32)}
    if norm == "layernorm":
        params["norm_bias"] = jnp.asarray(BIAS, jnp.float32)
    got = made(norm=norm, norm_offset=offset).apply({"params": params}, jnp.asarray(X, jnp.float32))
    assert np.allclose(got, expected(norm, offset), atol=1e-5)


@pytest.mark.parametrize(("norm", "leaves"), [("rmsnorm", {"norm_scale"}), ("layernorm", {"norm_scale", "norm_bias"})])
def test_leaves(norm, leaves):
    params = made(norm=norm).init(jax.random.key(0), jnp.ones((2, 24)))["params"]
    assert params.keys() == leaves
    assert {k: float(v.value.std()) for k, v in params.items()} == dict.fromkeys(leaves, 0.0)


# case B41: the mean square is taken in float32, so that it neither overflows nor is rounded
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_half_precision(norm, dtype):
    x = jnp.asarray(X * 1000, dtype)  # squares are above 65504
    params = {"norm_scale": jnp.ones(24), "norm_bias": jnp.zeros(24)}
    params = params if norm == "layernorm" else {"norm_scale": params["norm_scale"]}
    got = made(norm=norm, dtype=dtype).apply({"params": params}, x)
    wide = made(norm=norm).apply({"params": params}, x.astype(jnp.float32))
    assert got.dtype == jnp.dtype(dtype)
    assert (got == wide.astype(dtype)).all()  # rounded once, at the end


def test_scale_does_not_matter():
    params = {"norm_scale": jnp.ones(24)}
    x = jnp.asarray(X, jnp.float32)
    assert np.allclose(made().apply({"params": params}, x), made().apply({"params": params}, 1000 * x), atol=1e-5)
    assert not made().apply({"params": params}, 0 * x).any()


def test_epsilon():
    x = jnp.full((1, 24), 1e-3)
    got = made(norm_eps=3e-6).apply({"params": {"norm_scale": jnp.ones(24)}}, x)
    assert np.allclose(got, 0.5)
