"""What training says of itself: warnings that name the layer, from probes every N steps and from every loss."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from deepinit.geometry import Role
from deepinit.signal.measured import Measured, plain

BAND = 10.0
"""Factor by which a layer's variance may leave the median of its last probes."""
RECENT = 5
"""Probes that make that median."""
DEAD_AFTER = 100
"""Steps after which a learnable factor should have moved."""
CLOSED = 0.01
"""Size of a gate on a branch under which the branch hardly takes part."""
EARLY = 50
"""Steps in which a healthy run moves all positions alike: it learns how often each token comes."""
COLLAPSED = 0.95
"""Token correlation from which on positions can hardly be told apart."""
RATIO = (1e-7, 0.3)
"""Range of update over weight (RMS), which two probes in a row must leave."""
SPIKE = 0.5
"""Nats above the median of the last losses, and at least ten times their scatter."""
MOVED = 3.0
"""Factor by which a layer's gradient has moved."""
WINDOW = 50
"""Losses that are averaged."""
NEAR = 0.1
"""Nats below the unigram entropy at which a run has learnt letter frequencies only."""
STILL = 0.02
"""Nats from one window to the next that are no progress."""


def unigram_entropy(tokens: Any) -> float:
    """Entropy in nats of the token frequencies of a text's first ten million: what a model of them alone reaches."""
    counts = np.unique(np.asarray(tokens[:10_000_000]), return_counts=True)[1]
    p = counts / counts.sum()
    return float(-(p * np.log(p)).sum())


