"""An initial state on disk: its parameters, recipe, birth certificate and verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinit import certificate, digests
from deepinit.errors import ConfigError
from deepinit.interop import hf, trees
from deepinit.interop.sources import ARTEFACT, CERTIFICATE
from deepinit.recipe import Recipe
from deepinit.verdict import Verdict


def certify(params: Any, recipe: Recipe, seed: int, verdict: Verdict, versions: dict[str, str]) -> dict[str, Any]:
    """The birth certificate of a tree of ours."""
    tree = trees.viewed(params, recipe.geometry)
    lanes = digests.summed(tree.leaves, tree.arrays)
    facts = {"ok": verdict.ok, "verdict": verdict.summary(), "versions": versions}
    return certificate.make(list(zip(tree.leaves, tree.arrays)), lanes, recipe, seed, verdict.digest, **facts)


def write(
    out: Path, params: Any, recipe: Recipe, seed: int, verdict: Verdict, versions: dict[str, str], form: str = "orbax"
) -> None:
    """The folder: params/ (orbax) or params.safetensors, recipe.json, certificate.json, init.json.

    Raises:
      ConfigError: the folder holds something already.
    """
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"out: {out} is not empty")
    out.mkdir(parents=True, exist_ok=True)
    if form == "safetensors":
        arrays = {path: np.asarray(x) for path, x in trees.flat(params)}
        facts = {"format": "np", "scheme": recipe.name, "digest": verdict.digest}
        hf.write(out / (ARTEFACT + hf.SUFFIX), arrays, facts)
    else:
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as saver:
            saver.save((out / ARTEFACT).absolute(), params)
    if jax.process_index() == 0:
        page = certify(params, recipe, seed, verdict, versions)
        dump(out / CERTIFICATE, page)
        dump(out / "recipe.json", recipe.to_json())
        rows = [row.to_json() for row in verdict.rows]
        dump(out / "init.json", {"ok": verdict.ok, "digest": verdict.digest, "scheme": recipe.name, "rows": rows})


def dump(path: Path, data: Any) -> None:
    """JSON with a newline at its end."""
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
