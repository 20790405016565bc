"""Recipes changed by role and put together from two schemes."""

import json

import pytest

from deepinit.errors import ConfigError
from deepinit.geometry import Geometry
from deepinit.laws import Constant, Normal, TruncatedNormal, Uniform
from deepinit.recipe import Recipe
from deepinit.schemes.mixing import mixed, overridden
from deepinit.schemes.registry import recipe

G = Geometry(num_layers=6, d_model=64, num_heads=8, d_ff=160, vocab_size=100)
GPT2 = recipe("gpt2", G)


def refused(call, *args, **kwargs):
    with pytest.raises(ConfigError) as e:
        call(*args, **kwargs)
    assert len(str(e.value).splitlines()) == 1
    return str(e.value)


def test_one_role():
    r = overridden(GPT2, {"attn_out": {"std": 0.003}})
    assert r.weights["attn_out"] == Normal(0.003)
    assert {k: v for k, v in r.weights.items() if k != "attn_out"} == {
        k: v for k, v in GPT2.weights.items() if k != "attn_out"
    }
    assert r.changes == ("attn_out: std 0.003",)
    assert Recipe.from_json(json.loads(json.dumps(r.to_json()))) == r
    assert r != GPT2


@pytest.mark.parametrize(
    ("given", "law"),
    [
        ({"std": 0.1, "law": "uniform"}, Uniform(0.1)),
        ({"std": 0.1, "cut": 2}, TruncatedNormal(0.1, 2.0)),
        ({"cut": 3}, TruncatedNormal(0.02, 3.0)),
        ({"law": "uniform"}, Uniform(0.02)),
        ({"value": 0.0}, Constant(0.0)),
    ],
)
def test_laws(given, law):
    assert overridden(GPT2, {"attn_q": given}).weights["attn_q"] == law


def test_updates():
    r = overridden(recipe("mup", G, base_width=32), {"attn_q": {"lr": 0.25}})
    assert (r.updates["attn_q"].lr, r.updates["attn_q"].weight_decay) == (0.25, 2.0)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"attn_o": {"std": 1}}, "did you mean 'attn_out'"),
        ({"attn_out": {"sdt": 1}}, "did you mean 'std'"),
        ({"attn_out": {"std": "big"}}, "attn_out.std: 'big' is not a number"),
        ({"attn_out": {"std": -1}}, "attn_out has std -1"),
        ({"attn_out": 0.003}, "is not a mapping"),
        ({"attn_out": {"value": 0.0, "std": 1}}, "std: a constant law has none"),
        ({"attn_out": {"law": "gaussian"}}, "law 'gaussian' is unknown"),
        ({"router": {"std": 1}}, "these sizes have no router"),
        ({"norm_scale": {"law": "normal"}}, "give the std"),
        ({"attn_out": {"value": 0.0}, "attn_v": {"value": 0.0}}, "both exactly zero in one branch"),
    ],
)
def test_wrong_overrides(overrides, says):
    assert says in refused(overridden, GPT2, overrides)


def test_gpt2_weights_with_a_rezero_gate():
    r = mixed("gpt2", "rezero", G)
    assert r.weights["attn_out"] == GPT2.weights["attn_out"]
    assert r.residual == recipe("rezero", G).residual
    assert r.weights["residual_gate"] == Constant(0.0)
    assert any("gated as well" in c for c in r.changes)
    assert any("no norm: the stream keeps the size of the embedding, std 0.02" in c for c in r.changes)
    assert Recipe.from_json(json.loads(json.dumps(r.to_json()))) == r


def test_layerscale_on_small_init():
    r = mixed("small_init", "layerscale", G)
    assert r.residual.gate.shape == "channel"
    assert r.changes == ("residual rule of layerscale",)


@pytest.mark.parametrize(
    ("weights", "residual", "says"),
    [
        ("deepnorm", "rezero", "deepnorm: its weights belong to its own rule"),
        ("gpt2", "deepnorm", "deepnorm: its rule x <- N(1.861 x + F(x)) belongs to its own weights"),
        ("subln", "rezero", "subln: its weights belong"),
        ("gpt2", "fixup", "fixup: its rule"),
        ("gpt2", "completep", "completep: its rule"),
        ("zero_out", "rezero", "both exactly zero in one branch"),
        ("gpt2", "layernorm_scaling", "both shrink branches with depth"),
    ],
)
def test_pairs_that_cannot_work(weights, residual, says):
    assert says in refused(mixed, weights, residual, G)


def test_layernorm_scaling_takes_weights_without_a_divisor():
    assert mixed("small_init", "layernorm_scaling", G).residual.scale_in[3] == pytest.approx(0.5)
