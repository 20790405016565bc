"""Predicted against measured: how far a drawn model may be from the prediction by chance, and what else must hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinit.signal.measured import Measured, plain
from deepinit.signal.predict import Prediction, rate_of_repetition

LIMIT = 6.0
"""Largest |z| that passes: finite widths are not quite Gaussian."""
AMPLIFIED = 2.0
"""Amplification above which a norm-free stack is not judged: its Var may be off by half."""
WIDEST = 2.0
"""Logit variance up to which the loss's own scatter is known."""
LEVEL = (0.8, 1.25)
"""Gradient after the first layer over that after the last, where it is carried level."""
COLLAPSED = 0.9
"""Token correlation from which on queries and keys get no gradient to speak of."""
REPETITIVE = 0.05
"""Added to the tolerance of a variance on repetitive text: a frequent token gets less attention than predicted."""


@dataclass(frozen=True)
class Check:
    """One quantity. `ok` is None where there is no verdict to be had, and `note` says why."""

    name: str
    predicted: float
    measured: float
    z: float | None
    ok: bool | None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        numbers = {k: plain(getattr(self, k)) for k in ("predicted", "measured")}
        return {"name": self.name, **numbers, "z": None if self.z is None else plain(self.z), "ok": self.ok,
                "note": self.note}  # fmt: skip


def passed(checks: list[Check]) -> bool:
    """Whether nothing failed."""
    return all(c.ok is not False for c in checks)


def variance_sd(p: Prediction, at: int = -1) -> float:
    """Seed-to-seed sd of measured / predicted variance of the stream after some addition (its ln, without norms).

    sqrt((2/d) [(share rho)^2 + sum_t p_t^2]), share the branches' part of the variance, rho the token correlation, p_t
    the frequencies of the batch's tokens: the stream meets what is added under random angles, alike for all positions
    that are aligned; and a token's embedding is drawn once however often it stands there. Without norms an early excess
    is amplified.
    """
    d = p.recipe.geometry.d_model
    share = 1 - p.kept[at] ** 2 * p.variance[0] / p.variance[at]
    sd = math.sqrt(2 / d * ((share * p.correlation[at]) ** 2 + p.repetition))
    return sd * p.amplification


def logit_sd(p: Prediction) -> float:
    """Seed-to-seed sd of measured / predicted logit variance: V rows of the head meet the stream's few directions."""
    g = p.recipe.geometry
    spread = math.sqrt(2 / g.vocab_size * (p.correlation[-1] ** 2 + p.repetition + 1 / g.d_model))
    own = 0.0 if p.forward.final_norm or p.forward.fixed_size else variance_sd(p)
    return math.hypot(spread, own)


def loss_sd(p: Prediction, targets: Any) -> float:
    """Seed-to-seed sd of the loss at step 0, in nats: repeated targets at aligned positions draw the same logit."""
    spread, aligned = p.logit_variance, abs(float(p.correlation[-1]))
    alone, repeated = 1 / np.size(targets), rate_of_repetition(targets)
    target = spread * (alone + aligned * (repeated - alone))
    partition = math.expm1(min(spread, 50.0) * aligned) / p.recipe.geometry.vocab_size
    own = p.own_logit**2 * repeated / (2 * p.recipe.geometry.d_model)  # an embedding's own length varies
    return math.sqrt(target + partition + own)


def compare(p: Prediction, m: Measured, targets: Any) -> list[Check]:
    """Every verdict on one drawn model whose batch the prediction was made for."""
    if not m.finite:
        return [Check("finite", math.nan, math.nan, None, False, not_finite(p, m))]
    checks = [*variances(p, m), logit_variance(p, m), loss(p, m, targets)]
    top = float(m.correlation[-1])
    stacked_norms = p.forward.additions[-1].norm == "post"
    collapsed = stacked_norms and top >= COLLAPSED
    note = "tokens have collapsed to one direction: queries and keys get no gradient" if collapsed else ""
    checks.append(Check("token correlation, top", float(p.correlation[-1]), top, None, not collapsed or None, note))
    if collapsed:
        checks[-1] = Check(checks[-1].name, float(p.correlation[-1]), top, None, False, note)
    elif not stacked_norms:
        checks[-1] = Check(checks[-1].name, float(p.correlation[-1]), top, None, None, "no sd is known")
    checks.append(gradient(p, m))
    return checks


