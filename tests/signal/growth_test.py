"""Growth exponents of the first update against the published table of drawn models."""

import dataclasses
import math

import pytest

import deepinit
from deepinit import Geometry
from deepinit.recipe import FrozenMap
from deepinit.signal import growth
from deepinit.signal.predict import predict

GEOMETRY = Geometry(num_layers=6, d_model=32, num_heads=2, d_ff=128, vocab_size=96, max_seq_len=32, mlp="relu")
OPTIONS = {"positions": "none", "norm": "layernorm"}


def exponents(scheme, **args):
    def at(depth):
        r = deepinit.recipe(scheme, GEOMETRY.replace(num_layers=depth), **args)
        unit = {**r.multipliers, "embed": 1 / r.weights["token_embed"].std}  # the stream starts at variance 1
        return dataclasses.replace(r, multipliers=FrozenMap(unit))

    return growth.exponents(at, options=OPTIONS)


@pytest.mark.parametrize(
    ("scheme", "args", "group", "sgd", "adam"),
    [
        ("deepnorm", {}, "matrices", -0.01, 0.49),
        ("deepnorm", {}, "norm_gains", 1.00, 1.03),
        ("zero_out", {}, "matrices", 1.00, 1.00),
        ("rezero", {}, "gates", 0.54, 0.51),
        ("tfixup_decoder", {}, "matrices", 0.50, 0.74),
        ("peri_ln", {}, "matrices", 0.24, 0.56),
        ("completep", {"base_width": 32, "base_depth": 1, "std": 0.18}, "matrices", -1.02, -0.03),
        ("completep", {"base_width": 32, "base_depth": 1, "std": 0.18}, "norm_gains", -1.23, -0.27),
        ("depth_mup", {"base_width": 32, "base_depth": 1, "std": 0.18}, "norm_gains", -0.59, -0.13),
        ("megatron", {"std": "sqrt(2/(5d))", "embed_std": 1.0}, "norm_gains", -0.25, 0.24),
        ("skipinit", {"start": "1/sqrt(R)", "base": "xavier_normal"}, "matrices", 0.03, 0.50),
    ],
)
def test_measured_table(scheme, args, group, sgd, adam):
    found = exponents(scheme, **args)[group]
    assert found.sgd == pytest.approx(sgd, abs=0.15)
    assert found.adam == pytest.approx(adam, abs=0.15)


def test_fixup_by_role():
    found = exponents("fixup")
    assert found["mlp_down"] == pytest.approx((0.0, 0.5), abs=0.03)  # two matrices in the branch: R^(-1/2)
    assert found["attn_out"] == pytest.approx((2 / 3, 5 / 6), abs=0.03)  # four: R^(-1/6) on v
    assert found["attention"] == found["attn_out"]  # v moves nothing while out is 0
    assert all(math.isnan(x) for x in found["shifts"])  # nor do the shifts inside a branch that ends with 0


def test_one_constant_at_two_places_gives_two_updates():
    weights = exponents("small_init_scaled")["matrices"]
    branch = exponents("depth_mup", base_width=32, base_depth=6, std=0.18)["matrices"]
    assert weights.sgd > 0.8
    assert branch.sgd < 0.15


def test_rates_of_the_recipe_count():
    plain = exponents("deepnorm")
    repaired = exponents("deepnorm", updates="depth", base_depth=6)
    for group, power in (("matrices", 0.5), ("norm_gains", 1.0)):
        assert repaired[group].adam == pytest.approx(plain[group].adam - power, abs=1e-6)
    assert repaired["matrices"].adam == pytest.approx(0, abs=0.03)


def test_a_group_without_effect_has_no_law():
    assert all(math.isnan(x) for x in exponents("rezero")["matrices"])
    assert "norm_gains" not in exponents("rezero")


def test_overflow_and_changed_recipes_have_no_law():
    r = deepinit.recipe("glorot_normal", GEOMETRY.replace(mlp="swiglu"), norm="none")
    p = predict(r, **OPTIONS)
    assert p.exponents == {}
    assert any("no law of the update" in n for n in p.notes)
    from deepinit.schemes import mixing

    changed = mixing.overridden(deepinit.recipe("gpt2", GEOMETRY), {"attn_out": {"std": 0.003}})
    assert any("was changed" in n for n in predict(changed, **OPTIONS).notes)
