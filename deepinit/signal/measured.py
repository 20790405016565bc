"""What a probe found, as plain numbers: read by verdicts and reports without jax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class RoleSignal:
    """One role's parameters at step 0, by layer that has them (one entry outside the stack)."""

    weight_rms: Array
    gradient: Array
    """Norm of the loss's gradient."""
    zero_gradient: Array
    """Share of entries whose gradient is exactly 0."""
    sgd_update: Array
    """RMS of one SGD step at the configured rate over the RMS of the weights; inf over weights that are 0."""
    update: Array
    """The same for the configured optimizer's first step."""
    sgd_effect: float
    """RMS change of the logits by the role's SGD step alone, to first order."""
    effect: float
    """The same for the configured optimizer's step."""
    layers: tuple[int, ...] = ()
    """The layers (0-based) that the entries are of; none outside the stack."""

    def where(self, entry: int) -> str:
        """` in layer 3` (1-based) of the third layer's entry; nothing outside the stack."""
        return f" in layer {self.layers[entry] + 1}" if self.layers else ""


@dataclass(frozen=True, eq=False)
class Measured:
    """One pass over a drawn model. N residual additions in L layers; variances are mean squares."""

    scheme: str
    layers: int
    batch: int
    seq_len: int
    variance: Array
    """(N + 1,): of the stream, before the first addition and after each."""
    branch: Array
    """(N,): of what each addition adds."""
    correlation: Array
    """(N + 1,): mean cosine of two positions of one sequence."""
    entropy: Array
    """(L,): mean entropy of attention over that of uniform attention, of one sequence."""
    scores: Array
    """(L,): variance of attention logits over the keys of a row, of one sequence."""
    gradient: Array
    """(L + 1,): norm of the loss's gradient with respect to the stream, before the first layer and after each."""
    roles: Mapping[str, RoleSignal]
    gates: Mapping[str, Array]
    """Learnable factors by path: their mean absolute value by layer."""
    loss: float
    logit_variance: float
    """Of logits that are not the position's own token."""
    own_logit: float
    """Mean logit of the position's own token."""
    seconds: float
    """Of the pass, compiled."""

    @property
    def gradient_ratio(self) -> float:
        """Gradient after the first layer over that after the last: 1 carries it level, more grows toward the input."""
        return float(self.gradient[1] / self.gradient[-1]) if self.gradient[-1] > 0 else math.nan

    @property
    def layer_variance(self) -> Array:
        """(L + 1,): the stream's variance before the first layer and after each."""
        return self.variance[:: (len(self.variance) - 1) // self.layers]

    @property
    def layer_correlation(self) -> Array:
        """(L + 1,): mean cosine of two positions, the same way."""
        return self.correlation[:: (len(self.correlation) - 1) // self.layers]

    @property
    def finite(self) -> bool:
        """Whether every number of the pass is finite."""
        arrays = (self.variance, self.branch, self.gradient, np.array([self.loss]))
        return all(bool(np.isfinite(a).all()) for a in arrays)

    def to_json(self) -> dict[str, Any]:
        """Plain data; what is not finite is null."""
        return {
            "scheme": self.scheme,
            "batch": self.batch,
            "seq_len": self.seq_len,
            "variance": plain(self.variance),
            "branch_variance": plain(self.branch),
            "token_correlation": plain(self.correlation),
            "attention_entropy": plain(self.entropy),
            "attention_logit_variance": plain(self.scores),
            "stream_gradient": plain(self.gradient),
            "gradient_ratio": plain(self.gradient_ratio),
            "roles": {
                role: {name: plain(getattr(s, name)) for name in s.__dataclass_fields__ if name != "layers"}
                | {"layers": list(s.layers)}
                for role, s in self.roles.items()
            },
            "gates": {path: plain(v) for path, v in self.gates.items()},
            "loss": plain(self.loss),
            "logit_variance": plain(self.logit_variance),
            "own_logit": plain(self.own_logit),
            "seconds": plain(self.seconds),
        }


def plain(value: Any) -> Any:
    """Numbers as JSON has them: null where not finite."""
    if np.ndim(value):
        return [plain(v) for v in np.asarray(value)]
    return float(value) if math.isfinite(value) else None
