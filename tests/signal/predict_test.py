"""The prediction against closed forms, published tables and drawn models."""

import dataclasses
import json
import math
import subprocess
import sys

import jax
import numpy as np
import pytest

import deepinit
from deepinit import Geometry, stacks
from deepinit.laws import Normal
from deepinit.signal import gaussian, gram, logits
from deepinit.signal.forward import Forward, Options
from deepinit.signal.predict import predict
from tests.models import born, own_recipe, refused, stats_of, tokens

SMALL = Geometry(num_layers=12, d_model=64, num_heads=2, d_ff=168, vocab_size=256, max_seq_len=64)
PLAIN = {"positions": "none", "norm_eps": 0.0}


def wide(scheme, geometry=SMALL, norm=None, args=None, **options):
    """A prediction from an input of variance 1, without positions."""
    r = deepinit.recipe(scheme, geometry, norm=norm, **(args or {}))
    return predict(r, **{"input_variance": 1.0, "exponents": False, **PLAIN, **options})


# --- closed forms ------------------------------------------------------------------------------------------------


def test_flat_attention_over_different_tokens_has_the_harmonic_share():
    g = SMALL.replace(max_seq_len=48)
    r = deepinit.recipe("fixed_normal", g, std=1e-4)
    p = predict(r, input_variance=1.0, **PLAIN)
    harmonic = sum(1 / i for i in range(1, 49)) / 48
    v = 1e-8  # E w^2
    assert p.branch[0] == pytest.approx((64 * v) * (64 * v) * harmonic, rel=1e-6)


def test_first_relu_branch_in_closed_form():
    g = SMALL.replace(mlp="relu", d_ff=256)
    p = wide("glorot_normal", g)
    up = 2 / (64 + 256)
    assert p.branch[1] == pytest.approx(256 * up * (64 * up) / 2, rel=1e-6)


@pytest.mark.parametrize("sigma", [0.0, 1.0, 2.0])
def test_participation_of_random_softmax(sigma):
    n, draws = 16, 40_000
    x = np.exp(sigma * np.random.default_rng(1).standard_normal((draws, n)))
    p = x / x.sum(1, keepdims=True)
    sampled = (p**2).sum(1)
    t = gaussian.sharpness(sigma**2, n)[-1]
    predicted = math.exp(t) / (math.exp(t) + n - 1)
    assert predicted == pytest.approx(sampled.mean(), abs=5 * sampled.std() / math.sqrt(draws) + 1e-9)


