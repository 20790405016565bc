"""The folder of a run: config.yaml, recipe.json and init.json, which say what the run is and what it started from."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from deepinit.errors import ConfigError
from deepinit.files import write_whole
from deepinit.invariants import Verdict
from deepinit.recipe import Recipe
from deepinit.train.config import Config

Record = dict[str, Any]
LIBRARIES = ("deepinit", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
# Settings that say how far a run goes and where, not what it computes.
BOOKKEEPING = ("train.stop_at", "train.run_dir", "train.checkpoint_dir", "data.log_samples")


def of(config: Config) -> Path:
    """The folder that the config names, or a new runs/SCHEME-TIME."""
    if config.train.run_dir:
        folder = Path(config.train.run_dir)
        make(folder, exist_ok=True)
        return folder
    name = f"{config.scheme.name.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    again = 0
    while True:  # two runs of one second get two folders
        folder = Path("runs") / (f"{name}-{again}" if again else name)
        try:
            make(folder, exist_ok=False)
            return folder
        except FileExistsError:
            again += 1


def make(folder: Path, *, exist_ok: bool) -> None:
    """Make the folder, or say in one line why not."""
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        raise
    except OSError as e:
        raise ConfigError(f"train.run_dir: {folder} cannot be made: {e.strerror}") from None


def write(folder: Path, config: Config, recipe: Recipe, init: Record) -> None:
    """The three files."""
    write_whole(folder / "config.yaml", config.to_yaml())
    write_whole(folder / "recipe.json", json.dumps(recipe.to_json(), indent=1) + "\n")
    write_whole(folder / "init.json", json.dumps(init, indent=1) + "\n")


def init_record(verdict: Verdict, config: Config) -> Record:
    """What init.json holds: whether every leaf follows its law, the table, the digest, and what they depend on."""
    return {
        "ok": verdict.ok,
        "digest": verdict.digest,
        "scheme": verdict.scheme,
        "versions": versions(),
        "rng": {"seed": config.train.seed, "sampler": config.scheme.sampler, "impl": "threefry2x32"},
        "rows": [row.to_json() for row in verdict.rows],
    }


def versions() -> dict[str, str]:
    """Of Python, and of the libraries whose change could change a number."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from a checkout that is not installed
            found[name] = "not installed"
    return found


# ---------------------------------------------------------------------------------------------- going on with a run


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, old, new) of everything in which two plain trees differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(k for k in new if k not in old)]:
            yield from differences(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
    elif old != new:
        yield path, old, new


def compare(folder: Path, config: Config, recipe: Recipe, init: Record) -> list[str]:
    """Refuse to go on with a run that was initialised otherwise; else, the settings that are now different.

    Raises:
      ConfigError: the recipe, or the digest of the initial parameters, is another; one line naming the difference.
    """
    try:
        old_config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        old_recipe = plain(Recipe.from_json(json.loads((folder / "recipe.json").read_text())))  # with what is new since
        old_init = json.loads((folder / "init.json").read_text())
    except (OSError, ValueError, LookupError, TypeError) as e:  # the last two: JSON that is no recipe
        raise ConfigError(f"{folder} has checkpoints, but no record of their run that can be read: {e}") from None
    changed = [d for d in differences(old_config, config.to_dict()) if d[0] not in BOOKKEEPING]
    wrong = list(differences(old_recipe, plain(recipe)))
    if wrong or old_init["digest"] != init["digest"]:
        causes = [d for d in changed if d[0].split(".")[0] in ("model", "scheme") or d[0] == "train.seed"]
        others = [("init.digest", old_init["digest"], init["digest"])]
        name, old, new = (causes or wrong or others)[0]
        raise ConfigError(
            f"{folder} began otherwise: {name} {show(old)} there, {show(new)} here; give another train.run_dir"
        )
    return [f"{name} {show(old)} -> {show(new)}" for name, old, new in changed]


def plain(recipe: Recipe) -> Any:
    """A recipe as JSON has it."""
    return json.loads(json.dumps(recipe.to_json()))


def show(value: Any) -> str:
    """A setting in a line; None is one that is not there."""
    return "unset" if value is None else f"{value}"
