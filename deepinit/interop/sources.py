"""Parameter trees from disk: an orbax checkpoint, a run or an init artefact of ours, safetensors, npz."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from deepinit.errors import ConfigError
from deepinit.interop import hf
from deepinit.recipe import Recipe

CERTIFICATE = "certificate.json"
ARTEFACT = "params"
"""Where an init artefact keeps its tree, as a folder of orbax or, with the suffix, as a safetensors file."""


@dataclass(frozen=True)
class Source:
    """A tree, and what lies beside it."""

    path: Path
    params: Any
    kind: str
    recipe: Recipe | None = None
    """Of a run or an artefact of ours."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a Geometry that a config.json states."""
    certificate: Mapping[str, Any] | None = None
    step: int | None = None
    """Of a checkpoint of one of our runs."""


def load(path: str | Path) -> Source:
    """Read the parameters, and only those, of whatever stands at the path.

    Raises:
      ConfigError: nothing is there, or nothing that is known.
    """
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"{path} does not exist")
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as opened:
            return Source(path, dict(opened), "npz")
    if path.suffix == hf.SUFFIX:
        return Source(path, hf.read(path), "safetensors", **beside(path.parent))
    if not path.is_dir():
        raise ConfigError(f"{path}: not a folder, {hf.SUFFIX} or .npz file")
    if (path / (ARTEFACT + hf.SUFFIX)).is_file():
        return Source(path, hf.read(path / (ARTEFACT + hf.SUFFIX)), "safetensors", **beside(path))
    if hf.files(path):
        return Source(path, hf.read(path), "safetensors", **beside(path))
    for folder, step in places(path):
        if (folder / "_METADATA").exists() or (folder / "manifest.ocdbt").exists():
            home = next((p for p in (path, *path.parents[:3]) if (p / "recipe.json").exists()), path)
            return Source(path, orbax(folder), "orbax", step=step, **beside(home))
    raise ConfigError(f"{path}: neither a checkpoint of orbax, nor a run, nor a folder with {hf.SUFFIX} files")


def places(path: Path) -> list[tuple[Path, int | None]]:
    """Where in a folder the arrays of a checkpoint may be, and at which step."""
    own = int(path.name) if path.name.isdigit() else None
    found: list[tuple[Path, int | None]] = [(path, own), (path / ARTEFACT, 0), (path / "state", own)]
    found += [(path / "default", own)]
    for home in (path / "checkpoints", path):
        steps = sorted((p for p in home.glob("*") if p.name.isdigit()), key=lambda p: int(p.name), reverse=True)
        for p in steps[:1]:
            found += [(p / "state", int(p.name)), (p / "default", int(p.name)), (p, int(p.name))]
    return found


def orbax(folder: Path) -> Any:
    """The parameters of a checkpoint, as arrays of numpy; nothing of the optimizer is read."""
    import jax
    import orbax.checkpoint as ocp

    def is_array(x: Any) -> bool:
        return hasattr(x, "shape") and hasattr(x, "dtype")

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        described = checkpointer.metadata(folder.absolute()).item_metadata.tree
        chosen = described
        keys = []
        while isinstance(chosen, Mapping) and (key := next((k for k in ("params", "model") if k in chosen), None)):
            keys.append(key)
            chosen = chosen[key]
        wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), chosen, is_leaf=is_array)
        for key in reversed(keys):
            wanted = {key: wanted}
        how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
        args = ocp.args.PyTreeRestore(item=wanted, restore_args=how, partial_restore=bool(keys))
        got = checkpointer.restore(folder.absolute(), args=args)
    for key in keys:
        got = got[key]
    return got


def beside(folder: Path) -> dict[str, Any]:
    """What a folder says of its parameters: a recipe, a certificate, the sizes of a config.json."""
    found: dict[str, Any] = {}
    for name, key in (("recipe.json", "recipe"), (CERTIFICATE, "certificate"), ("config.json", "sizes")):
        if (folder / name).is_file():
            try:
                data = json.loads((folder / name).read_text())
            except ValueError as e:
                raise ConfigError(f"{folder / name}: {e}") from None
            found[key] = Recipe.from_json(data) if key == "recipe" else hf.sizes(data) if key == "sizes" else data
    return found
