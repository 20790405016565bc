"""Healthy initial states pass; every kind of damage fails and names the leaf; healthy z are standard normal."""

import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import deepinit
from deepinit import invariants, laws, roles, sampler
from deepinit.errors import ConfigError
from deepinit.invariants import inspect
from deepinit.nn import Decoder
from deepinit.recipe import Gate, Residual
from deepinit.sharded_init import abstract_params, plan
from tests.models import SMALL, born, flat, own_recipe, recipe_of

L = SMALL.num_layers
ATTN, MLP = "layers/attention", "layers/mlp"


def buildable(name):
    """Whether our modules have what the scheme asks for, and give the closures."""
    try:
        Decoder.from_recipe(recipe_of(name))
    except ConfigError:
        return False
    return name != "external"


SCHEMES = [name for name in deepinit.scheme_names() if buildable(name)]


def test_most_schemes_are_checked():
    assert len(SCHEMES) > 0.8 * len(deepinit.scheme_names())
    issue = "glorot_normal glorot_uniform he_normal lecun_normal fixed_normal gpt2 megatron small_init modern post_ln"
    assert {*issue.split(), "small_init_scaled", "modern_small", "deepnorm", "rezero", "fixup"} <= set(SCHEMES)


def assert_healthy(params, recipe):
    verdict = inspect(params, recipe)
    assert verdict.ok, verdict.table()
    assert {r.path for r in verdict.rows} == set(flat(params))
    assert all(r.n and r.role for r in verdict.rows)


# case B53: every leaf of every scheme is what its law says
@pytest.mark.parametrize("name", SCHEMES)
def test_healthy(name):
    _, recipe, params = born(name)
    assert_healthy(params, recipe)


# A cut, a uniform, a law by layer, and exact constants: at 20 seeds, from one compiled program.
def test_healthy_at_many_seeds():
    recipe = own_recipe(
        residual=Residual(gate=Gate((0.1, 0.2, 0.3))),
        attn_out=laws.TruncatedNormal((0.1, 0.2, 0.3), 2.0),
        mlp_up=laws.Uniform(0.3),
        mlp_down=laws.Normal((0.3, 0.2, 0.1)),
    )
    model = Decoder.from_recipe(recipe)
    shapes = roles.unboxed(abstract_params(model))
    draw = jax.jit(plan(model, shapes, 0)[0])
    for seed in range(20):
        assert_healthy(draw(plan(model, shapes, seed)[1]), recipe)


EVERYTHING = {"bias": True, "qk_norm": True, "positions": "learned", "norm": "layernorm", "vocab_multiple": 64}


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("modern", {"param_dtype": "bfloat16"}),
        ("modern", {"param_dtype": "float16"}),
        ("modern", {"vocab_multiple": 128, "scan": False}),
        ("layerscale", {"mesh": (2, 2, 2)}),
        ("layerscale", EVERYTHING),
        ("fixup", {"scan": False, "param_dtype": "bfloat16"}),
        ("deepnorm", {"sampler": "jax"}),
    ],
    ids=str,
)
def test_healthy_in_every_form(scheme, options):
    _, recipe, params = born(scheme, **options)
    assert_healthy(params, recipe)


def test_rows():
    _, recipe, params = born("megatron")
    verdict = inspect(params, recipe)
    by_path = {r.path: r for r in verdict.rows}
    row = by_path[f"{ATTN}/attn_out"]
    assert (row.role, row.law, row.shape, row.dtype) == ("attn_out", "Normal", (3, 8, 8, 64), "float32")
    leaf = np.asarray(params["layers"]["attention"]["attn_out"], np.float64)
    assert row.n == leaf.size
    assert row.expected_std == pytest.approx(0.02 / math.sqrt(6))
    assert row.measured_std == pytest.approx(leaf.std(), rel=1e-4)
    assert row.measured_mean == pytest.approx(leaf.mean(), rel=1e-3, abs=1e-9)
    assert row.max_abs == pytest.approx(np.abs(leaf).max())
    assert abs(row.z) < verdict.threshold
    assert verdict.ok
    assert "largest deviation" in verdict.summary()
    assert verdict.digest == deepinit.digest(params)
    for row in verdict.rows:
        text = json.dumps(row.to_json(), allow_nan=False)
        assert {"path", "role", "expected_std", "measured_std", "z", "ok"} <= json.loads(text).keys()


def test_a_law_by_layer_has_a_row_a_layer():
    _, recipe, params = born(recipe_of("megatron", divisor="layer"))
    rows = [r for r in deepinit.verify(params, recipe) if r.role == "attn_out"]
    assert [r.layer for r in rows] == [0, 1, 2]
    assert [r.expected_std for r in rows] == pytest.approx([0.02 / math.sqrt(2 * (i + 1)) for i in range(3)])


