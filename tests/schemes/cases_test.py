"""What people reported from the field, as far as the numbers of a recipe answer it."""

import math

import pytest

from deepinit.geometry import Geometry
from deepinit.laws import Uniform
from deepinit.schemes.registry import recipe

GPT2 = Geometry(num_layers=12, d_model=768, num_heads=12, d_ff=3072, vocab_size=50257, mlp="gelu", tied_embeddings=True)
OUT = ("attn_out", "mlp_down")


# case B06: the down-projection takes its own fan-in where the law is by fan, and the common std where it is fixed
def test_down_projection_by_fan_or_by_width():
    g = Geometry(num_layers=22, d_model=2048, num_heads=32, d_ff=5632, vocab_size=32000, parallel=True)
    by_fan = recipe("lecun_normal", g, divisor="total").weights  # a parallel block has L additions
    assert by_fan["attn_out"].std == pytest.approx(4.711e-3, rel=1e-4)
    assert by_fan["mlp_down"].std == pytest.approx(2.841e-3, rel=1e-4)
    assert by_fan["mlp_down"].formula == "sqrt(1/fan_in)/sqrt(L)"
    fixed = recipe("small_init_scaled", g).weights
    assert fixed["attn_out"].std == fixed["mlp_down"].std
    assert fixed["mlp_down"].formula == "sqrt(2/(5d))/sqrt(L)"


# case B08: the bound of a uniform law is sqrt(3) times its std
def test_uniform_bound():
    g = Geometry(num_layers=2, d_model=1024, num_heads=8, d_ff=1024, vocab_size=1024)
    law = recipe("glorot_uniform", g).weights["attn_q"]
    assert law == Uniform(0.03125)
    assert law.bound == pytest.approx(math.sqrt(3 / 1024))


# case B10: residual projections found by role, all 2L of them
def test_gpt2_residual_projections():
    r = recipe("gpt2", GPT2)
    assert r.outputs == OUT
    assert sum(GPT2.count(role) for role in r.outputs) == GPT2.num_residuals == 24
    for role, law in r.weights.items():
        if role in (*OUT, "expert_down"):
            assert law.std == pytest.approx(0.02 / math.sqrt(24))
        elif role in ("attn_q", "attn_k", "attn_v", "mlp_up", "token_embed", "lm_head"):
            assert law.std == 0.02


# case B13: N is the number of residual additions, 2L in a sequential block
def test_variance_of_the_stream():
    g = GPT2.replace(num_layers=80)
    scaled, plain = recipe("small_init_scaled", g).weights, recipe("small_init", g).weights
    ratio = (scaled["attn_out"].std / plain["attn_out"].std) ** 2
    assert ratio * g.num_residuals == pytest.approx(1)  # 1 + sigma_F^2 in total, against 1 + 2L sigma_F^2


# case B14
@pytest.mark.parametrize(
    ("change", "additions", "std"),
    [
        ({"parallel": True}, 24, 0.004082),
        ({}, 48, 0.002887),
        ({"stack": "decoder", "encoder_layers": 24, "decoder_layers": 24}, 72, 0.002357),
    ],
)
def test_divisor_counts_additions(change, additions, std):
    g = GPT2.replace(num_layers=24, **change)
    assert g.num_residuals == additions
    weights = recipe("megatron", g).weights
    for role in (*OUT, *(["cross_out"] if g.stack == "decoder" else [])):
        assert weights[role].std == pytest.approx(std, abs=5e-7)
        assert weights[role].std == pytest.approx(0.02 / math.sqrt(additions))


# case B17: a gain on Xavier, and a Xavier draw times the gain, are one law
def test_gain_on_xavier():
    g = Geometry(num_layers=2, d_model=512, num_heads=8, d_ff=4096, vocab_size=1000)
    law = recipe("glorot_normal", g, gain=0.343).weights["mlp_down"]
    assert law.std == pytest.approx(0.00715, abs=5e-6)
    assert law == recipe("glorot_normal", g).weights["mlp_down"].scaled(0.343)


# case B21: by total depth, or by layer index
def test_two_families_of_divisors():
    g = GPT2.replace(num_layers=4)
    assert recipe("gpt2", g, divisor="total").weights["attn_out"].std == pytest.approx(0.00707, abs=5e-6)
    by_index = recipe("gpt2", g, divisor="layer").weights["attn_out"]
    assert by_index.std == pytest.approx((0.01414, 0.01, 0.00816, 0.00707), abs=5e-6)
    assert by_index.formula == "0.02/sqrt(2l)"
    # by layer index, the last layer of a stack is the total-depth rule
    assert by_index.std[-1] == pytest.approx(recipe("gpt2", g).weights["attn_out"].std)


