"""From a config to verified parameters on the mesh: what `check` does, and `train` before step 0."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from deepinit.invariants import Verdict, inspect
from deepinit.nn import Decoder
from deepinit.recipe import Recipe
from deepinit.sharded_init import init_sharded
from deepinit.sharding import make_mesh
from deepinit.train.config import Config


@dataclass(frozen=True)
class Birth:
    """A model, its initial parameters, and the verdict on them."""

    recipe: Recipe
    model: Decoder
    mesh: Mesh
    params: Any
    verdict: Verdict


def born(config: Config, replay: str | None = "sample") -> Birth:
    """Build, initialize on the mesh, verify; `replay` says how many weights are drawn again (`deepinit.verify`)."""
    recipe = config.recipe()
    model = Decoder.from_recipe(recipe, **config.model_options())
    mesh = make_mesh(dataclasses.asdict(config.mesh))
    with jax.set_mesh(mesh):
        params = init_sharded(model, recipe, mesh, config.train.seed)
        portable = config.scheme.sampler == "portable"  # stock draws cannot be drawn again one by one
        verdict = inspect(params, recipe, seed=config.train.seed if portable else None, replay=replay)
    return Birth(recipe, model, mesh, params, verdict)
