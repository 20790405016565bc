"""Parametrizations: at base size the standard scheme, elsewhere the factors of their tables."""

import math

import pytest

from deepinit.errors import ConfigError
from deepinit.geometry import LAYER_MATRICES, Geometry
from deepinit.recipe import Update
from deepinit.schemes.registry import entry, recipe, undecided

BASE = Geometry(num_layers=2, d_model=128, num_heads=8, d_ff=512, vocab_size=256)  # heads of 16
FINAL = "final_norm/norm_scale"


def wider(m, heads=1):
    """m times the width: `heads` times the heads, the rest by wider heads."""
    return Geometry(
        num_layers=2, d_model=128 * m, num_heads=8 * heads, head_dim=16 * m // heads, d_ff=512 * m, vocab_size=256
    )


def facts(r):
    return r.weights, r.residual, r.multipliers, {k: u for k, u in r.updates.items() if u != Update()}, r.leaves


# cases B60, B61: at base width and depth, the standard scheme bit for bit
@pytest.mark.parametrize(
    ("name", "standard", "args"),
    [
        ("mup", "fixed_normal", {"base_width": 128}),
        ("mup", "fixed_normal", {"base_width": 128, "base_head_dim": 16, "base_d_ff": 512}),
        ("mup", "fixed_normal", {"base_width": 128, "optimizer": "sgd"}),
        ("mup_nanogpt", "nanogpt", {"base_width": 128}),
        ("megatron_mup", "megatron", {"base_width": 128}),
        ("depth_mup", "fixed_normal", {"base_width": 128, "base_depth": 2}),
        ("completep", "fixed_normal", {"base_width": 128, "base_depth": 2}),
        ("completep", "fixed_normal", {"base_width": 128, "base_depth": 2, "base_head_dim": 16, "alpha": 0.75}),
        ("completed_p", "fixed_normal", {"base_width": 128, "base_depth": 2}),
    ],
)
def test_base_is_the_standard_scheme(name, standard, args):
    assert facts(recipe(name, BASE, **args)) == facts(recipe(standard, BASE))


# case B59: the form of table 8, m = 1024 / 128
def test_mup_under_adam():
    r = recipe("mup", wider(8), base_width=128)
    for role in LAYER_MATRICES:
        if role in r.weights:
            assert r.weights[role].std == pytest.approx(0.02 / math.sqrt(8))
            assert r.updates[role].lr == 1 / 8
            assert r.updates[role].weight_decay == 8  # lr times decay knows no width
    for role in ("token_embed", "pos_embed", "lm_head"):
        assert r.weights[role].std == 0.02
        assert r.updates[role] == Update()
    for role in ("bias", "norm_scale"):
        assert r.updates[role] == Update()
    assert r.multipliers["logits"] == 1 / 8


def test_mup_under_sgd():
    r = recipe("mup", wider(8), base_width=128, optimizer="sgd")
    assert r.updates["attn_q"] == Update()
    assert {r.updates[role].lr for role in ("token_embed", "lm_head", "norm_scale", "bias")} == {8.0}


def test_decay_of_mup_may_be_plain():
    r = recipe("mup", wider(2), base_width=128, decay="plain", scale_eps=True)
    assert r.updates["mlp_up"] == Update(lr=0.5, weight_decay=1.0, eps=0.5)


# case B60: scores by the head's width
def test_scale_of_the_scores():
    def scale(g, **args):
        return recipe("mup", g, base_width=128, **args).multipliers["attention"]

    assert scale(wider(4)) == 1 / 64  # wider heads, as many: 1/h
    assert scale(wider(2)) / scale(wider(4)) == 2
    assert scale(wider(4), base_head_dim=16) == pytest.approx(math.sqrt(16) / 64)
    assert scale(wider(4, heads=4), base_head_dim=16) == scale(BASE) == 16**-0.5  # more heads, as wide


# case B61
def test_a_base_must_be_chosen_and_widths_grow_together():
    assert undecided("mup", {}) == ("base_width",)
    assert undecided("completep", {"base_width": 64}) == ("base_depth",)
    assert undecided("completep", {"base_width": 64, "base_depth": 2}) == undecided("gpt2", {}) == ()
    g = wider(2).replace(d_ff=512)
    with pytest.raises(ConfigError, match=r"model.d_ff: 512 is 1 times base_d_ff 512.*nearest: 1024"):
        recipe("mup", g, base_width=128, base_d_ff=512)
    for name in ("mup", "completep"):
        with pytest.raises(ConfigError, match="base_width: 0 is not the width"):
            recipe(name, BASE, base_width=0)
    with pytest.raises(ConfigError, match="base_depth: 0 is not the depth"):
        recipe("completep", BASE, base_depth=0)


