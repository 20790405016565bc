"""z of mean squares, extremes and kurtosis against exact distributions."""

import math

import numpy as np
import pytest
from scipy import stats

from deepinit import deviations, laws
from deepinit.laws import Normal, TruncatedNormal, Uniform

LAWS = (Normal(1.0), TruncatedNormal(1.0, 2.0), TruncatedNormal(1.0, 3.0), Uniform(1.0))
SIX_SIGMA = 6.389  # false-alarm rate 1e-6 over 2000 tensors and three statistics


def draws(law, shape, seed=0):
    """Values of the law with std 1, by NumPy and scipy."""
    rng = np.random.default_rng(seed)
    if isinstance(law, Uniform):
        return rng.uniform(-math.sqrt(3), math.sqrt(3), shape)
    if isinstance(law, TruncatedNormal):
        unit, _ = laws.truncated_moments(law.cut)
        return stats.truncnorm.rvs(-law.cut, law.cut, size=shape, random_state=rng) / unit
    return rng.normal(size=shape)


@pytest.mark.parametrize("n", [4, 16, 64, 256, 1000])
@pytest.mark.parametrize("p", [1e-12, 1e-6, 1e-3, 0.3, 0.9, 1 - 1e-3, 1 - 1e-6])
def test_the_saddle_point_is_chi_square_for_a_normal(n, p):
    z = deviations.mean_square(Normal(0.3), stats.chi2.ppf(p, n) / n, n)
    assert z == pytest.approx(stats.norm.ppf(p), abs=0.006)


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("n", [8, 100])
def test_small_samples_of_every_law_give_a_standard_normal_z(law, n):
    ratios = (draws(law, (2000, n)) ** 2).mean(1)
    z = np.sort([deviations.mean_square(law, r, n) for r in ratios])
    assert stats.kstest(z, "norm").pvalue > 1e-4


def test_small_samples_have_the_quantiles_of_the_study():
    # science: at z = 6.389 the exact bands of std are [0.495, 1.604] at n = 64, [0.731, 1.293] at 256
    for n, low, high in ((64, 0.495, 1.604), (256, 0.731, 1.293)):
        assert deviations.mean_square(Normal(1.0), low**2, n) == pytest.approx(-SIX_SIGMA, abs=0.02)
        assert deviations.mean_square(Normal(1.0), high**2, n) == pytest.approx(SIX_SIGMA, abs=0.02)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_two_ways_meet_at_1024(law):
    for ratio in (0.9, 0.97, 1.03, 1.1):
        exact = deviations.saddle_point(law, ratio, 1023)
        assert deviations.std_deviation(ratio, 1023, law.kurtosis) == pytest.approx(exact, abs=0.35)


def test_degenerate_mean_squares():
    assert deviations.mean_square(Uniform(1.0), 0.0, 10) == -math.inf
    assert deviations.mean_square(Uniform(1.0), 3.1, 10) == math.inf
    assert abs(deviations.mean_square(Normal(1.0), 1.0, 10)) < 0.3


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_extreme_of_healthy_samples_is_a_standard_normal_or_zero(law):
    peaks = np.abs(draws(law, (2000, 500))).max(1)
    z = np.asarray([deviations.extreme(law, peak, 500) for peak in peaks])
    below = z < 0
    assert 0.46 < below.mean() < 0.54
    assert stats.kstest(z[below], lambda x: 2 * stats.norm.cdf(x)).pvalue > 1e-4
    if isinstance(law, Normal):
        assert stats.kstest(z, "norm").pvalue > 1e-4


def test_the_extreme_sees_what_the_std_cannot():
    # science: at n = 4096 a cut of 2 sigmas is seen to be 2.3% too low, q(n) = 0.9769 of the bound
    law, n = TruncatedNormal(1.0, 2.0), 4096
    bound = law.bound
    assert deviations.extreme(law, 0.9769 * bound, n) == pytest.approx(-6.28, abs=0.05)
    assert deviations.extreme(law, bound, n) == 0
    assert deviations.extreme(Uniform(1.0), 0.9945 * math.sqrt(3), n) == pytest.approx(-6.28, abs=0.05)
    # a normal's largest of 4096 lies in [2.77, 7.65] at this level
    assert deviations.extreme(Normal(1.0), 2.77, n) == pytest.approx(-6.28, abs=0.15)
    assert deviations.extreme(Normal(1.0), 7.65, n) == pytest.approx(6.28, abs=0.15)


def test_a_cast_may_move_an_extreme():
    assert deviations.extreme(Uniform(1.0), 0.994 * math.sqrt(3), 4096) < -6
    assert deviations.extreme(Uniform(1.0), 0.994 * math.sqrt(3), 4096, ulp=2**-8) > -4


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_kurtosis_knows_its_spread(law):
    x = draws(law, (2000, 4096))
    sample = (x**4).mean(1) / (x**2).mean(1) ** 2
    spread = (sample - law.kurtosis) / math.sqrt(deviations.kurtosis_variance(law) / 4096)
    assert abs(spread.mean()) < 0.1
    assert spread.std() == pytest.approx(1, abs=0.06)
    assert max(abs(deviations.kurtosis(law, s, 4096)) for s in sample) < 5


def test_kurtosis_tells_the_laws_apart():
    for law in LAWS:
        for other in LAWS:
            z = deviations.kurtosis(law, other.kurtosis, 1 << 16)
            assert (abs(z) > 6) == (law != other), (law, other)
    assert deviations.kurtosis(Normal(1.0), 1.8, 4095) == 0
