"""Fans by role, counts of residuals, parameters and FLOPs, and what is refused."""

import dataclasses
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinit.geometry import (
    CROSS,
    EXPERTS,
    LAYER_MATRICES,
    OUTPUTS,
    VECTORS,
    Geometry,
    Role,
    nearest_divisor,
)
from tests.models import SMALL, geometries, refused

GPT2 = Geometry(num_layers=12, d_model=768, num_heads=12, d_ff=3072, vocab_size=50257, mlp="gelu", tied_embeddings=True)


# case B01: the head axes of a (d, H, h) kernel are one output, whatever the array's shape
def test_fans_of_attention():
    g = Geometry(num_layers=2, d_model=512, num_heads=8, head_dim=64, d_ff=2048, vocab_size=1000)
    assert [g.matrix(r) for r in ("attn_q", "attn_k", "attn_v", "attn_out")] == [(512, 512)] * 4


def test_fans_with_grouped_heads_and_a_head_width_of_its_own():
    g = Geometry(num_layers=2, d_model=100, num_heads=6, num_kv_heads=2, head_dim=16, d_ff=40, vocab_size=9)
    assert g.matrix("attn_q") == (100, 96)
    assert g.matrix("attn_k") == g.matrix("attn_v") == (100, 32)
    assert g.matrix("attn_out") == (96, 100)
    assert (g.fan_in("mlp_down"), g.fan_out("mlp_down")) == (40, 100)
    assert g.matrix("lm_head") == (100, 9)


# case B02: the fans of an expert do not know how many there are
@given(geometries(num_experts=0), st.integers(1, 64))
def test_experts_do_not_enter_the_fans(g, experts):
    with_experts = g.replace(num_experts=experts)
    for expert, dense in (("expert_gate", "mlp_gate"), ("expert_up", "mlp_up"), ("expert_down", "mlp_down")):
        assert with_experts.matrix(expert) == g.matrix(dense)
        assert with_experts.count(expert) == experts * g.count(dense)
        assert with_experts.count(dense) == 0
    assert with_experts.matrix("router") == (g.d_model, experts)


@given(geometries())
def test_matrices_fit_together(g):
    stream = {r: g.matrix(r) for r in LAYER_MATRICES if r is not Role.ROUTER}
    for role, (fan_in, fan_out) in stream.items():
        assert (fan_out if role in OUTPUTS else fan_in) == g.d_model
        assert g.fan_in(role) == fan_in
        assert g.fan_out(role) == fan_out
    assert g.fan_out("attn_q") == g.fan_in("attn_out") == g.num_heads * g.head_dim
    assert g.fan_out("attn_k") * g.num_heads == g.fan_out("attn_q") * g.num_kv_heads


@given(geometries())
def test_roles_and_counts(g):
    assert set(g.roles).isdisjoint(EXPERTS) == (g.num_experts == 0)
    assert set(g.roles).isdisjoint(CROSS) == (g.stack != "decoder")
    for role in Role:
        assert g.count(role) >= 0
        if role not in g.roles or role in VECTORS:
            assert g.count(role) == 0
    assert g.count("mlp_gate") == (g.num_layers if g.gated and not g.num_experts else 0)
    assert g.count("lm_head") == 1 - g.tied_embeddings
    assert g.count("attn_out") == g.num_layers


@pytest.mark.parametrize(
    ("change", "routed"),
    [
        ({}, range(8)),
        ({"moe_every": 2}, (1, 3, 5, 7)),
        ({"moe_every": 3}, (2, 5)),
        ({"first_dense": 3}, range(3, 8)),
        ({"moe_every": 2, "first_dense": 4}, (5, 7)),
        ({"moe_every": 8}, (7,)),
        ({"num_experts": 0}, ()),
    ],
)
def test_routed_layers(change, routed):
    g = SMALL.replace(**{"num_layers": 8, "num_experts": 5} | change)
    assert g.routed_layers == tuple(routed)
    assert g.mixed == (0 < len(routed) < 8)
    assert [g.routed(i) for i in range(8)] == [i in routed for i in range(8)]
    dense = 8 - len(routed)
    assert [g.count(r) for r in ("mlp_gate", "mlp_up", "mlp_down")] == [dense] * 3
    assert [g.count(r) for r in EXPERTS] == [len(routed), *[5 * len(routed)] * 3]
    # parameters and FLOPs are those of the layers one by one
    every, none = (SMALL.replace(num_layers=8, num_experts=n) for n in (5, 0))
    for count in (lambda g: g.num_parameters, lambda g: g.flops_per_token(16)):
        assert 8 * (count(g) - count(none)) == len(routed) * (count(every) - count(none))


