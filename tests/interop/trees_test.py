"""Roles, fan axes and twins of trees in the layouts of public code."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import deepinit
from deepinit import audits
from deepinit.interop import TABLES, Table, trees
from deepinit.interop.sizes import geometry_of, rule_of
from deepinit.invariants import inspect
from deepinit.nn import Decoder
from deepinit.recipe import Recipe
from deepinit.reinits import reinit
from deepinit.sharded_init import abstract_params
from tests.interop import layouts
from tests.interop.layouts import GATED, MOE, PLAIN
from tests.models import SMALL, assert_same, born, refused

GEMMA = dataclasses.replace(GATED, tied_embeddings=True)
EQUAL = dataclasses.replace(GEMMA, num_kv_heads=8)
MIXED = dataclasses.replace(MOE, moe_every=2)
NANODO = dataclasses.replace(PLAIN, tied_embeddings=True)
LAYOUTS = {
    "flax_gemma": (lambda: layouts.Gemma(GEMMA, nnx.Rngs(0)), GEMMA, "gemma"),
    "flax_gemma, all fused": (lambda: layouts.Gemma(EQUAL, nnx.Rngs(0)), EQUAL, "gemma"),
    "flax_lm1b": (lambda: layouts.linen_params(layouts.Lm1b(PLAIN)), PLAIN, "glorot_uniform"),
    "flax_lm1b, boxed": (lambda: layouts.linen_params(layouts.Lm1b(PLAIN), boxed=True), PLAIN, "ds_init"),
    "nanodo": (lambda: layouts.linen_params(layouts.Nanodo(NANODO)), NANODO, "nanodo"),
    "maxtext": (lambda: layouts.maxtext(GATED), GATED, "megatron"),
    "maxtext, experts": (lambda: layouts.maxtext(MOE), MOE, "lecun_normal"),
    "hf_gpt2": (layouts.hf_gpt2, PLAIN, "gpt2"),
    "hf_gpt2, tied": (lambda: layouts.hf_gpt2(tied=True), NANODO, "gpt2"),
    "hf_gpt2, bfloat16": (lambda: layouts.hf_gpt2(dtype=jnp.bfloat16), PLAIN, "gpt2"),
    "hf_llama": (layouts.hf_llama, GATED, "torchtitan_llama3"),
    "hf_llama, experts": (lambda: layouts.hf_llama(MOE), MOE, "megatron"),
    "hf_llama, mixed": (lambda: layouts.hf_llama(MIXED), MIXED, "megatron"),
}


def recipe_for(scheme: str, g: deepinit.Geometry) -> Recipe:
    return deepinit.recipe(scheme, g)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_reinitialized_verified_and_audited(name):
    make, g, scheme = LAYOUTS[name]
    params, recipe = make(), recipe_for(scheme, g)
    new = reinit(params, recipe, seed=5)
    verdict = inspect(new, recipe, seed=5, replay="full")
    assert verdict.ok, verdict.table()
    assert verdict.replayed == sum(x.size for x in jax.tree.leaves(trees.roles.state_of(new)))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), trees.roles.state_of(new)) == jax.tree.map(
        lambda x: (x.shape, x.dtype), trees.roles.state_of(params)
    )
    found = audits.audit(new, sizes={"num_heads": g.num_heads})
    assert found.table == name.partition(",")[0]
    assert scheme in {f.recipe.name for f in found.best}
    assert found.initial
    assert not found.misfits
    assert found.digest == verdict.digest


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_weights_are_those_of_our_own_modules(name):
    make, g, scheme = LAYOUTS[name]
    recipe = recipe_for(scheme, g)
    tree = trees.viewed(reinit(make(), recipe, seed=5), g)
    if g.num_experts:
        pytest.skip("the dense decoder has no experts to compare with")
    own = deepinit.init_sharded(Decoder.from_recipe(recipe, positions="learned"), recipe, seed=5)
    wanted = {leaf.role: np.asarray(x, np.float32) for leaf, x in deepinit.roles.leaves(own)}
    seen = 0
    for view in tree.views:
        role = view.leaf.role
        if role in deepinit.geometry.VECTORS:
            continue
        found = np.asarray(view.take(np.asarray(tree.arrays[view.array])))
        stacked = role not in ("token_embed", "pos_embed", "lm_head")
        for i in range(view.layers):
            layer = view.layer(i)
            ours = (wanted[role][layer] if stacked else wanted[role]).astype(found.dtype)
            assert (found[i].reshape(-1) == ours.reshape(-1)).all(), view.leaf.path
            seen += 1
    assert seen == sum(g.count(r) for r in g.roles) + any(v.leaf.role == "pos_embed" for v in tree.views)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_sizes_are_read_off_the_shapes(name):
    make, g, _ = LAYOUTS[name]
    params = make()
    given = {"num_heads": g.num_heads} if name.startswith("hf") else {}
    found, assumed = geometry_of(params, given=given)
    same = dataclasses.replace(g, max_seq_len=found.max_seq_len, mlp=found.mlp)
    assert found == same
    assert found.gated == g.gated
    assert not assumed
    if name == "hf_gpt2":
        assert "heads of width 64" in geometry_of(params)[1][0]


@pytest.mark.parametrize(
    ("routed", "rule"),
    [
        (range(7), {"moe_every": 1, "first_dense": 0}),
        ((1, 3, 5), {"moe_every": 2, "first_dense": 0}),
        ((3, 5), {"moe_every": 2, "first_dense": 2}),
        ((2, 3, 4, 5, 6), {"moe_every": 1, "first_dense": 2}),
    ],
)
def test_the_routed_layers_are_read_off_the_tree(routed, rule):
    assert rule_of(list(routed), 7) == rule
    g = dataclasses.replace(MOE, num_layers=7, **rule)
    for scan in (True, False):
        params = abstract_params(Decoder.from_recipe(recipe_for("megatron", g), scan=scan))
        assert geometry_of(deepinit.roles.unboxed(params))[0] == dataclasses.replace(g, max_seq_len=1024)


def test_other_mixtures_of_layers_are_refused():
    assert "layers [0, 3] of 7 are routed" in refused(rule_of, [0, 3], 7)
    told = refused(trees.viewed, layouts.maxtext(MOE), MIXED)
    assert "decoder/layers/" in told
    assert "model.moe_every" in told


def test_a_gemma_and_its_values_go_on_working():
    recipe = recipe_for("gemma", GEMMA)
    model = layouts.Gemma(GEMMA, nnx.Rngs(0))
    before = model(jnp.zeros((1, 4), jnp.int32))
    assert not inspect(model, recipe).ok  # normal(0.01), and gates, ups and downs of zeros
    new = reinit(model, recipe)
    assert isinstance(new, layouts.Gemma)
    assert new is not model
    assert (model(jnp.zeros((1, 4), jnp.int32)) == before).all()  # the old one is as it was
    assert (new(jnp.zeros((1, 4), jnp.int32)) != before).any()


def test_linen_and_nnx_twins_get_the_same_bits():
    _, recipe, params = born("megatron")
    as_state = nnx.State(jax.tree.map(nnx.Param, params))
    assert_same(nnx.to_pure_dict(reinit(as_state, recipe)), params)
    assert_same(reinit(params, recipe), params)
    unrolled = born("megatron", scan=False)[2]
    assert_same(reinit(unrolled, recipe), unrolled)
    assert deepinit.digest(as_state) == deepinit.digest(params)


@pytest.mark.parametrize("scheme", ["ds_init", "fixup", "lingua_current_depth", "ngpt"])
def test_own_trees_of_any_law_are_reinitialized_on_their_mesh(scheme):
    _, recipe, params = born(scheme, mesh=(1, 4, 2), vocab_multiple=64, seed=2)
    new = reinit(jax.tree.map(jnp.zeros_like, params), recipe, seed=2)
    assert_same(new, params)
    assert jax.tree.map(lambda x: x.sharding, new) == jax.tree.map(lambda x: x.sharding, params)


@pytest.mark.parametrize("make", [layouts.hf_llama, layouts.maxtext], ids=["outputs first", "layers second"])
def test_unit_vectors_lie_along_d_model_whatever_the_axes(make):
    _, recipe, params = born("ngpt")
    wanted = {leaf.role: np.asarray(x) for leaf, x in deepinit.roles.leaves(params)}
    new = reinit(make(SMALL), recipe)
    tree = trees.viewed(new, SMALL)
    for view in tree.views:
        if view.leaf.role not in deepinit.geometry.VECTORS:
            ours = wanted[view.leaf.role]
            ours = ours[view.leaf.layer][None] if view.leaf.layer is not None else ours
            found = np.asarray(view.take(np.asarray(tree.arrays[view.array])))
            assert found.tobytes() == ours.tobytes(), view.leaf.path
    verdict = inspect(new, recipe)
    assert {r.test for r in verdict.bad} <= {"constant"}, verdict.table()  # nGPT has no norms, these trees do


# --- rules --------------------------------------------------------------------------------------------------------

TREE = layouts.shapes(
    {
        "blocks/wq": (3, 64, 8, 8), "blocks/wkv": (3, 2, 64, 4, 8), "blocks/wo": (3, 8, 8, 64),
        "blocks/w1": (3, 160, 64), "blocks/w2": (64, 3, 160), "table": (104, 64), "head": (64, 100),
    }
)  # fmt: skip
RULES = {
    "wq": "attn_q", "wkv": "attn_k attn_v | S i o o", "wo": "attn_out", "w1": "mlp_up", "w2": "mlp_down | o L i",
    "table": "token_embed", "head": "lm_head",
}  # fmt: skip


def test_axes_are_found_from_the_shape_or_said():
    views = {v.leaf.role: v for v in trees.viewed(TREE, GATED, RULES).views}
    assert {r: v.axes for r, v in views.items()} == {
        "attn_q": "Lioo", "attn_k": "LSioo", "attn_v": "LSioo", "attn_out": "Liio", "mlp_up": "Loi",
        "mlp_down": "oLi", "token_embed": "io", "lm_head": "io",
    }  # fmt: skip
    assert views["attn_v"].cut == (1, 1, 2)
    assert views["attn_k"].canonical == (64, 4, 8)
    assert views["lm_head"].canonical == (100, 64)
    assert all(v.layers == (1 if r in ("token_embed", "lm_head") else 3) for r, v in views.items())


@pytest.mark.parametrize("role", ["mlp_up", "attn_q", "attn_out", "lm_head"])
def test_positions_are_where_take_takes(role):
    (view,) = [v for v in trees.viewed(TREE, GATED, RULES).views if v.leaf.role == role]
    x = np.arange(np.prod(view.shape)).reshape(view.shape)
    taken = view.take(x).reshape(view.layers, -1)
    layer, index = np.arange(view.layers).repeat(5), np.arange(view.layers * 5) * 37 % view.n
    at = view.positions(layer, index)
    assert (x[tuple(at.T)] == taken[layer, index]).all()
    back = view.flat(at)
    assert (back[0] == layer).all()
    assert (back[1] == index).all()
    assert (view.put(view.take(x)) == x).all()


def test_a_leaf_without_a_rule_is_an_error_that_lists_all_of_them():
    message = refused(trees.viewed, TREE, GATED, {"wq": "attn_q", "table": "token_embed"})
    assert "5 of 7 leaves are matched by no rule: blocks/w1, blocks/w2, blocks/wkv, blocks/wo, head" in message


def test_a_rule_without_a_leaf_is_an_error():
    # what once left GPT-2's residual scaling out for years: a name compared, never matched, nothing said
    assert "'c_proj' matches no leaf" in refused(trees.viewed, TREE, GATED, {**RULES, "c_proj": "attn_out"})


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({**RULES, "wq": "attn_k"}, "blocks/wq: shape (3, 64, 8, 8) cannot hold the 64 x 32 matrix"),
        ({**RULES, "wq": "atn_q"}, "did you mean 'attn_q'?"),
        ({**RULES, "wkv": "attn_k attn_v"}, "say which axis is which"),
        ({**RULES, "wkv": "attn_k attn_v | S q o o"}, "axis 'q' is unknown"),
        ({**RULES, "w2": "mlp_down | i L o"}, "axes 'i L o' of shape (64, 3, 160) cannot hold"),
        ({**RULES, "(": "bias"}, "is no regular expression"),
        ("hf_gtp2", "did you mean 'hf_gpt2'?"),
        (7, "neither a mapping"),
    ],
)
def test_refusals(rules, said):
    assert said in refused(trees.viewed, TREE, GATED, rules)


def test_a_tree_that_nothing_knows_is_refused():
    assert "no leaf of this tree is named by a role (blocks/w1" in refused(trees.viewed, TREE, GATED)


def test_the_first_rule_wins_and_frozen_leaves_are_unmanaged():
    rules = {"frozen/.*": None, **RULES, ".*": "bias"}
    tree = TREE | layouts.shapes({"frozen/table": (100, 64), "odd": (64,)})
    recipe = recipe_for("megatron", GATED)
    params = reinit(jax.tree.map(lambda s: jnp.ones(s.shape), tree), recipe, roles=rules)
    assert (params["frozen/table"] == 1).all()
    rows = {r.path: r for r in inspect(params, recipe, roles=rules).rows}
    assert (rows["frozen/table"].ok, rows["frozen/table"].reason) == (True, "(own initializer, unmanaged)")
    assert (rows["odd"].role, rows["odd"].ok) == ("bias", True)
    strict = inspect(params, recipe, roles=rules, strict=True)
    assert [r.path for r in strict.bad if r.path[0] != "("] == ["frozen/table"]


def test_presets_are_tables_and_a_user_may_change_one():
    assert set(TABLES) == {"flax_gemma", "flax_lm1b", "nanodo", "maxtext", "hf_gpt2", "hf_llama"}
    wider = dataclasses.replace(
        TABLES["hf_gpt2"], rules=(*Table.of({"adapter/.*": None}).rules, *TABLES["hf_gpt2"].rules)
    )
    tree = layouts.hf_gpt2() | layouts.shapes({"transformer.h.0.adapter.weight": (4, 4)})
    assert [v.leaf.path for v in trees.viewed(tree, PLAIN, wider).views if v.leaf.role is None] == [
        "transformer.h.0.adapter.weight"
    ]


def test_integers_are_no_weights():
    tree = {**reinit(layouts.hf_gpt2(), recipe_for("gpt2", PLAIN)), "transformer.h.0.attn.bias": jnp.ones((4, 4), bool)}
    assert inspect(tree, recipe_for("gpt2", PLAIN)).ok


# --- cases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [1, 8, 64])
def test_experts_do_not_enter_the_fan(experts):  # case B02
    g = deepinit.Geometry(2, 256, 4, 128, 64, num_experts=experts)
    recipe = recipe_for("lecun_normal", g)
    tree = layouts.shapes({"moe/up": (2, experts, 256, 128)})
    up = np.asarray(reinit(tree, recipe, roles={"moe/up": "expert_up"})["moe/up"])
    assert up.std() == pytest.approx(256**-0.5, rel=0.02)
    for layer in up:
        assert len({e.tobytes() for e in layer}) == experts
    assert up.std((2, 3)) == pytest.approx(np.full((2, experts), 0.0625), rel=0.03)


@pytest.mark.parametrize("depth", [12, 24, 36])
def test_layer_scale_is_exact_on_every_path(depth):  # case B27
    value = {12: 0.1, 24: 1e-5, 36: 1e-6}[depth]
    g = deepinit.Geometry(depth, 8, 2, 8, 8)
    sizes = layouts.shapes({"layers/gate": (depth, 8)})
    for given, wanted in (({}, value), ({"value": 1e-5}, 1e-5)):
        recipe = deepinit.recipe("layerscale", g, **given)
        gates = [
            reinit(sizes, recipe, roles={"gate": "residual_gate"})["layers/gate"],
            recipe.initializer("residual_gate", layer=0)(jax.random.key(3), (8,)),
            jax.jit(lambda key, r=recipe: r.initializer("residual_gate")(key, (8,), jnp.float32))(jax.random.key(1)),
        ]
        if depth == 12:
            born_ = deepinit.init_sharded(Decoder.from_recipe(recipe), recipe)
            gates += [x for path, x in trees.flat(born_) if "residual_gate" in path]
            assert len(gates) == 5
        for gate in gates:
            assert (np.asarray(gate) == np.float32(wanted)).all()


def test_a_stage_of_a_pipeline_counts_layers_as_the_whole_stack_does():  # case B16
    g = deepinit.Geometry(8, 64, 4, 128, 64, mlp="gelu")
    recipe = recipe_for("ds_init", g)

    def stage(layers):
        return layouts.shapes({f"layers_{i}/attn_out": (4, 16, 64) for i in layers})

    whole, second = reinit(stage(range(8)), recipe), reinit(stage(range(4, 8)), recipe)
    for i in range(4, 8):
        path = f"layers_{i}/attn_out"
        assert (second[path] == whole[path]).all()
        assert second[path].std() == pytest.approx(recipe.weights["attn_out"].std[i], rel=0.05)
    assert inspect(second, recipe, seed=0).ok
    local = {f"layers_{i - 4}/attn_out": second[f"layers_{i}/attn_out"] for i in range(4, 8)}
    assert len(inspect(local, recipe).bad) == 4
