"""Text files that are whole whenever the process that writes them is killed."""

from __future__ import annotations

from typing import Any


def write_whole(path: Any, text: str) -> None:
    """Write beside the file and rename: whoever reads meets what was there before or all of the new text.

    `path` is a `pathlib.Path` or an `epath.Path`, whose stores (gs://) have no parts of a file anyway.
    """
    new = path.with_name(f"{path.name}.part")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
