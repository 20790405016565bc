"""Verdicts: what a drawn model may be off by chance, and what may not pass."""

import dataclasses
import math

import numpy as np
import pytest

import deepinit
from deepinit import Geometry
from deepinit.signal import checks
from deepinit.signal.measured import Measured
from deepinit.signal.predict import predict

GEOMETRY = Geometry(num_layers=4, d_model=64, num_heads=4, d_ff=168, vocab_size=256, max_seq_len=64)
DIFFERENT = np.arange(64)[None]
TARGETS = np.arange(64)[None] + 100


def case(scheme="small_init_scaled", batch=DIFFERENT, geometry=GEOMETRY, norm=None, x0=None, **args):
    """A prediction, and a measurement that agrees with it."""
    p = predict(deepinit.recipe(scheme, geometry, norm=norm, **args), batch, input_variance=x0, exponents=False)
    layers = geometry.num_layers
    m = Measured(
        scheme=scheme, layers=layers, batch=len(batch), seq_len=batch.shape[1], variance=p.variance.copy(),
        branch=p.branch, correlation=p.correlation.copy(), entropy=np.ones(layers), scores=p.scores,
        gradient=np.ones(layers + 1), roles={}, gates={}, loss=p.loss, logit_variance=p.logit_variance,
        own_logit=p.own_logit, seconds=0.0,
    )  # fmt: skip
    return p, m


def verdicts(p, m):
    return {c.name: c for c in checks.compare(p, m, TARGETS)}


def test_agreement_passes():
    p, m = case()
    found = verdicts(p, m)
    assert checks.passed(list(found.values()))
    assert found["Var(x) after layer 2"].ok
    assert found["Var(x) after layer 4"].z == pytest.approx(0)
    assert found["token correlation, top"].ok is None


@pytest.mark.parametrize("sds", [5.5, 6.5, -6.5])
def test_six_deviations_are_the_limit(sds):
    p, m = case()
    off = 1 + sds * checks.variance_sd(p)
    m.variance[-1] *= off
    found = verdicts(p, m)["Var(x) after layer 4"]
    assert found.z == pytest.approx(sds, rel=1e-6)
    assert found.ok is (abs(sds) <= 6)


def test_repetitive_text_gets_five_percent():
    text = np.tile([1, 2, 3, 1, 1, 4, 1, 5], 8)[None]
    p, m = case(batch=text)
    m.variance[-1] *= 1 + 6 * checks.variance_sd(p) + 0.04
    assert verdicts(p, m)["Var(x) after layer 4"].ok
    m.variance[-1] = p.variance[-1] * (1 + 6 * checks.variance_sd(p) + 0.06)
    assert not verdicts(p, m)["Var(x) after layer 4"].ok


def test_the_sd_grows_with_repetition_and_with_alignment():
    spread = [checks.variance_sd(case(batch=b)[0]) for b in (DIFFERENT, DIFFERENT % 4)]
    assert spread[1] > 2 * spread[0]
    aligned = checks.variance_sd(case("glorot_normal")[0])
    assert aligned > 2 * spread[0]
    narrow, wide = (checks.variance_sd(case("rezero", geometry=GEOMETRY.replace(d_model=d))[0]) for d in (64, 256))
    assert wide == pytest.approx(narrow / 2)


def test_amplified_stacks_are_not_judged():
    p, m = case("glorot_normal", norm="none", geometry=GEOMETRY.replace(num_layers=3), x0=1.0)
    assert p.amplification > checks.AMPLIFIED
    m.variance[-1] *= 3
    found = verdicts(p, m)["Var(x) after layer 3"]
    assert found.ok is None
    assert "no verdict" in found.note


def test_norm_free_but_bounded_stacks_are_judged_in_the_logarithm():
    p, m = case("tfixup_decoder")
    assert p.amplification <= checks.AMPLIFIED
    sd = checks.variance_sd(p)
    m.variance[-1] *= math.exp(7 * sd)
    assert verdicts(p, m)["Var(x) after layer 4"].z == pytest.approx(7)
    assert not verdicts(p, m)["Var(x) after layer 4"].ok


def test_post_norm_is_judged_by_gradient_and_correlation():
    p, m = case("deepnorm")
    assert checks.passed(checks.compare(p, m, TARGETS))
    for gradient in (np.linspace(3, 1, 5), np.linspace(0.5, 1, 5)):
        bad = dataclasses.replace(m, gradient=gradient)
        assert verdicts(p, bad)["gradient, first over last layer"].ok is False
    m.correlation[-1] = 0.97
    assert "collapsed" in verdicts(p, m)["token correlation, top"].note
    assert verdicts(p, m)["token correlation, top"].ok is False
    m.variance[-1] = 1.3
    assert verdicts(p, m)["Var(x) after layer 4"].ok is False


def test_an_identity_must_be_exact_in_the_gradient():
    p, m = case("rezero")
    assert verdicts(p, m)["gradient, first over last layer"].ok
    bent = dataclasses.replace(m, gradient=np.array([1.0, 1.01, 1.0, 1.0, 1.0]))
    assert verdicts(p, bent)["gradient, first over last layer"].ok is False


def test_the_loss_and_the_logits_are_judged():
    p, m = case("lecun_normal")
    worse = dataclasses.replace(m, loss=m.loss + 7 * checks.loss_sd(p, TARGETS))
    assert verdicts(p, worse)["loss at step 0"].ok is False
    louder = dataclasses.replace(m, logit_variance=m.logit_variance * (1 + 7 * checks.logit_sd(p)))
    assert verdicts(p, louder)["logit variance"].ok is False
    zero, silent = case("fixup")
    found = verdicts(zero, silent)
    assert found["loss at step 0"].ok
    assert found["loss at step 0"].predicted == pytest.approx(math.log(256))
    assert found["logit variance"].ok


def test_wide_logits_have_no_verdict_on_the_loss():
    p, m = case("minicpm")
    assert p.logit_variance > checks.WIDEST
    assert verdicts(p, m)["loss at step 0"].ok is None


def test_what_is_not_finite_fails_and_says_where():
    p, m = case("glorot_normal", norm="none", geometry=GEOMETRY.replace(num_layers=10), x0=1.0)
    blown = np.concatenate([p.variance, np.full(21 - len(p.variance), np.inf)])
    blown[14:] = np.inf
    [found] = checks.compare(p, dataclasses.replace(m, variance=blown), TARGETS)
    assert found.ok is False
    assert "from layer 7 on" in found.note
    assert "predicted to overflow in layer" in found.note
