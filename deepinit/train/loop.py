"""A run from its config to its last checkpoint, in the order in which things happen."""

from __future__ import annotations

import signal
import time
from typing import Any

import jax
import optax

from deepinit.train import data as text
from deepinit.train import folder, optimizer, step
from deepinit.train.birth import Birth, born
from deepinit.train.checkpoint import CheckpointError, Checkpoints
from deepinit.train.config import Config
from deepinit.train.data import Data
from deepinit.train.metrics import Metrics, Row
from deepinit.train.screen import Screen, si
from deepinit.train.watch import Profile, cache_compilations, interruptible


def train(config: Config) -> int:
    """Pre-train; the exit status: 0, 1 where the initialization or the numbers are wrong, 128 + signal if interrupted.

    Raises:
      ConfigError: what cannot work, in one line.
    """
    recipe = config.check()
    if config.train.compilation_cache:
        cache_compilations(config.train.compilation_cache)
    part = config.train.batch_size // config.train.accumulate
    data = text.load(
        config.data,
        batch_size=config.train.batch_size,
        eval_batch_size=part,
        eval_batches=config.train.eval_batches,
    )
    birth = born(config)
    screen = Screen(config.last_step, recipe.geometry.flops_per_token(config.data.seq_len))
    with screen, jax.set_mesh(birth.mesh):
        run = Run(config, birth, data, screen)
        try:
            return run.go()
        except CheckpointError as e:
            return run.end(1, str(e))
        except KeyboardInterrupt:
            return run.end(128 + signal.SIGINT, "interrupted at once; what was saved before is kept")


