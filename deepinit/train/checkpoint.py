"""Checkpoints through orbax: written in the background, restored strictly, refused where they are of another run.

The layout of what is restored comes from the current shardings, so a run may go on with another mesh; shapes, types and
the initialization must be the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from deepinit import roles
from deepinit.errors import ConfigError
from deepinit.train.step import TrainState


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. The message is one line."""


class Checkpoints:
    """The checkpoints of a run, by step. A step counts once it is whole: a save that was cut off leaves none."""

    def __init__(self, folder: Path, keep: int = 2):
        self.folder = folder
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(keep),
            enable_async_checkpointing=True,
            cleanup_tmp_directories=True,
        )
        handlers = {"state": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handlers)
        self.saving = False

    @property
    def latest(self) -> int | None:
        """The newest whole step."""
        return self.manager.latest_step()

    def save(self, step: int, state: TrainState, meta: Mapping[str, Any]) -> None:
        """Write in the background, unless the step is there already. The state may be donated once this returns."""
        if step == self.latest:
            return
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(dict(meta)))
        try:
            self.manager.save(step, args=args, force=True)
            self.saving = True
        except Exception as e:
            raise self._failed(e) from e

    def check(self) -> None:
        """Raise what went wrong in the background, once the save has ended; never waits for it."""
        if self.saving and not self.manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Wait until what is being written is whole."""
        self.saving = False
        try:
            self.manager.wait_until_finished()
        except Exception as e:
            raise self._failed(e) from e

    def restore(self, step: int, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The state and the meta data of a step, in the containers, types and shardings of the given state (or shapes).

        Raises:
          ConfigError: a leaf is missing, left over, or of another shape or type. (Orbax would cast in silence.)
        """
        saved = self.manager.item_metadata(step)["state"]
        compare_leaves(dict(flat(saved.tree)), dict(flat(state)), self.folder / str(step))
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(target, strict=True), meta=ocp.args.JsonRestore())
        got = self.manager.restore(step, args=args)
        return got["state"], got["meta"]

    def close(self) -> None:
        """Wait, and let go of the folder."""
        try:
            self.wait()
        finally:
            self.manager.close()

    def _failed(self, e: Exception) -> CheckpointError:
        return CheckpointError(f"checkpoint in {self.folder} could not be written: {type(e).__name__}: {first_line(e)}")


def first_line(e: Exception) -> str:
    """The first line of an error."""
    return str(e).strip().partition("\n")[0]


def flat(tree: Any) -> Iterator[tuple[str, Any]]:
    """Leaves with their paths, the same for the state and for what orbax says of a saved one."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        yield "/".join(roles.names(path)), leaf


def compare_leaves(saved: Mapping[str, Any], wanted: Mapping[str, Any], where: Path) -> None:
    """Refuse a checkpoint whose leaves are not those of the state, in one line."""
    for name in [*wanted, *saved]:
        if name not in saved:
            raise ConfigError(f"{where}: has no {name}, which this run needs; was it made with other model options?")
        if name not in wanted:
            raise ConfigError(f"{where}: has {name}, which this run lacks; was it made with other model options?")
        for what in ("shape", "dtype"):
            old, new = getattr(saved[name], what), getattr(wanted[name], what)
            if old != new:
                raise ConfigError(f"{where}: {name} has {what} {old} there, {new} here")