@pytest.mark.parametrize("name", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("rho", [-0.6, 0.0, 0.5, 0.95])
def test_kernels_against_sampling(name, rho):
    u, draws = 0.8, 400_000
    a, b = np.random.default_rng(2).standard_normal((2, draws)) * math.sqrt(u)
    f = gaussian.ACTIVATIONS[name]
    products = f(a) * f(rho * a + math.sqrt(1 - rho**2) * b)
    predicted = gaussian.kernel(name, u, np.array([rho]))[0]
    assert predicted == pytest.approx(products.mean(), abs=6 * products.std() / math.sqrt(draws))
    assert gaussian.kernel(name, u, np.array([1.0]))[0] == pytest.approx(gaussian.second_moment(name, u), rel=2e-3)


@pytest.mark.parametrize(
    ("spread", "own", "rate"), [(0.3, 0.0, 0.0), (4.0, 0.0, 0.0), (30.0, 0.0, 0.0), (0.5, 3.0, 0.2)]
)
def test_expected_loss_against_sampling(spread, own, rate):
    vocab, draws = 97, 20_000
    z = math.sqrt(spread) * np.random.default_rng(3).standard_normal((draws, vocab))
    if own:
        z[:, 0] = own
    top = z.max(1)
    log_z = top + np.log(np.exp(z - top[:, None]).sum(1))
    predicted = logits.expected_loss(spread, own, vocab, rate)
    assert predicted == pytest.approx(log_z.mean() - rate * own, abs=6 * log_z.std() / math.sqrt(draws))


def test_soft_cap_bounds_the_logits():
    free, capped = (logits.expected_loss(100.0, 0.0, 97, 0.0, cap) for cap in (0.0, 2.0))
    assert capped < math.log(97) + 2 < free
    assert logits.capped_variance(1e-4, 15.0) == pytest.approx(1e-4, rel=1e-3)


# --- tables of drawn models (Var(x_L), d = 64, 64 positions, 3 seeds) ------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "norm", "layers", "measured", "sd"),
    [
        ("glorot_normal", "pre", 12, 7.179, 0.45),
        ("glorot_normal", "pre", 80, 68.45, 4.4),
        ("small_init", "pre", 12, 1.878, 0.054),
        ("small_init", "pre", 80, 9.915, 0.62),
        ("small_init_scaled", "pre", 80, 1.025, 0.015),
        ("he_normal", "pre", 80, 405.7, 13),
        ("fixed_normal", "pre", 80, 0.9985, 0.016),
        ("subln", "sub", 80, 994.8, 75),
    ],
)
def test_measured_tables(scheme, norm, layers, measured, sd):
    p = wide(scheme, SMALL.replace(num_layers=layers), norm)
    share = 1 - p.kept[-1] ** 2 / p.variance[-1]
    scatter = math.sqrt(2 / 64 * ((share * p.correlation[-1]) ** 2 + 1 / 128)) * p.variance[-1]
    assert abs(p.variance[-1] - measured) < 3 * max(sd, scatter)


@pytest.mark.parametrize("layers", [12, 80])
def test_peri_ln_adds_one_each_time_whatever_the_weights(layers):
    for std in (0.02, 0.2):
        p = wide("peri_ln", SMALL.replace(num_layers=layers), args={"std": std})
        np.testing.assert_allclose(p.variance, 1 + np.arange(2 * layers + 1), rtol=1e-9)


def test_a_post_norm_stream_has_variance_one():
    for scheme in ("post_ln", "deepnorm", "admin"):
        np.testing.assert_allclose(wide(scheme).variance[1:], 1, rtol=1e-9)


def test_post_norm_aligns_tokens_and_deepnorm_does_not():
    deep = SMALL.replace(num_layers=80)
    assert wide("post_ln", deep).correlation[-1] > 0.99
    assert wide("deepnorm", deep).correlation[-1] < 0.01


@pytest.mark.parametrize("scheme", ["rezero", "zero_out", "skipinit", "fixup"])
def test_identity_is_exact(scheme):
    p = wide(scheme)
    assert (p.branch == 0).all()
    assert (p.variance == p.variance[0]).all()
    assert p.forward.identity


def test_the_same_constant_on_weights_and_on_the_branch_gives_one_variance():
    g = SMALL.replace(num_layers=16)
    on_weights = wide("small_init_scaled", g)
    plain = deepinit.recipe("small_init", g)
    branch = plain.residual.replace(branch=(2 * 16) ** -0.5)
    on_branch = predict(dataclasses.replace(plain, residual=branch), input_variance=1.0, exponents=False, **PLAIN)
    np.testing.assert_allclose(on_branch.variance, on_weights.variance, rtol=1e-12)


def test_norm_free_stacks_overflow_where_they_do():
    p = wide("glorot_normal", norm="none")
    np.testing.assert_allclose(p.layer_variance[1:4], [1.31, 2.23, 11.2], rtol=0.35)  # measured, then 1e8 in layer 5
    assert p.overflow["float16"] in (5, 6)
    assert p.overflow["float32"] in (7, 8, 9)
    assert p.overflow["bfloat16"] == p.overflow["float32"]
    assert any("ln Var" in note for note in p.notes)


