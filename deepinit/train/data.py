"""Text as tokens, cut into windows; batches that depend on (seed, step) alone.

A batch is {"tokens": (B, T+1) int32, "weights": (B, T) float32}: weights say which targets count. The last window is
padded, with weight 0. Windows do not overlap, so held-out text is never trained on.
"""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from deepinit.errors import ConfigError
from deepinit.train import sources
from deepinit.train.tokenizers import Tokenizer
from deepinit.train.tokenizers import load as load_tokenizer

if TYPE_CHECKING:  # grain imports jax, and files are looked for before that
    import grain

    from deepinit.train.config import DataConfig

Batch = dict[str, np.ndarray]
Reader = Callable[[Sequence[int]], Batch]
LARGEST_SOURCE = 150_000  # bytes; longer modules of the standard library are mostly tables
CHUNK = 8  # neighbouring windows that are held out together


@dataclass(frozen=True)
class Text:
    """Tokens of some documents, and what identifies them."""

    tokens: Any
    """(N,) whole numbers: an array, or parts of files joined."""
    documents: int
    sha256: str
    """Of all bytes of documents; of files of tokens, of their names, sizes and pieces from all over them."""
    bounds: np.ndarray | None = None
    """(documents,) the first token of each, where it is known."""
    eos: int | None = None
    """The token after each document, where there is one."""

    @classmethod
    def of(cls, documents: list[bytes]) -> Text:
        """Documents of bytes one after the other, an empty line between two."""
        joined = b"\n\n".join(documents)
        ends = np.cumsum([len(d) + 2 for d in documents])
        bounds = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        return cls(np.frombuffer(joined, np.uint8), len(documents), hashlib.sha256(joined).hexdigest(), bounds)