def variances(p: Prediction, m: Measured) -> list[Check]:
    """Var(x) half way up and at the top."""
    each = p.recipe.geometry.sublayers
    out = []
    for layer in dict.fromkeys((max(1, m.layers // 2), m.layers)):
        at = layer * each
        want, got = float(p.variance[at]), float(m.variance[at])
        name = f"Var(x) after layer {layer}"
        if p.forward.fixed_size:
            out.append(Check(name, want, got, None, abs(got / want - 1) < 0.02, "set by a norm"))
            continue
        off = math.log(got / want) if p.forward.normless else got / want - 1
        sd = variance_sd(p, at)
        z = off / sd
        if p.amplification > AMPLIFIED:
            note = f"no verdict: without norms an early excess grows to the power {p.amplification:.2g}"
            out.append(Check(name, want, got, z, None, note))
            continue
        slack = REPETITIVE if p.repetition > 4 / (m.batch * m.seq_len) else 0.0
        out.append(Check(name, want, got, z, abs(off) <= LIMIT * sd + slack))
    return out


def logit_variance(p: Prediction, m: Measured) -> Check:
    """Spread of the logits."""
    name = "logit variance"
    if p.logit_variance == 0:
        return Check(name, 0.0, m.logit_variance, None, m.logit_variance == 0, "the head is zero")
    z = (m.logit_variance / p.logit_variance - 1) / logit_sd(p)
    if p.amplification > AMPLIFIED and not p.forward.final_norm:
        return Check(name, p.logit_variance, m.logit_variance, z, None, "no verdict: as Var(x)")
    return Check(name, p.logit_variance, m.logit_variance, z, abs(z) <= LIMIT)


def loss(p: Prediction, m: Measured, targets: Any) -> Check:
    """Cross-entropy at step 0."""
    sd = loss_sd(p, targets)
    if sd == 0:
        return Check("loss at step 0", p.loss, m.loss, None, abs(m.loss - p.loss) < 1e-4, "all logits are 0")
    z = (m.loss - p.loss) / sd
    if p.logit_variance > WIDEST:
        note = f"no verdict: logits of variance {p.logit_variance:.3g} scatter beyond what is known"
        return Check("loss at step 0", p.loss, m.loss, z, None, note)
    return Check("loss at step 0", p.loss, m.loss, z, abs(z) <= LIMIT)


def gradient(p: Prediction, m: Measured) -> Check:
    """Gradient after the first layer over that after the last."""
    ratio, name = m.gradient_ratio, "gradient, first over last layer"
    if not math.isfinite(ratio):
        return Check(name, math.nan, ratio, None, None, "no gradient reaches the stream: the head is zero")
    if p.forward.identity:
        return Check(name, 1.0, ratio, None, abs(ratio - 1) < 1e-3, "the stack is the identity")
    first, last = float(p.layer_variance[1]), float(p.layer_variance[-1])
    level = LEVEL[0] <= ratio <= LEVEL[1]
    if p.forward.additions[-1].norm == "post":
        note = "" if level else f"not level ({LEVEL[0]:g} to {LEVEL[1]:g}); a post-norm stream is judged by this"
        return Check(name, 1.0, ratio, None, level, note)
    note = "" if level else "a gradient goes as 1/|x|" if ratio > 1 else ""
    return Check(name, math.sqrt(last / first), ratio, None, None, note)


def not_finite(p: Prediction, m: Measured) -> str:
    """Where numbers stop being finite, and whether that was predicted."""
    bad = np.flatnonzero(~np.isfinite(m.layer_variance))
    where = f"the stream is not finite from layer {bad[0]} on" if len(bad) else "loss or gradient is not finite"
    due = p.overflow["float32"]
    return where + (f"; float32 was predicted to overflow in layer {due}" if due is not None else "")
