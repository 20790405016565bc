"""Models that mix dense and routed layers: scanned, unrolled and on a mesh one model, at one size of the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepinit
from deepinit import roles, stacks
from deepinit.births import assert_birth_invariants
from deepinit.geometry import EXPERTS, Role
from deepinit.nn import Decoder
from deepinit.recipe import Gate, Residual
from tests.models import SMALL, assert_same, born, flat, forward, loss_of, noise, own_recipe, recipe_of, tokens

ROUTED = SMALL.replace(num_layers=7, d_model=32, d_ff=48, num_experts=4)
MIXED = {
    "every second": ROUTED.replace(moe_every=2),
    "first dense": ROUTED.replace(first_dense=1),
    "both": ROUTED.replace(moe_every=3, first_dense=4),
}
NAMES = {
    "every second": {"layers_0_2": (0, 2, 4), "layers_1_2": (1, 3, 5), "layers_6_1": (6,)},
    "first dense": {"layers_0_1": (0,), "layers_1_1": (1, 2, 3, 4, 5, 6)},
    "both": {"layers_0_1": (0, 1, 2), "layers_3_3": (3,), "layers_4_3": (4,), "layers_5_3": (5,), "layers_6_1": (6,)},
}
cases = pytest.mark.parametrize("case", MIXED)
RULE = Residual("sandwich", branch=(0.5, 1.0, 2.0, 0.3, 0.7, 0.2, 0.1), gate=Gate((0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)))


@st.composite
def geometries(draw):
    depth = draw(st.integers(1, 24))
    every = draw(st.integers(1, depth))
    return ROUTED.replace(
        num_layers=depth, moe_every=every, first_dense=draw(st.integers(0, depth // every * every - 1))
    )


@given(geometries())
def test_every_layer_stands_in_one_stack_with_layers_of_its_kind(g):
    found = [layer for run in stacks.runs(g) for period in zip(*run, strict=True) for layer in period]
    assert found == list(range(g.num_layers))
    named = stacks.named(g)
    assert sorted(layer for layers in named.values() for layer in layers) == found
    assert len(named) <= g.moe_every + 2
    for name, layers in named.items():
        assert len({g.routed(layer) for layer in layers}) == 1
        leaf = roles.locate(f"{name}/mlp/router")
        assert leaf.rows((len(layers), 8)) == tuple(layers)
        assert leaf.canonical == "layers/mlp/router"
    assert g.mixed or list(named) == ["layers"]


@cases
def test_names_in_the_tree(case):
    params = born(recipe_of("megatron", MIXED[case]))[2]
    held = {name: tuple(layers) for name, layers in stacks.named(MIXED[case]).items()}
    assert held == NAMES[case]
    assert {name for name in params if name.startswith("layers")} == set(held)
    for name, layers in held.items():
        assert ("expert_up" in params[name]["mlp"]) == MIXED[case].routed(layers[0])
        assert params[name]["attention"]["attn_q"].shape[0] == len(layers)


# case B05 for mixed stacks: one birth, however the model is laid out
@cases
def test_one_birth_scanned_unrolled_and_on_a_mesh(case):
    recipe = recipe_of("megatron", MIXED[case], divisor="layer")  # a std for each layer
    model, _, params = born(recipe)
    other = born(recipe, scan=False)[2]
    assert_same(stacks.scanned(other, MIXED[case], jnp.stack), params)
    assert_same(stacks.scanned(params, MIXED[case], jnp.stack), params)
    mesh = deepinit.make_mesh({"fsdp": 2, "tensor": 2, "expert": 2})
    spread = deepinit.init_sharded(model, recipe, mesh)
    assert spread[next(iter(NAMES[case]))]["attention"]["attn_q"].sharding.spec[:3] == (None, "fsdp", "tensor")
    assert_same(spread, params)
    assert len({deepinit.digest(p) for p in (params, other, spread)}) == 1
    plain = born(recipe_of("megatron", ROUTED, divisor="layer"))[2]  # the layers know nothing of the others' kind
    whole = stacks.layered(params)
    assert np.array_equal(whole["layers/attention/attn_out"], plain["layers"]["attention"]["attn_out"])
    routed = np.asarray(MIXED[case].routed_layers)
    assert np.array_equal(whole["layers/mlp/expert_down"], plain["layers"]["mlp"]["expert_down"][routed])


@pytest.mark.slow
def test_birth_invariants():
    recipe = recipe_of("megatron", MIXED["both"].replace(num_layers=8, first_dense=2), divisor="layer")
    facts = assert_birth_invariants(deepinit.make_mesh({"fsdp": 2}), model=Decoder.from_recipe(recipe), recipe=recipe)
    assert {f.name: f.said for f in facts}["depth prefix"] == "4 layers are the first of 8"


@cases
@pytest.mark.parametrize("options", [{"scan": False}, {"remat": "full"}], ids=str)
def test_one_function_however_it_is_run(case, options):
    recipe = own_recipe(geometry=MIXED[case], residual=RULE)
    one, other = Decoder.from_recipe(recipe), Decoder.from_recipe(recipe, **options)
    params = noise(one)
    given_ = unrolled(params) if "scan" in options else params
    (loss, gradient), (other_loss, other_gradient) = (
        loss_of(m)(p, tokens()) for m, p in ((one, params), (other, given_))
    )
    assert np.isclose(loss, other_loss, rtol=1e-5)
    if "scan" in options:
        other_gradient = stacks.scanned(other_gradient, MIXED[case], jnp.stack)
    other_gradient = flat(other_gradient)
    for path, g in flat(gradient).items():
        assert np.allclose(g, other_gradient[path], rtol=1e-3, atol=1e-4 * np.abs(g).max()), path


def unrolled(params):
    """A mixed tree with its layers apart."""
    out = {}
    for path, layer, x in stacks.apart(params):
        *above, last = (path if layer is None else path.replace("layers", f"layers_{layer}", 1)).split("/")
        at = out
        for part in above:
            at = at.setdefault(part, {})
        at[last] = x
    return out


# A routed layer is one where it should be: without its experts the model of the other kind is another function.
def test_the_layers_are_of_their_kinds_and_in_order():
    recipe = own_recipe(geometry=MIXED["every second"])
    model = Decoder.from_recipe(recipe, scan=False)
    params = noise(model)
    kinds = ["router" in params[f"layers_{i}"]["mlp"] for i in range(7)]
    assert kinds == [False, True, False, True, False, True, False]
    swapped = params | {"layers_0": params["layers_2"], "layers_2": params["layers_0"]}
    a, b = (forward(model)(p, tokens()) for p in (params, swapped))
    assert np.abs(a - b).max() > 0.1 * np.abs(a).max()


def equations(jaxpr):
    """How many equations a program has, those of its loops counted once."""
    inner = [v for e in jaxpr.eqns for v in jax.tree.leaves(e.params, is_leaf=lambda x: hasattr(x, "eqns"))]
    return len(jaxpr.eqns) + sum(
        equations(getattr(v, "jaxpr", v)) for v in inner if hasattr(getattr(v, "jaxpr", v), "eqns")
    )


@pytest.mark.parametrize("rule", [{"moe_every": 2}, {"first_dense": 1}, {"moe_every": 4, "first_dense": 4}], ids=str)
def test_the_program_does_not_grow_with_depth(rule):
    """Forward and backward, and the init: as many equations for 32 layers as for 8."""
    counts = []
    for depth in (8, 32):
        recipe = recipe_of("megatron", ROUTED.replace(num_layers=depth, **rule), divisor="layer")
        model = Decoder.from_recipe(recipe, remat="full")
        params = roles.unboxed(deepinit.sharded_init.abstract_params(model))
        batch = jax.ShapeDtypeStruct((2, 8), jnp.int32)
        step = jax.make_jaxpr(jax.grad(lambda p, t, m=model: m.apply({"params": p}, t).mean()))(params, batch)
        draw, keys = deepinit.sharded_init.plan(model, params, 0)
        counts.append((equations(step.jaxpr), equations(jax.make_jaxpr(draw)(keys).jaxpr)))
    assert counts[0] == counts[1]
    assert min(counts[0]) > 100


# XLA inlines a loop of one turn, and would then merge what remat computes twice.
def test_remat_outside_of_a_loop_is_kept_from_merging():
    recipe = own_recipe(geometry=MIXED["first dense"])
    model = Decoder.from_recipe(recipe, remat="full")
    program = str(jax.make_jaxpr(lambda p: model.apply({"params": p}, tokens()))(noise(model)))
    assert (program.count("prevent_cse=True"), program.count("prevent_cse=False")) == (1, 1)


@cases
@pytest.mark.parametrize("scan", [True, False])
def test_verify_passes_over_every_leaf(case, scan):
    model, recipe, params = born(recipe_of("megatron", MIXED[case], divisor="layer"), scan=scan)
    rows = deepinit.verify(params, recipe, seed=0, replay="full", model=model)
    of_leaf = {(r.path, r.layer) for r in rows if r.dtype}
    down = {"mlp_down": set(), "expert_down": set()}
    for path, layer in of_leaf:
        if (name := path.rpartition("/")[2]) in down:
            down[name].add(layer)
    assert down["expert_down"] == set(MIXED[case].routed_layers)
    assert down["mlp_down"] == set(range(7)) - down["expert_down"]


@pytest.mark.parametrize(("name", "role"), [("layers_2_2", "mlp_up"), ("layers_3_2", "expert_up")])
def test_a_spoiled_leaf_is_found_by_its_path_and_layer(name, role):
    recipe = recipe_of("megatron", ROUTED.replace(moe_every=2, first_dense=3))
    params = born(recipe)[2]
    leaf = params[name]["mlp"][role]
    spoiled = params | {name: params[name] | {"mlp": params[name]["mlp"] | {role: leaf.at[1].multiply(1.2)}}}
    bad = [r for r in deepinit.verify(spoiled, recipe, raises=False) if not r.ok]
    assert [r.path for r in bad] == [f"{name}/mlp/{role}"]
    assert f"layer {int(name[7]) + 2}: std is 1." in bad[0].reason
    one = leaf.at[(1, *[3] * (leaf.ndim - 1))].add(1e-6)
    moved = params | {name: params[name] | {"mlp": params[name]["mlp"] | {role: one}}}
    bad = [r for r in deepinit.verify(moved, recipe, seed=0, replay="full", raises=False) if not r.ok]
    assert [r.path for r in bad] == [f"{name}/mlp/{role}"]
    assert f"of layer {int(name[7]) + 2} holds" in bad[0].reason


# Layers of two stacks that hold the same values, and a missing expert layer, are seen across the stacks.
def test_the_stacks_are_judged_together():
    recipe = recipe_of("megatron", MIXED["every second"])
    params = born(recipe)[2]
    attention = params["layers_1_2"]["attention"]
    copied = attention | {"attn_q": attention["attn_q"].at[0].set(params["layers_0_2"]["attention"]["attn_q"][2])}
    twice = params | {"layers_1_2": params["layers_1_2"] | {"attention": copied}}
    bad = [r for r in deepinit.verify(twice, recipe, raises=False) if not r.ok]
    assert {r.path for r in bad} == {"layers_0_2/attention/attn_q", "layers_1_2/attention/attn_q"}
    assert all("layers 4 and 1 hold" in r.reason or "layers 1 and 4 hold" in r.reason for r in bad)
    wrong = recipe_of("megatron", ROUTED.replace(moe_every=3))
    counts = {r.role for r in deepinit.verify(params, wrong, raises=False) if r.test == "count"}
    assert counts == {Role.MLP_GATE, Role.MLP_UP, Role.MLP_DOWN, *EXPERTS}


@cases
def test_reinit_and_replay_give_the_same_bits(case):
    recipe = recipe_of("megatron", MIXED[case], divisor="layer")
    params = born(recipe)[2]
    assert_same(deepinit.reinit(jax.tree.map(jnp.zeros_like, params), recipe), params)
    layer = MIXED[case].routed_layers[-1]
    name, layers = next((n, ls) for n, ls in stacks.named(MIXED[case]).items() if layer in ls)
    stored = np.asarray(params[name]["mlp"]["expert_down"][layers.index(layer)]).reshape(-1)
    assert np.array_equal(deepinit.replay(recipe, "expert_down", range(200), layer=layer), stored[:200])


def test_statistics_come_in_the_order_of_the_layers():
    recipe = own_recipe(geometry=MIXED["every second"], residual=RULE)
    model, other = Decoder.from_recipe(recipe), Decoder.from_recipe(recipe, scan=False)
    params = noise(model)

    def kept(model, params):
        return stacks.layered(model.apply({"params": params}, tokens(), mutable=["stats"])[1]["stats"])

    one, alone = kept(model, params), kept(other, unrolled(params))
    assert one.keys() == alone.keys()
    assert one["layers/stream_ms"].shape == (7, 2)
    for path, x in one.items():
        assert np.allclose(x, alone[path], rtol=1e-3, atol=1e-6), path