class Joined:
    """Files of tokens, or the texts of a mixture, as one array; nothing is read until a piece is asked for."""

    def __init__(self, files: Sequence[Any]):
        self.files = files
        self.starts = np.cumsum([0, *(len(f.tokens) for f in files)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, piece: slice) -> np.ndarray:
        start, stop, _ = piece.indices(len(self))
        first = int(np.searchsorted(self.starts, start, "right")) - 1
        out = []
        while start < stop:
            tokens, offset = self.files[first].tokens, int(self.starts[first])
            part = np.asarray(tokens[start - offset : stop - offset])
            out.append(part.astype(np.int64))
            start += len(part)
            first += 1
        return np.concatenate(out) if out else np.zeros(0, np.int64)

    def place(self, i: int) -> tuple[Path, int]:
        """The file of a token, and its first byte there."""
        k = int(np.searchsorted(self.starts, i, "right")) - 1
        return self.files[k].path, self.files[k].byte(i - int(self.starts[k]))


def read(
    files: tuple[str, ...],
    tokenizer: Tokenizer | None = None,
    reading: sources.Reading | None = None,
    eos: int | None = None,
) -> Text:
    """The text of files, folders and globs, in the order given (matches sorted); of Python itself if there are none.

    Raises:
      ConfigError: a file is missing or damaged, or files of text and of tokens are mixed.
    """
    paths = sources.find(files)
    kinds = {sources.holds_tokens(path) for path in paths}
    if len(kinds) > 1:
        raise ConfigError(f"data.files: {paths[0]} and others are text and tokens; data.mixture takes both")
    if kinds == {True}:
        return token_files([sources.tokens(path) for path in paths], eos)
    reading = reading or sources.Reading()
    documents = [text for path in paths for _, text in sources.documents(path, reading)] if files else python()
    if tokenizer is None or tokenizer.name == "bytes":
        return Text.of(documents)
    return tokenized(documents, tokenizer)


def tokenized(documents: Sequence[bytes], tokenizer: Tokenizer) -> Text:
    """Documents as tokens in memory, each with its end."""
    parts = [tokenizer.document(d) for d in documents]
    bounds = np.cumsum([0, *(len(p) for p in parts[:-1])]).astype(np.int64)
    sha = hashlib.sha256(b"".join(hashlib.sha256(d).digest() for d in documents)).hexdigest()
    return Text(np.concatenate(parts), len(parts), sha, bounds, tokenizer.eos)


def token_files(files: list[sources.Tokens], eos: int | None) -> Text:
    """Files of tokens as one text."""
    joined = Joined(files)
    bounds = None
    if all(f.bounds is not None for f in files):
        bounds = np.concatenate([f.bounds + start for f, start in zip(files, joined.starts)])
    ends = {f.eos for f in files} - {None} or {eos}
    count = 0 if bounds is None else len(bounds)
    return Text(joined, count, fingerprint(files), bounds, ends.pop() if len(ends) == 1 else None)


def fingerprint(files: Sequence[sources.Tokens]) -> str:
    """A hash of names, sizes and 64 pieces of each file: all bytes of a large corpus would take hours."""
    h = hashlib.sha256()
    for f in files:
        h.update(f"{f.path.name} {len(f.tokens)} {f.tokens.dtype}".encode())
        for at in np.linspace(0, max(len(f.tokens) - 4096, 0), 64).astype(np.int64):
            h.update(np.asarray(f.tokens[at : at + 4096]).tobytes())
    return h.hexdigest()


def python() -> list[bytes]:
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
    return documents


class Windows:
    """Random access to some of the windows of a text."""

    def __init__(
        self,
        text: Text,
        seq_len: int,
        index: np.ndarray,
        document_mask: bool = False,
        vocab_size: int | None = None,
        source: int = 0,
    ):
        """`document_mask` adds which document each token is of; `vocab_size` refuses tokens beyond it."""
        self.text, self.width, self.index, self.source = text, seq_len + 1, index, source
        self.document_mask, self.vocab_size = document_mask, vocab_size

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> Batch:
        start = int(self.index[i]) * self.width
        piece = np.asarray(self.text.tokens[start : start + self.width]).astype(np.int32)
        if self.vocab_size is not None and len(piece) and not 0 <= piece.min() <= piece.max() < self.vocab_size:
            self.refuse(start, piece)
        missing = self.width - len(piece)
        weights = np.ones(self.width - 1, np.float32)
        weights[len(weights) - missing :] = 0
        sample: Batch = {
            "tokens": np.pad(piece, (0, missing)),
            "weights": weights,
            "id": np.asarray((self.source << 48) + int(self.index[i]), np.int64),
        }
        if self.document_mask:
            segments = np.pad(self.segments(start, piece), (0, missing))
            weights[segments[1:] != segments[:-1]] = 0  # the first token of a document does not follow from another
            sample["segments"] = segments
        return sample

    def segments(self, start: int, piece: np.ndarray) -> np.ndarray:
        """(T+1,) int32: the number of each token's document in the window, from 1."""
        if self.text.bounds is not None:
            first = np.searchsorted(self.text.bounds, start, "right")
            at = np.arange(start, start + len(piece))
            return (np.searchsorted(self.text.bounds, at, "right") - first + 1).astype(np.int32)
        ends = piece == self.text.eos
        return (1 + np.cumsum(ends) - ends).astype(np.int32)

    def refuse(self, start: int, piece: np.ndarray) -> NoReturn:
        """Say where a token stands that the model does not know."""
        at = int(np.flatnonzero((piece < 0) | (piece >= (self.vocab_size or 0)))[0])
        where = f"token {start + at}"
        if isinstance(self.text.tokens, Joined):
            path, byte = self.text.tokens.place(start + at)
            where = f"{path}, byte {byte}"
        raise ConfigError(f"data.files: {where}: token {piece[at]} is not below model.vocab_size {self.vocab_size}")


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
    skipped: int = 0
    """Documents that were damaged and left out."""

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


def load(
    config: DataConfig,
    *,
    batch_size: int,
    eval_batch_size: int,
    eval_batches: int,
    vocab_size: int | None = None,
) -> Data:
    """The data of a run. Sizes are in windows; `eval_batches` is an upper bound, since none is seen twice.

    Raises:
      ConfigError: a file is missing or damaged, there is too little text, or documents have no known bounds.
    """
    import grain

    tokenizer = load_tokenizer(config.tokenizer)
    reading = sources.Reading(config.text_field, config.on_corrupt)
    eos = None if config.eos < 0 else config.eos
    groups: list[tuple[str, ...]] = [(pattern,) for pattern in config.mixture] or [config.files]
    texts = [read(group, tokenizer, reading, eos) for group in groups]
    width = config.seq_len + 1
    train: list[Windows] = []
    held: list[Windows] = []
    for k, text in enumerate(texts):
        if config.document_mask and text.bounds is None and text.eos is None:
            raise ConfigError(
                f"data.document_mask: nothing says where documents of {groups[k][0]!r} end; give data.eos"
            )
        # A tail of one token has no target.
        count = len(text.tokens) // width + (len(text.tokens) % width > 1)
        parts = split(count, config.eval_fraction)
        if not len(parts[0]) or not len(parts[1]):
            need = round(1 / config.eval_fraction) * width
            raise ConfigError(
                f"data.files: {len(text.tokens)} {'bytes' if tokenizer.name == 'bytes' else 'tokens'} are too few "
                f"for windows of data.seq_len {config.seq_len} "
                f"with data.eval_fraction {config.eval_fraction:g} held out; at least {need}"
            )
        for kept, index in zip((train, held), parts):
            kept.append(Windows(text, config.seq_len, index, config.document_mask, vocab_size, k))

    def shuffled(windows: Windows) -> grain.MapDataset:
        return grain.MapDataset.source(windows).shuffle(config.seed).repeat(reseed_each_epoch=True)

    samples = [shuffled(w) for w in train]
    mixed = samples[0]
    if len(samples) > 1:
        mixed = grain.MapDataset.mix(samples, weights=[float(w) for w in config.mixture.values()])
    apart = grain.MapDataset.concatenate([grain.MapDataset.source(w) for w in held]).shuffle(0)
    num_held = sum(len(w) for w in held)
    return Data(
        text=texts[0] if len(texts) == 1 else together(texts),
        train=Stream(mixed, batch_size),
        held_out=Stream(apart.repeat(reseed_each_epoch=False), eval_batch_size, limit=num_held),
        num_train=sum(len(w) for w in train),
        num_held_out=num_held,
        num_eval_batches=max(1, min(eval_batches, num_held // eval_batch_size)),
        skipped=sum(reading.skipped.values()),
    )


def together(texts: Sequence[Text]) -> Text:
    """The texts of a mixture one after the other, and what identifies it."""
    sha = hashlib.sha256("".join(t.sha256 for t in texts).encode()).hexdigest()
    return Text(Joined(texts), sum(t.documents for t in texts), sha)
