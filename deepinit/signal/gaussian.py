"""Gaussian integrals that a wide network comes down to: activations of correlated inputs, softmax of random logits.

A pre-activation is a sum of many independent terms, so normal with the variance u of its row of the Gram matrix; two
positions are two normals of correlation rho.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

Array = np.ndarray
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(96)
WEIGHTS = WEIGHTS / WEIGHTS.sum()
ORDERS = 24
HERMITE = np.stack(
    [np.polynomial.hermite_e.hermeval(NODES, np.eye(ORDERS)[k]) / math.sqrt(math.factorial(k)) for k in range(ORDERS)]
)
"""Normalized Hermite polynomials at the nodes, (orders, nodes)."""


def gelu(x: Array) -> Array:
    """The tanh form, which is what `jax.nn.gelu` computes unless told otherwise."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Array) -> Array:
    """x times its logistic function."""
    return x / (1 + np.exp(-np.clip(x, -700, 700)))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu": gelu,
    "silu": silu,
}
OF_KIND = {"swiglu": ("silu", True), "geglu": ("gelu", True), "gelu": ("gelu", False), "relu": ("relu", False)}
"""MLP kind -> its activation, and whether a gate carries it."""


def second_moment(name: str, u: float) -> float:
    """E phi(sqrt(u) z)^2."""
    return u / 2 if name == "relu" else float((ACTIVATIONS[name](math.sqrt(u) * NODES) ** 2 * WEIGHTS).sum())


def mean(name: str, u: float) -> float:
    """E phi(sqrt(u) z)."""
    return float((ACTIVATIONS[name](math.sqrt(u) * NODES) * WEIGHTS).sum())


def kernel(name: str, u: float, rho: Array) -> Array:
    """E phi(a) phi(b) for normals a, b of variance u and correlation rho (clipped to [-1, 1]).

    ReLU in closed form (Cho & Saul 2009, order 1); the others by their Hermite series, sum of a_k^2 rho^k.
    """
    rho = np.clip(rho, -1, 1)
    if name == "relu":
        return u / (2 * math.pi) * (np.sqrt(1 - rho * rho) + rho * (math.pi - np.arccos(rho)))
    series = ((HERMITE * (ACTIVATIONS[name](math.sqrt(u) * NODES) * WEIGHTS)).sum(1)) ** 2
    largest = float(np.abs(rho).max(initial=0.0))
    terms = series * largest ** np.arange(ORDERS)
    needed = np.flatnonzero(terms > 1e-13 * series.sum())
    total = np.zeros_like(rho)
    for k in range(needed[-1] if len(needed) else 0, -1, -1):  # Horner
        total *= rho
        total += series[k]
    return total


# --- softmax -----------------------------------------------------------------------------------------------------

Z_GRID = np.linspace(-8, 8, 401)
Z_WEIGHT = np.exp(-(Z_GRID**2) / 2) / np.exp(-(Z_GRID**2) / 2).sum()
SIGMA_GRID = np.concatenate([np.linspace(0, 6, 49), np.linspace(6.5, 14, 16)])


@lru_cache
def participation(length: int) -> Array:
    """E sum_j p_j^2 of a softmax over n = 1..length independent N(0, sigma^2) logits, a row for each sigma of the grid.

    From 1/Z^2 = int t e^(-t Z) dt: n int t phi2(t) phi0(t)^(n-1) dt with phi_k = E e^(k l) exp(-t e^l). Exact; the
    shortcut e^s/(e^s + n - 1), s the logits' variance, is three times too large at s = 4.
    """
    count = np.arange(1, length + 1)
    table = np.empty((len(SIGMA_GRID), length))
    for row, sigma in enumerate(SIGMA_GRID):
        weight = np.exp(sigma * Z_GRID)
        log_t = np.linspace(-7 * sigma - math.log(length) - 9, 6 * sigma + 7, 700)
        decay = np.exp(-np.minimum(np.outer(np.exp(log_t), weight), 700))
        log_phi0 = np.log(np.maximum(decay @ Z_WEIGHT, 1e-300))
        front = np.exp(2 * log_t) * (decay @ (Z_WEIGHT * weight**2))
        table[row] = np.trapezoid(front * np.exp((count[:, None] - 1) * log_phi0), log_t, axis=1) * count
    return np.clip(table, 1 / count, 1.0)


def sharpness(logit_variance: float, length: int) -> Array:
    """t_n with E sum_j p_j^2 = e^t / (e^t + n - 1), for n = 1..length keys; logits wider than sigma 14 count as 14."""
    sigma = min(math.sqrt(max(logit_variance, 0.0)), SIGMA_GRID[-1])
    low = min(int(np.searchsorted(SIGMA_GRID, sigma, "right")) - 1, len(SIGMA_GRID) - 2)
    part = (sigma - SIGMA_GRID[low]) / (SIGMA_GRID[low + 1] - SIGMA_GRID[low])
    table, count = participation(length), np.arange(1, length + 1)
    share = (1 - part) * table[low] + part * table[low + 1]
    return np.log(np.maximum((count - 1) * share / np.maximum(1 - share, 1e-12), 1e-12)) * (count > 1)


# --- routing -----------------------------------------------------------------------------------------------------

RHO_GRID = (0.0, 0.25, 0.5, 0.75, 0.9, 0.97, 1.0)


@lru_cache
def shared_routing(experts: int, chosen: int, sigma: float, draws: int = 4096) -> tuple[float, ...]:
    """E sum_e w_e w'_e over a grid of correlations of two tokens' router logits, N(0, sigma^2).

    w is the router's softmax, cut to the `chosen` largest and brought to sum 1 (of one expert: its probability). By
    sampling, always the same draws: good to 1%.
    """
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, draws, experts))

    def weights(logits: Array) -> Array:
        p = np.exp(sigma * (logits - logits.max(-1, keepdims=True)))
        p /= p.sum(-1, keepdims=True)
        p[p < np.sort(p, axis=-1)[:, [-chosen]]] = 0
        return p / p.sum(-1, keepdims=True) if chosen > 1 else p

    w = weights(a)
    return tuple(float((w * weights(rho * a + math.sqrt(1 - rho * rho) * b)).sum(-1).mean()) for rho in RHO_GRID)
