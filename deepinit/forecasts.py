"""Bytes for each device, from abstract shapes and layouts: before anything is allocated or compiled."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from deepinit import roles, sharding
from deepinit.sharded_init import abstract_params, check_divisible

MOMENTS = 2  # of Adam


@dataclass(frozen=True)
class Forecast:
    """Bytes on one device; of the sizes that matter before a run starts."""

    devices: int
    parameters: int
    """Entries of the whole model."""
    params: int
    moments: int
    """Two of Adam, in float32."""
    gradients: int
    largest: str
    """The leaf with the largest shard."""
    largest_bytes: int
    whole: int
    """Of the unsharded tree."""

    @property
    def total(self) -> int:
        """Parameters, moments and gradients; activations come on top."""
        return self.params + self.moments + self.gradients

    def lines(self) -> list[str]:
        """For the terminal."""
        gib = 2**30
        return [
            f"{self.parameters:,} parameters over {self.devices} device{'s' if self.devices > 1 else ''}",
            f"each device: parameters {self.params / gib:.3f} GiB, Adam's moments {self.moments / gib:.3f}, gradients "
            f"{self.gradients / gib:.3f}: {self.total / gib:.3f} GiB and activations",
            f"largest shard: {self.largest}, {self.largest_bytes / gib:.3f} GiB; init needs no more than the shards",
        ]


def forecast(model: Any, mesh: Mesh | None = None) -> Forecast:
    """What a model takes on each device of a mesh (None: one device).

    Raises:
      ConfigError: the mesh does not divide a leaf.
    """
    boxed = abstract_params(model)
    shapes = roles.unboxed(boxed)
    layout: Any = None
    if mesh is not None:
        layout = sharding.param_shardings(boxed, mesh)
        check_divisible(shapes, layout)
        shards = [s.shard_shape(x.shape) for x, s in zip(jax.tree.leaves(shapes), jax.tree.leaves(layout))]
    else:
        shards = [x.shape for x in jax.tree.leaves(shapes)]
    leaves = [(roles.joined(roles.names(path)), x) for path, x in jax.tree.leaves_with_path(shapes)]
    bytes_ = [math.prod(s) * x.dtype.itemsize for s, (_, x) in zip(shards, leaves)]
    entries = sum(math.prod(s) for s in shards)
    top = max(range(len(bytes_)), key=bytes_.__getitem__)
    return Forecast(
        devices=mesh.size if mesh is not None else 1,
        parameters=sum(x.size for _, x in leaves),
        params=sum(bytes_),
        moments=MOMENTS * 4 * entries,
        gradients=sum(bytes_),
        largest=leaves[top][0],
        largest_bytes=bytes_[top],
        whole=sum(x.size * x.dtype.itemsize for _, x in leaves),
    )


def command(config: Any, as_json: bool) -> int:
    """Print the forecast of a config; a mesh of more devices than are here is taken as given."""
    from deepinit.nn import Decoder

    model = Decoder.from_recipe(config.recipe(), **config.model_options())
    sizes = dataclasses.asdict(config.mesh)
    made = forecast(model, abstract_mesh(sizes))
    if as_json:
        print(json.dumps(dataclasses.asdict(made) | {"total": made.total}, indent=1))
    else:
        print("\n".join(made.lines()))
    return 0


def abstract_mesh(sizes: dict[str, int]) -> Any:
    """A mesh of these sizes without devices, so that a cluster can be asked about from anywhere."""
    from jax.sharding import AbstractMesh, AxisType

    known = {axis: max(sizes.get(axis, 1), 1) for axis in sharding.MESH_AXES}
    return AbstractMesh(tuple(known.values()), tuple(known), axis_types=(AxisType.Auto,) * len(known))
