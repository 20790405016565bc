"""Moments of the laws against quadrature, scaling by layer, JSON, equality."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from deepinit import laws
from deepinit.laws import Constant, External, Normal, Orthogonal, Sign, TruncatedNormal, Uniform
from tests.models import distributions, numbers, positive, refused

FACTORS = st.floats(1e-3, 1e3)


def moment(cut: float, power: int) -> float:
    """E z^power of a unit normal inside +-cut, by quadrature."""
    inside = stats.norm.cdf(cut) - stats.norm.cdf(-cut)
    return integrate.quad(lambda z: z**power * stats.norm.pdf(z) / inside, -cut, cut, epsabs=0, epsrel=1e-12)[0]


# case B38: the real std after truncation, and the kurtosis that the tolerances rest on
@pytest.mark.parametrize("cut", [0.3, 1.0, 2.0, 2.5, 3.0, 5.0])
def test_truncated_moments(cut):
    std, kurtosis = laws.truncated_moments(cut)
    assert std == pytest.approx(math.sqrt(moment(cut, 2)), rel=1e-9)
    assert kurtosis == pytest.approx(moment(cut, 4) / moment(cut, 2) ** 2, rel=1e-9)


def test_no_cut():
    assert laws.truncated_moments(0.0) == (1.0, 3.0)
    assert laws.truncated_moments(20.0) == pytest.approx((1.0, 3.0))


# case B38: the published factors, and one meaning of std
@pytest.mark.parametrize(("cut", "factor"), [(2.0, 0.879626), (3.0, 0.986578)])
def test_from_sigma_and_from_std(cut, factor):
    uncorrected, corrected = TruncatedNormal.from_sigma(0.02, cut), TruncatedNormal(0.02, cut)
    assert uncorrected.std == pytest.approx(0.02 * factor, rel=1e-6)
    assert uncorrected.sigma == pytest.approx(0.02)
    assert corrected.std == 0.02
    assert corrected.sigma == pytest.approx(0.02 / factor, rel=1e-6)


# case B37: the bound follows from the cut in sigmas
@given(numbers(), st.floats(0.1, 8))
def test_bound_is_the_cut_in_sigmas(std, cut):
    law = TruncatedNormal(std, cut)
    for bound, sigma in zip(np.atleast_1d(law.bound), np.atleast_1d(law.sigma)):
        assert bound == pytest.approx(cut * sigma)
    assert np.all(np.asarray(law.bound) >= np.asarray(law.std) * (1 - 1e-12))


@pytest.mark.parametrize("cut", [0.0, -2.0, math.nan])
def test_cut_must_be_positive(cut):
    assert refused(TruncatedNormal, 0.02, cut) == f"cut: {cut} is not a positive number of sigmas"


# case B08: uniform draws lie within sqrt(3) std
def test_uniform():
    law = Uniform(0.03125)
    assert law.bound == pytest.approx(math.sqrt(3 / 1024))
    assert law.kurtosis == pytest.approx(stats.uniform.stats(moments="k") + 3)


def test_moments_of_the_others():
    assert (Normal(2.0).mean, Normal(2.0).bound, Normal(2.0).kurtosis) == (0.0, math.inf, 3.0)
    assert (Constant(-2.0).mean, Constant(-2.0).std, Constant(-2.0).bound) == (-2.0, 0.0, 2.0)
    assert (Sign(0.5).bound, Sign(0.5).kurtosis) == (0.5, 1.0)
    assert math.isnan(External().std)
    assert math.isnan(External().mean)
    q = np.linalg.qr(np.random.default_rng(0).standard_normal((12, 5)))[0]
    assert Orthogonal(3.0, 12).std == pytest.approx(3 * np.sqrt((q**2).mean()))  # exact for any semi-orthogonal matrix


def test_parameter_of_each_law():
    assert (Normal(0.1).parameter, Constant(0.2).parameter, Orthogonal(0.3, 2).parameter) == (0.1, 0.2, 0.3)


@given(distributions(), FACTORS)
def test_scaled_by_a_number(law, factor):
    if isinstance(law, External):
        return
    scaled = law.scaled(factor, "new")
    assert type(scaled) is type(law)
    assert scaled.formula == "new"
    assert scaled.layered == law.layered
    assert np.allclose(scaled.parameter, np.asarray(law.parameter) * factor, rtol=1e-12, atol=0)
    assert np.allclose(scaled.std, np.asarray(law.std) * factor, rtol=1e-9, atol=0, equal_nan=True)
    assert np.allclose(scaled.mean, np.asarray(law.mean) * factor, rtol=1e-9, atol=0)
    assert scaled.kurtosis == law.kurtosis


@given(positive, st.lists(FACTORS, min_size=1, max_size=6).map(tuple))
def test_scaled_by_layer(std, factors):
    law = Normal(std, "s").scaled(factors)
    assert law.layered
    for layer, factor in enumerate(factors):
        assert law.at(layer) == Normal(std * factor)
        assert not law.at(layer).layered
    assert law.scaled(factors).std == pytest.approx([std * f * f for f in factors], rel=1e-15)


@given(distributions(), st.integers(0, 4))
def test_at_a_layer(law, layer):
    if not law.layered:
        assert law.at(layer) is law
    elif layer < len(law.parameter):
        assert law.at(layer).parameter == law.parameter[layer]
        assert law.at(layer).formula == law.formula
        assert law.at(layer).std == law.std[layer]


@given(distributions())
def test_json_round_trip(law):
    text = json.dumps(law.to_json(), allow_nan=False)
    again = laws.from_json(json.loads(text))
    assert again == law
    assert hash(again) == hash(law)
    assert again.formula == law.formula


@given(distributions())
def test_json_says_what_follows(law):
    data = law.to_json()
    for name in ("std", "mean", "bound"):
        value = getattr(law, name)
        finite = np.all(np.isfinite(value))
        assert data[name] == (value if finite else None)


def test_equality_is_that_of_the_law():
    assert Normal(0.02, "a") == Normal(0.02, "b")
    assert hash(Normal(0.02, "a")) == hash(Normal(0.02))
    assert len({Normal(0.02), TruncatedNormal(0.02, 2), TruncatedNormal(0.02, 3), Uniform(0.02), Constant(0.02)}) == 5
    assert Normal(0.02) != Normal((0.02, 0.02))


def test_show():
    assert laws.show(0.0204124) == "0.02041"
    assert laws.show((1.0, 0.5, 0.25)) == "1..0.25"
    assert laws.each(lambda x: 2 * x, (1.0, 2.0)) == (2.0, 4.0)
