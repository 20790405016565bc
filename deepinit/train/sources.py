"""Files of documents (text, JSONL, ArrayRecord) and of tokens (.bin of nanoGPT and llm.c, .bin and .idx of Megatron).

A file that is cut off or damaged is an error that names it and the place in it; damaged documents may be skipped and
are then counted.
"""

from __future__ import annotations

import glob
import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from deepinit.errors import ConfigError

LLMC: dict[int, np.dtype[Any]] = {
    20240520: np.dtype("<u2"),
    20240801: np.dtype("<u4"),
}  # magic numbers of llm.c's headers of 256 int32
MEGATRON = b"MMIDIDX\x00\x00"
MEGATRON_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class Damaged(ConfigError):
    """A file is not what it should be. The line names file and place."""

    def __init__(self, path: Path, place: str, why: str):
        super().__init__(f"data.files: {path}, {place}: {why}")


def find(patterns: Sequence[str], name: str = "data.files") -> list[Path]:
    """The files that paths, folders (all files below) and globs name; an error for one that names none."""
    found: list[Path] = []
    for pattern in patterns:
        matches = sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else [pattern]
        paths = [path for path in map(Path, matches) if path.is_file()]
        if not glob.has_magic(pattern) and Path(pattern).is_dir():
            paths = sorted(p for p in Path(pattern).rglob("*") if p.is_file() and not p.name.startswith("."))
        if not paths:
            raise ConfigError(f"{name}: there is no file {pattern!r}")
        found += [p for p in paths if not (p.suffix == ".idx" and p.with_suffix(".bin") in paths)]
    return [p for p in found if not (p.suffix == ".json" and p.with_suffix(".bin") in found)]


def holds_tokens(path: Path) -> bool:
    """Whether a file holds tokens, not text."""
    return path.suffix == ".bin"


# ---------------------------------------------------------------------------------------------- documents


@dataclass
class Reading:
    """How documents are read: the field of a JSON line, and what is done with damage."""

    text_field: str = "text"
    on_corrupt: str = "error"
    skipped: Counter[str] = field(default_factory=Counter)
    """Documents that were skipped, by file."""

    def damaged(self, path: Path, place: str, why: str) -> None:
        """An error, or one more that is skipped."""
        if self.on_corrupt == "error":
            raise Damaged(path, place, why)
        self.skipped[str(path)] += 1


