"""Text to tokens: bytes, a Hugging Face `tokenizer.json`, or a SentencePiece `.model`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepinit.errors import ConfigError

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>")


@dataclass(frozen=True)
class Tokenizer:
    """`encode` gives the tokens (int64) of a document; `eos`, if there is one, is put after it."""

    name: str
    vocab_size: int
    encode: Callable[[bytes], np.ndarray]
    eos: int | None = None

    def document(self, text: bytes) -> np.ndarray:
        """The tokens of a document, its end included."""
        tokens = self.encode(text)
        return tokens if self.eos is None else np.append(tokens, self.eos)


def load(name: str) -> Tokenizer:
    """`bytes`, or a file.

    Raises:
      ConfigError: no such file, another kind of file, or the extra is missing.
    """
    if name == "bytes":
        return Tokenizer("bytes", 256, lambda text: np.frombuffer(text, np.uint8).astype(np.int64))
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"data.tokenizer: there is no file {name!r}; 'bytes', a tokenizer.json or a .model")
    try:
        if path.suffix == ".json":
            return huggingface(path)
        if path.suffix == ".model":
            return sentencepiece(path)
    except ImportError as e:
        raise ConfigError(f"data.tokenizer: {name!r} needs the extra: pip install 'deepinit[hf]' ({e})") from None
    except Exception as e:  # of no one type: tokenizers raises Exception itself
        raise ConfigError(f"data.tokenizer: {name!r} cannot be read: {' '.join(str(e).split())[:200]}") from None
    raise ConfigError(f"data.tokenizer: {name!r} is neither a tokenizer.json nor a .model; or 'bytes'")


def huggingface(path: Path) -> Tokenizer:
    """A file of the `tokenizers` library; nothing is added to a document but its end."""
    import tokenizers

    t = tokenizers.Tokenizer.from_file(str(path))
    eos = next((i for token in ENDS if (i := t.token_to_id(token)) is not None), None)

    def encode(text: bytes) -> np.ndarray:
        return np.asarray(t.encode(text.decode(), add_special_tokens=False).ids, np.int64)

    return Tokenizer(str(path), t.get_vocab_size(with_added_tokens=True), encode, eos)


def sentencepiece(path: Path) -> Tokenizer:
    """A model of SentencePiece."""
    import sentencepiece as sp

    t: Any = sp.SentencePieceProcessor(model_file=str(path))
    eos = t.eos_id()
    return Tokenizer(
        str(path),
        t.get_piece_size(),
        lambda text: np.asarray(t.encode(text.decode()), np.int64),
        eos if eos >= 0 else None,
    )
