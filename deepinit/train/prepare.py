"""Documents to one file of tokens, as `deepinit data OUT.bin` does: with a progress bar, and resumed where it stopped.

OUT.bin is plain little-endian tokens, as nanoGPT reads them; OUT.json beside it says their type, tokenizer, the token
that ends a document, and how far the work has come. After an interruption the same command cuts the file to what is
known to be whole and goes on: the result is the same to the last byte.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from deepinit.errors import ConfigError
from deepinit.files import write_whole
from deepinit.train import sources
from deepinit.train.config import DataConfig
from deepinit.train.tokenizers import Tokenizer
from deepinit.train.tokenizers import load as load_tokenizer

EVERY_BYTES, EVERY_S = 1 << 22, 5.0  # between two records of how far it has come


def prepare(config: DataConfig, out: Path, console: Console | None = None, stop_after: int | None = None) -> int:
    """Tokenize the files into `out`; the number of its tokens. `stop_after` ends early, after so many documents.

    Raises:
      ConfigError: no files, files of tokens, a damaged document, or a file of another work in the way.
    """
    if not config.files:
        raise ConfigError("data.files: name the files that are to be tokenized")
    if out.suffix != ".bin":
        raise ConfigError(f"data: {str(out)!r} does not end in .bin")
    paths = sources.find(config.files)
    if held := [path for path in paths if sources.holds_tokens(path)]:
        raise ConfigError(f"data.files: {held[0]} holds tokens already")
    tokenizer = load_tokenizer(config.tokenizer)
    reading = sources.Reading(config.text_field, config.on_corrupt)
    record = begin(out, paths, tokenizer)
    reading.skipped["before"] = record["skipped"]
    if record["done"]:
        return int(record["tokens"])
    kind = np.dtype(record["dtype"])
    total = sum(size for _, size in record["files"])
    console = console or Console(stderr=True, highlight=False)
    bar = Progress(
        TextColumn("tokens {task.fields[tokens]}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with bar, out.open("r+b" if out.exists() else "w+b") as file:
        task = bar.add_task("", total=total, tokens=record["tokens"])
        file.truncate(record["tokens"] * kind.itemsize)
        file.seek(0, os.SEEK_END)
        number, start = record["at"]
        written, last, seen = 0, time.monotonic(), 0
        before = sum(size for _, size in record["files"][:number])
        for k in range(number, len(paths)):
            for place, text in sources.documents(paths[k], reading, start):
                tokens = tokenizer.document(text).astype(kind)
                file.write(tokens.tobytes())
                record["tokens"] += len(tokens)
                record["documents"] += 1
                written += len(text)
                seen += 1
                bar.update(task, completed=min(before + written, total), tokens=record["tokens"])
                if written >= EVERY_BYTES or time.monotonic() - last > EVERY_S:
                    keep(file, out, record, [k, place], reading)
                    before, written, last = before + written, 0, time.monotonic()
                if seen == stop_after:
                    keep(file, out, record, [k, place], reading)
                    return int(record["tokens"])
            start = 0
        record["done"] = True
        keep(file, out, record, [len(paths), 0], reading)
        bar.update(task, completed=total)
    return int(record["tokens"])


def begin(out: Path, paths: list[Path], tokenizer: Tokenizer) -> dict[str, Any]:
    """How far the work has come; from the start where there is none."""
    beside = out.with_suffix(".json")
    fresh = {
        "dtype": "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4",
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eos": tokenizer.eos,
        "files": [[str(path), path.stat().st_size] for path in paths],
        "documents": 0,
        "skipped": 0,
        "tokens": 0,
        "at": [0, 0],
        "done": False,
    }
    if not beside.exists():
        if out.exists():
            raise ConfigError(f"data: {out} is there already, and no {beside.name} says what it is")
        return fresh
    record = dict(json.loads(beside.read_text()))
    for name in ("tokenizer", "vocab_size", "files"):
        if record.get(name) != fresh[name]:
            raise ConfigError(f"data: {out} was begun with other {name}: {record.get(name)} there, {fresh[name]} here")
    return record


def keep(file: Any, out: Path, record: dict[str, Any], at: list[int], reading: sources.Reading) -> None:
    """Tokens on disk first, then the record of them."""
    file.flush()
    os.fsync(file.fileno())
    record["at"], record["skipped"] = at, sum(reading.skipped.values())
    write_whole(out.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
