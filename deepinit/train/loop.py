"""A run from its config to its last checkpoint, in the order in which things happen."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from deepinit import calibration, sharding
from deepinit.files import write_whole
from deepinit.signal.measured import Measured
from deepinit.signal.probe import gates, observer
from deepinit.signal.watch import Watch, spread, unigram_entropy
from deepinit.signal.watch import row as probe_row
from deepinit.train import checkpoint, distributed, folder, step
from deepinit.train import data as text
from deepinit.train.birth import Birth, born, planned
from deepinit.train.checkpoint import CheckpointError, Checkpoints, Restored
from deepinit.train.config import Config
from deepinit.train.data import Batch, Data
from deepinit.train.metrics import Metrics, Nowhere, Row, Samples
from deepinit.train.program import Program
from deepinit.train.screen import Screen, si
from deepinit.train.watch import Profile, interruptible
from deepinit.train.watchdog import RETRY, Beat


def train(config: Config, beat: Beat = lambda where: None) -> int:
    """Pre-train; the exit status: 0; 1 where the initialization, the numbers or a save are wrong; 75 after SIGTERM, all
    being saved so that the same command goes on; 130 after Ctrl-C. `beat` is called as the run moves.

    Raises:
      ConfigError: what cannot work, in one line.
    """
    recipe = config.check()
    beat("tracing")
    plan = planned(config, recipe)
    early = None if recipe.calibrate else Program(config, plan)
    part = config.train.batch_size // config.train.accumulate
    beat("reading data")
    data = text.load(
        config.data,
        batch_size=config.train.batch_size,
        eval_batch_size=part,
        eval_batches=config.train.eval_batches,
        vocab_size=config.model.vocab_size,
    )
    distributed.same("the text", data.text.sha256)
    beat("initialization")
    birth = born(config, plan=plan)
    distributed.check_replicas(birth.params, birth.mesh)
    console = None if distributed.first() else Console(quiet=True)
    screen = Screen(config.last_step, recipe.geometry.flops_per_token(config.data.seq_len), console)
    with screen, jax.set_mesh(birth.mesh):
        run = Run(config, birth, early or Program(config, birth), data, screen, beat)
        try:
            return run.go()
        except CheckpointError as e:
            return run.end(1, str(e))
        except KeyboardInterrupt:
            return run.end(128 + signal.SIGINT, "interrupted at once; what was saved before is kept")


class Run:
    """One run: what it is made of, and the loop."""

    def __init__(self, config: Config, birth: Birth, program: Program, data: Data, screen: Screen, beat: Beat):
        self.birth, self.program, self.data, self.screen, self.beat = birth, program, data, screen, beat
        self.folder = Path(distributed.from_first(str(folder.of(config)) if distributed.first() else ""))
        self.config = config.replace(train__run_dir=str(self.folder))
        self.init = folder.init_record(birth.verdict, config)
        self.evaluate = step.evaluator(birth.model, birth.mesh)
        self.ballot = distributed.Ballot(birth.mesh)
        self.stream = data.train
        self.watch = Watch(unigram_entropy(data.text.tokens), config.optimizer.warmup_steps)
        self.tokens = 0
        self.compile_s: float | None = None

    def go(self) -> int:
        """From the verdict on; the exit status."""
        config, birth, screen, t = self.config, self.birth, self.screen, self.config.train

        # ---- stop here if a leaf is wrong
        if not birth.verdict.ok:
            if not (self.folder / "checkpoints").exists():  # else the record is that of the run's own start
                self.write_folder()
            return self.end(1, birth.verdict.table())

        # ---- restore, if there is a checkpoint
        self.checkpoints = Checkpoints(t.checkpoint_dir or self.folder / "checkpoints", t.keep_checkpoints)
        start = self.checkpoints.latest or 0
        changed = folder.compare(self.folder, config, birth.recipe, self.init) if start else []
        self.write_folder()
        if start >= config.last_step:
            self.checkpoints.close()
            return self.end(0, f"{self.folder} is finished: step {start} of {config.last_step}, nothing to do")
        self.show(start)
        for change in changed:
            screen.say(f"changed since the last start: {change}")
        state, _ = step.create(birth.params, self.program.tx, birth.mesh, self.program.shardings)
        self.beat("restoring")
        if start:
            restored = self.checkpoints.resume(step.released(state))
        else:
            restored = self.loaded(state)
        if restored:
            start, state, self.tokens = restored.step, restored.state, restored.meta["tokens"]
            self.stream = self.data.train.after(restored.meta["samples"], start)
            for damage in restored.said:
                screen.say(f"{damage}; going on from step {start}")
            if restored.meta["data"] != self.data.text.sha256:
                screen.say(f"changed since the last start: the text, sha256 {restored.meta['data'][:16]} there")

        # ---- loop
        self.samples = Samples(self.folder, jax.process_index())
        if config.data.log_samples and distributed.first():
            self.samples.open(start)
        distributed.sync("samples")
        self.metrics = Metrics(self.folder, start, t.tensorboard) if distributed.first() else Nowhere()
        keeping = t.probe_every and distributed.first()
        self.probes = Metrics(self.folder, start, name="probe.jsonl") if keeping else Nowhere()
        try:
            return self.loop(state, start)
        finally:
            self.metrics.close()
            self.probes.close()

    def loop(self, state: step.TrainState, start: int) -> int:
        """Dispatch a step, read the metrics of the one before, evaluate, save."""
        birth, screen, t, end = self.birth, self.screen, self.config.train, self.config.last_step
        screen.start(start)
        batch = self.batch(start)
        self.beat("compiling")
        run_step, self.compile_s, waited = self.program.ready()
        screen.say(f"step compiled in {self.compile_s:.1f} s, {waited:.1f} s of them waited for")
        observe = observer(birth.model, birth.recipe, self.program.tx, birth.mesh)
        sizes = jax.jit(gates, out_shardings=NamedSharding(birth.mesh, PartitionSpec()))
        waiting, bad, vote, self.clock = None, 0, 0, time.perf_counter()
        with interruptible() as interrupted, Profile(self.folder / "profile", t.profile) as profile:
            for done in range(start + 1, end + 1):
                profile.before(done)
                probed = observe(state, batch) if due(done, t.probe_every) else None
                state, metrics = run_step(state, batch)
                if done < end:
                    batch = self.batch(done)  # while the devices work
                if probed:
                    self.observed(done, probed())
                if waiting:
                    bad, vote = self.read(*waiting)
                waiting = (done, metrics, self.ballot.cast(sum(interrupted)))
                profile.after(done, metrics)
                self.checkpoints.check()
                self.beat(f"step {done}")

                vote = vote or self.ballot.now(sum(interrupted))
                last = done == end or bool(vote)
                evaluating = done == end or due(done, t.eval_every)
                saving = last or due(done, t.checkpoint_every)
                if not (evaluating or saving or bad):
                    continue
                (bad, late), waiting = self.read(*waiting), None
                if bad >= t.max_bad_steps:
                    return self.stop_bad(done, bad)
                if evaluating:
                    loss = self.evaluate(state.params, self.data.eval_rows())
                    self.evaluated(done, loss, jax.device_get(sizes(state.params)))
                if saving and (last or not bad):
                    self.checkpoints.save(done, state, self.meta(done))
                if vote and done < end:
                    self.checkpoints.close()
                    status = RETRY if vote == signal.SIGTERM else 128 + vote
                    return self.end(status, f"saved after step {done}; to resume: {self.resume}")
                vote = late
                self.clock = time.perf_counter()
        self.checkpoints.close()
        return self.end(0)

    def batch(self, number: int) -> dict[str, jax.Array]:
        """The batch with this number, on the devices."""
        t = self.config.train

        def read(rows: Sequence[int]) -> Batch:
            batch = self.stream.rows(number, rows)
            if self.config.data.log_samples:
                self.samples.write(number + 1, batch["id"])
            return batch

        return step.place(read, t.batch_size, t.accumulate, self.birth.mesh)

    def loaded(self, state: step.TrainState) -> Restored | None:
        """The first state of a new run that takes some of it from another; the origin of every leaf in origins.json."""
        t = self.config.train
        if not t.load_from:
            return None
        restored = checkpoint.load(t.load_from, state, t.load, t.load_paths, self.birth.recipe)
        origins = {path: str(origin) for path, origin in restored.origins.items()}
        if distributed.first():
            record = {"checkpoint": restored.said[0], "leaves": origins}
            write_whole(self.folder / "origins.json", json.dumps(record, indent=1) + "\n")
        fresh = sum(origin == "initial" for origin in origins.values())
        self.screen.say(f"{len(origins) - fresh} leaves from {restored.said.pop()}, {fresh} initial; see origins.json")
        return restored

    def write_folder(self) -> None:
        """What the run is and began with, once all processes have compared what was there."""
        distributed.sync("compared")
        if distributed.first():
            folder.write(self.folder, self.config, self.birth.recipe, self.init)
            if measured := self.birth.calibration:
                measured.write(self.folder / calibration.FILE)

    def read(self, done: int, metrics: step.Metrics, ballot: Any) -> tuple[int, int]:
        """Wait for the metrics of a step, keep and show them; (how many steps in a row were bad, the vote to stop)."""
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
        for warning in self.watch.loss(done, m["loss"]):
            self.screen.say(f"step {done}: {warning}")
        if m["bad_in_row"]:
            self.screen.say(f"step {done}: loss or gradient is not finite, nothing was changed")
        return m["bad_in_row"], int(ballot)

    def observed(self, done: int, found: Measured) -> None:
        """Keep a probe of the step, and say what it warns of."""
        warnings = self.watch.probe(done, found)
        self.probes.write({**probe_row(done, found), "warnings": warnings})
        for warning in warnings:
            self.screen.say(f"step {done}: {warning}")

    def evaluated(self, done: int, loss: float, sizes: Mapping[str, np.ndarray]) -> None:
        """Keep and show an evaluation, and the sizes of gates by layer; say where most of them stay near zero."""
        row: Row = {"step": done, "eval_loss": loss}
        if sizes:
            row["gates"] = {path: spread(size) for path, size in sizes.items()}
        self.metrics.write(row)
        self.screen.evaluated(done, loss)
        for warning in self.watch.near_zero(done, sizes):
            self.screen.say(f"step {done}: {warning}")

    def meta(self, done: int) -> Row:
        """What a checkpoint says besides the state."""
        return {
            "step": done,
            "tokens": self.tokens,
            "samples": self.stream.offset + done * self.stream.size,
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
        unit = "B" if c.data.tokenizer == "bytes" else "tokens"
        tokens = data.held_out[0]["tokens"][:, :-1]
        facts = {
            "model": f"{g.num_layers} layers, d_model {g.d_model}, {g.num_heads} heads, {g.mlp} {g.d_ff}, "
            f"vocabulary {g.vocab_size}: {si(count)} parameters in {c.model.param_dtype}",
            "mesh": f"{sharding.show(mesh.devices.shape)} ({devices})",
            "data": f"{si(len(data.text.tokens), unit)}, {data.text.documents} documents, "
            f"sha256 {data.text.sha256[:16]}; "
            f"windows of {c.data.seq_len}: {data.num_train}, held out {data.num_held_out}"
            + (f"; {data.skipped} damaged documents left out" if data.skipped else ""),
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
