"""How far a sample is from its law, as a standard normal z: mean square, extreme and kurtosis of n independent entries.

A z is used, not a relative tolerance: what counts as far follows from the number of entries and the law's kurtosis.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from scipy import special

from deepinit import laws
from deepinit.laws import Distribution, Normal, TruncatedNormal, Uniform

EXACT_BELOW = 1024
"""Fewer entries than this are judged by the law's own cumulants instead of a chi-square with matched kurtosis."""
KURTOSIS_FROM = 4096
"""The least number of entries whose kurtosis is judged."""
RESOLUTION = 1 << 30
"""Entries after which a larger sample no longer promises a larger extreme: the sampler's tail has 2^31 steps."""


def normal_tail(p: float) -> float:
    """z with two-sided tail probability p."""
    return float(-special.ndtri(p / 2))


# --- mean square -------------------------------------------------------------------------------------------------


def std_deviation(ratio: float, n: float, kurtosis: float) -> float:
    """z of a sample mean square over n entries that is `ratio` times the expected one.

    Close to chi-square with 2n / (kurtosis - 1) degrees of freedom (exact for a normal); Wilson and Hilferty's cube
    root (1931) turns that into a standard normal far into both tails.
    """
    degrees = 2 * n / (kurtosis - 1)
    spread = 2 / (9 * degrees)
    return (ratio ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def mean_square(law: Distribution, ratio: float, n: int) -> float:
    """`std_deviation` by the law itself: below 1024 entries through the saddle point of its squares."""
    if n >= EXACT_BELOW or not isinstance(law, Normal | TruncatedNormal | Uniform):
        return std_deviation(ratio, n, law.kurtosis)
    return saddle_point(law, ratio, n)


def saddle_point(law: Distribution, ratio: float, n: int) -> float:
    """z = r + log(u / r) / r of Barndorff-Nielsen (1986), which is Lugannani and Rice's tail to relative order 1/n.

    With K the cumulant function of (w/std)^2 and K'(t) = ratio: r = sign(t) sqrt(2n (t ratio - K)), u = t sqrt(n K'').
    """
    if ratio <= 0:
        return -math.inf
    if abs(ratio - 1) < 1e-4:  # r and u meet at 0; the limit has the third cumulant, which a cube root has too
        return std_deviation(ratio, n, law.kurtosis)
    if isinstance(law, Normal):
        t, k, curvature = (1 - 1 / ratio) / 2, math.log(ratio) / 2, 2 * ratio**2
    else:
        squares, weights = quadrature(law.cut if isinstance(law, TruncatedNormal) else 0.0)
        if not squares[0] * 1.01 < ratio < squares[-1] * 0.99:
            return math.copysign(math.inf, ratio - 1)
        t, k, curvature = solve(squares, weights, ratio)
    r = math.copysign(math.sqrt(max(2 * n * (t * ratio - k), 0.0)), t)
    u = t * math.sqrt(n * curvature)
    return r + math.log(u / r) / r if r else 0.0


@functools.cache
def quadrature(cut: float) -> tuple[np.ndarray, np.ndarray]:
    """Nodes (w/std)^2 and weights of a normal cut off at `cut` sigmas, or of a uniform law (cut 0)."""
    nodes, weights = np.polynomial.legendre.leggauss(400)
    nodes, weights = (nodes + 1) / 2, weights / 2
    if not cut:
        return 3 * nodes**2, weights
    std, _ = laws.truncated_moments(cut)
    density = weights * np.exp(-((cut * nodes) ** 2) / 2)
    return (cut * nodes / std) ** 2, density / density.sum()


def solve(squares: np.ndarray, weights: np.ndarray, ratio: float) -> tuple[float, float, float]:
    """t with K'(t) = ratio, K(t) and K''(t), by Newton's method held inside a bracket."""
    low, high, t = -1e6, 1e6, 0.0
    for _ in range(200):
        exponent = t * squares
        top = exponent.max()
        mass = weights * np.exp(exponent - top)
        total = mass.sum()
        mean = float(mass @ squares / total)
        curvature = max(float(mass @ squares**2 / total) - mean**2, 1e-300)
        if abs(mean - ratio) < 1e-12 * max(ratio, 1):
            break
        low, high = (t, high) if mean < ratio else (low, t)
        t += (ratio - mean) / curvature
        if not low < t < high:
            t = (max(low, -1e6) + min(high, 1e6)) / 2
    return t, float(top + math.log(total)), curvature


# --- extreme -----------------------------------------------------------------------------------------------------


def extreme(law: Distribution, peak: float, n: int, ulp: float = 0.0) -> float:
    """z of the largest |w| among n entries; 0 for laws without one. `ulp` is the storage's rounding, allowed for.

    An extreme converges as 1/n where a std converges as 1/sqrt(n): at n = 4096 that of a normal cut at 2 sigmas sees a
    std 2.3% too small.
    """
    n = min(n, RESOLUTION)
    std = law.std
    if isinstance(std, tuple) or n < 16 or not isinstance(law, Normal | TruncatedNormal | Uniform):
        return 0.0
    lower = log_below(law, peak * (1 + ulp) * (1 + 1e-6))
    below = n * lower
    if below < math.log(0.5):
        return float(special.ndtri_exp(below))
    if isinstance(law, Normal):  # the others end at their bound, which is certain and not a matter of chance
        above = n * log_below(law, peak * (1 - ulp) * (1 - 1e-6))
        if above > math.log(0.5):
            return float(-special.ndtri_exp(math.log(max(-math.expm1(above), 1e-300))))
    return 0.0


def log_below(law: Distribution, peak: float) -> float:
    """log P(|w| <= peak) of one entry."""
    number: Any = law.bound if isinstance(law, Uniform) else law.sigma if isinstance(law, TruncatedNormal) else law.std
    x = peak / number
    if isinstance(law, Uniform):
        inside = min(x, 1.0)
        return math.log(inside) if inside > 0 else -math.inf
    outside = math.erfc(x / math.sqrt(2))
    if isinstance(law, TruncatedNormal):
        end = math.erfc(law.cut / math.sqrt(2))
        outside = max(outside - end, 0.0) / (1 - end)
    return math.log1p(-outside) if outside < 1 else -math.inf


# --- kurtosis ----------------------------------------------------------------------------------------------------


def kurtosis(law: Distribution, sample: float, n: int) -> float:
    """z of the sample kurtosis, its heavy upper tail allowed for; 0 below 4096 entries or for a law that has none."""
    if n < KURTOSIS_FROM or not isinstance(law, Normal | TruncatedNormal | Uniform) or not math.isfinite(sample):
        return 0.0
    z = (sample - law.kurtosis) / math.sqrt(kurtosis_variance(law) / n)
    # Cornish and Fisher's first term with a normal's skewness of the kurtosis, the largest of these laws
    return z - (z * z - 1) * math.sqrt(6 / n) if z > 1 else z


def kurtosis_variance(law: Distribution) -> float:
    """n Var of the sample kurtosis m4 / m2^2 of a symmetric law: mu8 - 4 mu4 mu6 + 4 mu4^3 - mu4^2, standardized."""
    if isinstance(law, Normal):
        return 24.0
    squares, weights = quadrature(law.cut if isinstance(law, TruncatedNormal) else 0.0)
    m4, m6, m8 = (float(weights @ squares**k) for k in (2, 3, 4))
    return m8 - 4 * m4 * m6 + 4 * m4**3 - m4**2
