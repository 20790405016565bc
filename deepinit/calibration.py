"""Factors on the skip that are measured on data before the first step, for the very stack that is trained.

Admin (arXiv:2004.08249, section 4.2): w_1 = 1 and w_(i+1)^2 = Var(w_i x_i) + Var(F_i(x_i)) over the residual additions
x <- LN(w_i x + F_i(x)), so that every branch changes the sum as little as the depth asks for.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinit import stacks
from deepinit.errors import ConfigError
from deepinit.files import write_whole
from deepinit.geometry import Geometry
from deepinit.recipe import Recipe

FILE = "calibration.json"
DIGITS = 4
"""Significant digits that are kept: sums over a batch differ in the last bits from mesh to mesh."""


@dataclass(frozen=True)
class Calibration:
    """What was measured, and of which model."""

    scheme: str
    geometry: Geometry
    skip: tuple[float, ...]
    """One factor for each residual addition."""
    tokens: int
    """How many it was measured on."""

    def check(self, recipe: Recipe, where: str) -> None:
        """Refuse a recipe that measures nothing, or a model other than the one that was measured."""
        if not recipe.calibrate:
            raise ConfigError(f"{where}: scheme {recipe.name} measures nothing before the first step")
        if self.scheme != recipe.name:
            raise ConfigError(f"{where}: measured for scheme {self.scheme}, not for {recipe.name}")
        for field in dataclasses.fields(Geometry):
            old, new = getattr(self.geometry, field.name), getattr(recipe.geometry, field.name)
            if old != new:
                raise ConfigError(f"{where}: measured at {field.name} {old}, this model has {new}; measure it anew")

    def applied(self, recipe: Recipe, where: str = FILE) -> Recipe:
        """The recipe with the measured factors; see `check`."""
        self.check(recipe, where)
        return recipe.calibrated(self.skip, f"skip measured on {self.tokens} tokens")

    def write(self, path: Path) -> None:
        """As JSON."""
        write_whole(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def read(path: str | Path) -> Calibration:
    """The calibration of a file.

    Raises:
      ConfigError: there is none.
    """
    try:
        data = json.loads(Path(path).read_text())
        return Calibration(data["scheme"], Geometry(**data["geometry"]), tuple(data["skip"]), data["tokens"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"scheme.calibration: {path} holds no calibration ({type(e).__name__})") from None


def measure(model: Any, recipe: Recipe, params: Any, tokens_BT: Any) -> Calibration:
    """Run the stack on some tokens until the factors that follow from its variances are those that it ran with.

    A factor moves only what comes after it, so as many rounds as there are additions suffice; a few do.
    """
    import jax

    run = jax.jit(lambda p, x: model.apply({"params": p}, x, mutable=["stats"])[1]["stats"])
    skip = (1.0,) * recipe.geometry.num_residuals
    for _ in range(len(skip) + 1):
        trial = recipe.calibrated(skip, "")
        last, skip = skip, chain(skip, variances(jax.device_get(run(with_skip(params, trial), tokens_BT)), recipe))
        if skip == last:
            break
    return Calibration(recipe.name, recipe.geometry, skip, int(tokens_BT.size))


def chain(skip: tuple[float, ...], variances: list[tuple[float, float]]) -> tuple[float, ...]:
    """w_1 = 1, w_(i+1)^2 = Var(w_i x) + Var(F_i), from (Var(x), Var(F)) of each addition run with these factors."""
    new = [1.0]
    for (kept, branch), _ in zip(variances, skip[1:]):
        new.append(float(f"{math.sqrt(new[-1] ** 2 * kept + branch):.{DIGITS}g}"))
    return tuple(new)


def variances(stats: Any, recipe: Recipe) -> list[tuple[float, float]]:
    """(Var(x), Var(F)) of each addition, in order, from what the modules kept."""
    g, kept = recipe.geometry, stacks.layered(stats)
    places = [(layer, f"layers/{kind}_residual") for layer in range(g.num_layers) for kind in g.additions]
    return [(float(kept[f"{at}/skip_var"][i]), float(kept[f"{at}/branch_var"][i])) for i, at in places]


def with_skip(params: Any, recipe: Recipe) -> Any:
    """The tree with the factors on the skip that the recipe says, laid out as they were."""
    import jax
    import jax.numpy as jnp

    from deepinit import roles

    def place(path: Any, x: Any) -> Any:
        leaf = roles.locate(path)
        if leaf.role is None or not leaf.path.endswith(f"skip_{leaf.role}"):
            return x
        law = recipe.law_at(leaf.canonical, leaf.role)
        values = [law.at(layer or 0).parameter for layer in leaf.rows(x.shape)]
        new = jnp.asarray(values, x.dtype)
        new = new.reshape(-1, *(1,) * (x.ndim - 1)) if leaf.stacked else new[0]
        return jax.device_put(jnp.broadcast_to(new, x.shape), x.sharding)

    return jax.tree.map_with_path(place, params)