def test_truncation_counts_through_the_real_std():
    whole = wide("modern", args={"cut": 0.0})
    cut = wide("modern")  # at 3 sigma, not corrected
    assert cut.branch[1] / whole.branch[1] == pytest.approx(0.986578**6, rel=0.05)


# --- what the batch says -------------------------------------------------------------------------------------------


def test_repeated_tokens_share_their_embedding():
    r = deepinit.recipe("small_init_scaled", SMALL)
    p = predict(r, np.array([[1, 2, 1, 3]]), exponents=False)
    assert p.correlation[0] == pytest.approx(2 / 12)
    assert p.repetition == pytest.approx((4 + 1 + 1) / 16)
    all_same = predict(r, np.zeros(8, np.int32), exponents=False)
    np.testing.assert_allclose(all_same.correlation, 1, rtol=1e-9)


def test_a_rate_of_repetition_is_the_mean_over_texts():
    r = deepinit.recipe("small_init_scaled", SMALL)
    texts = np.random.default_rng(0).integers(0, 8, (64, 32))
    drawn = predict(r, texts, exponents=False)
    rate = predict(r, seq_len=32, repetition=1 / 8, exponents=False)
    assert rate.variance[-1] == pytest.approx(drawn.variance[-1], rel=0.02)
    assert rate.correlation[-1] == pytest.approx(drawn.correlation[-1], rel=0.05)


def test_a_tied_head_meets_the_own_token():
    r = deepinit.recipe("rezero", SMALL.replace(tied_embeddings=True))
    p = predict(r, np.arange(16), exponents=False)
    assert p.own_logit == pytest.approx(64 * 64**-0.5)  # d * 1 * 1, times the factor 1/sqrt(d)
    assert p.loss > math.log(256)
    untied = predict(deepinit.recipe("rezero", SMALL), np.arange(16), exponents=False)
    assert untied.own_logit == 0


def test_tokens_change_what_attention_adds():
    r = deepinit.recipe("glorot_normal", SMALL.replace(max_seq_len=256))
    short, long = (predict(r, seq_len=n, exponents=False).branch[0] for n in (32, 256))
    assert long < short / 4
    assert "32 of 256 positions" in " ".join(predict(r, seq_len=32, exponents=False).notes)


def test_qk_norm_and_rope_enter():
    r = deepinit.recipe("he_normal", SMALL)
    scores = [predict(r, exponents=False, **o).scores[0] for o in ({}, {"qk_norm": True})]
    assert scores[0] == pytest.approx(4.0, rel=1e-3)
    assert scores[1] == pytest.approx(1.0, rel=1e-3)
    aligned = np.zeros(32, np.int32)
    turned, still = (predict(r, aligned, positions=x, exponents=False).scores[0] for x in ("rope", "none"))
    assert still == pytest.approx(0, abs=1e-9)  # every logit of a row is the same
    assert turned > 0.5


# --- what is refused -----------------------------------------------------------------------------------------------


def test_what_is_outside_is_refused_in_one_line():
    assert "given by the caller" in refused(predict, deepinit.recipe("external", SMALL))
    assert "drawn together" in refused(predict, deepinit.recipe("mimetic", SMALL))
    encoder = SMALL.replace(stack="encoder", encoder_layers=6, decoder_layers=6)
    assert "no encoder" in refused(predict, deepinit.recipe("deepnorm", encoder))
    r = deepinit.recipe("gpt2", SMALL)
    assert "rope_theta" in refused(predict, r, rope_tetha=1e4)
    assert "seq_len" in refused(predict, r, seq_len=65)
    assert "repetition" in refused(predict, r, repetition=1.5)
    assert "tokens" in refused(predict, r, np.zeros((2, 2, 2), int))
    assert "tokens" in refused(predict, r, np.zeros(4))
    assert "input_variance" in refused(predict, r, input_variance=-1.0)


