"""NumPy gives back single weights of a real initial state, bit for bit."""

import dataclasses
import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinit
from deepinit import laws, sampler
from deepinit.geometry import LAYER_MATRICES, VECTORS, Role
from deepinit.nn import Decoder
from deepinit.recipe import FrozenMap
from deepinit.train.config import load
from tests.models import SMALL, born, flat, mesh_of, recipe_of, refused

CONFIGS = Path(__file__).parents[1] / "configs"


@functools.cache
def gpt2():
    """The recipe of the shipped GPT-2 124M config."""
    return load([str(CONFIGS / "gpt2_124m.yaml")]).recipe()


def shapes(g):
    """Role -> shape of one layer of its leaf."""
    n, k, h, d, f = g.num_heads, g.num_kv_heads, g.head_dim, g.d_model, g.d_ff
    return {
        "token_embed": (g.vocab_size, d), "pos_embed": (g.max_seq_len, d), "attn_q": (d, n, h), "attn_k": (d, k, h),
        "attn_v": (d, k, h), "attn_out": (n, h, d), "mlp_up": (d, f), "mlp_down": (f, d),
    }  # fmt: skip


# 10,000 weights of each leaf of GPT-2 124M, one layer of each, against the closure that the model calls.
@pytest.mark.parametrize("role", shapes(SMALL))
def test_gpt2_leaf_by_leaf(role):
    recipe, seed = gpt2(), 11
    shape = shapes(recipe.geometry)[role]
    layer = 7 if role in LAYER_MATRICES else None
    key = sampler.slot_words(seed, role)
    key = key if layer is None else sampler.fold(key, np.uint32(layer))
    make = jax.jit(recipe.initializer(role, layer), static_argnums=1)
    leaf = np.asarray(make(jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32"), shape))
    index = np.random.default_rng(0).integers(0, leaf.size, 10_000)
    again = deepinit.replay(recipe, role, index, layer=layer, seed=seed)
    assert again.dtype == np.float32
    assert (again == leaf.ravel()[index]).all()
    assert leaf.std() == pytest.approx(recipe.weights[role].std, rel=0.01)


# 10,000 weights of every matrix, picked by index, out of 163 million that were born on a mesh of eight
def test_gpt2_as_a_whole():
    recipe = gpt2()
    model = Decoder.from_recipe(recipe, positions="learned", norm="layernorm", bias=True, vocab_multiple=128)
    params = deepinit.init_sharded(model, recipe, mesh_of((2, 2, 2)), seed=3)
    rng = np.random.default_rng(0)
    for path, x in flat(params).items():
        role = deepinit.roles.role_of(path)
        if role in VECTORS:
            continue
        one = x[0] if path.startswith("layers/") else x
        index = rng.integers(0, math.prod(recipe.geometry.matrix(role)), 10_000)
        for layer in (0, 5, 11) if path.startswith("layers/") else (None,):
            values = (one if layer is None else x[layer]).ravel()[index]
            assert (deepinit.replay(recipe, role, index, layer=layer, seed=3) == values).all()


LAWS = [
    laws.Normal(0.3),
    laws.TruncatedNormal(0.3, 2.0),
    laws.TruncatedNormal.from_sigma(0.3, 3.0),
    laws.TruncatedNormal(0.3, 1.5),
    laws.Uniform(0.3),
    laws.Sign(0.3),
    laws.Constant(0.3),
    laws.Normal((0.1, 0.2, 0.3)),
    laws.TruncatedNormal((0.1, 0.2, 0.3), 3.0),
    laws.Uniform((0.1, 0.2, 0.3)),
    laws.Constant((0.1, 0.2, 0.3)),
]


def with_law(law, role="attn_k"):
    """A recipe in which one role has this law."""
    base = recipe_of("megatron")
    return dataclasses.replace(base, weights=FrozenMap({**base.weights, role: law}))


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_every_law(law):
    _, recipe, params = born(with_law(law))
    leaf = np.asarray(params["layers"]["attention"]["attn_k"])
    index = np.arange(leaf[0].size).reshape(leaf[0].shape)
    for layer in range(SMALL.num_layers):
        assert (deepinit.replay(recipe, "attn_k", index, layer=layer) == leaf[layer]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_leaf_holds_these_values_cast(dtype):
    _, recipe, params = born("modern", param_dtype=dtype, dtype=dtype, seed=5)
    leaf = np.asarray(params["layers"]["mlp"]["mlp_up"])[2]
    index = np.arange(leaf.size).reshape(leaf.shape)
    assert (deepinit.replay(recipe, "mlp_up", index, layer=2, seed=5).astype(dtype) == leaf).all()


def test_any_shape_of_index():
    recipe = recipe_of("modern")
    one = deepinit.replay(recipe, "token_embed", 77)
    assert one.shape == ()
    assert one == deepinit.replay(recipe, "token_embed", [[76, 77]])[0, 1]
    assert deepinit.replay(recipe, "token_embed", np.zeros((0, 3), np.int64)).shape == (0, 3)


def test_seeds_layers_and_stacks_differ():
    recipe, index = recipe_of("megatron"), np.arange(50)
    draws = [
        deepinit.replay(recipe, "attn_q", index, layer=layer, seed=seed, stack=stack).tobytes()
        for layer in (0, 1)
        for seed in (0, 1, 2**33)
        for stack in ("", "encoder", "decoder")
    ]
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize(
    ("role", "index", "layer", "says"),
    [
        ("attn_q", 0, None, "replay: attn_q stands in every layer; say which layer"),
        ("attn_q", 0, 3, "replay: layer 3: the layers are 0 to 2"),
        ("attn_q", 4096, 0, "replay: index 4096 to 4096: attn_q has 4096 entries, 0 to 4095"),
        ("mlp_down", [5, -1], 0, "replay: index -1 to 5: mlp_down has 10240 entries, 0 to 10239"),
        ("token_embed", 6400, None, "replay: index 6400 to 6400: token_embed has 6400 entries, 0 to 6399"),
        ("attn_qq", 0, 0, "role 'attn_qq' is unknown; did you mean 'attn_q'?"),
    ],
)
def test_refusals(role, index, layer, says):
    assert refused(deepinit.replay, recipe_of("megatron"), role, index, layer=layer) == says


@pytest.mark.parametrize("law", [laws.Orthogonal(1.0, 64), laws.External(), laws.Factor(0.7, 0.7, 0.1, "attn_q")])
def test_laws_that_are_not_drawn_from_single_indices(law):
    assert "is not drawn from single indices" in refused(deepinit.replay, with_law(law), "attn_k", 0, layer=0)


def test_constants_of_vectors():
    assert (deepinit.replay(recipe_of("rezero"), Role.RESIDUAL_GATE, [0]) == 0).all()
    assert (deepinit.replay(recipe_of("rezero"), "norm_scale", range(9)) == 1).all()
    with_vector = with_law(laws.Normal(0.1), "bias")
    assert "the role of several leaves" in refused(deepinit.replay, with_vector, "bias", 0)
