"""metrics.jsonl: a row for a step or an evaluation, on disk as soon as it is known; TensorBoard beside it if wanted.

probe.jsonl has a row for each probe of the signal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepinit.errors import ConfigError
from deepinit.files import write_whole

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    """The rows of a file; a last line that was cut off is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


class Metrics:
    """Appends rows to a run's metrics."""

    def __init__(self, folder: Path, after: int = 0, tensorboard: bool = False, name: str = "metrics.jsonl"):
        """Rows after the step `after`, written by a run that did not come as far as a checkpoint, are dropped."""
        self.board = board(folder, after) if tensorboard else None
        path = folder / name
        rows = [row for row in read(path) if row["step"] <= after]
        write_whole(path, "".join(_line(row) for row in rows))
        self.file = path.open("a", buffering=1)

    def write(self, row: Mapping[str, Any]) -> None:
        """One row; it has a `step`."""
        self.file.write(_line(row))
        if self.board:
            for key, value in row.items():
                if key != "step" and isinstance(value, int | float):
                    self.board.add_scalar(key, value, row["step"])

    def close(self) -> None:
        """End both files."""
        self.file.close()
        if self.board:
            self.board.close()


class Nowhere:
    """Takes rows on the processes that write none."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Samples:
    """Which samples this process read for each step, in samples/PROCESS.jsonl.

    Over all files, the rows of a step name its samples, each on every process that holds it; whatever the number of
    processes was, so that a resumed run can be shown to have seen each sample once.
    """

    def __init__(self, folder: Path, process: int):
        self.path = folder / "samples" / f"{process:05}.jsonl"

    def open(self, after: int) -> None:
        """Process 0 drops the rows of all processes after the step that is resumed from, before any writes."""
        self.path.parent.mkdir(exist_ok=True)
        for path in self.path.parent.glob("*.jsonl"):
            write_whole(path, "".join(_line(row) for row in read(path) if row["step"] <= after))

    def write(self, step: int, ids: Any) -> None:
        """The ids that this process read for a step."""
        with self.path.open("a") as file:
            file.write(_line({"step": step, "ids": [int(i) for i in ids]}))


def _line(row: Mapping[str, Any]) -> str:
    # JSON knows no NaN: a number that is not finite is null.
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite) + "\n"


def require_tensorboard() -> None:
    """Refuse to promise a board that cannot be written."""
    if find_spec("tensorboardX") is None:
        raise ConfigError("train.tensorboard: true needs the extra: pip install 'deepinit[tensorboard]'")


def board(folder: Path, after: int) -> Any:
    """A TensorBoard writer whose events after a step count no more."""
    from tensorboardX import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1 if after else None)
