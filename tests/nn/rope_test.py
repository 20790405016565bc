"""Rotary positions: lengths are kept, and a score knows the distance alone."""

import jax.numpy as jnp
import numpy as np
import pytest

from deepinit.nn import rotary

rng = np.random.default_rng(0)
Q, K = (rng.standard_normal((1, 1, 1, 16)).astype(np.float32) for _ in range(2))


def turned(x, position, theta=10_000.0):
    return np.asarray(rotary(jnp.asarray(x), jnp.full((1, 1), position), theta))[0, 0, 0]


def test_formula():
    z = Q[0, 0, 0, :8] + 1j * Q[0, 0, 0, 8:]
    w = z * np.exp(1j * 7 * 10_000.0 ** (-np.arange(8) / 8))
    assert np.allclose(turned(Q, 7), np.concatenate([w.real, w.imag]), atol=1e-5)


def test_first_position_is_left_alone():
    assert (turned(Q, 0) == Q.ravel()).all()


@pytest.mark.parametrize("theta", [100.0, 10_000.0, 500_000.0])
def test_only_the_distance_counts(theta):
    scores = [turned(Q, m + 5, theta) @ turned(K, m, theta) for m in (0, 3, 100, 1000)]
    assert np.allclose(scores, scores[0], atol=1e-3)
    assert abs(turned(Q, 6, theta) @ turned(K, 0, theta) - scores[0]) > 1e-3


def test_lengths_are_kept():
    assert np.isclose(np.linalg.norm(turned(Q, 123)), np.linalg.norm(Q), rtol=1e-5)


# Positions beyond 256 are not exact in bfloat16: the angle is computed in float32.
def test_half_precision():
    x = jnp.asarray(Q, jnp.bfloat16)
    got = rotary(x, jnp.full((1, 1), 1001))
    assert got.dtype == jnp.bfloat16
    assert (got == rotary(x.astype(jnp.float32), jnp.full((1, 1), 1001)).astype(jnp.bfloat16)).all()