def test_every_option_of_the_decoder_is_known():
    from deepinit.nn.part import Part
    from deepinit.signal.forward import INDIFFERENT

    known = {*Options.__dataclass_fields__, *INDIFFERENT}
    assert set(Part.OPTIONS) <= known
    for name, default in ((f, getattr(Options(), f)) for f in Options.__dataclass_fields__):
        assert getattr(Part, name) == default, name


@pytest.mark.parametrize("name", [n for n in deepinit.scheme_names() if n not in ("external", "mimetic")])
@pytest.mark.parametrize(
    "changes", [{}, {"tied_embeddings": True}, {"mlp": "relu", "num_kv_heads": 1}, {"num_experts": 4}]
)
def test_every_scheme_is_predicted(name, changes):
    g = Geometry(**{"num_layers": 3, "d_model": 64, "num_heads": 2, "d_ff": 96, "vocab_size": 256, **changes})
    try:
        r = deepinit.recipe(name, g)
    except deepinit.ConfigError:
        pytest.skip("the scheme refuses these sizes")
    p = predict(r, seq_len=16)
    assert len(p.variance) == g.num_residuals + 1
    assert np.isfinite(p.variance).all()
    assert (p.variance > 0).all()
    assert (np.abs(p.correlation) <= 1 + 1e-9).all()
    assert p.loss >= math.log(g.vocab_size) - 1e-9 - abs(p.own_logit)
    json.dumps(p.to_json(), allow_nan=False)
    assert Forward.of(r, {}).additions[-1].layer == g.num_layers - 1


# Dense layers are predicted as dense, routed ones as routed: with stds that tell the two apart.
@pytest.mark.parametrize("rule", [{"moe_every": 2}, {"first_dense": 3}])
def test_a_mixed_stack_layer_by_layer(rule):
    g = SMALL.replace(num_layers=5, d_model=128, d_ff=256, num_experts=4, **rule)
    recipe = own_recipe(
        geometry=g, mlp_down=Normal(0.01), expert_down=Normal(0.08), mlp_up=Normal(0.05), expert_up=Normal(0.02)
    )
    batch = tokens(batch=4, time=32)
    model, _, params = born(recipe)
    kept = stacks.layered(jax.device_get(stats_of(model)(params, batch)))
    p = predict(recipe, np.asarray(batch), exponents=False)
    assert len(p.variance) == 11
    assert len(p.scores) == 5
    assert p.branch[1::2] == pytest.approx(kept["layers/mlp_residual/branch_ms"], rel=0.2)
    assert p.layer_variance[1:] == pytest.approx(kept["layers/stream_ms"][:, -1], rel=0.2)
    routed = np.asarray([g.routed(layer) for layer in range(5)])
    assert p.branch[1::2][routed].min() > 2 * p.branch[1::2][~routed].max()


def test_grams_average_over_a_batch():
    tokens = np.random.default_rng(0).integers(0, 5, (3, 16))
    whole = gram.of_tokens(tokens)
    assert whole.shape == (3, 16, 16)
    attention = gram.Attention(16, 1e4, 8)
    one_by_one = [attention(whole[i : i + 1], 0.0) for i in range(3)]  # flat attention knows no batch average
    np.testing.assert_allclose(attention(whole, 0.0), np.concatenate(one_by_one), rtol=1e-12)


def test_the_largest_models_need_little_memory_and_no_jax():
    code = """
import sys
import deepinit
from deepinit.signal.predict import predict
llama = deepinit.Geometry(126, 16384, 128, 53248, 128256, num_kv_heads=8, max_seq_len=8192)
p = predict(deepinit.recipe("small_init_scaled", llama))
deep = predict(deepinit.recipe("deepnorm", llama.replace(num_layers=1000)))
assert p.seq_len == deep.seq_len == 256
assert len(deep.variance) == 2001
assert "jax" not in sys.modules
print(next(int(x.split()[1]) for x in open('/proc/self/status') if x.startswith('VmHWM')) / 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 300  # MiB