# case B03: std_l = s / sqrt(2 (l + 1)), l = 0 .. L-1
def test_std_by_layer():
    std = recipe("megatron", GPT2.replace(num_layers=8), divisor="layer", std=1.0).weights["mlp_down"].std
    assert std == pytest.approx([1 / math.sqrt(2 * (layer + 1)) for layer in range(8)])
    assert std[0] / std[7] == pytest.approx(math.sqrt(8))


# case B29: the embedding's multiplier and its std belong together
@pytest.mark.parametrize("name", ["post_ln", "fixup"])
def test_embedding_of_unit_size(name):
    r = recipe(name, Geometry(num_layers=6, d_model=512, num_heads=8, d_ff=2048, vocab_size=1000))
    assert r.multipliers["embed"] == pytest.approx(math.sqrt(512))
    assert r.weights["token_embed"].std * r.multipliers["embed"] == pytest.approx(1)


# case B32
def test_positions_have_a_law_of_their_own():
    weights = recipe("gpt2", GPT2).weights
    assert (weights["token_embed"].std, weights["pos_embed"].std) == (0.02, 0.01)
    logit_std = weights["token_embed"].std * math.sqrt(GPT2.d_model) * recipe("gpt2", GPT2).multipliers["logits"]
    assert math.log(GPT2.vocab_size) + logit_std**2 / 2 == pytest.approx(10.98, abs=5e-3)


# case B33: an embedding is a look-up, whatever the size of the vocabulary
@pytest.mark.parametrize("name", ["xavier", "xavier_uniform", "he", "lecun_normal"])
def test_embedding_does_not_know_the_vocabulary(name):
    for vocab in (100, 50257):
        std = recipe(name, GPT2.replace(vocab_size=vocab)).weights["token_embed"].std
        assert std == 768**-0.5 == pytest.approx(0.0361, abs=5e-5)


# case B35: 0.02 as a std is 0.02 at any width, and the recipe says which version of the scheme it is
def test_std_is_a_std():
    wide = recipe("fixed_normal", GPT2.replace(d_model=4096), std=0.02)
    assert {law.std for role, law in wide.weights.items() if GPT2.count(role)} == {0.02}
    assert wide.version >= 1
    assert wide.to_json()["version"] == wide.version


# case B57
def test_published_and_real_numbers():
    g = Geometry(num_layers=32, d_model=4096, num_heads=32, d_ff=16384, vocab_size=50304)
    assert recipe("small_init", g).weights["attn_out"].std == pytest.approx(0.009882, abs=5e-7)
    assert recipe("wang_init", g).weights["attn_out"].std == pytest.approx(0.0009766, abs=5e-8)
    gpt2 = recipe("gpt2", g).weights
    assert (gpt2["attn_q"].std, gpt2["attn_out"].std) == pytest.approx((0.02, 0.0025))


# case B63: no argument is a variance
def test_std_not_variance():
    assert recipe("fixed_normal", GPT2, std=math.sqrt(0.04)).weights["token_embed"].std == pytest.approx(0.2)


def test_base_std_by_rule():
    for rule, short, value in (
        ("sqrt(2/d)", "he", math.sqrt(2 / 768)),
        ("sqrt(2/(5d))", "small", math.sqrt(2 / 3840)),
        ("1/sqrt(d)", "fan_in", 768**-0.5),
    ):
        by_rule = recipe("megatron", GPT2, std=rule).weights
        assert by_rule["attn_q"].std == pytest.approx(value)
        assert by_rule == recipe("megatron", GPT2, std=short).weights
        assert by_rule["attn_q"].formula == rule


@pytest.mark.parametrize(("cut", "unit"), [(2.0, 0.879626), (3.0, 0.986578)])
def test_cut_corrected_or_not(cut, unit):
    corrected = recipe("megatron", GPT2, cut=cut).weights["attn_q"]
    as_others = recipe("megatron", GPT2, cut=cut, corrected=False).weights["attn_q"]
    assert corrected.std == pytest.approx(0.02)
    assert as_others.std == pytest.approx(0.02 * unit, rel=1e-6)
    assert as_others.bound == pytest.approx(0.02 * cut)


@pytest.mark.parametrize("layers", [12, 32, 80, 200, 1000])
def test_deepnorm_update_bound(layers):
    r = recipe("deepnorm", GPT2.replace(num_layers=layers))
    beta = r.weights["attn_out"].std / math.sqrt(2 / (2 * 768))
    alpha = {12: 2.213, 32: 2.828, 80: 3.557, 200: 4.472, 1000: 6.687}[layers]
    assert r.residual.skip == pytest.approx(alpha, abs=5e-4)
    assert 4 * layers * beta**2 / r.residual.skip**2 == pytest.approx(1)


