"""From a config to one examined model: drawn on its mesh, probed, and compared with its prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from deepinit.report.plots import Curve
from deepinit.sharding import batch_sharding
from deepinit.signal import checks
from deepinit.signal.checks import Check
from deepinit.signal.follow import SEQ_LEN
from deepinit.signal.measured import Measured
from deepinit.signal.predict import Prediction, predict
from deepinit.signal.probe import probe
from deepinit.train import optimizer
from deepinit.train.birth import Birth, born
from deepinit.train.config import Config

BATCH = 8
"""Sequences of a probe; their number is raised to one that the mesh divides."""


@dataclass(frozen=True, eq=False)
class Case:
    """One scheme, examined."""

    label: str
    config: Config
    predicted: Prediction
    measured: Measured
    checks: list[Check]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return checks.passed(self.checks)

    @property
    def curve(self) -> Curve:
        """Its lines and points."""
        return Curve(self.label, self.predicted, self.measured)

    @property
    def summary(self) -> str:
        """How many verdicts there are, and which fail."""
        given = [c for c in self.checks if c.ok is not None]
        bad = [c.name for c in given if not c.ok]
        return f"{len(given)} verdicts, {', '.join(bad) + ' wrong' if bad else 'all good'}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "ok": self.ok,
            "scheme": self.label,
            "checks": [c.to_json() for c in self.checks],
            "predicted": self.predicted.to_json(),
            "measured": self.measured.to_json(),
        }


def examine(label: str, config: Config, tokens: str = "text", effects: bool = True) -> Case:
    """Draw, probe, predict for the same batch, compare.

    Raises:
      ConfigError: something in the config cannot work, or the scheme is outside the prediction.
    """
    recipe = config.recipe()
    predict(recipe, np.zeros((1, 2), np.int32), exponents=False, **config.model_options())  # refused before a draw
    batch = sample(config, tokens)
    made = born(config)
    rows = config.mesh.data * config.mesh.fsdp if min(config.mesh.data, config.mesh.fsdp) > 0 else made.mesh.size
    update, rates = first_steps(config, made)
    with jax.set_mesh(made.mesh):
        on_mesh = jax.device_put(batch, batch_sharding(made.mesh))
        measured = probe(made.model, recipe, made.params, on_mesh, update, rates, effects=rows if effects else 0)
    predicted = predict(recipe, batch[:, :-1], **config.model_options())
    return Case(label, config, predicted, measured, checks.compare(predicted, measured, batch[:, 1:]))


def sample(config: Config, tokens: str) -> np.ndarray:
    """(B, T + 1) tokens: of the training text, or uniformly random."""
    shards = max(config.mesh.data, 1) * max(config.mesh.fsdp, 1)
    if min(config.mesh.data, config.mesh.fsdp) < 0:  # the rest of the devices
        shards = jax.device_count()
    rows = -(-min(BATCH, config.train.batch_size) // shards) * shards
    width = min(config.data.seq_len, SEQ_LEN)
    if tokens == "random":
        return np.random.default_rng(config.data.seed).integers(0, config.model.vocab_size, (rows, width + 1), np.int32)
    from deepinit.train import data

    text = data.load(config.data, batch_size=rows, eval_batch_size=1, eval_batches=1)
    return np.asarray(text.train[0]["tokens"])[:, : width + 1]


def first_steps(config: Config, made: Birth) -> tuple[Any, Any]:
    """((gradients, parameters) -> the configured optimizer's first update, an SGD step's rates), at the peak rate."""
    flat = config.replace(optimizer__warmup_steps=0, optimizer__schedule="constant")
    tx = optimizer.make(flat, made.recipe, made.params)
    groups = optimizer.groups(made.params, made.recipe, config.optimizer)
    rates = jax.tree.map(lambda g: config.optimizer.lr * g.lr, groups, is_leaf=optimizer.is_group)

    def update(grads: Any, params: Any) -> Any:
        return tx.update(grads, tx.init(params), params)[0]

    return update, rates
