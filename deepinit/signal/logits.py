"""From the stream to the loss at step 0: the spread of the logits, and the mean cross-entropy that it costs."""

from __future__ import annotations

import math

import numpy as np

from deepinit.signal.forward import Forward
from deepinit.signal.gaussian import Z_GRID, Z_WEIGHT


def moments(forward: Forward, variance: float, kept: float) -> tuple[float, float]:
    """(variance of a logit, mean logit of the position's own token) over a stream of this variance, uncapped.

    `kept` is the coefficient of the stack's input in the stream: with a tied head the position's own row meets what is
    left of itself.
    """
    g = forward.recipe.geometry
    rescale = 1.0
    if forward.final_norm:
        rescale = float(forward.norm_gain("final_norm")[0]) / (variance + forward.options.norm_eps)
    spread = g.d_model * forward.head_variance * variance * rescale
    if not g.tied_embeddings:
        return spread, 0.0
    row = math.sqrt(forward.embed_variance)  # as it was looked up; as a head it has its own factor
    if forward.options.embed_norm:
        row = 1.0
    return spread, kept * math.sqrt(rescale) * g.d_model * row * math.sqrt(forward.head_variance)


def capped(logits: np.ndarray, cap: float) -> np.ndarray:
    """Logits as the model gives them: cap tanh(logits / cap), or as they are where cap is 0."""
    return cap * np.tanh(logits / cap) if cap else logits


def capped_variance(spread: float, cap: float) -> float:
    """Variance of a logit after the soft cap."""
    return float(capped(math.sqrt(spread) * Z_GRID, cap) ** 2 @ Z_WEIGHT) if cap else spread


def expected_loss(spread: float, own: float, vocab_size: int, own_target_rate: float, cap: float = 0.0) -> float:
    """Mean cross-entropy: E ln sum_v e^(logit_v) less the mean logit of the target, over independent normal logits.

    E ln Z = int (e^-t - E e^(-t Z)) dt/t, exact at any spread; ln V + spread/2 while e^spread stays far below V.
    """
    if not math.isfinite(spread):
        return math.inf
    own = float(capped(np.asarray(own), cap))
    if spread == 0 and own == 0:
        return math.log(vocab_size)
    values = capped(math.sqrt(spread) * Z_GRID, cap)
    reach = float(values[-1])
    log_t = np.linspace(-max(reach, own) - math.log(vocab_size) - 20, reach + 5, 4000)

    def survives(logit: np.ndarray) -> np.ndarray:
        return np.exp(-np.exp(np.minimum(log_t[:, None] + logit, 6.5)))  # e^(-t e^logit), 0 beyond

    others = vocab_size - (own != 0)
    survive = np.exp(others * np.log(np.maximum(survives(values) @ Z_WEIGHT, 1e-300)))
    if own:
        survive *= survives(np.array([own]))[:, 0]
    partition = float(np.trapezoid(survives(np.zeros(1))[:, 0] - survive, log_t))
    return partition - own_target_rate * own
