"""Parameters born sharded: the same bits on every mesh and in every layout of the model, and no collective."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import deepinit
from deepinit import roles, sharding
from deepinit.geometry import Geometry
from deepinit.nn import Decoder, Mlp
from deepinit.nn.part import Part
from deepinit.recipe import Gate, Residual
from deepinit.sharded_init import abstract_params, plan
from tests.models import MESHES, SMALL, assert_same, born, flat, mesh_of, own_recipe, recipe_of, refused, stacked

# A law by layer, a gate by layer, a law that is cut and one that is uniform.
RECIPE = own_recipe(
    residual=Residual("sandwich", gate=Gate((0.1, 0.2, 0.3), "channel")),
    attn_out=deepinit.laws.TruncatedNormal((0.1, 0.2, 0.3), 3.0),
    mlp_up=deepinit.laws.Uniform(0.3),
)


# case B44: the digest, and the values, do not know of the mesh, of scan, of remat, nor of padding
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        *((sizes, {}) for sizes in MESHES),
        ((2, 2, 2), {"scan": False}),
        ((1, 4, 2), {"remat": "full"}),
        ((1, 1, 1), {"remat": "dots", "scan": False}),
        ((1, 4, 2), {"vocab_multiple": 64}),
        ((2, 2, 2), {"fused_qkv": True, "fused_gate_up": True}),
    ],
    ids=str,
)
def test_same_bits_everywhere(mesh, options):
    expected = born(RECIPE)[2]
    params = born(RECIPE, mesh=mesh, **options)[2]
    assert deepinit.digest(params) == deepinit.digest(expected)
    if options.get("vocab_multiple"):
        assert params["token_embed"].shape == (128, SMALL.d_model)
        params = params | {t: params[t][: SMALL.vocab_size] for t in ("token_embed", "lm_head")}
    assert_same(stacked(params) if options.get("scan") is False else params, expected)


def test_leaves_are_born_in_their_place():
    mesh = mesh_of((2, 2, 2))
    model, _, params = born(RECIPE, mesh=(2, 2, 2))
    layout = flat_layout(sharding.param_shardings(abstract_params(model), mesh))
    for path, x in jax.tree.leaves_with_path(params):
        assert x.sharding == layout[jax.tree_util.keystr(path)]
    q = params["layers"]["attention"]["attn_q"]
    assert {s.data.shape for s in q.addressable_shards} == {(3, 32, 4, 8)}
    # replicas hold the same, shards do not
    shards = {}
    for s in q.addressable_shards:
        shards.setdefault(str(s.index), set()).add(np.asarray(s.data).tobytes())
    assert all(len(copies) == 1 for copies in shards.values())
    assert len({copy for copies in shards.values() for copy in copies}) == 4


def flat_layout(tree):
    return {jax.tree_util.keystr(path): s for path, s in jax.tree.leaves_with_path(tree)}


# The process may have any default: keys are threefry, and jax's own draws take no part.
@pytest.mark.parametrize("setting", [lambda: jax.default_prng_impl("rbg"), lambda: jax.threefry_partitionable(False)])
def test_defaults_of_the_process_do_not_matter(setting):
    expected = born(RECIPE)[2]
    with setting():
        params = deepinit.init_sharded(Decoder.from_recipe(RECIPE), RECIPE, mesh_of((1, 4, 2)))
    assert_same(params, expected)


def test_inside_set_mesh():
    mesh = mesh_of((2, 2, 2))
    with jax.set_mesh(mesh):
        params = deepinit.init_sharded(Decoder.from_recipe(RECIPE), RECIPE, mesh)
    assert_same(params, born(RECIPE)[2])


# The first layers of a deeper model are those of the shallow one.
@pytest.mark.parametrize("scan", [True, False])
def test_depth_prefix(scan):
    shallow, deep = (born(recipe_of("fixed_normal", SMALL.replace(num_layers=n)), scan=scan)[2] for n in (2, 5))
    if not scan:
        shallow, deep = stacked(shallow), stacked(deep)
    assert_same(shallow["layers"], jax.tree.map(lambda x: x[:2], deep["layers"]))
    assert (shallow["token_embed"] == deep["token_embed"]).all()


# case B52: no two layers, roles or seeds draw the same
def test_nothing_is_drawn_twice():
    trees = [flat(born("fixed_normal", seed=seed)[2]) for seed in (0, 1, 2**32)]
    drawn = [(path, x) for t in trees for path, x in t.items() if x.std()]
    draws = [one.tobytes() for path, x in drawn for one in (x if path.startswith("layers/") else [x])]
    assert len(set(draws)) == len(draws)
    # queries and keys of equal shape have keys of their own
    assert not (trees[0]["layers/attention/attn_k"] == trees[0]["layers/attention/attn_v"]).any()


def test_another_seed_compiles_nothing_anew():
    model = Decoder.from_recipe(RECIPE)
    shapes = roles.unboxed(abstract_params(model))
    (draw, keys), (_, other) = plan(model, shapes, 0), plan(model, shapes, 1)
    compiled = jax.jit(draw)
    a, b = compiled(keys), compiled(other)
    assert compiled._cache_size() == 1
    assert deepinit.digest(a) == deepinit.digest(born(RECIPE)[2]) != deepinit.digest(b)


# --- the compiled program ----------------------------------------------------------------------------------------

LARGE = Geometry(4, 256, 8, 1024, 8192, num_kv_heads=4, max_seq_len=64)
COLLECTIVES = re.compile(r"all-(gather|reduce|to-all)|collective-permute|reduce-scatter|collective-broadcast")


def compiled(recipe, mesh, **options):
    """(the compiled init, abstract parameters)."""
    model = Decoder.from_recipe(recipe, **options)
    boxed = abstract_params(model)
    draw, keys = plan(model, roles.unboxed(boxed), 0)
    layout = sharding.param_shardings(boxed, mesh)
    return jax.jit(draw, out_shardings=layout).lower(keys).compile(), roles.unboxed(boxed)


# case B48: no collective, and no array that is larger than a few shards
@pytest.mark.parametrize("options", [{}, {"scan": False}], ids=str)
@pytest.mark.parametrize("scheme", ["modern", "glorot_uniform"])
def test_no_collective_and_no_full_size_temporary(scheme, options):
    program, shapes = compiled(recipe_of(scheme, LARGE), mesh_of((1, 4, 2)), **options)
    assert not COLLECTIVES.search(program.as_text())
    memory = program.memory_analysis()
    whole = sum(4 * x.size for x in jax.tree.leaves(shapes))
    assert memory.output_size_in_bytes < 1.1 * whole / 8
    # an unrolled stack is drawn stacked and taken apart: its own shards once more, and no more than that
    assert memory.temp_size_in_bytes < (1.0 if options else 0.02) * whole / 8


# case B49 and B80: the program does not grow with depth
def test_the_program_does_not_grow_with_depth():
    sizes = {}
    for layers in (4, 64):
        recipe = recipe_of("megatron", LARGE.replace(num_layers=layers), divisor="layer")
        model = Decoder.from_recipe(recipe)
        draw, keys = plan(model, roles.unboxed(abstract_params(model)), 0)
        sizes[layers] = jax.jit(draw).lower(keys).as_text().count("\n")
    assert sizes[4] == sizes[64]


def test_405b_allocates_nothing():
    g = Geometry(126, 16384, 128, 53248, 128256, num_kv_heads=8, max_seq_len=8192)
    shapes = flat_shapes(abstract_params(Decoder.from_recipe(recipe_of("megatron", g))))
    matrices = {path: n for path, n in shapes.items() if "norm" not in path}
    assert sum(matrices.values()) == g.num_parameters > 405e9


def flat_shapes(boxed):
    return {leaf.path: x.size for leaf, x in roles.leaves(roles.unboxed(boxed))}


# --- refusals ----------------------------------------------------------------------------------------------------


# case B78: before anything compiles, with the leaf's name and the nearest sizes
@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (
            (1, 1, 8),
            "mesh.tensor: 8 does not divide 4, an axis of layers/attention/attn_k (3, 64, 4, 8); "
            "nearest that it divides: 8 and 8",
        ),
        ((1, 3, 1), "mesh.fsdp: 3 does not divide 64, an axis of"),
    ],
)
def test_a_mesh_that_does_not_divide(sizes, says):
    mesh = deepinit.make_mesh(dict(zip(sharding.MESH_AXES, sizes)))
    assert says in refused(deepinit.init_sharded, Decoder.from_recipe(RECIPE), RECIPE, mesh)


def test_another_geometry():
    message = refused(deepinit.init_sharded, Decoder.from_recipe(RECIPE), recipe_of("megatron", LARGE))
    assert message.startswith("the model has geometry Geometry(num_layers=3")


class Twins(Part):
    """Two MLPs outside the stack: four matrices for two keys."""

    @linen.compact
    def __call__(self, tokens):
        x = jnp.ones((1, 1, self.geometry.d_model))
        return Mlp(**self.shared(), name="one")(x) + Mlp(**self.shared(), name="two")(x)


def test_two_leaves_with_one_key():
    message = refused(deepinit.init_sharded, Twins.from_recipe(RECIPE), RECIPE)
    assert "one/mlp_down and two/mlp_down would draw from one key (mlp_down)" in message


# --- leaves of other hands ---------------------------------------------------------------------------------------


class Wrapped(Part):
    """A decoder inside a module that has a parameter of its own, without a role."""

    @linen.compact
    def __call__(self, tokens):
        scale = self.param("temperature", linen.initializers.normal(1.0), (7,))
        return Decoder(**self.shared(), name="model")(tokens) * scale[0]


# case B81: it keeps its own initializer, is listed as unmanaged, and fails in strict mode
@pytest.mark.parametrize("mesh", [None, (2, 2, 2)])
def test_an_unmanaged_leaf(mesh):
    recipe = recipe_of("megatron")
    params = deepinit.init_sharded(Wrapped.from_recipe(recipe), recipe, mesh and mesh_of(mesh), seed=4)
    assert_same(params["model"], born("megatron", seed=4)[2])
    assert np.abs(params["temperature"]).min() > 0
    [row] = [r for r in deepinit.verify(params, recipe) if r.path == "temperature"]
    assert (row.role, row.ok, row.reason) == ("", True, "(own initializer, unmanaged)")
    with pytest.raises(AssertionError, match=r"temperature .*own initializer, unmanaged"):
        deepinit.verify(params, recipe, strict=True)


# case B56: closures of the caller's own, born on a mesh like any other
def test_external_closures_on_a_mesh():
    recipe = recipe_of("external")

    def mine(role, layer=None):
        if role == "norm_scale":
            return jax.nn.initializers.ones
        return deepinit.initializers.normal(0.1)

    model = Decoder(SMALL, initializer=mine, residual=recipe.residual, multipliers=recipe.multipliers)
    alone = deepinit.init_sharded(model, recipe)
    assert_same(deepinit.init_sharded(model, recipe, mesh_of((2, 2, 2))), alone)
    assert {r.reason for r in deepinit.verify(alone, recipe) if r.role != "norm_scale"} == {"(given by the caller)"}


def test_narrow_parameters_are_the_wide_ones_cast():
    wide, narrow = born(RECIPE)[2], born(RECIPE, param_dtype="bfloat16", mesh=(1, 4, 2))[2]
    assert_same(jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide), narrow)
