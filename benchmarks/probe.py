"""What does it cost to look? A step of 80 layers, d = 64, 8 sequences of 64 bytes; the same with statistics of every
layer in it; and a probe (`train.probe_every`), which is a pass of its own. A difference of 3 % takes 20 rounds.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import steps
from benchmarks.harness import Race
from deepinit.signal import probe
from deepinit.train import optimizer, step
from deepinit.train.step import TrainState

SIZES = {"layers": 80, "d": 64, "heads": 4, "seq": 64, "batch": 8, "model__remat": "full"}
STREAM = "mean squares of the stream"
SIGNAL = "mean squares of the stream, of its gradient and of each role's"
EVERYTHING = "all statistics of a probe"
EVERY = 50
"""Steps between two probes, of which the share of a run's time is told."""


def run(rounds: int, sizes: dict[str, Any] = SIZES) -> Race:
    """Steps per CPU-second."""
    running = steps.Running(steps.config(**sizes))
    parts = running.parts
    looking = {f"step and {what}": looked(running, what) for what in (STREAM, SIGNAL, EVERYTHING)}
    with jax.set_mesh(parts.mesh):
        observe = probe.observer(parts.model, parts.recipe, parts.tx, parts.mesh)
    cases: dict[str, Any] = {"step": running, **looking, "probe": lambda: observe(running.state, running.batch)()}
    race = Race("a step of 80 layers", "steps", 1, cases).run(rounds)
    for name in looking:
        race.target(f"{name}, over a step", race.ratio(name, "step"), at_most=1.03)
    race.target(f"a run with a probe every {EVERY} steps, over one without",
                1 + race.ratio("probe", "step") / EVERY, at_most=1.03)  # fmt: skip
    return race


def looked(running: steps.Running, what: str) -> Any:
    """Steps of a state of its own, with statistics from the same passes."""
    parts = running.parts
    lr = optimizer.schedule(parts.config)

    def step_and_look(state: TrainState, batch: Any) -> Any:
        """The arithmetic of `train_step`, once with its gradient's by-products."""
        tokens, taps = batch["tokens"][0], {} if what == STREAM else probe.taps_of(parts.model)
        value = jax.value_and_grad(
            lambda p, t: probe.observed_loss(parts.model, p, t, tokens), argnums=(0, 1), has_aux=True
        )
        (loss, seen), (grads, tapped) = value(state.params, taps)
        norm = optimizer.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        updates, moments = parts.tx.update(grads, state.opt_state, state.params)
        new = optimizer.apply_updates(state.params, updates), moments
        params, moments = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, (state.params, state.opt_state))
        found = {"loss": loss, "norm": norm, "lr": lr(state.step)}
        if what == EVERYTHING:
            trees = {"weight": state.params, "update": updates}
            found |= {name: probe.by_role(tree, probe.square) for name, tree in trees.items()}
            found |= {"seen": seen, "zero": probe.by_role(grads, lambda g: (g == 0) * 1.0)}
        else:
            found["stream_ms"] = seen["stats"]["layers"]["stream_ms"]
        if what != STREAM:
            found |= {"tapped": tapped, "gradient": probe.by_role(grads, probe.square)}
        return state.replace(params=params, opt_state=moments, step=state.step + 1), found

    with jax.set_mesh(parts.mesh):
        state = jax.tree.map(jnp.copy, running.state)
        compiled = step.jitted(step_and_look, parts.shardings, parts.mesh).lower(state, running.batch).compile()

    def one() -> None:
        nonlocal state
        state, found = compiled(state, running.batch)
        jax.block_until_ready((state, found))

    return one
