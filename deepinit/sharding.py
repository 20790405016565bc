"""Meshes, and the one table from the logical axes of our modules to the axes of a mesh.

Names are strict: an axis that stands in neither table is an error (flax's own constraint ignores a misspelt one).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import linen
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from deepinit.errors import ConfigError, unknown

MESH_AXES = ("data", "fsdp", "tensor", "sequence", "expert")
OUTER_FIRST = ("data", "fsdp", "expert", "sequence", "tensor")  # neighbours share what is exchanged most often
RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp", "expert"),
    "seq": "sequence",
    "positions": None,  # rows of a table of positions
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "experts": "expert",
    "features": None,  # of vectors, and of activations
    "layers": None,
}

FSDP = tuple(name for name, rule in RULES.items() if rule == "fsdp")


def unrolled() -> bool:
    """Whether loops with collectives must be laid out turn by turn: where CPUs of several processes work together.

    XLA's CPU runtime starts what follows a loop before the loop has ended, and Gloo pairs collectives by their order
    alone: with some in a loop and some after it, processes exchange the wrong ones, which ends them or spoils sums.
    """
    return jax.default_backend() == "cpu" and jax.process_count() > 1


def make_mesh(sizes: Mapping[str, int] | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with axes data, fsdp, tensor, sequence and expert over the first devices; one size may be -1, the rest.

    The axes are `Auto`: jax.make_mesh makes explicit ones by default, on which Linen's logical boxes fail.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = dict(sizes or {})
    if extra := [k for k in sizes if k not in MESH_AXES]:
        raise unknown("mesh axis", extra[0], MESH_AXES)
    shape = [sizes.get(axis, 1) for axis in MESH_AXES]
    if shape.count(-1) > 1 or any(s < 1 and s != -1 for s in shape):
        raise ConfigError(f"mesh: {show(shape)}: sizes must be positive, at most one of them -1")
    known = math.prod(s for s in shape if s != -1)
    if -1 in shape:
        if len(devices) % known:
            raise ConfigError(f"mesh: {known} does not divide the {len(devices)} devices here")
        shape[shape.index(-1)] = len(devices) // known
    count = math.prod(shape)
    if count > len(devices):
        raise ConfigError(f"mesh: {show(shape)} needs {count} devices, there are {len(devices)}")
    sorted_shape = tuple(shape[MESH_AXES.index(axis)] for axis in OUTER_FIRST)
    auto = (AxisType.Auto,) * len(shape)
    mesh = jax.make_mesh(sorted_shape, OUTER_FIRST, axis_types=auto, devices=devices[:count])
    return Mesh(mesh.devices.transpose([OUTER_FIRST.index(axis) for axis in MESH_AXES]), MESH_AXES, axis_types=auto)


def show(sizes: Sequence[int]) -> str:
    """The axes that are split, as text: `data 2 x fsdp 4`."""
    return " x ".join(f"{axis} {size}" for axis, size in zip(MESH_AXES, sizes) if size != 1) or "no axis split"


def spec(axes: Sequence[str | None], mesh_axes: Sequence[str] = MESH_AXES) -> PartitionSpec:
    """The partition of an array with these logical axes; mesh axes that the mesh lacks are left out."""

    def place(name: str | None) -> str | tuple[str, ...] | None:
        if name is None:
            return None
        if name not in RULES:
            raise unknown("logical axis", name, RULES)
        rule = RULES[name]
        if isinstance(rule, tuple):
            return tuple(r for r in rule if r in mesh_axes) or None
        return rule if rule in mesh_axes else None

    return PartitionSpec(*map(place, axes))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Lay an activation out by its logical axes on the mesh in use (`jax.set_mesh`); without one, nothing happens."""
    if len(axes) != x.ndim:
        raise ConfigError(f"constrain: {len(axes)} axes named for an array of shape {x.shape}")
    mesh = jax.sharding.get_abstract_mesh()
    layout = spec(axes, mesh.axis_names)
    if mesh.empty or any(mesh.shape[a] > 1 and t == AxisType.Manual for a, t in zip(mesh.axis_names, mesh.axis_types)):
        return x
    return jax.lax.with_sharding_constraint(x, layout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gathered(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """A table whole along d_model, for look-ups; its gradient is summed whole and then laid out as the table is.

    Left to itself the partitioner looks rows up in slices of d_model and then moves the activations, on some meshes by
    copying them to every device. Matrices need no such help: a product gathers its weight.
    """
    return constrain(x, *whole(axes))


def _gathered(x: jax.Array, axes: tuple[str | None, ...]) -> tuple[jax.Array, None]:
    return gathered(x, axes), None


def _scattered(axes: tuple[str | None, ...], _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (constrain(constrain(gradient, *whole(axes)), *axes),)


def whole(axes: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """The axes without those that fsdp splits."""
    return tuple(None if name in FSDP else name for name in axes)


gathered.defvjp(_gathered, _scattered)


def batch_sharding(mesh: Mesh, ndim: int = 2, axis: int = 0) -> NamedSharding:
    """The layout of a batch whose `axis` runs over the samples."""
    return NamedSharding(mesh, spec([*(None,) * axis, "batch", *(None,) * (ndim - axis - 1)], mesh.axis_names))


def param_shardings(boxed: Any, mesh: Mesh) -> Any:
    """NamedSharding for every leaf of an abstract tree with logical names; leaves without names are replicated."""

    def is_box(x: Any) -> bool:
        return isinstance(x, linen.Partitioned)

    def place(x: Any) -> NamedSharding:
        return NamedSharding(mesh, spec(x.names, mesh.axis_names) if is_box(x) else PartitionSpec())

    return jax.tree.map(place, boxed, is_leaf=is_box)