# --- damage ------------------------------------------------------------------------------------------------------


def scaled(x, rng):
    return 1.1 * x


def zero(x, rng):
    return 0 * x


def constant(x, rng):
    return 0 * x + np.float32(0.02)


def zero_layer(x, rng):
    x[1] = 0
    return x


def scaled_layer(x, rng):
    x[2] *= np.float32(1.3)
    return x


def equal_layers(x, rng):
    x[2] = x[0]
    return x


def not_a_number(x, rng):
    x.flat[7] = np.nan
    return x


def infinite(x, rng):
    x.flat[7] = -np.inf
    return x


def shifted(x, rng):
    return x + np.float32(0.2) * x.std()


def drawn_in_bfloat16(x, rng):
    draw = jax.random.normal(jax.random.key(0), x.shape, jnp.bfloat16) * jnp.bfloat16(x.std())
    return np.asarray(draw.astype(jnp.float32))


DAMAGE = (
    scaled, zero, constant, zero_layer, scaled_layer, equal_layers, not_a_number, infinite, shifted, drawn_in_bfloat16,
)  # fmt: skip
MATRICES = (
    [f"{ATTN}/attn_{r}" for r in "qkv"] + [f"{ATTN}/attn_out"] + [f"{MLP}/mlp_{r}" for r in ("gate", "up", "down")]
)


def damaged(params, path, change):
    """The tree with one leaf changed."""
    tree = jax.tree.map(np.asarray, params)
    *above, name = path.split("/")
    holder = tree
    for part in above:
        holder = holder[part]
    holder[name] = change(np.array(holder[name]), np.random.default_rng(0))
    return tree


def fails(params, recipe, *paths, **options):
    """The message with which a tree fails; it names these leaves and no other."""
    with pytest.raises(AssertionError) as e:
        deepinit.verify(params, recipe, **options)
    bad = {r.path for r in deepinit.verify(params, recipe, raises=False, **options) if not r.ok}
    assert bad == set(paths)
    assert all(path in str(e.value) for path in paths)
    return str(e.value)


