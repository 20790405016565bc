"""Closures in flax's own layers, and our modules inside NNX models."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import deepinit
from deepinit import sharding
from deepinit.interop import nnx as bridge
from deepinit.invariants import inspect
from deepinit.nn import Block
from deepinit.reinits import reinit
from tests.models import SMALL, born, mesh_of, recipe_of, tokens

D, H, WIDTH = 64, 8, 8


@pytest.mark.parametrize("scheme", ["megatron", "glorot_uniform", "lecun_normal"])
def test_closures_are_kernel_inits(scheme):
    recipe = recipe_of(scheme, deepinit.Geometry(3, D, H, 160, 100))
    init = recipe.initializer
    x = jnp.ones((2, 5, D))
    nnx_linear = nnx.Linear(D, 160, kernel_init=init("mlp_up", layer=0), use_bias=False, rngs=nnx.Rngs(0))
    dense = linen.Dense(160, kernel_init=init("mlp_up", layer=0)).init(jax.random.key(0), x)
    general = linen.DenseGeneral((H, WIDTH), kernel_init=init("attn_q", layer=0)).init(jax.random.key(0), x)
    mhsa = linen.MultiHeadDotProductAttention(
        H, kernel_init=init("attn_q", layer=0), out_kernel_init=init("attn_out", layer=0)
    )
    attention = mhsa.init(jax.random.key(0), x)["params"]
    nnx_mha = nnx.MultiHeadAttention(
        H,
        D,
        D,
        kernel_init=init("attn_q", layer=0),
        out_kernel_init=init("attn_out", layer=0),
        decode=False,
        rngs=nnx.Rngs(0),
    )
    for role, kernel in (
        ("mlp_up", nnx_linear.kernel[...]),
        ("mlp_up", dense["params"]["kernel"]),
        ("attn_q", general["params"]["kernel"]),
        ("attn_q", attention["query"]["kernel"]),
        ("attn_out", attention["out"]["kernel"]),
        ("attn_q", nnx_mha.query.kernel[...]),
        ("attn_out", nnx_mha.out.kernel[...]),
    ):
        law = recipe.weights[role]
        assert np.std(kernel) == pytest.approx(law.std, rel=0.04), role
        assert np.abs(kernel).max() <= law.bound


def test_names_of_axes_do_not_change_a_draw():  # case B09
    g = deepinit.Geometry(2, 64, 4, 128, 64)
    closure = recipe_of("small_init_scaled", g).initializer("attn_q", layer=1)
    boxed = linen.with_logical_partitioning(closure, ("embed", "heads", "head_dim"))

    class Attention(linen.Module):
        @linen.compact
        def __call__(self, x):
            return jnp.einsum("bd,dnh->bnh", x, self.param("attn_q", boxed, (64, 4, 16), jnp.float32))

    model = Attention()
    variables = model.init(jax.random.key(0), jnp.ones((1, 64)))
    box = variables["params"]["attn_q"]
    assert box.names == ("embed", "heads", "head_dim")
    assert box.value.shape == (64, 4, 16)
    abstract = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 64)))["params"]["attn_q"]
    assert sharding.spec(abstract.names) == P("fsdp", "tensor", None)
    assert sharding.param_shardings({"q": abstract}, mesh_of((1, 4, 2)))["q"].spec == P("fsdp", "tensor", None)
    key = jax.random.key(7)
    assert (boxed(key, (64, 4, 16), jnp.float32).value == closure(key, (64, 4, 16), jnp.float32)).all()


def test_the_twin_of_a_decoder_is_it():
    model, recipe, params = born("megatron")
    twin = bridge.twin(model, recipe)
    assert (twin(tokens()) == model.apply({"params": params}, tokens())).all()
    assert deepinit.digest(twin) == deepinit.digest(params)
    verdict = inspect(twin, recipe, seed=0)
    assert verdict.ok, verdict.table()
    assert {r.path for r in verdict.rows} == {r.path for r in inspect(params, recipe).rows}
    for new in (reinit(twin, recipe), reinit(nnx.state(twin, nnx.Param), recipe)):
        assert deepinit.digest(new) == deepinit.digest(params)


def test_the_twin_is_born_on_the_mesh():
    mesh = mesh_of((1, 4, 2))
    model, recipe, params = born("megatron")
    with jax.set_mesh(mesh):
        twin = bridge.twin(model, recipe, mesh)
        assert twin(tokens(8)).shape == (8, 16, SMALL.vocab_size)
    assert deepinit.digest(twin) == deepinit.digest(params)
    up = nnx.to_pure_dict(nnx.state(twin, nnx.Param))["layers"]["mlp"]["mlp_up"]
    assert up.sharding.spec == P(None, "fsdp", "tensor")


def test_a_block_of_ours_trains_inside_an_nnx_model():
    recipe = recipe_of("deepnorm")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(100, 64, rngs=rngs)
            block = Block.from_recipe(recipe)
            self.block = bridge.bridged(block, jnp.zeros((1, 4, 64)), layer=0)
            self.head = nnx.Linear(64, 100, rngs=rngs)

        def __call__(self, x):
            return self.head(self.block(self.embed(x), layer=0)[0])

    model = Model(nnx.Rngs(0))
    rows = {r.role: r for r in inspect(model.block, recipe).rows}
    assert rows["attn_v"].ok
    assert rows["attn_v"].expected_std == pytest.approx(recipe.weights["attn_v"].std)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    losses = []
    for _ in range(3):
        loss, grads = nnx.value_and_grad(
            lambda m: -jnp.take_along_axis(jax.nn.log_softmax(m(tokens())), tokens(seed=1)[..., None], -1).mean()
        )(model)
        optimizer.update(model, grads)
        losses.append(float(loss))
    assert losses[0] > losses[1] > losses[2]