class Watch:
    """Looks at a run as it goes; every method gives the warnings that are new."""

    def __init__(self, unigram: float | None = None, patience: int = 0):
        """`unigram`: entropy of the data's token frequencies. Before `patience` steps nothing counts as a stall."""
        self.unigram, self.patience = unigram, patience
        self.losses: deque[float] = deque(maxlen=2 * WINDOW)
        self.probes: deque[tuple[int, Measured]] = deque(maxlen=RECENT)
        self.first: tuple[int, Measured] | None = None
        self.steps = 0
        self.said: set[str] = set()
        self.out_of_range: set[str] = set()

    # --- every step ----------------------------------------------------------------------------------------------

    def loss(self, step: int, loss: float) -> list[str]:
        """A spike, with the layer whose gradient moved first; or a stall at the unigram entropy."""
        self.steps += 1
        found = []
        recent = np.array(list(self.losses)[-30:])
        if len(recent) >= 10 and math.isfinite(loss):
            usual = float(np.median(recent))
            scatter = float(np.median(np.abs(recent - usual)))
            if loss - usual > max(SPIKE, 10 * scatter):
                found.append(f"loss spike, {loss:.3f} after {usual:.3f}; {self.moved_first()}")
        if math.isfinite(loss):
            self.losses.append(loss)
        if self.stalled() and self.once("stall"):
            found.append(
                f"loss has stalled at {np.mean(list(self.losses)[-WINDOW:]):.3f}, the unigram entropy of the text "
                f"({self.unigram:.3f}): only token frequencies have been learnt"
            )
        return found

    def stalled(self) -> bool:
        """Whether the last losses stay at or above the unigram entropy and do not fall."""
        if self.unigram is None or self.steps < self.patience or len(self.losses) < 2 * WINDOW:
            return False
        before, now = np.mean(list(self.losses)[:WINDOW]), np.mean(list(self.losses)[WINDOW:])
        return bool(now > self.unigram - NEAR and before - now < STILL)

    def moved_first(self) -> str:
        """The layer whose gradient left its usual size first, in the probes before now."""
        seen = [
            (step, np.concatenate([m.gradient, *(s.gradient for s in m.roles.values())])) for step, m in self.probes
        ]
        if len(seen) < 2:
            return "set train.probe_every to see in which layer it began"
        for i, (step, size) in enumerate(seen[1:], 1):
            usual = np.median([s for _, s in seen[:i]], axis=0)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where(usual > 0, size / usual, 0.0)
            if float(np.nanmax(ratio, initial=0)) > MOVED:
                return f"the gradient of {self.name(int(np.nanargmax(ratio)))} moved first, at step {step}"
        return "no layer's gradient had moved at the probes before"

    def name(self, index: int) -> str:
        """What the entry of the gradients' row is."""
        _, m = self.probes[-1]
        if index < len(m.gradient):
            return "the embedding's output" if index == 0 else f"layer {index}"
        index -= len(m.gradient)
        for role, s in m.roles.items():
            if index < len(s.gradient):
                return role + s.where(index)
            index -= len(s.gradient)
        raise IndexError(index)

    # --- every evaluation ----------------------------------------------------------------------------------------

    def near_zero(self, step: int, sizes: Mapping[str, np.ndarray]) -> list[str]:
        """Gates on branches that are still near zero in most layers; `sizes` are means of |gate| by layer."""
        found = []
        for path, size in sizes.items():
            closed = int((size < CLOSED).sum())
            late = step >= DEAD_AFTER and path.rpartition("/")[2] == Role.RESIDUAL_GATE
            if late and 2 * closed > len(size) and self.once(f"closed {path}"):
                found.append(
                    f"closed gates: {path} is below {CLOSED:g} in {closed} of {len(size)} layers after {step} steps; "
                    "those branches hardly take part"
                )
        return found

    # --- every probe ---------------------------------------------------------------------------------------------

    def probe(self, step: int, m: Measured) -> list[str]:
        """Variance out of its band, collapsed tokens, dead gates, updates out of range."""
        found = [*self.variance(m), *self.tokens(step, m), *self.gates(step, m), *self.updates(m)]
        self.first = self.first or (step, m)
        self.probes.append((step, m))
        return found

    def variance(self, m: Measured) -> Iterator[str]:
        """Layers whose variance has left the median of their last probes."""
        now = m.layer_variance
        if not np.isfinite(now).all():
            yield f"variance of layer {int(np.flatnonzero(~np.isfinite(now))[0])} is not finite"
            return
        if len(self.probes) < 2:
            return
        usual = np.median([p.layer_variance for _, p in self.probes], axis=0)
        off = np.abs(np.log(np.maximum(now, 1e-300) / np.maximum(usual, 1e-300)))
        out = np.flatnonzero(off > math.log(BAND))
        if len(out):
            worst = int(np.argmax(off))
            yield (
                f"variance of the stream leaves its band first in layer {out[0]}; layer {worst} has {now[worst]:.3g} "
                f"after {usual[worst]:.3g}"
            )

    def tokens(self, step: int, m: Measured) -> Iterator[str]:
        """The layer from which on all positions carry one vector; in its first steps any run has little else to say."""
        out = np.flatnonzero(m.layer_correlation > COLLAPSED)
        if step >= EARLY and len(out) and self.once("correlation"):
            yield (
                f"tokens have collapsed: from layer {out[0]} on the cosine of two positions is "
                f"{m.layer_correlation[out[0]]:.3f}"
            )

    def gates(self, step: int, m: Measured) -> Iterator[str]:
        """Learnable factors that have not moved since the first probe."""
        if self.first is None or step - self.first[0] < DEAD_AFTER:
            return
        for path, value in m.gates.items():
            before = self.first[1].gates[path]
            still = np.flatnonzero(np.abs(value - before) <= 1e-7 * np.maximum(np.abs(before), 1e-3))
            if len(still) and self.once(f"gate {path}"):
                layers = ", ".join(str(i + 1) for i in still[:5]) + (" ..." if len(still) > 5 else "")
                yield f"dead gates: {path} has not moved in {step - self.first[0]} steps in layer {layers}"

    def updates(self, m: Measured) -> Iterator[str]:
        """Matrices whose step is too large or too small for them, twice in a row."""
        now = set()
        for role, s in m.roles.items():
            if "norm_scale" in role or role in ("bias", "residual_gate", "branch_scale", "branch_shift"):
                continue
            known = np.isfinite(s.update) & (s.update > 0)
            bad = np.flatnonzero(known & ((s.update < RATIO[0]) | (s.update > RATIO[1])))
            if len(bad):
                now.add(role)
                if role in self.out_of_range and self.once(f"update {role}"):
                    at = int(bad[np.argmax(np.abs(np.log(s.update[bad])))])
                    low, high = RATIO
                    yield f"update over weight of {role}{s.where(at)} is {s.update[at]:.2g}, not in {low:g} to {high:g}"
        self.out_of_range = now

    def once(self, what: str) -> bool:
        """True the first time."""
        new = what not in self.said
        self.said.add(what)
        return new


def spread(size: np.ndarray) -> dict[str, Any]:
    """One number a layer as a row of the metrics has it."""
    ends = {"mean": float(size.mean()), "min": float(size.min()), "max": float(size.max())}
    return {**ends, "layers": plain(size)}


def row(step: int, m: Measured) -> Mapping[str, Any]:
    """A probe as a row of probe.jsonl: numbers by layer."""
    return {
        "step": step,
        "variance": plain(m.layer_variance),
        "branch_variance": plain(m.branch),
        "token_correlation": plain(m.layer_correlation),
        "attention_entropy": plain(m.entropy),
        "attention_logit_variance": plain(m.scores),
        "stream_gradient": plain(m.gradient),
        "gradient": {role: plain(s.gradient) for role, s in m.roles.items()},
        "zero_gradient": {role: plain(s.zero_gradient) for role, s in m.roles.items()},
        "update_over_weight": {role: plain(s.update) for role, s in m.roles.items()},
        "weight_rms": {role: plain(s.weight_rms) for role, s in m.roles.items()},
        "gates": {path: plain(v) for path, v in m.gates.items()},
        "logit_variance": plain(m.logit_variance),
        "loss": plain(m.loss),
    }