@pytest.mark.parametrize("change", DAMAGE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("path", MATRICES)
def test_damage_to_a_matrix(path, change):
    _, recipe, params = born("megatron")
    fails(damaged(params, path, change), recipe, path)


@pytest.mark.parametrize("change", [c for c in DAMAGE if "layer" not in c.__name__], ids=lambda f: f.__name__)
@pytest.mark.parametrize("path", ["token_embed", "lm_head", "pos_embed"])
def test_damage_to_a_table(path, change):
    _, recipe, params = born(recipe_of("gpt2", SMALL.replace(max_seq_len=128)), positions="learned")
    fails(damaged(params, path, change), recipe, path)


@pytest.mark.parametrize(
    ("path", "value"),
    [("final_norm/norm_scale", 0.0), ("final_norm/norm_bias", 1e-6), ("layers/attention/attn_q_bias", 0.01),
     ("layers/attn_residual/norm/norm_scale", 1.01), ("layers/mlp_residual/residual_gate", 1.0)],
)  # fmt: skip
def test_damage_to_one_entry_of_a_constant(path, value):
    def change(x, rng):
        x.flat[3] = value
        return x

    _, recipe, params = born("layerscale", norm="layernorm", bias=True)
    assert "should be exactly" in fails(damaged(params, path, change), recipe, path)


def test_the_layer_is_named():
    _, recipe, params = born(recipe_of("megatron", divisor="layer"))
    message = fails(damaged(params, f"{ATTN}/attn_out", scaled_layer), recipe, f"{ATTN}/attn_out")
    assert f"{ATTN}/attn_out[layer 2]" in message
    assert "[layer 1]" not in message
    _, recipe, params = born("megatron")
    message = fails(damaged(params, f"{ATTN}/attn_q", zero_layer), recipe, f"{ATTN}/attn_q")
    assert re.search(r"layer 1\b.*zero", message)


def test_the_layer_of_an_unrolled_stack_is_named():
    _, recipe, params = born("megatron", scan=False)
    fails(damaged(params, "layers_1/mlp/mlp_up", zero), recipe, "layers_1/mlp/mlp_up")
    twins = params | {"layers_2": params["layers_2"] | {"mlp": params["layers_0"]["mlp"]}}
    paths = [f"layers_{i}/mlp/mlp_{r}" for i in (0, 2) for r in ("gate", "up", "down")]
    bad = {r.path for r in deepinit.verify(twins, recipe, raises=False) if not r.ok}
    assert bad
    assert bad <= set(paths)
    assert {p.split("/")[-1] for p in bad} == {"mlp_gate", "mlp_up", "mlp_down"}


# case B10: residual scaling left off is seen at both output matrices
def test_residual_scaling_left_off():
    params = born(recipe_of("gpt2", divisor="none"))[2]
    message = fails(params, recipe_of("gpt2"), f"{ATTN}/attn_out", f"{MLP}/mlp_down")
    factors = [float(x) for x in re.findall(r"std is ([\d.]+) times", message)]
    assert factors == pytest.approx([math.sqrt(6)] * 2, rel=0.05)


# case B57: what ran is not what was published
def test_another_scheme():
    wide = SMALL.replace(d_model=256, num_heads=8, num_kv_heads=8, head_dim=0)
    params = born(recipe_of("gpt2", wide))[2]
    rows = deepinit.verify(params, recipe_of("wang_init", wide), raises=False)
    assert {r.role for r in rows if not r.ok} == set(wide.roles[:10]) - {"pos_embed"}
    measured = {r.role: r.measured_std for r in rows}
    assert measured["attn_q"] == pytest.approx(0.02, rel=0.02)
    assert measured["attn_out"] == pytest.approx(0.02 / math.sqrt(6), rel=0.02)


def test_swapped_roles():
    _, recipe, params = born("megatron")
    attention = dict(params["layers"]["attention"])
    q, out = attention["attn_q"], attention["attn_out"]
    attention |= {"attn_q": out.reshape(q.shape), "attn_out": q.reshape(out.shape)}
    tree = params | {"layers": params["layers"] | {"attention": attention}}
    fails(tree, recipe, f"{ATTN}/attn_q", f"{ATTN}/attn_out")


# The law of a cut is more than its std: one value beyond it is seen
def test_beyond_the_cut():
    def beyond(x, rng):
        x.flat[5] = np.float32(1.001) * bound
        return x

    _, recipe, params = born("modern")
    bound = recipe.weights["mlp_up"].bound
    fails(damaged(params, f"{MLP}/mlp_up", beyond), recipe, f"{MLP}/mlp_up")


def test_padding_must_be_zero():
    def change(x, rng):
        x[110, 5] = 1e-3
        return x

    _, recipe, params = born("megatron", vocab_multiple=128)
    message = fails(damaged(params, "token_embed", change), recipe, "token_embed")
    assert "beyond the vocabulary" in message


# The count of matrices is the geometry's: a projection that was missed, one too many, a stack too short
def test_counts():
    _, recipe, params = born("megatron")
    mlp = {k: v for k, v in params["layers"]["mlp"].items() if k != "mlp_down"}
    missing = params | {"layers": params["layers"] | {"mlp": mlp}}
    with pytest.raises(AssertionError, match=r"mlp_down.*the geometry has 3 of these matrices, the tree 0"):
        deepinit.verify(missing, recipe)
    with pytest.raises(AssertionError, match=r"lm_head.*the geometry has 1 of these matrices, the tree 0"):
        deepinit.verify({k: v for k, v in params.items() if k != "lm_head"}, recipe)
    short = params | {"layers": jax.tree.map(lambda x: x[:2], params["layers"])}
    with pytest.raises(AssertionError, match="the geometry has 3 of these matrices, the tree 2"):
        deepinit.verify(short, recipe)
    with pytest.raises(AssertionError, match="the geometry has 4 of these matrices, the tree 3"):
        deepinit.verify(params, recipe_of("megatron", SMALL.replace(num_layers=4)))


def test_more_layers_than_the_law_has():
    _, _, params = born(recipe_of("megatron", divisor="layer"))
    rows = deepinit.verify(params, recipe_of("megatron", SMALL.replace(num_layers=2), divisor="layer"), raises=False)
    assert {"attn_out", "mlp_down"} <= {r.role for r in rows if not r.ok}


def test_a_part_of_a_model_is_judged_by_itself():
    _, recipe, params = born("megatron")
    assert all(r.ok for r in deepinit.verify({"layers": {"mlp": params["layers"]["mlp"]}}, recipe))


# case B81: no guess from the values
def test_unmanaged_leaves():
    _, recipe, params = born("megatron")
    tree = params | {"adapter": {"kernel": jnp.zeros((3, 3))}}
    rows = {r.path: r for r in deepinit.verify(tree, recipe)}
    assert rows["adapter/kernel"].reason == "(own initializer, unmanaged)"
    assert rows["adapter/kernel"].expected_std is None
    bad = {r.path for r in deepinit.verify(tree, recipe, strict=True, raises=False) if not r.ok}
    assert bad == {"adapter/kernel"}


def test_external_values_must_be_finite():
    params = born("megatron")[2]
    external = recipe_of("external")
    assert all(r.ok for r in deepinit.verify(params, external))
    message = fails(damaged(params, f"{MLP}/mlp_up", not_a_number), external, f"{MLP}/mlp_up")
    assert "finite" in message


def test_gates_by_layer():
    recipe = own_recipe(residual=Residual(gate=Gate((0.1, 0.2, 0.3))))
    params = born(recipe)[2]
    assert all(r.ok for r in deepinit.verify(params, recipe))
    path = "layers/mlp_residual/residual_gate"
    fails(damaged(params, path, lambda x, rng: x[::-1]), recipe, path)


@pytest.mark.parametrize("law", [laws.Orthogonal(1.0, 64), laws.Sign(0.1)])
def test_laws_that_are_exact(law):
    recipe = own_recipe(attn_q=law)
    params = born(recipe)[2]
    path = f"{ATTN}/attn_q"
    assert all(r.ok for r in deepinit.verify(params, recipe))
    fails(damaged(params, path, lambda x, rng: np.float32(1.01) * x), recipe, path)
    gauss = damaged(params, path, lambda x, rng: (law.std * rng.standard_normal(x.shape)).astype(np.float32))
    fails(gauss, recipe, path) if isinstance(law, laws.Sign) else None


def test_a_pair_of_factors_is_not_taken_for_independent():
    recipe = own_recipe(attn_q=laws.Normal(0.02))
    paired = dataclasses.replace(
        recipe, weights=type(recipe.weights)({**recipe.weights, "attn_q": laws.Factor(0.7, 0.7, 0.1, "attn_k")})
    )
    rows = deepinit.verify(born(recipe)[2], paired, raises=False)
    assert "attn_q" in {r.role for r in rows if not r.ok}


# --- false alarms ------------------------------------------------------------------------------------------------


# case B53: z = (3 sigma and all) of healthy leaves is standard normal, for every law and size, far into both tails
@pytest.mark.parametrize(
    "law",
    [laws.Normal(1.0), laws.TruncatedNormal(1.0, 2.0), laws.TruncatedNormal(1.0, 3.0), laws.Uniform(1.0)],
    ids=str,
)
@pytest.mark.parametrize("n", [1024, 4096])
def test_z_of_healthy_samples_is_standard_normal(law, n):
    trials = 4000
    kind, cut = ("uniform", 0.0) if isinstance(law, laws.Uniform) else ("normal", getattr(law, "cut", 0.0))
    number = law.bound if kind == "uniform" else getattr(law, "sigma", law.std)
    x = sampler.draw(jax.random.key(1), (trials, n), np.float32(number), kind, cut)
    ratios = np.asarray(jnp.mean(jnp.square(x), axis=1), np.float64)
    z = np.asarray([invariants.std_deviation(r, n, law.kurtosis) for r in ratios])
    assert stats.kstest(z, "norm").pvalue > 1e-6
    for at in (2.0, 3.0):
        for tail in (z > at, z < -at):  # a binomial count, the tail's probability itself being right to 15%
            low, high = (
                stats.binom.ppf(p, trials, (1 + off) * stats.norm.sf(at))
                for p, off in ((1e-7, -0.15), (1 - 1e-7, 0.15))
            )
            assert low <= tail.sum() <= high
    means = np.asarray(jnp.mean(x, axis=1), np.float64) * math.sqrt(n)
    assert stats.kstest(means, "norm").pvalue > 1e-6


def test_the_threshold_follows_from_the_number_of_tests():
    small, _, params = born("megatron")
    threshold = inspect(params, recipe_of("megatron")).threshold
    rows = len(deepinit.verify(params, recipe_of("megatron")))
    # at least one test a row and layer share the rate of 1e-6, and no more than a hundred times as many do
    assert stats.norm.isf(0.5e-6 / rows) < threshold < stats.norm.isf(0.5e-6 / (100 * rows * L))
    deep = recipe_of("megatron", SMALL.replace(num_layers=40))
    assert inspect(born(deep)[2], deep).threshold > threshold
    assert small.geometry == SMALL


def test_the_digest_and_the_bits_are_those_of_the_tree():
    _, recipe, params = born("modern")
    before = deepinit.digest(params)
    assert inspect(params, recipe).digest == before == deepinit.digest(params)
