"""Text as bytes, cut into windows; batches that depend on (seed, step) alone.

A batch is {"tokens": (B, T+1) int32, "weights": (B, T) float32}: weights say which targets count. The last window is
padded, with weight 0. Windows do not overlap, so held-out text is never trained on.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deepinit.errors import ConfigError

if TYPE_CHECKING:  # grain imports jax, and files are looked for before that
    import grain

    from deepinit.train.config import DataConfig

Batch = dict[str, np.ndarray]
Reader = Callable[[Sequence[int]], Batch]
LARGEST_SOURCE = 150_000  # bytes; longer modules of the standard library are mostly tables
CHUNK = 8  # neighbouring windows that are held out together


@dataclass(frozen=True)
class Text:
    """Bytes of some documents, and what identifies them."""

    tokens: np.ndarray
    """(N,) uint8."""
    documents: int
    sha256: str

    @classmethod
    def of(cls, documents: list[bytes]) -> Text:
        """Documents one after the other, an empty line between two."""
        joined = b"\n\n".join(documents)
        return cls(np.frombuffer(joined, np.uint8), len(documents), hashlib.sha256(joined).hexdigest())


def read(files: tuple[str, ...]) -> Text:
    """The text of files and globs, in the order given (a glob's matches sorted); of Python itself if there are none."""
    if not files:
        return python_text()
    documents = []
    for path in find(files):
        try:
            documents.append(path.read_bytes())
        except OSError as e:
            raise ConfigError(f"data.files: '{path}' cannot be read: {e.strerror}") from None
    return Text.of(documents)


def find(patterns: tuple[str, ...]) -> list[Path]:
    """The files that paths and globs name; an error for one that names none."""
    found: list[Path] = []
    for pattern in patterns:
        matches = sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else [pattern]
        paths = [path for path in map(Path, matches) if path.is_file()]
        if not paths:
            raise ConfigError(f"data.files: there is no file {pattern!r}")
        found += paths
    return found


def python_text() -> Text:
    """Real text that every machine has: the language reference that Python's help() shows, and the standard library."""
    documents = []
    try:
        from pydoc_data.topics import topics

        documents += [topics[name].encode() for name in sorted(topics)]
    except ImportError:  # some distributions leave it out
        pass
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if path.stat().st_size <= LARGEST_SOURCE and not path.name.startswith("_sysconfigdata"):
            documents.append(path.read_bytes())
    if sum(map(len, documents)) < 1_000_000:
        raise ConfigError("data.files: this Python came without its documentation and sources; name files of your own")
    return Text.of(documents)


class Windows:
    """Random access to some of the windows of a text."""

    def __init__(self, text: Text, seq_len: int, index: np.ndarray):
        self.tokens, self.width, self.index = text.tokens, seq_len + 1, index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> Batch:
        start = int(self.index[i]) * self.width
        piece = self.tokens[start : start + self.width].astype(np.int32)
        missing = self.width - len(piece)
        weights = np.ones(self.width - 1, np.float32)
        weights[len(weights) - missing :] = 0
        return {"tokens": np.pad(piece, (0, missing)), "weights": weights, "id": np.asarray(self.index[i], np.int64)}


class Stream:
    """Batches of `size` samples: `stream[step]`, or some rows of one, so that a process reads only its own.

    Which samples a step gets depends on (seed, step) alone; a batch's `id`s say which they are.
    """

    def __init__(self, samples: grain.MapDataset, size: int, offset: int = 0, limit: int | None = None):
        """`offset`: samples before step 0. `limit`: samples there are; rows beyond it have weight 0."""
        self.samples, self.size, self.offset, self.limit = samples, size, offset, limit

    def rows(self, step: int, rows: Sequence[int]) -> Batch:
        """Some rows of the batch of a step, counted from 0."""
        items = []
        for row in rows:
            i = self.offset + step * self.size + row
            item = self.samples[i]
            if self.limit is not None and i >= self.limit:
                item = {**item, "weights": np.zeros_like(item["weights"])}
            items.append(item)
        return {name: np.stack([item[name] for item in items]) for name in items[0]}

    def __getitem__(self, step: int) -> Batch:
        return self.rows(step, range(self.size))

    def after(self, samples: int, step: int) -> Stream:
        """The stream that has given so many samples before this step, whatever its batches were then."""
        return Stream(self.samples, self.size, samples - step * self.size, self.limit)


@dataclass(frozen=True)
class Data:
    """Training batches by step, and the held-out ones."""

    text: Text
    train: Stream
    """`train[step]`: the batch of one optimizer step; every window once an epoch, each epoch in another order."""
    held_out: Stream
    num_train: int
    """Windows."""
    num_held_out: int
    num_eval_batches: int

    def eval_batches(self) -> Iterator[Batch]:
        """The same held-out batches each time."""
        for i in range(self.num_eval_batches):
            yield self.held_out[i]

    def eval_rows(self) -> Iterator[tuple[int, Reader]]:
        """For each of them, its size and what reads some rows of it."""
        for i in range(self.num_eval_batches):
            yield self.held_out.size, functools.partial(self.held_out.rows, i)


def split(count: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the training and the held-out windows: every 1/fraction-th chunk is held out."""
    period = round(1 / fraction)
    chunk = max(1, min(CHUNK, count // (2 * period)))
    index = np.arange(count)
    held = (index // chunk) % period == period - 1
    return index[~held], index[held]


def load(config: DataConfig, *, batch_size: int, eval_batch_size: int, eval_batches: int) -> Data:
    """The data of a run. Sizes are in windows; `eval_batches` is an upper bound, since none is seen twice."""
    import grain

    text = read(config.files)
    width = config.seq_len + 1
    # A tail of one byte has no target.
    count = len(text.tokens) // width + (len(text.tokens) % width > 1)
    train, held = split(count, config.eval_fraction)
    if not len(train) or not len(held):
        need = round(1 / config.eval_fraction) * width
        raise ConfigError(
            f"data.files: {len(text.tokens)} bytes are too few for windows of data.seq_len {config.seq_len} "
            f"with data.eval_fraction {config.eval_fraction:g} held out; at least {need}"
        )

    def batches(index: np.ndarray, seed: int, size: int, again: bool) -> Stream:
        windows = grain.MapDataset.source(Windows(text, config.seq_len, index)).shuffle(seed)
        return Stream(windows.repeat(reseed_each_epoch=again), size, limit=None if again else len(index))

    return Data(
        text=text,
        train=batches(train, config.seed, batch_size, True),
        held_out=batches(held, 0, eval_batch_size, False),
        num_train=len(train),
        num_held_out=len(held),
        num_eval_batches=max(1, min(eval_batches, len(held) // eval_batch_size)),
    )