def documents(path: Path, reading: Reading, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """(where the next one begins, text) of every document of a file, from `start` on.

    Places are bytes of a JSONL file, numbers of records of an ArrayRecord; a text file is one document.
    """
    name = path.name.removesuffix(".gz")
    try:
        if name.endswith((".jsonl", ".ndjson")):
            yield from json_lines(path, reading, start)
        elif name.endswith((".arrayrecord", ".array_record")):
            yield from records(path, reading, start)
        elif start == 0:
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            yield max(len(data), 1), data
    except (OSError, EOFError) as e:
        if isinstance(e, Damaged):
            raise
        raise ConfigError(f"data.files: '{path}' cannot be read: {getattr(e, 'strerror', None) or e}") from None


def json_lines(path: Path, reading: Reading, start: int) -> Iterator[tuple[int, bytes]]:
    """A document a line, in one field of an object."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        file.seek(start)
        at = start
        for line in file:
            place, at = f"byte {at}", at + len(line)
            if not line.strip():
                continue
            try:
                text = json.loads(line)[reading.text_field]
                if not isinstance(text, str):
                    raise TypeError(f"{reading.text_field!r} is not text")
            except KeyError:
                reading.damaged(path, place, f"no field {reading.text_field!r}; data.text_field names it")
            except (ValueError, TypeError) as e:
                reading.damaged(path, place, f"not a JSON object with text: {e}")
            else:
                yield at, text.encode("utf-8", "surrogatepass")


def records(path: Path, reading: Reading, start: int) -> Iterator[tuple[int, bytes]]:
    """A document a record, as UTF-8."""
    from array_record.python import array_record_module

    try:
        reader = array_record_module.ArrayRecordReader(str(path))
        count = reader.num_records()
    except Exception as e:  # the reader raises what its status is, of no one type
        raise Damaged(path, "its end", f"not a whole ArrayRecord: {' '.join(str(e).split())[:200]}") from None
    for i in range(start, count):
        try:
            (record,) = reader.read([i])
            record.decode()
        except Exception as e:  # as above, or not UTF-8
            reading.damaged(path, f"record {i}", " ".join(str(e).split())[:200])
        else:
            yield i + 1, record
    try:
        reader.close()
    except Exception as e:  # said only now where the end of the file, which lists the records, is missing
        raise Damaged(path, "its end", f"not a whole ArrayRecord: {' '.join(str(e).split())[:200]}") from None


# ---------------------------------------------------------------------------------------------- tokens


@dataclass(frozen=True)
class Tokens:
    """The tokens of a file, mapped into memory, and where its documents begin or end."""

    path: Path
    tokens: np.ndarray
    first_byte: int = 0
    """Where the tokens begin in the file."""
    bounds: np.ndarray | None = None
    """(documents,) int64: the first token of each."""
    eos: int | None = None
    """The token after each document, where one is known."""

    def byte(self, i: int) -> int:
        """The place of a token in the file."""
        return self.first_byte + i * self.tokens.dtype.itemsize


def tokens(path: Path) -> Tokens:
    """Megatron's where there is an .idx, llm.c's by its header, else nanoGPT's: uint16, or what the .json beside says.

    Raises:
      Damaged: the length is not what the header, the index or the type asks for.
    """
    if path.with_suffix(".idx").exists():
        return megatron(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        head = np.frombuffer(file.read(1024), np.uint8)
    if len(head) == 1024 and (magic := int(head[:4].view("<i4")[0])) in LLMC:
        kind, count = LLMC[magic], int(head[8:12].view("<i4")[0])
        if size != 1024 + count * kind.itemsize:
            raise Damaged(path, f"byte {size}", f"the header says {count} tokens, {1024 + count * kind.itemsize} bytes")
        return Tokens(path, np.memmap(path, dtype=kind, mode="r", offset=1024, shape=(count,)), 1024)
    record = described(path)
    kind = np.dtype(str(record.get("dtype", "<u2")))
    if size % kind.itemsize:
        raise Damaged(path, f"byte {size}", f"the file ends inside a token of {kind.itemsize} bytes")
    if "tokens" in record and record["tokens"] * kind.itemsize != size:
        raise Damaged(path, f"byte {size}", f"{path.with_suffix('.json').name} says {record['tokens']} tokens")
    return Tokens(path, mapped(path, kind), eos=record.get("eos"))


def mapped(path: Path, kind: np.dtype[Any]) -> np.ndarray:
    """A whole file as an array; an empty file cannot be mapped."""
    empty = np.zeros(0, kind)
    return np.memmap(path, dtype=kind, mode="r") if path.stat().st_size else empty


def described(path: Path) -> dict[str, Any]:
    """What the .json beside a .bin says of it; nothing where there is none."""
    beside = path.with_suffix(".json")
    if not beside.exists():
        return {}
    try:
        record = json.loads(beside.read_text())
    except ValueError as e:
        raise Damaged(beside, "its text", f"not JSON: {e}") from None
    if not record.get("done", True):
        raise ConfigError(f"data.files: {path} is not finished; run the `deepinit data` that made it again")
    return dict(record)


def megatron(path: Path) -> Tokens:
    """Megatron's indexed dataset: sizes of sequences, where they begin, and which begin a document."""
    idx = path.with_suffix(".idx")
    raw = idx.read_bytes()
    head = len(MEGATRON) + 8 + 1 + 16
    if raw[: len(MEGATRON)] != MEGATRON or len(raw) < head:
        raise Damaged(idx, "byte 0", "not an index of Megatron")
    code, (sequences, documents) = raw[len(MEGATRON) + 8], np.frombuffer(raw, "<u8", 2, len(MEGATRON) + 9).tolist()
    if code not in MEGATRON_TYPES:
        raise Damaged(idx, f"byte {len(MEGATRON) + 8}", f"type {code} is not one of whole numbers")
    need = head + 12 * sequences + 8 * documents
    if len(raw) < need:
        raise Damaged(idx, f"byte {len(raw)}", f"cut off: {sequences} sequences and {documents} documents need {need}")
    sizes = np.frombuffer(raw, "<i4", sequences, head).astype(np.int64)
    starts = np.frombuffer(raw, "<i8", sequences, head + 4 * sequences)
    first = np.frombuffer(raw, "<i8", documents, head + 12 * sequences)
    kind = np.dtype(MEGATRON_TYPES[code])
    ends = np.cumsum(sizes)
    if (starts != (ends - sizes) * kind.itemsize).any():
        at = int(np.flatnonzero(starts != (ends - sizes) * kind.itemsize)[0])
        raise Damaged(idx, f"sequence {at}", "sequences do not follow each other in the .bin")
    size, total = path.stat().st_size, int(ends[-1]) * kind.itemsize if sequences else 0
    if size != total:
        raise Damaged(path, f"byte {min(size, total)}", f"{size} bytes, the index says {total}")
    begins = np.concatenate([[0], ends])[first]
    return Tokens(path, mapped(path, kind), bounds=begins[begins < (ends[-1] if sequences else 0)])