# case B13 and B14: the number of residual additions
@given(geometries())
def test_residual_additions(g):
    per_layer = {"single": 1 if g.parallel else 2, "encoder": 2, "decoder": 3}[g.stack]
    assert g.sublayers == per_layer
    assert g.num_residuals == per_layer * g.num_layers
    assert g.num_branches == (3 if g.stack == "decoder" else 2) * g.num_layers
    if not g.num_experts:
        assert sum(g.count(r) for r in OUTPUTS) == g.num_branches


def test_counts_of_gpt2():
    g = GPT2
    layer = 4 * 768 * 768 + 2 * 768 * 3072
    assert g.num_parameters == 12 * layer + 50257 * 768  # 123.5 M; with positions and vectors 124.4 M
    # PaLM's appendix B, the tied head's product included
    assert g.flops_per_token(1024) == 6 * (12 * layer + 50257 * 768) + 12 * 12 * 768 * 1024


# case B55: a tied head is no parameter, but its product is still a product
@given(geometries())
def test_tied_head(g):
    tied, untied = g.replace(tied_embeddings=True), g.replace(tied_embeddings=False)
    assert untied.num_parameters - tied.num_parameters == g.vocab_size * g.d_model
    assert untied.flops_per_token(64) == tied.flops_per_token(64)


@given(geometries())
def test_geometry_is_a_value(g):
    again = Geometry(**dataclasses.asdict(g))
    assert again == g
    assert hash(again) == hash(g)
    assert g.replace(num_layers=g.num_layers + 1) != g


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_layers": 0}, "model.num_layers: 0 is not a positive number"),
        ({"vocab_size": -1}, "model.vocab_size: -1 is not a positive number"),
        ({"num_experts": -2}, "model.num_experts: -2 is negative"),
        ({"mlp": "swigl"}, "model.mlp 'swigl' is unknown; did you mean 'swiglu'?"),
        ({"stack": "encode"}, "model.stack 'encode' is unknown; did you mean 'encoder'?"),
        ({"stack": "decoder"}, "model.stack: 'decoder' needs encoder_layers and decoder_layers"),
        (
            {"num_heads": 7, "num_kv_heads": 7, "head_dim": 0},
            "model.num_heads: 7 does not divide d_model 64; nearest that does: 8 (or give head_dim)",
        ),
        ({"num_kv_heads": 3}, "model.num_kv_heads: 3 does not divide num_heads 8; nearest that does: 2"),
        ({"moe_every": 2}, "model.moe_every: 2 needs model.num_experts; nearest: 1"),
        ({"first_dense": 1}, "model.first_dense: 1 needs model.num_experts; nearest: 0"),
        ({"num_experts": 4, "moe_every": 0}, "model.moe_every: 0 is too small; nearest: 1"),
        ({"num_experts": 4, "first_dense": -1}, "model.first_dense: -1 is too small; nearest: 0"),
        (
            {"num_experts": 4, "moe_every": 4},
            "model.moe_every: 4 leaves no routed layer of num_layers 3; nearest: 3",
        ),
        (
            {"num_experts": 4, "first_dense": 3},
            "model.first_dense: 3 leaves no routed layer of num_layers 3; nearest: 2",
        ),
        (
            {"num_experts": 4, "moe_every": 2, "first_dense": 2},
            "model.first_dense: 2 leaves no routed layer of num_layers 3 with moe_every 2; nearest: 1",
        ),
    ],
)
def test_refusals_name_the_nearest(change, says):
    assert refused(SMALL.replace, **change) == says


@given(geometries())
def test_a_vector_has_no_fan(g):
    for role in VECTORS:
        assert "has no fan" in refused(g.matrix, role)


def test_unknown_role():
    assert refused(Role.of, "attn_o") == "role 'attn_o' is unknown; did you mean 'attn_out'?"
    assert refused(SMALL.matrix, "mlp_dwn").endswith("did you mean 'mlp_down'?")


@given(st.integers(1, 400), st.integers(1, 400))
def test_nearest_divisor(value, whole):
    best = nearest_divisor(value, whole)
    assert whole % best == 0
    assert all(abs(best - value) <= abs(k - value) for k in range(1, whole + 1) if whole % k == 0)


def test_a_405b_geometry_allocates_nothing():
    g = Geometry(126, 16384, 128, 53248, 128256, num_kv_heads=8, max_seq_len=131072)
    assert g.num_parameters == pytest.approx(405.8e9, rel=1e-3)
    assert math.isfinite(g.flops_per_token(8192))


def test_no_jax():
    code = "import sys, deepinit.geometry, deepinit.laws, deepinit.recipe; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
