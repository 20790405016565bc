"""The token Gram matrix C[i, j] = E x_i . x_j / width, averaged over weights, and what a sublayer makes of it.

Leading axes of a Gram matrix are sequences of a batch; the last two are positions.
"""

from __future__ import annotations

import math

import numpy as np

from deepinit.signal import gaussian
from deepinit.signal.gaussian import Array


def of_tokens(tokens_BT: Array, variance: float = 1.0, position_variance: float = 0.0) -> Array:
    """Gram of an embedding of this variance: positions that hold one token share its vector; positions have their own.

    (B, T) or (T,) -> (B, T, T).
    """
    tokens_BT = np.atleast_2d(np.asarray(tokens_BT))
    same = tokens_BT[..., :, None] == tokens_BT[..., None, :]
    return variance * same + position_variance * np.eye(tokens_BT.shape[-1])


def of_repetition(length: int, rate: float, variance: float = 1.0, position_variance: float = 0.0) -> Array:
    """Mean Gram over random texts in which two positions hold one token at this rate; 0: all tokens differ."""
    eye = np.eye(length)
    return (variance * (eye + rate * (1 - eye)) + position_variance * eye)[None]


def diagonal(gram: Array) -> Array:
    """C[i, i]."""
    return np.diagonal(gram, axis1=-2, axis2=-1)


def power(gram: Array) -> float:
    """Mean of the diagonal: the mean square of an entry."""
    return float(diagonal(gram).mean())


def off_diagonal(gram: Array) -> float:
    """Mean of all other entries."""
    length = gram.shape[-1]
    return float((gram.mean() * length - power(gram)) / max(length - 1, 1))


def normalized(gram: Array, eps: float = 0.0) -> Array:
    """Gram after a norm with this epsilon."""
    scale = 1 / np.sqrt(np.maximum(diagonal(gram) + eps, 1e-300))
    return gram * scale[..., :, None] * scale[..., None, :]


def correlation(gram: Array) -> float:
    """Mean cosine of two different positions."""
    return off_diagonal(normalized(gram))


def rotation_overlap(theta: float | None, head_dim: int, length: int) -> Array:
    """trace(R_i^T R_j) / head_dim of rotary positions: what is left of two queries' overlap, (T, T); None: no rope."""
    if theta is None:
        return np.ones((length, length))
    rate = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    position = np.arange(length)
    by_distance = np.cos(position[:, None] * rate).mean(-1)
    return by_distance[np.abs(position[:, None] - position)]


def cumulative(gram: Array) -> Array:
    """Sums over all positions up to the row and up to the column. Row by row, which numpy's own does not vectorize."""
    sums = gram.copy()
    for i in range(1, gram.shape[-2]):
        sums[..., i, :] += sums[..., i - 1, :]
    return sums.cumsum(-1)


class Attention:
    """Causal attention over some number of positions, its tables made once."""

    def __init__(self, length: int, theta: float | None, head_dim: int):
        position = np.arange(1, length + 1)
        self.length = length
        self.rotation = rotation_overlap(theta, head_dim, length)
        self.shared_rotation = off_diagonal(self.rotation)
        self.last = np.maximum.outer(position, position) - 1  # index of the later of two rows
        self.first = np.minimum.outer(position, position) - 1
        self.keys = self.first + 1.0  # that both rows see
        self.others = self.last.astype(float)
        self.pairs = 1 / np.maximum(np.outer(position, position) - self.keys, 1)  # of two different keys

    def common(self, gram: Array) -> float:
        """The part of a logit's variance that is the same for all keys of a row, and leaves the softmax alone."""
        return off_diagonal(gram) / power(gram) * self.shared_rotation

    def __call__(self, gram: Array, spread: float, values: Array | None = None) -> Array:
        """Gram of the mixtures sum_j p_ij v_j, `spread` the variance of logits over the keys of a row.

        `gram` is of what queries and keys are made from, `values` of v (by default the same). Two rows share weight on
        a key as far as their queries agree.
        """
        common = self.common(gram)
        tilt = gram * (self.rotation - common)
        tilt *= gaussian.sharpness(spread, self.length)[self.last] / (power(gram) * max(1 - common, 1e-12))
        np.exp(np.minimum(tilt, 60.0, out=tilt), out=tilt)
        same_key = tilt / (tilt + self.others)  # E sum_j p_ij p_i'j
        values = gram if values is None else values
        diag = diagonal(values).cumsum(-1)[..., self.first]
        other_keys = cumulative(values)
        other_keys -= diag
        other_keys *= self.pairs
        diag /= self.keys
        return other_keys + same_key * (diag - other_keys)


def mlp(gram: Array, kind: str, gate_gain: float, up_gain: float, centered: bool = False) -> Array:
    """Gram of the hidden layer, phi(up) or phi(gate) * up; a gain is fan_in std^2. `centered`: less its feature mean.

    Positions are taken to have one variance, their mean: exact after a norm.
    """
    activation, gated = gaussian.OF_KIND[kind]
    size = power(gram)
    u = (gate_gain if gated else up_gain) * size
    rho = gram / size
    i = np.arange(gram.shape[-1])
    hidden = gaussian.kernel(activation, u, rho)
    hidden[..., i, i] = gaussian.second_moment(activation, u) * rho[..., i, i]
    if gated:
        hidden *= up_gain
        hidden *= gram
    elif centered:
        hidden -= gaussian.mean(activation, u) ** 2
    return hidden


def routed(gram: Array, hidden: Array, experts: int, chosen: int, router_gain: float) -> Array:
    """Gram of a mixture of experts, from that of one expert: two tokens share what they send to the same experts."""
    sigma = math.sqrt(router_gain * power(gram))
    table = gaussian.shared_routing(experts, chosen, round(sigma, 3))
    return hidden * np.interp(np.clip(gram / power(gram), 0, 1), gaussian.RHO_GRID, table)
