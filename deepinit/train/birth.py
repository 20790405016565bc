"""From a config to verified parameters on the mesh: what `check` does, and `train` before step 0."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from deepinit import calibration, structure
from deepinit.calibration import Calibration
from deepinit.invariants import Verdict, inspect
from deepinit.nn import Decoder
from deepinit.recipe import Recipe
from deepinit.sharded_init import abstract_params, init_shapes
from deepinit.sharding import batch_sharding, make_mesh
from deepinit.train import compilations, data
from deepinit.train.config import Config


@dataclass(frozen=True)
class Plan:
    """What a config says of a run before anything is drawn."""

    recipe: Recipe
    model: Decoder
    mesh: Mesh
    boxed: Any
    """Shapes, dtypes and logical axes of the parameters."""


@dataclass(frozen=True)
class Birth(Plan):
    """A model, its initial parameters, and the verdict on them."""

    params: Any
    verdict: Verdict
    calibration: Calibration | None = None
    """What was measured on data, for a scheme that asks for it."""


def planned(config: Config, recipe: Recipe | None = None) -> Plan:
    """Everything that follows from the config alone. `recipe`: where it is there already, or has been measured."""
    compilations.keep(config.train.compilation_cache)
    recipe = recipe or config.recipe()
    model = Decoder.from_recipe(recipe, **config.model_options())
    mesh = make_mesh(dataclasses.asdict(config.mesh))
    with jax.set_mesh(mesh):
        return Plan(recipe, model, mesh, abstract_params(model))


def born(config: Config, replay: str | None = "sample", *, strict: bool = False, plan: Plan | None = None) -> Birth:
    """Build, initialize on the mesh, verify; `replay` says how many weights are drawn again (`deepinit.verify`).

    Where the scheme has numbers that are measured on data, they are: on the first batch, unless there are some already.
    """
    plan = plan or planned(config)
    found, seed = None, config.train.seed
    with jax.set_mesh(plan.mesh):
        params = init_shapes(plan.boxed, plan.model, plan.recipe, plan.mesh, seed)
        if plan.recipe.calibrate:
            found = known(config) or calibration.measure(
                plan.model, plan.recipe, params, first_tokens(config, plan.mesh)
            )
            plan = planned(config, found.applied(plan.recipe, known_path(config)))
            params = init_shapes(plan.boxed, plan.model, plan.recipe, plan.mesh, seed)
        portable = config.scheme.sampler == "portable"  # stock draws cannot be drawn again one by one
        verdict = inspect(params, plan.recipe, strict=strict, seed=seed if portable else None, replay=replay)
        verdict = verdict.joined(structure.check(plan.model, plan.recipe, params, strict=strict))
    return Birth(**vars(plan), params=params, verdict=verdict, calibration=found)


def known_path(config: Config) -> str:
    """Where numbers measured before would stand: the file that the config names, or that of the run to go on with."""
    return config.scheme.calibration or str(Path(config.train.run_dir) / calibration.FILE)


def known(config: Config) -> Calibration | None:
    """Numbers that were measured before, if there are any."""
    path = known_path(config)
    exists = config.scheme.calibration or (config.train.run_dir and Path(path).exists())
    return calibration.read(path) if exists else None


def first_tokens(config: Config, mesh: Mesh) -> jax.Array:
    """The inputs of the first batch, as much of it as is taken at once."""
    part = config.train.batch_size // config.train.accumulate
    found = data.load(config.data, batch_size=config.train.batch_size, eval_batch_size=part, eval_batches=1)
    tokens = found.train[0]["tokens"][:part, :-1]
    return jax.make_array_from_callback(tokens.shape, batch_sharding(mesh), lambda at: tokens[at])
