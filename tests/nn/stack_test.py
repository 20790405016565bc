"""Scanned, unrolled, with remat: one model. Dropout differs by layer; a std may differ by layer."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinit
from deepinit.nn import Decoder, Stack
from deepinit.recipe import Gate, Residual
from tests.models import SMALL, assert_same, born, flat, forward, loss_of, noise, own_recipe, stacked, tokens

L = SMALL.num_layers
RULE = Residual("sandwich", branch=(0.5, 1.0, 2.0), gate=Gate((0.1, 0.2, 0.3), share="layer"))
OPTIONS = [{"scan": False}, {"remat": "full"}, {"scan": False, "remat": "dots"}]


def unstacked(params):
    """A scanned tree with its layers apart."""
    rest = {k: v for k, v in params.items() if k != "layers"}
    return rest | {f"layers_{i}": jax.tree.map(lambda x: x[i], params["layers"]) for i in range(L)}  # noqa: B023


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_model_however_it_is_run(options):
    recipe = own_recipe(residual=RULE)
    scanned, other = Decoder.from_recipe(recipe), Decoder.from_recipe(recipe, **options)
    params = noise(scanned)
    given = unstacked(params) if options.get("scan") is False else params
    (loss, gradient), (other_loss, other_gradient) = (
        loss_of(m)(p, tokens()) for m, p in ((scanned, params), (other, given))
    )
    assert np.isclose(loss, other_loss, rtol=1e-5)
    other_gradient = flat(stacked(other_gradient) if given is not params else other_gradient)
    for path, g in flat(gradient).items():
        assert np.allclose(g, other_gradient[path], rtol=1e-3, atol=1e-4 * np.abs(g).max()), path


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_birth_however_it_is_run(options):
    recipe = own_recipe(residual=RULE)
    params = born(recipe, **options)[2]
    assert_same(stacked(params) if options.get("scan") is False else params, born(recipe)[2])


# case B03: std_l = s / sqrt(2 (l + 1)), in a scan and unrolled
@pytest.mark.parametrize("scan", [True, False])
def test_std_by_layer(scan):
    g = SMALL.replace(num_layers=8)
    _, recipe, params = born(deepinit.recipe("megatron", g, divisor="layer"), scan=scan)
    leaf = (params if scan else stacked(params))["layers"]["mlp"]["mlp_down"]
    std = np.asarray(leaf, np.float64).std((1, 2))
    expected = 0.02 / np.sqrt(2 * np.arange(1, 9))
    assert recipe.weights["mlp_down"].std == pytest.approx(expected)
    assert np.abs(std / expected - 1).max() < 5 / math.sqrt(2 * leaf[0].size)
    assert std[0] / std[7] == pytest.approx(math.sqrt(8), rel=0.05)


# case B52: masks differ by layer and by step, the same again for the same key
@pytest.mark.parametrize("scan", [True, False])
def test_dropout(scan):
    # no norm, zero outputs but biases of one: each addition adds 0 or 1 / (1 - rate), in base 5 by layer
    branch = tuple(0.5 * 5.0**i for i in range(L))
    rule = Residual("none", branch=branch)
    recipe = own_recipe(residual=rule, attn_out=deepinit.laws.Constant(0.0), mlp_down=deepinit.laws.Constant(0.0))
    stack = Stack.from_recipe(recipe, bias=True, dropout=0.5, deterministic=False, scan=scan)
    x = jnp.zeros((4, 8, SMALL.d_model))
    params = deepinit.roles.unboxed(
        stack.init({"params": jax.random.key(0), "dropout": jax.random.key(0)}, x)["params"]
    )
    params = jax.tree.map_with_path(
        lambda path, p: p * 0 + 1 if path[-1].key in ("attn_out_bias", "mlp_down_bias") else p, params
    )
    run = jax.jit(lambda key: stack.apply({"params": params}, x, rngs={"dropout": key}))
    first, again, second = (np.asarray(run(jax.random.key(k))) for k in (1, 1, 2))
    assert (first == again).all()
    assert not (first == second).all()
    digits = [np.round(first / 5**i).astype(int) % 5 for i in range(L)]  # how many of a layer's two branches were kept
    n = first.size
    for i, kept in enumerate(digits):
        assert set(np.unique(kept)) == {0, 1, 2}
        assert abs(kept.mean() - 1) < 5 * math.sqrt(0.5 / n)
        for other in digits[:i]:  # masks of two layers are independent: the correlation of n pairs is 1 / sqrt(n) small
            assert abs(np.corrcoef(kept.ravel(), other.ravel())[0, 1]) < 5 / math.sqrt(n)
    off = Stack.from_recipe(recipe, bias=True, dropout=0.5, scan=scan).apply({"params": params}, x)
    assert np.allclose(off, sum(2 * b for b in branch))


def test_a_stack_alone_is_the_decoders():
    recipe = own_recipe()
    model = Decoder.from_recipe(recipe)
    params = noise(model)
    x = params["token_embed"][tokens()]
    stream = Stack.from_recipe(recipe).apply({"params": {"layers": params["layers"]}}, x)
    normed = stream / np.sqrt((np.asarray(stream) ** 2).mean(-1, keepdims=True) + 1e-6)
    logits = normed * params["final_norm"]["norm_scale"] @ params["lm_head"].T
    assert np.allclose(logits, forward(model)(params, tokens()), rtol=1e-4, atol=1e-4)


# The layers are run in order: swapping two changes the result.
def test_layers_are_run_in_order():
    model = Decoder.from_recipe(own_recipe())
    params = noise(model)
    swapped = params | {"layers": jax.tree.map(lambda x: x[jnp.asarray([1, 0, 2])], params["layers"])}
    a, b = (forward(model)(p, tokens()) for p in (params, swapped))
    assert np.abs(a - b).max() > 0.1 * np.abs(a).max()