def test_deepnorm_encoder_decoder():
    decoder = GPT2.replace(stack="decoder", encoder_layers=12, decoder_layers=6, num_layers=6)
    r = recipe("deepnorm", decoder)
    beta = r.weights["cross_out"].std / math.sqrt(2 / (2 * 768))
    assert r.residual.skip == pytest.approx(18**0.25)
    assert 6 * 6 * beta**2 / r.residual.skip**2 == pytest.approx(1)  # three sublayers a layer
    assert r.weights["cross_q"].std == r.weights["attn_q"].std
    encoder = decoder.replace(stack="encoder", num_layers=12)
    deep = (12**4 * 6) ** (1 / 16)
    assert recipe("deepnorm", encoder).residual.skip == pytest.approx(0.81 * deep)
    assert recipe("deepnorm", encoder, exact=True).residual.skip == pytest.approx(0.813841 * deep, rel=1e-6)


def test_fixup():
    r = recipe("fixup", GPT2.replace(tied_embeddings=False))
    assert {role for role, law in r.weights.items() if law.bound == 0} == {
        "attn_out", "mlp_down", "lm_head", "bias", "branch_shift"
    }  # fmt: skip
    assert r.residual.shift
    assert (r.residual.gate.value, r.residual.gate.role) == (1.0, "branch_scale")
    assert (r.updates["branch_scale"].lr, r.updates["branch_shift"].lr, r.updates["attn_q"].lr) == (0.1, 0.1, 1.0)


def test_rezero_shares_a_gate_by_layer():
    r = recipe("rezero", GPT2)
    assert (r.residual.gate.value, r.residual.gate.shape, r.residual.gate.share) == (0.0, "scalar", "layer")
    assert r.weights["residual_gate"].value == 0.0
    assert recipe("rezero", GPT2, share="sublayer").residual.gate.share == "sublayer"


def test_external_knows_nothing_of_the_matrices():
    weights = recipe("external", GPT2).weights
    assert math.isnan(weights["attn_q"].std)
    assert weights["norm_scale"].value == 1.0


# case B15: the divisor is that of the whole stack; a stage of it is no geometry of its own
def test_divisor_of_a_pipeline_stage():
    g = GPT2.replace(num_layers=32)
    assert recipe("gpt2", g).weights["attn_out"].std == pytest.approx(0.0025)
    by_layer = recipe("gpt2", g, divisor="layer").weights["attn_out"]
    assert [by_layer.at(layer).std for layer in (8, 15)] == pytest.approx([0.02 / math.sqrt(18), 0.02 / math.sqrt(32)])


# case B18: q : k : v = 1 : 1 : beta, however the matrices are fused
def test_deepnorm_gains():
    g = Geometry(num_layers=12, d_model=64, num_heads=4, d_ff=256, vocab_size=100)
    weights = recipe("deepnorm", g).weights
    xavier = recipe("glorot_normal", g).weights
    gains = {role: weights[role].std / xavier[role].std for role in weights if role.startswith(("attn", "mlp"))}
    beta = pytest.approx(0.3195, abs=5e-5)
    assert gains == {
        "attn_q": 1.0, "attn_k": 1.0, "attn_v": beta, "attn_out": beta,
        "mlp_gate": 1.0, "mlp_up": beta, "mlp_down": beta,
    }  # fmt: skip
    gated = recipe("deepnorm", g, scale_gate=True).weights
    assert gated["mlp_gate"].std / xavier["mlp_gate"].std == beta


# case B23: different constants in the two stacks, depths may differ, q and k untouched
def test_tfixup():
    sizes = Geometry(num_layers=6, d_model=512, num_heads=8, d_ff=2048, vocab_size=1000, mlp="relu")
    encoder = sizes.replace(stack="encoder", encoder_layers=6, decoder_layers=3)
    decoder = sizes.replace(stack="decoder", encoder_layers=3, decoder_layers=6)
    xavier = recipe("glorot_uniform", decoder).weights
    for g, factor in ((encoder, 0.4281), (decoder, 0.3689)):
        r = recipe("tfixup", g)
        for role in ("attn_v", "attn_out", "mlp_up", "mlp_down", *(["cross_v", "cross_out"] if g is decoder else [])):
            assert r.weights[role].std / xavier[role].std == pytest.approx(factor, abs=5e-5)
        assert r.weights["attn_q"] == xavier["attn_q"]
        assert r.weights["token_embed"].std == pytest.approx(512**-0.5 * 54**-0.25)
        assert r.residual.norm == "none"
    # decoder-only has no formula of its own: the documented choice is the decoder's
    assert recipe("tfixup", sizes).weights["attn_v"] == recipe("tfixup", decoder).weights["attn_v"]


