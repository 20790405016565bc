"""What a module takes from a recipe, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import deepinit
from deepinit.laws import Normal
from deepinit.nn import Attention, Block, Decoder, Mlp
from deepinit.nn.part import Part
from deepinit.roles import unboxed
from tests.models import SMALL, assert_same, born, flat, own_recipe, recipe_of, refused


@pytest.mark.parametrize(
    ("scheme", "options", "says"),
    [
        ("megatron", {"fused_qvk": True}, "model option 'fused_qvk' is unknown; did you mean 'fused_qkv'?"),
        ("megatron", {"norm": "rms"}, "model.norm 'rms' is unknown; did you mean 'rmsnorm'?"),
        ("megatron", {"positions": "rotary"}, "model.positions 'rotary' is unknown"),
        ("megatron", {"remat": "dot"}, "model.remat 'dot' is unknown; did you mean 'dots'?"),
        ("fixup", {"bias": True}, "scheme fixup needs model.bias False, got True"),
        ("megatron", {"norm_offset": True}, "model.norm_offset: a norm that multiplies by 1 + w starts at w = 0"),
    ],
)
def test_refusals(scheme, options, says):
    assert refused(Decoder.from_recipe, recipe_of(scheme), **options).startswith(says)


# A scheme is never applied half: what it needs and the modules lack is refused.
def test_what_the_modules_lack():
    recipe = own_recipe(requires={"warp_drive": True})
    assert refused(Decoder.from_recipe, recipe) == "scheme own needs warp_drive True, which Decoder does not have"


def test_what_a_scheme_needs_is_set():
    assert Decoder.from_recipe(own_recipe(requires={"qk_norm": True})).qk_norm is True
    assert Decoder.from_recipe(own_recipe(requires={"norm": ("layernorm", "rmsnorm")})).norm == "layernorm"
    with_choice = own_recipe(requires={"norm": ("layernorm", "rmsnorm")})
    assert Decoder.from_recipe(with_choice, norm="rmsnorm").norm == "rmsnorm"


# The 1 + w form starts where the plain form starts: at a gain of 1.
def test_norm_offset_is_the_same_model():
    recipe = recipe_of("megatron")
    model, _, params = born(recipe)
    moved = recipe.with_norm_offset()
    offset, _, offset_params = born(moved, norm_offset=True)
    assert not flat(offset_params)["final_norm/norm_scale"].any()
    x = jnp.arange(20).reshape(2, 10)
    assert (model.apply({"params": params}, x) == offset.apply({"params": offset_params}, x)).all()
    assert Decoder.from_recipe(moved).norm_offset is True


@pytest.mark.parametrize("kind", [Attention, Mlp, Block])
def test_parts_by_themselves(kind):
    part = kind.from_recipe(recipe_of("modern"))
    x = jax.random.normal(jax.random.key(0), (2, 5, SMALL.d_model))
    variables = jax.jit(part.init)(jax.random.key(0), x)
    out = jax.jit(part.apply)(variables, x)
    assert (out[0] if kind is Block else out).shape == x.shape
    for leaf, value in deepinit.roles.leaves(variables["params"]):
        law = recipe_of("modern").weights[leaf.role]
        n = value.size
        assert abs(np.mean(np.square(value)) / (law.std**2 or 1) - 1) < 5 * np.sqrt((law.kurtosis - 1) / n)


def test_a_weight_is_named_by_its_role():
    class Own(Part):
        @linen.compact
        def __call__(self, x):
            return x @ self.weight("kernel", (4, 4), ("embed", None))

    own = Own(SMALL, initializer=recipe_of("megatron").initializer)
    assert "kernel: a parameter is named by its role" in refused(own.init, jax.random.key(0), jnp.ones((1, 4)))


# case B56: blocks accept any closure, from anywhere, and nothing in them is hard-coded
def test_closures_from_outside():
    def mine(role, layer=None):
        return jax.nn.initializers.constant(0.25) if role.startswith("attn") else jax.nn.initializers.normal(0.5)

    recipe = recipe_of("external")
    model = Decoder(SMALL, initializer=mine, residual=recipe.residual, multipliers=recipe.multipliers)
    params = deepinit.init_sharded(model, recipe)
    for path, x in flat(params).items():
        if "attn_" in path.split("/")[-1]:
            assert (x == 0.25).all()
        else:
            assert abs(x.std() / 0.5 - 1) < 5 / np.sqrt(2 * x.size), path
    assert model.apply({"params": params}, jnp.zeros((1, 4), jnp.int32)).shape == (1, 4, SMALL.vocab_size)


@pytest.mark.parametrize("sampler", ["portable", "jax"])
def test_sampler(sampler):
    _, recipe, params = born("megatron", sampler=sampler)
    assert all(r.ok for r in deepinit.verify(params, recipe))
    other = born("megatron", sampler="jax" if sampler == "portable" else "portable")[2]
    assert not (params["token_embed"] == other["token_embed"]).any()


def test_settings_reach_every_part():
    model = Decoder.from_recipe(recipe_of("megatron"), norm_eps=0.5, dropout=0.25, dtype="bfloat16")
    shared = model.shared()
    assert (shared["norm_eps"], shared["dropout"], shared["dtype"]) == (0.5, 0.25, "bfloat16")
    assert not {"parent", "name"} & shared.keys()


# case B09: the names of the axes go with the values, and change none
def test_boxes():
    attention = Attention.from_recipe(recipe_of("modern"))
    x = jnp.ones((1, 2, SMALL.d_model))
    boxed = attention.init(jax.random.key(0), x)["params"]
    assert boxed["attn_q"].names == ("embed", "heads", "head_dim")
    assert boxed["attn_q"].value.shape == (64, 8, 8)
    plain = Attention(SMALL, initializer=recipe_of("modern").initializer).init(jax.random.key(0), x)["params"]
    assert_same(unboxed(boxed), unboxed(plain))


def test_law_by_leaf_is_the_modules_own():
    recipe = own_recipe(attn_q=Normal(0.5))
    leaf = born(recipe)[2]["layers"]["attention"]["attn_q"]
    assert abs(leaf.std() / 0.5 - 1) < 5 / np.sqrt(2 * leaf.size)
