"""The structures that some schemes have of their own, against the same formulas in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinit
from deepinit.nn import Decoder
from deepinit.recipe import Gate, Residual
from tests.models import (
    SMALL,
    born,
    flat,
    forward,
    loss_of,
    noise,
    own_recipe,
    recipe_of,
    refused,
    stats_of,
    tokens,
)
from tests.nn.reference import Reference

L = SMALL.num_layers
SCHEMES = {
    "keel": {},
    "hybridnorm": {},
    "normformer": {},
    "normformer, skip": {"residual_scale": True},
    "admin": {},
    "depth_scaled_sandwich": {},
    "nanochat": {},
    "modded_nanogpt_medium": {},
    "ngpt": {},
}


def made(case, **more):
    """(model, params in which no leaf is without effect, reference) of a scheme."""
    recipe = recipe_of(case.partition(",")[0], **SCHEMES[case])
    model = Decoder.from_recipe(recipe, **more)
    options = {name: getattr(model, name) for name in Decoder.OPTIONS}
    return model, noise(model), Reference(SMALL, recipe.residual, recipe.multipliers, recipe.gains, **options)


@pytest.mark.parametrize("case", SCHEMES)
def test_against_numpy(case):
    model, params, reference = made(case)
    expected = reference.forward(params, tokens(time=12))
    got = forward(model)(params, tokens(time=12))
    assert np.allclose(got, expected, rtol=3e-4, atol=3e-5 * np.abs(expected).max())


# No leaf is without effect, save the outer norm of Keel's first layer, which stands there for the scan.
@pytest.mark.parametrize("case", SCHEMES)
def test_every_leaf_takes_part(case):
    model, params, _ = made(case)
    gradient = flat(loss_of(model)(params, tokens(4, 16))[1])
    for path, g in gradient.items():
        moves = np.abs(g.reshape(L if path.startswith("layers/") else 1, -1)).max(1) > 0
        assert moves.tolist() == [
            not (case == "keel" and "residual/norm/" in path and i == 0) for i in range(len(moves))
        ]


@pytest.mark.parametrize("case", ["keel", "nanochat", "ngpt"])
def test_unrolled_is_the_same(case):
    model, params, _ = made(case)
    unrolled = made(case, scan=False)[0]
    apart = {k: v for k, v in params.items() if k != "layers"}
    apart |= {f"layers_{i}": jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(L)}
    assert np.allclose(forward(model)(params, tokens()), forward(unrolled)(apart, tokens()), rtol=1e-4, atol=1e-5)


# The first layer is plain pre-norm; the others scale the skip by 2L and norm the sum.
def test_keel_at_first():
    model, recipe, params = born("keel")
    assert recipe.residual.skip == 2 * L
    stream = np.asarray(stats_of(model)(params, tokens())["layers"]["stream_ms"])
    assert np.allclose(stream[1:], 1, rtol=1e-3)
    assert (stream[0] < 0.5).all()
    assert "final_norm" not in params


def test_a_keel_of_one_layer_has_a_final_norm():
    model = Decoder.from_recipe(recipe_of("keel", SMALL.replace(num_layers=1)))
    assert "final_norm" in noise(model)


# case of the sphere: the stream's length is 1 after every addition, which turns it by a = 0.05
def test_the_stream_of_ngpt_stays_on_the_sphere():
    model, recipe, params = born("ngpt")
    stats = stats_of(model)(params, tokens())
    assert np.allclose(stats["embed_ms"], 1 / SMALL.d_model, rtol=1e-5)
    assert np.allclose(stats["layers"]["stream_ms"], 1 / SMALL.d_model, rtol=1e-5)
    gate = recipe.residual.gate
    assert gate.value * gate.scale == pytest.approx(0.05)


def test_value_tables_are_in_every_other_layer_the_last_among_them():
    for layers, tables in ((3, 2), (4, 2), (1, 1)):
        g = SMALL.replace(num_layers=layers)
        model = Decoder.from_recipe(recipe_of("nanochat", g))
        params = noise(model)
        assert params["value_token_embed"].shape == (g.vocab_size, tables, g.num_kv_heads * g.head_dim)
    # four layers: tables in the second and the last one
    model = Decoder.from_recipe(recipe_of("nanochat", SMALL.replace(num_layers=4)))
    params = noise(model)
    other = params | {"value_token_embed": params["value_token_embed"] + 1.0}
    before, after = (stats_of(model)(p, tokens())["layers"]["stream_ms"] for p in (params, other))
    assert (before[0] == after[0]).all()
    assert (before[1] != after[1]).all()


def test_norms_without_a_gain_have_no_leaves():
    leaves = flat(born("nanochat")[2])
    assert not [path for path in leaves if "norm" in path]
    layernorm = noise(Decoder.from_recipe(recipe_of("nanochat"), norm="layernorm"))
    assert not [path for path in flat(layernorm) if "norm" in path]


@pytest.mark.parametrize("cap", [0.0, 5.0, 15.0])
def test_logits_are_capped_softly(cap):
    recipe = own_recipe(lm_head=deepinit.laws.Normal(3.0))
    model, plain = (Decoder.from_recipe(recipe, logit_softcap=c, vocab_multiple=64) for c in (cap, 0.0))
    params = deepinit.init_sharded(model, recipe)
    logits, bare = forward(model)(params, tokens()), forward(plain)(params, tokens())
    real = np.s_[..., : SMALL.vocab_size]
    assert np.allclose(logits[real], cap * np.tanh(bare[real] / cap) if cap else bare[real], rtol=1e-5)
    assert (logits[..., SMALL.vocab_size :] == np.finfo(np.float32).min).all()


# A gain's own law reaches the leaf that it is for, and no other.
def test_a_leaf_has_its_own_law():
    _, recipe, params = born("depth_scaled_sandwich")
    gains = {path: x for path, x in flat(params).items() if path.endswith("norm_scale")}
    for path, x in gains.items():
        assert (x == np.float32(L**-0.5 if "post_norm" in path else 1.0)).all(), path
    moved = recipe.with_norm_offset()
    model = Decoder.from_recipe(moved, norm_offset=True)
    offset = flat(deepinit.init_sharded(model, moved))
    assert np.allclose(offset["layers/attn_residual/post_norm/norm_scale"] + 1, L**-0.5)
    assert (offset["final_norm/norm_scale"] == 0).all()


def test_factors_at_the_head_of_a_layer():
    _, recipe, params = born("nanochat")
    assert np.allclose(params["layers"]["skip_residual_gate"], [1.15, 1.1, 1.05])
    assert np.allclose(params["layers"]["x0_residual_gate"], [0.2, 0.125, 0.05])
    # with no branch, the stream is what these factors make of the embedding, less the middle's share
    model = Decoder.from_recipe(recipe)
    stats = stats_of(model)(params, tokens())
    made = np.float64(stats["embed_ms"]) ** 0.5
    size = np.cumprod([1.15]) * made
    assert np.allclose(stats["layers"]["stream_ms"][0, 1] ** 0.5, size[0] + 0.2 * made, rtol=1e-4)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"placements": ("post",)}, "placements"),
        ({"placements": ("post", "above")}, "'above'"),
        ({"inner_norm": True}, "inner_norm"),
    ],
)
def test_rules_that_are_none(parts, says):
    assert says in refused(lambda: Residual(**parts))


def test_a_factor_for_each_addition():
    values = tuple(float(i + 1) for i in range(2 * L))
    recipe = own_recipe(residual=Residual("post", skip_gate=Gate(values, "channel")))
    params = flat(deepinit.init_sharded(Decoder.from_recipe(recipe), recipe))
    for i, kind in enumerate(("attn", "mlp")):
        leaf = params[f"layers/{kind}_residual/skip_residual_gate"]
        assert (leaf == np.asarray(values[i::2], np.float32)[:, None]).all()
    deepinit.verify(jax.tree.map(jnp.asarray, deepinit.init_sharded(Decoder.from_recipe(recipe), recipe)), recipe)
    unrolled = deepinit.init_sharded(Decoder.from_recipe(recipe, scan=False), recipe)
    assert (unrolled["layers_1"]["mlp_residual"]["skip_residual_gate"] == 4.0).all()
