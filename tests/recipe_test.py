"""Frozen data: hash, equality, JSON, completion, and what cannot train."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

import deepinit
from deepinit.geometry import VECTORS, Role
from deepinit.laws import Constant, Normal, TruncatedNormal
from deepinit.recipe import FrozenMap, Gate, Laws, Recipe, Residual, Update
from tests.models import SMALL, distributions, geometries, own_recipe, recipe_of, refused

MATRICES = {r: Normal(0.02) for r in SMALL.roles if r not in VECTORS}
LAYERS = SMALL.num_layers


# --- FrozenMap ---------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.text(max_size=4), st.integers(), max_size=6), st.randoms())
def test_frozen_map(items, random):
    shuffled = list(items.items())
    random.shuffle(shuffled)
    a, b = FrozenMap(items), FrozenMap(dict(shuffled))
    assert a == b == items
    assert hash(a) == hash(b)
    assert len(a) == len(items)
    assert FrozenMap({**items, "more!": 1}) != a


def test_frozen_map_reads_roles_and_strings_alike():
    m = FrozenMap({Role.ATTN_Q: 1}, other=2)
    assert m["attn_q"] == m[Role.ATTN_Q] == 1
    with pytest.raises(KeyError, match="'attn_k' is not here; there are attn_q, other"):
        m["attn_k"]
    with pytest.raises(TypeError):
        m["attn_q"] = 3


def test_laws_find_a_leaf_by_its_own_name():
    laws = Laws({"norm_scale": Constant(1.0)}, {"post_norm/norm_scale": Constant(0.5)})
    assert laws["post_norm/norm_scale"] == Constant(0.5)
    assert list(laws) == ["norm_scale"]


# --- Residual ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "formula"),
    [
        (Residual(), "x <- x + F(N(x))"),
        (Residual("post", skip=2.2133638), "x <- N(2.213 x + F(x))"),
        (Residual("none", gate=Gate(0.0)), "x <- x + g F(x), g = 0 at first"),
        (Residual("sandwich", branch=0.5), "x <- x + 0.5 N(F(N(x)))"),
        (Residual("reordered"), "x <- x + N(F(x))"),
        (Residual("pre", scale_in=(1.0, 0.5)), "x <- x + F(1..0.5 N(x))"),
        (Residual("post", skip_gate=Gate(1.0)), "x <- N(w x + F(x)), w = 1 at first"),
    ],
)
def test_formula(rule, formula):
    assert rule.formula == formula


def test_unknown_norm_names_the_nearest():
    assert refused(Residual, "prenorm") == "residual norm 'prenorm' is unknown; did you mean 'pre'?"


# --- Recipe ------------------------------------------------------------------------------------------------------


def test_every_role_has_a_law_and_an_update():
    r = own_recipe(updates={"attn_q": Update(lr=0.5), "final_norm/norm_scale": Update(lr=2.0)})
    assert tuple(r.weights) == tuple(map(str, SMALL.roles))
    assert r.weights["norm_scale"] == Constant(1.0)
    # case B07: a bias starts at exactly zero
    assert r.weights["bias"] == Constant(0.0)
    assert r.updates["attn_q"] == Update(lr=0.5)
    assert r.updates["mlp_up"] == Update()
    assert dict(r.multipliers) == {"embed": 1.0, "logits": 1.0, "attention": SMALL.head_dim**-0.5}
    assert r.outputs == ("attn_out", "mlp_down")


def test_a_gate_sets_the_law_of_its_role():
    r = own_recipe(residual=Residual(gate=Gate(0.25, "channel")))
    assert r.weights["residual_gate"] == Constant(0.25)
    r = own_recipe(residual=Residual(gate=Gate(0.25, role=Role.BRANCH_SCALE)))
    assert r.weights["branch_scale"] == Constant(0.25)
    assert r.weights["residual_gate"] == Constant(1.0)


def test_a_missing_law_is_refused():
    weights = {k: v for k, v in MATRICES.items() if k != "attn_out"}
    assert refused(own_recipe, SMALL, weights) == "scheme own: no law for attn_out"
    assert "did you mean 'attn_out'" in refused(own_recipe, SMALL, {**weights, "attn_outt": Normal(1.0)})


@pytest.mark.parametrize("role", [("attn_v", "attn_out"), ("mlp_up", "mlp_down")])
def test_two_exact_zeros_in_a_branch_never_learn(role):
    zero = {r: Constant(0.0) for r in role}
    message = refused(own_recipe, SMALL, MATRICES | zero)
    assert message.startswith(f"scheme own: {role[0]} and {role[1]} are both exactly zero in one branch")
    assert own_recipe(SMALL, MATRICES | {role[1]: Constant(0.0)}).weights[role[1]] == Constant(0.0)


@pytest.mark.parametrize("share", ["layer", "sublayer"])
def test_a_zero_gate_and_a_zero_matrix_never_learn(share):
    rule = Residual("none", gate=Gate(0.0, share=share))
    message = refused(own_recipe, SMALL, MATRICES | {"mlp_down": Constant(0.0)}, residual=rule)
    assert "mlp_down and residual_gate are both exactly zero" in message
    assert own_recipe(
        SMALL, MATRICES | {"mlp_down": Constant(0.0)}, residual=rule.replace(gate=Gate(0.1))
    ).residual.gate


@pytest.mark.parametrize("std", [0.0, -0.02, math.nan, math.inf, (0.02, 0.0, 0.02)])
def test_a_std_is_a_positive_number(std):
    assert "scheme own: attn_q has std" in refused(own_recipe, SMALL, MATRICES | {"attn_q": Normal(std)})


@pytest.mark.parametrize("place", ["weights", "skip", "branch", "scale_in"])
def test_one_number_a_layer(place):
    bad = tuple(1.0 for _ in range(LAYERS + 1))
    with_bad = (
        {"weights": MATRICES | {"attn_q": Normal(bad)}}
        if place == "weights"
        else {"residual": Residual(**{place: bad})}
    )
    assert refused(own_recipe, **with_bad).endswith(f"has {LAYERS + 1} entries, the model {LAYERS} layers")
    for count in (LAYERS, SMALL.num_residuals):
        good = tuple(1.0 for _ in range(count))
        if place != "weights":
            assert own_recipe(residual=Residual(**{place: good}))


def test_scale_in_needs_a_norm():
    assert "there is no norm" in refused(own_recipe, residual=Residual("none", scale_in=0.5))


def test_required_sizes():
    r = {"tied_embeddings": False, "mlp": ("relu", "gelu")}
    assert refused(own_recipe, requires=r) == "scheme own needs model.mlp 'relu' or 'gelu'; got 'swiglu'"
    assert own_recipe(geometry=SMALL.replace(mlp="relu"), requires=r).requires["mlp"] == ("relu", "gelu")


def test_the_longest_end_of_a_path_wins():
    r = own_recipe(
        leaves={"norm_scale": Constant(0.5), "post_norm/norm_scale": Constant(0.25)},
        updates={"final_norm/norm_scale": Update(lr=3.0)},
    )
    assert r.law_at("layers/attn_residual/post_norm/norm_scale", "norm_scale") == Constant(0.25)
    assert r.law_at("final_norm/norm_scale", "norm_scale") == Constant(0.5)
    assert r.law_at("layers/attention/attn_q", "attn_q") == Normal(0.02)
    assert r.update_at("final_norm/norm_scale", "norm_scale").lr == 3.0
    assert r.update_at("layers/final_norm/x_norm_scale", "norm_scale").lr == 1.0  # whole parts only


def test_norm_offset():
    moved = recipe_of("megatron").with_norm_offset()
    assert moved.weights["norm_scale"] == Constant(0.0)
    assert moved.requires["norm_offset"] is True
    assert moved.with_norm_offset() is moved
    assert {r: law for r, law in moved.weights.items() if r != "norm_scale"} == {
        r: law for r, law in recipe_of("megatron").weights.items() if r != "norm_scale"
    }


# --- JSON --------------------------------------------------------------------------------------------------------

gates = st.builds(
    Gate,
    st.floats(0.1, 2) | st.lists(st.floats(0.1, 2), min_size=LAYERS, max_size=LAYERS).map(tuple),
    st.sampled_from(["scalar", "channel"]),
    st.sampled_from(["sublayer", "layer"]),
    st.sampled_from([Role.RESIDUAL_GATE, Role.BRANCH_SCALE]),
)
constants = st.floats(0.1, 4) | st.lists(st.floats(0.1, 4), min_size=LAYERS, max_size=LAYERS).map(tuple)


@given(
    st.lists(distributions().filter(lambda d: not d.layered), min_size=len(MATRICES), max_size=len(MATRICES)),
    st.builds(Residual, st.just("sandwich"), constants, constants, constants, st.none() | gates, st.booleans()),
    st.dictionaries(st.sampled_from(["embed", "logits", "attention", "mlp_up"]), st.floats(0.1, 10)),
    st.dictionaries(st.sampled_from(list(SMALL.roles)), st.builds(Update, lr=st.floats(0, 4), eps=st.floats(0, 4))),
    st.dictionaries(st.sampled_from(["tied_embeddings", "parallel"]), st.just(False)),
)
def test_json_round_trip(laws, residual, multipliers, updates, requires):
    try:
        r = own_recipe(
            SMALL,
            dict(zip(MATRICES, laws)),
            residual=residual,
            multipliers=multipliers,
            updates=updates,
            requires=requires,
        )
    except deepinit.ConfigError:  # two exact zeros in one branch
        reject()
    again = Recipe.from_json(json.loads(json.dumps(r.to_json(), allow_nan=False)))
    assert again == r
    assert hash(again) == hash(r)
    assert again.residual.formula == r.residual.formula
    assert [law.formula for law in again.weights.values()] == [law.formula for law in r.weights.values()]


@pytest.mark.parametrize("name", deepinit.scheme_names())
def test_json_round_trip_of_the_registry(name):
    r = recipe_of(name)
    again = Recipe.from_json(json.loads(json.dumps(r.to_json(), allow_nan=False)))
    assert again == r
    assert hash(again) == hash(r)
    assert all(again.law_at(path, "norm_scale") == law for path, law in r.leaves.items())


@given(geometries())
def test_equal_recipes_are_one_key(g):
    a, b = deepinit.recipe("megatron", g), deepinit.recipe("megatron", g, std=0.02)
    assert a.weights == b.weights
    assert deepinit.recipe("megatron", g) == a
    assert hash(deepinit.recipe("megatron", g)) == hash(a)
    assert deepinit.recipe("megatron", g, std=0.03) != a


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe_of("megatron").name = "other"


# case B56: one base std reaches every matrix, and nothing is hard-coded
def test_the_base_std_reaches_every_matrix():
    a, b = recipe_of("megatron", std=0.006), recipe_of("megatron", std=0.012)
    for role, law in a.weights.items():
        if role in VECTORS:
            assert law == b.weights[role]
        else:
            assert b.weights[role].std == pytest.approx(2 * law.std)
            assert law.std in (0.006, pytest.approx(0.006 / math.sqrt(SMALL.num_residuals)))


def test_the_face_of_a_recipe():
    r = recipe_of("modern")
    assert isinstance(r.weights["attn_out"], TruncatedNormal)
    assert {type(r.weights["attn_out"].std), type(r.residual.skip), type(r.updates["mlp_up"].lr)} == {float}
    layered = recipe_of("megatron", divisor="layer")
    assert len(layered.weights["attn_out"].std) == LAYERS
    assert refused(layered.initializer, "attn_out") == (
        "scheme megatron: the std of attn_out differs from layer to layer; say which layer"
    )


def test_a_405b_recipe_needs_no_jax():
    code = (
        "import sys, deepinit\n"
        "g = deepinit.Geometry(126, 16384, 128, 53248, 128256, num_kv_heads=8)\n"
        "deepinit.recipe('deepnorm', g).to_json()\n"
        "sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