# case B25, as far as it is data: the gate is learnable, starts at exactly 0, and the branch has no other zero
def test_rezero_gate_is_the_only_zero():
    r = recipe("rezero", GPT2.replace(num_layers=32))
    zero = {role for role, law in r.weights.items() if law.bound == 0}
    assert zero == {"residual_gate", "bias", "branch_shift"}


# case B27: the value by depth, exactly
@pytest.mark.parametrize(("layers", "value"), [(12, 0.1), (18, 0.1), (24, 1e-5), (36, 1e-6)])
def test_layerscale_by_depth(layers, value):
    g = GPT2.replace(num_layers=layers)
    r = recipe("layerscale", g)
    assert (r.residual.gate.value, r.residual.gate.shape) == (value, "channel")
    assert r.weights["residual_gate"].value == r.weights["layer_scale"].value == value
    assert recipe("layerscale", g, value=1e-5).weights["residual_gate"].value == 1e-5


# case B28, as far as it is data: the vector stands on the skip, one per feature, and knows its own stack
def test_admin():
    r = recipe("admin", GPT2)
    gate = r.residual.skip_gate
    assert (gate.shape, r.residual.norm, r.residual.gate) == ("channel", "post", None)
    assert gate.value == pytest.approx(math.sqrt(25 / math.log(25) - 1))
    assert recipe("admin", GPT2, growth="1").residual.skip_gate.value == pytest.approx(math.sqrt(24))
    assert recipe("admin", GPT2, growth="n").residual.skip_gate.value == 1.0
    constant = recipe("admin", GPT2, learnable=False).residual
    assert (constant.skip, constant.skip_gate) == (gate.value, None)


# case B30: a table of unit std is a head only with 1/sqrt(d) behind it
@pytest.mark.parametrize("name", ["t5x", "palm", "olmo_core_llama", "torchtitan_llama3", "rezero", "zero_out"])
def test_tied_unit_table(name):
    g = Geometry(num_layers=2, d_model=768, num_heads=12, d_ff=3072, vocab_size=32128, tied_embeddings=True)
    r = recipe(name, g)
    assert r.weights["token_embed"].std == 1.0
    assert r.multipliers["logits"] == 768**-0.5
    own = recipe(name, g.replace(tied_embeddings=False))
    if own.residual.norm != "none":
        logit = own.weights["lm_head"].std * math.sqrt(768) * own.multipliers["logits"]
        assert math.log(32128) + logit**2 / 2 == pytest.approx(10.88, abs=0.02)


def test_what_a_scheme_presupposes():
    untied = GPT2.replace(tied_embeddings=False)
    for name, needs in {
        "gemma": {"norm_offset": True},
        "hybridnorm": {"qk_norm": True, "v_norm": True, "parallel": False},
        "normformer": {"parallel": False},
        "admin": {},
    }.items():
        assert dict(recipe(name, untied).requires) == needs
    nanochat = recipe("nanochat", untied).requires
    assert (nanochat["norm_gain"], nanochat["embed_norm"], nanochat["logit_softcap"]) == (False, True, 15.0)


def test_norm_offset():
    plain = recipe("gpt2", GPT2)
    moved = plain.with_norm_offset()
    assert (plain.weights["norm_scale"].value, moved.weights["norm_scale"].value) == (1.0, 0.0)
    assert moved.requires["norm_offset"] is True
    gemma = recipe("gemma", GPT2)
    assert gemma.with_norm_offset() == gemma


def test_layernorm_scaling_shrinks_the_norm_of_layer_l():
    r = recipe("layernorm_scaling", GPT2)
    assert [s**2 for s in r.residual.scale_in] == pytest.approx([1 / layer for layer in range(1, 13)])


def test_subln_constants_of_two_depths():
    g = GPT2.replace(stack="decoder", encoder_layers=18, decoder_layers=6, num_layers=6)
    decoder, xavier = recipe("subln", g).weights, recipe("glorot_normal", g).weights
    assert decoder["attn_v"].std / xavier["attn_v"].std == pytest.approx(math.sqrt(math.log(18)))
    assert decoder["cross_v"] == xavier["cross_v"]
    encoder = recipe("subln", g.replace(stack="encoder", num_layers=18)).weights
    assert encoder["attn_v"].std / xavier["attn_v"].std == pytest.approx(math.sqrt(math.log(18) * math.log(36) / 3))
