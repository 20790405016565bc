"""Compiled programs, kept on disk for the next start."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

SHORTEST = 0.1
"""Seconds of compilation below which a program is not worth a file."""


def keep(folder: str) -> None:
    """Keep the programs that are compiled from here on in a folder, in the user's cache (`user`), or not (empty).

    A folder that JAX was told of (JAX_COMPILATION_CACHE_DIR) goes before the user's; JAX_ENABLE_COMPILATION_CACHE=false
    turns it all off.
    """
    if not folder or (folder == "user" and jax.config.jax_compilation_cache_dir):  # type: ignore[attr-defined]
        return
    path = user_folder() if folder == "user" else Path(folder).absolute()
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST)
    compilation_cache.reset_cache()  # else the first program of the process, compiled before, has settled it


def user_folder() -> Path:
    """`deepinit/xla-...` in the user's cache folder. A home may be shared by machines whose instructions differ, and
    XLA's programs for a CPU are made of what this one has: one folder for each set.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "deepinit" / f"xla-{hashlib.sha256(instructions().encode()).hexdigest()[:12]}"


def instructions() -> str:
    """What the processor can do, as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {flags}"