# case B62: depth ratio 4, width ratio 2
def test_completep():
    g = wider(2).replace(num_layers=8)
    r = recipe("completep", g, base_width=128, base_depth=2)
    assert r.residual.branch == 1 / 4
    assert r.updates["attn_out"] == Update(lr=1 / 2, weight_decay=2.0, eps=1 / 8)
    assert r.updates["norm_scale"] == r.updates["bias"] == Update(lr=1.0, eps=1 / 8)
    assert r.update_at(FINAL, "norm_scale") == r.updates["lm_head"] == r.updates["token_embed"] == Update()
    half = recipe("completep", g, base_width=128, base_depth=2, alpha=0.5)
    assert half.residual.branch == 1 / 2
    assert half.updates["attn_out"].lr == 1 / 4
    assert half.updates["norm_scale"].lr == 1 / 2
    assert facts(half) == facts(recipe("depth_mup", g, base_width=128, base_depth=2))


def test_completed_p_is_completep_in_other_coordinates():
    g = wider(2).replace(num_layers=8)
    a = recipe("completep", g, base_width=128, base_depth=2)
    b = recipe("completed_p", g, base_width=128, base_depth=2)
    # one function, and one update of it: the head's factor moves from the logits into the matrix and its rate
    assert a.weights["lm_head"].std * a.multipliers["logits"] == b.weights["lm_head"].std * b.multipliers["logits"]
    assert a.updates["lm_head"].lr * a.multipliers["logits"] == b.updates["lm_head"].lr * b.multipliers["logits"]


@pytest.mark.parametrize("layers", [1, 12, 80])
def test_umup_shares_the_last_variance_by_three(layers):
    r = recipe("umup", BASE.replace(num_layers=layers)).residual
    held = [1.0]  # the embedding's share, then each addition's
    for skip, branch in zip(r.skip, r.branch):
        assert skip**2 + branch**2 == pytest.approx(1)
        held = [h * skip**2 for h in held] + [branch**2]
    assert held[0] == pytest.approx(1 / 3)
    assert sum(held[1::2]) == pytest.approx(1 / 3)
    assert sum(held[2::2]) == pytest.approx(1 / 3)


def test_umup_forward_factors_stand_apart_from_weights():
    r = recipe("umup", BASE)
    for role in ("attn_q", "attn_out", "mlp_down"):
        assert r.weights[role].std == 1.0
        assert r.multipliers[role] == pytest.approx(BASE.fan_in(role) ** -0.5)
        assert r.updates[role].lr == pytest.approx((BASE.fan_in(role) * BASE.num_layers) ** -0.5)
        assert r.updates[role].lr * r.updates[role].weight_decay == pytest.approx(1)  # decay knows no rate
    assert r.multipliers["logits"] == 1 / BASE.d_model


# Norm gains of the blocks and of the end are told apart: the one stands in the stack, the other outside.
@pytest.mark.parametrize(
    ("name", "args", "matrices", "gains"),
    [
        ("deepnorm", {"updates": "depth", "base_depth": 6}, 6 / 96, 6 / 96),
        ("megatron", {"updates": "depth", "base_depth": 6}, 6 / 96, 6 / 96),
    ],
)
def test_updates_by_depth(name, args, matrices, gains):
    r = recipe(name, BASE.replace(num_layers=96), **args)
    power = 0.5 if name == "deepnorm" else 1.0
    assert r.updates["attn_v"].lr == r.updates["mlp_down"].lr == pytest.approx(matrices**power)
    assert r.update_at("layers/attn_residual/norm/norm_scale", "norm_scale").lr == pytest.approx(gains)
    assert r.update_at(FINAL, "norm_scale") == r.updates["token_embed"] == r.updates["lm_head"] == Update()
    plain = recipe(name, BASE.replace(num_layers=96))
    assert plain.weights == r.weights
    assert set(plain.updates.values()) == {Update()}
    with pytest.raises(ConfigError, match="base_depth: updates='depth' needs"):
        recipe(name, BASE, updates="depth")


def test_what_a_run_must_choose_is_a_hyperparameter():
    assert {"base_width", "base_depth"} <= set(entry("completep").hyperparameters)
