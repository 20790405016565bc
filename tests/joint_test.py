"""Matrices drawn in pairs: their products are what the paper says, and verify judges the products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinit
from deepinit import joint
from deepinit.nn import Decoder
from tests.models import SMALL, assert_same, born, recipe_of, refused, stacked

G = SMALL.replace(num_kv_heads=8)
MHA = recipe_of("mimetic", G)


@pytest.fixture(scope="module")
def params():
    return deepinit.init_sharded(Decoder.from_recipe(MHA), MHA)


def layer(params, i=1):
    return {k: np.asarray(v[i], np.float64) for k, v in params["layers"]["attention"].items()}


# Every head: the h largest singular values of its own 0.7 Z + 0.7 I, split evenly.
def test_queries_and_keys(params):
    w = layer(params)
    products = np.einsum("dnh,enh->nde", w["attn_q"], w["attn_k"])
    assert len({p.tobytes() for p in products}) == 8
    for n in range(8):
        q, k = w["attn_q"][:, n], w["attn_k"][:, n]
        s = np.linalg.svd(products[n])[1]
        assert (s[8:] < 1e-5).all()
        assert np.allclose(np.linalg.norm(q, axis=0) ** 2, s[:8], rtol=1e-3)
        assert np.allclose(q.T @ q, np.diag(s[:8]), atol=1e-4)
        assert np.allclose(k.T @ k, np.diag(s[:8]), atol=1e-4)
    expected, along = joint.spectrum(0.7, 0.7, 1.0, 8 / 64)
    assert np.isclose(np.linalg.norm(w["attn_q"], axis=0).mean() ** 2, expected, rtol=0.1)
    assert along > 0.1


# All heads together: 0.4 Z - 0.4 I, whole.
def test_values_and_outputs(params):
    w = layer(params)
    product = w["attn_v"].reshape(64, 64) @ w["attn_out"].reshape(64, 64)
    z = (product + 0.4 * np.eye(64)) / 0.4
    assert np.isclose(z.std(), 64**-0.5, rtol=5 / np.sqrt(2 * 64**2))
    assert abs(z.mean()) < 5 * 64**-0.5 / 64
    assert np.isclose(np.trace(product) / 64, -0.4, atol=5 * 0.4 / 64)


@pytest.mark.parametrize("options", [{"mesh": (2, 2, 2)}, {"mesh": (1, 8, 1)}, {"scan": False}], ids=str)
def test_same_bits_everywhere(params, options):
    again = born(MHA, **options)[2]
    assert_same(stacked(again) if "scan" in options else again, params)


def test_layers_and_seeds_differ(params):
    q = np.asarray(params["layers"]["attention"]["attn_q"])
    assert not (q[0] == q[1]).any()
    other = deepinit.init_sharded(Decoder.from_recipe(MHA), MHA, seed=1)
    assert not (q == np.asarray(other["layers"]["attention"]["attn_q"])).any()


# Query heads that share a key: each is the best fit to a product of its own.
def test_grouped_heads():
    _, recipe, params = born("mimetic")
    w = layer(params)
    assert w["attn_k"].shape == (64, 4, 8)
    first, second = w["attn_q"][:, 0], w["attn_q"][:, 1]
    key = w["attn_k"][:, 0]
    assert np.allclose(first.T @ first, key.T @ key, atol=1e-4)
    assert not np.allclose(first, second, atol=0.01)
    # as large as the first one, within the spread of random matrices
    assert 0.5 < np.linalg.norm(second @ key.T) / np.linalg.norm(first @ key.T) < 1.5
    assert (w["attn_out"][0] == w["attn_out"][1]).all()
    deepinit.verify(params, recipe)


@pytest.mark.parametrize(
    ("role", "change", "says"),
    [
        ("attn_q", lambda x: x * 1.2, "not as long"),
        ("attn_k", lambda x: x[..., ::-1], "not as long"),
        ("attn_out", lambda x: -x, "along the identity"),
        ("attn_v", lambda x: x.at[:, :, 0].add(0.1), "not orthogonal"),
    ],
)
def test_verify_judges_the_product(params, role, change, says):
    deepinit.verify(params, MHA)
    attention = params["layers"]["attention"]
    wrong = params | {"layers": params["layers"] | {"attention": attention | {role: change(attention[role])}}}
    bad = [r for r in deepinit.verify(wrong, MHA, raises=False) if not r.ok]
    assert {r.role for r in bad} == {role, MHA.weights[role].partner}
    assert all(says in r.reason for r in bad), bad


def test_verify_judges_the_size(params):
    attention = {k: v * 1.2 if k in ("attn_q", "attn_k") else v for k, v in params["layers"]["attention"].items()}
    wrong = params | {"layers": params["layers"] | {"attention": attention}}
    bad = [r for r in deepinit.verify(wrong, MHA, raises=False) if not r.ok]
    assert {r.role for r in bad} == {"attn_q", "attn_k"}
    assert all("singular values" in r.reason for r in bad)


def test_shapes_that_cannot_hold_a_pair():
    init = MHA.initializer("attn_q", layer=0)
    assert "(64, 8, 8)" in refused(init, jax.random.key(0), (64, 64))
    wide = recipe_of("mimetic", SMALL.replace(num_kv_heads=8, head_dim=32))
    assert "num_kv_heads: 8" in refused(wide.initializer("attn_v"), jax.random.key(0), (64, 8, 32))
    out = MHA.initializer("attn_out")(jax.random.key(0), (8, 8, 64), jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
