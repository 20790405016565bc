"""Checkpoints through orbax: written in the background, restored strictly, refused where they are of another run.

The layout of what is restored comes from the current shardings, so a run may go on with another mesh or number of
processes, scanned or unrolled; shapes, types and the initialization must be the same. A step counts once it is whole:
its files have the sizes that they were written with, and its values the sums of the state that was saved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_utils

from deepinit import digests, roles
from deepinit.errors import ConfigError
from deepinit.files import write_whole
from deepinit.recipe import Recipe
from deepinit.train import distributed, transplant
from deepinit.train.step import TrainState
from deepinit.train.transplant import Origin, flat


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none can be read. The message is one line."""


class Damaged(RuntimeError):
    """A checkpoint is not what was saved. The message is one line."""


@dataclass(frozen=True)
class Restored:
    """What came from a checkpoint."""

    step: int
    state: TrainState
    meta: dict[str, Any]
    origins: dict[str, Origin]
    """Of every leaf."""
    said: list[str]
    """Checkpoints that were passed over, each with the reason."""


class Checkpoints:
    """The checkpoints of a run, by step. A save that was cut off leaves none."""

    def __init__(self, folder: str | Path, keep: int = 2):
        self.folder = epath.Path(folder)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(keep),
            enable_async_checkpointing=True,
            cleanup_tmp_directories=True,
        )
        handlers = {"state": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
        where = self.folder if "://" in str(folder) else epath.Path(Path(folder).absolute())
        try:
            self.manager = ocp.CheckpointManager(where, options=options, item_handlers=handlers)
        except OSError as e:
            raise self._failed(e) from e
        self.saving: int | None = None

    @property
    def latest(self) -> int | None:
        """The newest step that was written to its end."""
        return self.manager.latest_step()

    def save(self, step: int, state: TrainState, meta: Mapping[str, Any]) -> None:
        """Write in the background, unless the step is there already. The state may be donated once this returns.

        Raises:
          CheckpointError: the state is not finite (a save would replace a better one), or the disk failed.
        """
        if step == self.latest:
            return
        sums, bad = survey(state)
        if bad:
            raise CheckpointError(f"the state after step {step} is not finite and was not saved: {', '.join(bad[:4])}")
        meta = {**meta, "sums": sums}
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        try:
            self.wait()
            probe(self.folder)
            self.manager.save(step, args=args, force=True)
            self.saving = step
        except CheckpointError:
            raise
        except Exception as e:
            raise self._failed(e) from e

    def check(self) -> None:
        """Raise what went wrong in the background, once the save has ended; never waits for it."""
        if self.saving is not None and not self.manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Wait until what is being written is whole."""
        step, self.saving = self.saving, None
        try:
            self.manager.wait_until_finished()
            if step is not None and distributed.first():
                list_files(self.folder, step)
        except Exception as e:
            raise self._failed(e) from e

    # ---------------------------------------------------------------------------------------------- reading

    def resume(self, state: TrainState) -> Restored | None:
        """The newest step that is whole; None where there is no step at all.

        A damaged step is set aside as `damaged-STEP`, and the one before it is taken.

        Raises:
          ConfigError: the step does not fit the state.
          CheckpointError: no step is whole.
        """
        said: list[str] = []
        steps = sorted(self.manager.all_steps(), reverse=True)
        for step in steps:
            try:
                return Restored(step, *read(self.folder / str(step), state), said)
            except Damaged as e:
                said.append(str(e))
                self.set_aside(step)
        if steps:
            raise CheckpointError("; ".join(said))
        return None

    def restore(self, step: int, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The state and the meta data of a step, in the containers, types and shardings of the given state (or shapes).

        Raises:
          ConfigError: a leaf is missing, left over, or of another shape or type.
          Damaged: it is not what was saved.
        """
        got, meta, _ = read(self.folder / str(step), state)
        return got, meta

    def set_aside(self, step: int) -> None:
        """Rename a damaged step, so that it counts no more and can still be looked at."""
        distributed.sync(f"damaged {step}")
        if distributed.first():
            aside = self.folder / f"damaged-{step}"
            if aside.exists():
                aside.rmtree()
            (self.folder / str(step)).rename(aside)
        distributed.sync(f"set aside {step}")
        self.manager.reload()

    def close(self) -> None:
        """Wait, and let go of the folder."""
        try:
            self.wait()
        finally:
            self.manager.close()

    def _failed(self, e: Exception) -> CheckpointError:
        return CheckpointError(f"checkpoint in {self.folder} could not be written: {type(e).__name__}: {first_line(e)}")


# ---------------------------------------------------------------------------------------------- one checkpoint


def locate(where: str) -> epath.Path:
    """The folder of one checkpoint: itself, or the newest of a run's or of a folder of checkpoints.

    Raises:
      ConfigError: there is none.
    """
    root = epath.Path(where)
    for folder in (root, root / "checkpoints"):
        if (folder / "state").exists():
            return folder
        steps = [int(p.name) for p in folder.iterdir() if p.name.isdigit()] if folder.exists() else []
        if steps:
            return folder / str(max(steps))
    raise ConfigError(f"train.load_from: there is no checkpoint in {where}")


def load(where: str, state: TrainState, mode: str, paths: Sequence[str], recipe: Recipe) -> Restored:
    """The first state of a run from another run's checkpoint. `exact` goes on at its step, the others begin at 0.

    Raises:
      ConfigError: there is no checkpoint; it does not fit; or (but for `list`) its scheme computes another function.
      CheckpointError: it is damaged.
    """
    folder = locate(where)
    try:
        got, meta, origins = read(folder, state, mode, paths)
    except Damaged as e:
        raise CheckpointError(str(e)) from e
    here = json.loads(json.dumps(recipe.to_json()))
    for name in ("name", "residual", "multipliers") if mode != "list" else ():
        if meta["recipe"].get(name) != here.get(name):
            raise ConfigError(
                f"{folder} is of another scheme: {name} {meta['recipe'].get(name)} there, {here[name]} here"
            )
    if mode != "exact":
        meta = {"tokens": 0, "samples": 0, "data": meta["data"], "step": 0}
    return Restored(meta["step"], got, meta, origins, [str(folder)])


def read(
    folder: epath.Path, state: TrainState, mode: str = "exact", paths: Sequence[str] = ()
) -> tuple[TrainState, dict[str, Any], dict[str, Origin]]:
    """A state from one checkpoint, its meta data, and the origin of every leaf.

    Args:
      folder: of one step.
      state: gives containers, shapes, types and layouts, and the values of what is not read.
      mode: `exact`, every leaf; `params`, the parameters alone, no byte of the optimizer's read; `list`, what `paths`
        names.
      paths: globs over the paths of leaves, such as `params/layers/*`.

    Raises:
      ConfigError: the state does not fit; one line with every path.
      Damaged: the files or the values are not what was saved.
    """
    problem = wrong_files(folder) if distributed.first() else ""
    if problem := distributed.from_first(problem):
        raise Damaged(f"{folder} is damaged: {problem}")
    try:
        meta = ocp.Checkpointer(ocp.JsonCheckpointHandler()).restore(folder / "meta")
        tree = ocp.StandardCheckpointHandler().metadata(folder / "state").tree
        saved = dict(flat(tree))
    except Exception as e:
        raise Damaged(f"{folder} is damaged: {type(e).__name__}: {first_line(e)}") from e
    ours = dict(flat(state))
    if mode == "params":
        taken = {path: path.startswith("params/") for path in ours}
    else:
        taken = transplant.select(ours, paths) if mode == "list" else dict.fromkeys(ours, True)
    wanted = {path: leaf for path, leaf in ours.items() if taken[path]}
    there = {path: leaf for path, leaf in saved.items() if mode != "params" or path.startswith("params/")}
    origins = transplant.plan(there, wanted, str(folder), partial=mode == "list")
    needed = transplant.targets(saved, wanted, origins)
    try:
        got = fetch(folder / "state", tree, needed)
    except Exception as e:
        raise Damaged(f"{folder} is damaged: {type(e).__name__}: {first_line(e)}") from e
    new = transplant.assemble(got, wanted, origins)
    meta = dict(meta)
    if sums := meta.pop("sums", None):
        verify(new, sums, folder)
    leaves = [new.get(path, leaf) for path, leaf in ours.items()]
    every = {path: origins.get(path, Origin(())) for path in ours}
    return jax.tree.unflatten(jax.tree.structure(state), leaves), meta, every


def fetch(folder: epath.Path, tree: Any, needed: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Some leaves of a saved tree, by path; of the others no byte is read."""

    def target(path: Any, _: Any) -> Any:
        return needed.get("/".join(roles.names(path)), ocp.PLACEHOLDER)

    item = jax.tree.map_with_path(target, tree)
    args = ocp.args.PyTreeRestore(item, restore_args=checkpoint_utils.construct_restore_args(item))
    got = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(folder, args=args)
    return {path: leaf for path, leaf in flat(got) if path in needed}


# ---------------------------------------------------------------------------------------------- what proves it whole


def probe(folder: epath.Path) -> None:
    """Write a file and take it away: where that fails orbax would wait for minutes before it says so."""
    if "://" not in str(folder):
        file = folder / f".probe-{jax.process_index()}"
        file.write_text("writable")
        file.unlink()


def list_files(folder: epath.Path, step: int) -> None:
    """Keep the names and sizes of a step's files beside it, and forget those of steps that are gone."""
    root = folder / str(step)
    if not root.exists():
        return
    sizes = {str(f.relative_to(root)): f.stat().length for f in walk(root)}
    write_whole(folder / f"{step}.files.json", json.dumps(sizes))
    for old in folder.glob("*.files.json"):
        if not (folder / old.name.partition(".")[0]).exists():
            old.unlink()


def walk(folder: epath.Path) -> list[epath.Path]:
    """Every file below a folder."""
    out: list[epath.Path] = []
    for path in sorted(folder.iterdir()):
        out += walk(path) if path.is_dir() else [path]
    return out


def wrong_files(folder: epath.Path) -> str:
    """The first file whose size is not that which was written; nothing where all are right or nobody knows."""
    listed = folder.parent / f"{folder.name}.files.json"
    if not listed.exists():
        return ""
    try:
        sizes = json.loads(listed.read_text())
    except ValueError:
        return f"{listed.name} was cut off"
    for name, size in sizes.items():
        file = folder / name
        if not file.exists():
            return f"{name} is missing"
        if file.stat().length != size:
            return f"{name} has {file.stat().length} bytes, written were {size}"
    return ""


def survey(state: Any) -> tuple[dict[str, dict[str, list[int]]], list[str]]:
    """(sums of every leaf's bits by canonical path and layer, paths of leaves that are not finite), on the devices."""
    leaves = dict(flat(state))
    stacked = tuple(roles.locate(path).stacked for path in leaves)
    arrays = list(leaves.values())
    sums, finite = jax.device_get(digests.replicated(arrays, _survey(arrays, stacked)))
    out: dict[str, dict[str, list[int]]] = {}
    for path, rows in zip(leaves, sums):
        leaf = roles.locate(path)
        for i, row in enumerate(np.asarray(rows).tolist()):
            out.setdefault(leaf.canonical, {})[str(leaf.at(i) or 0)] = row
    return out, [path for path, ok in zip(leaves, finite) if not ok]


@jax.jit
def _finite(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.asarray(True) for x in arrays]


def _survey(arrays: Sequence[jax.Array], stacked: tuple[bool, ...]) -> tuple[list[jax.Array], list[jax.Array]]:
    return digests.all_lanes(arrays, stacked, digests.on_one_cpu(arrays)), _finite(arrays)


def verify(leaves: Mapping[str, Any], sums: Mapping[str, Any], folder: Any) -> None:
    """Compare what was read with the sums of what was saved.

    Raises:
      Damaged: names the leaf.
    """
    found, _ = survey(dict(leaves))
    for name, rows in found.items():
        if any(row != sums[name][layer] for layer, row in rows.items()):
            raise Damaged(f"{folder} is damaged: the values of {name} are not those that were saved")


def first_line(e: Exception) -> str:
    """The first line of an error."""
    return str(e).strip().partition("\n")[0]