class Run:
    """One run: what it is made of, and the loop."""

    def __init__(self, config: Config, birth: Birth, data: Data, screen: Screen):
        self.birth, self.data, self.screen = birth, data, screen
        self.folder = folder.of(config)
        self.config = config.replace(train__run_dir=str(self.folder))
        self.init = folder.init_record(birth.verdict, config)
        self.evaluate = step.evaluator(birth.model, birth.mesh)
        self.tokens = 0
        self.compile_s: float | None = None

    def go(self) -> int:
        """From the verdict on; the exit status."""
        config, birth, screen, t = self.config, self.birth, self.screen, self.config.train

        # ---- stop here if a leaf is wrong
        if not birth.verdict.ok:
            if not (self.folder / "checkpoints").exists():  # else the record is that of the run's own start
                folder.write(self.folder, config, birth.recipe, self.init)
            return self.end(1, birth.verdict.table())

        # ---- restore, if there is a checkpoint
        self.checkpoints = Checkpoints(self.folder / "checkpoints", t.keep_checkpoints)
        start = self.checkpoints.latest or 0
        changed = folder.compare(self.folder, config, birth.recipe, self.init) if start else []
        folder.write(self.folder, config, birth.recipe, self.init)
        if start >= config.last_step:
            self.checkpoints.close()
            return self.end(0, f"{self.folder} is finished: step {start} of {config.last_step}, nothing to do")
        self.show(start)
        for change in changed:
            screen.say(f"changed since the last start: {change}")
        tx = optimizer.make(config, birth.recipe, birth.params)
        state, shardings = step.create(birth.params, tx, birth.mesh)
        if start:
            state, meta = self.checkpoints.restore(start, step.released(state))
            self.tokens = meta["tokens"]
            if meta["data"] != self.data.text.sha256:
                screen.say(f"changed since the last start: the text, sha256 {meta['data'][:16]} there")

        # ---- loop
        self.metrics = Metrics(self.folder, start, t.tensorboard)
        try:
            return self.loop(state, shardings, tx, start)
        finally:
            self.metrics.close()

    def loop(self, state: step.TrainState, shardings: Any, tx: optax.GradientTransformation, start: int) -> int:
        """Dispatch a step, read the metrics of the one before, evaluate, save."""
        config, screen, t, end = self.config, self.screen, self.config.train, self.config.last_step
        pure = step.train_step(self.birth.model, tx, optimizer.schedule(config), t.seed, config.model.dropout > 0)
        screen.start(start)
        batch = self.batch(start)
        began = time.perf_counter()
        run_step = step.jitted(pure, shardings, self.birth.mesh).lower(state, batch).compile()
        self.compile_s = time.perf_counter() - began
        screen.say(f"step compiled in {self.compile_s:.1f} s")
        waiting, bad, self.clock = None, 0, time.perf_counter()
        with interruptible() as interrupted, Profile(self.folder / "profile", t.profile) as profile:
            for done in range(start + 1, end + 1):
                profile.before(done)
                state, metrics = run_step(state, batch)
                if done < end:
                    batch = self.batch(done)  # while the devices work
                if waiting:
                    bad = self.read(*waiting)
                waiting = (done, metrics)
                profile.after(done, metrics)
                self.checkpoints.check()

                last = done == end or bool(interrupted)
                evaluating = done == end or due(done, t.eval_every)
                saving = last or due(done, t.checkpoint_every)
                if not (evaluating or saving or bad):
                    continue
                bad, waiting = self.read(*waiting), None
                if bad >= t.max_bad_steps:
                    return self.stop_bad(done, bad)
                if evaluating:
                    loss = self.evaluate(state.params, self.data.eval_batches())
                    self.metrics.write({"step": done, "eval_loss": loss})
                    screen.evaluated(done, loss)
                if saving and (last or not bad):
                    self.checkpoints.save(done, state, self.meta(done))
                if interrupted and done < end:
                    self.checkpoints.close()
                    return self.end(128 + interrupted[0], f"saved after step {done}; to resume: {self.resume}")
                self.clock = time.perf_counter()
        self.checkpoints.close()
        return self.end(0)

    def batch(self, number: int) -> dict[str, jax.Array]:
        """The batch with this number, on the devices."""
        return step.put(self.data.train[number], self.config.train.accumulate, self.birth.mesh)

    def read(self, done: int, metrics: step.Metrics) -> int:
        """Wait for the metrics of a step, keep and show them; how many steps in a row were bad."""
        m = {k: v.item() for k, v in jax.device_get(metrics).items()}
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        self.tokens += int(m["tokens"])
        speed = m["tokens"] / seconds
        row: Row = {
            "step": done,
            **{k: m[k] for k in ("loss", "lr", "grad_norm")},
            "tokens_per_s": speed,
            "flops_per_s": speed * self.screen.flops_per_token,
            "step_s": seconds,
            "tokens": self.tokens,
            "bad_steps": m["bad_steps"],
        }
        first, self.compile_s = self.compile_s, None
        if first is not None:
            row["compile_s"] = first
        if first is not None or due(done, self.config.train.log_every) or done == self.config.last_step:
            self.metrics.write(row)
        self.screen.step(row)
        if m["bad_in_row"]:
            self.screen.say(f"step {done}: loss or gradient is not finite, nothing was changed")
        return m["bad_in_row"]

    def meta(self, done: int) -> Row:
        """What a checkpoint says besides the state."""
        return {
            "step": done,
            "tokens": self.tokens,
            "config": self.config.to_dict(),
            "recipe": self.birth.recipe.to_json(),
            "digest": self.init["digest"],
            "data": self.data.text.sha256,
            "versions": self.init["versions"],
        }

    # ---------------------------------------------------------------------------------------------- endings

    @property
    def resume(self) -> str:
        """The command that goes on with this run."""
        more = " --train.stop-at 0" if self.config.train.stop_at else ""
        return f"deepinit train --config {self.folder / 'config.yaml'}{more}"

    def stop_bad(self, done: int, bad: int) -> int:
        """Give up after too many bad steps, the last good checkpoint kept."""
        kept = self.checkpoints.latest
        where = f"the checkpoint of step {kept} is kept" if kept else "there is no checkpoint yet"
        self.checkpoints.close()
        return self.end(1, f"stopped after step {done}: {bad} steps in a row were not finite; {where}")

    def end(self, status: int, why: str = "") -> int:
        """Say why, and the run's folder in the last line; the exit status."""
        self.screen.stop()
        if why:
            self.screen.say(why)
        self.screen.say(f"run: {self.folder}")
        return status

    # ---------------------------------------------------------------------------------------------- header

    def show(self, start: int) -> None:
        """What is being run."""
        c, data, r, verdict = self.config, self.data, self.birth.recipe, self.birth.verdict
        g, params, mesh = r.geometry, self.birth.params, self.birth.mesh
        count = sum(x.size for x in jax.tree.leaves(params))
        devices = f"{mesh.size} {mesh.devices.flat[0].platform} device{'s' if mesh.size > 1 else ''}"
        tokens = data.held_out[0]["tokens"][:, :-1]
        facts = {
            "model": f"{g.num_layers} layers, d_model {g.d_model}, {g.num_heads} heads, {g.mlp} {g.d_ff}, "
            f"vocabulary {g.vocab_size}: {si(count)} parameters in {c.model.param_dtype}",
            "mesh": f"{' x '.join(f'{axis} {size}' for axis, size in mesh.shape.items())} ({devices})",
            "data": f"{si(len(data.text.tokens), 'B')}, {data.text.documents} documents, "
            f"sha256 {data.text.sha256[:16]}; "
            f"windows of {c.data.seq_len}: {data.num_train}, held out {data.num_held_out}",
            "scheme": f"{r.name}@{r.version} ({r.source}), {r.residual.formula}",
            "init": f"ok: {verdict.summary()}; digest {verdict.digest}",
            "stream": self.screen.stream(step.stream_variance(self.birth.model, params, tokens)),
            "run": f"{self.folder}" + (f", resumed after step {start}" if start else ""),
        }
        self.screen.header(
            f"deepinit train: {c.last_step} steps of {c.train.batch_size} x {c.data.seq_len} tokens", facts
        )


def due(done: int, every: int) -> bool:
    """Whether a thing done every so many steps (0: never) is due."""
    return every > 0 and done % every == 0
