"""Meshes, and the one table from the logical axes of our modules to the axes of a mesh.

Names are strict: an axis that stands in neither table is an error (flax's own constraint ignores a misspelt one).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import linen
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from deepinit.errors import ConfigError, unknown

MESH_AXES = ("data", "fsdp", "tensor")
RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "seq": None,
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "experts": None,
    "features": None,  # of vectors, and of activations
    "layers": None,
}


def make_mesh(sizes: Mapping[str, int] | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with axes data, fsdp and tensor over the first devices; one size may be -1, the rest of them.

    The axes are `Auto`: jax.make_mesh makes explicit ones by default, on which Linen's logical boxes fail.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = dict(sizes or {})
    if extra := [k for k in sizes if k not in MESH_AXES]:
        raise unknown("mesh axis", extra[0], MESH_AXES)
    shape = [sizes.get(axis, 1) for axis in MESH_AXES]
    if shape.count(-1) > 1 or any(s < 1 and s != -1 for s in shape):
        raise ConfigError(f"mesh: sizes {tuple(shape)} must be positive, at most one of them -1")
    known = math.prod(s for s in shape if s != -1)
    if -1 in shape:
        if len(devices) % known:
            raise ConfigError(f"mesh: {known} does not divide the {len(devices)} devices here")
        shape[shape.index(-1)] = len(devices) // known
    count = math.prod(shape)
    if count > len(devices):
        text = " x ".join(f"{a} {s}" for a, s in zip(MESH_AXES, shape))
        raise ConfigError(f"mesh: {text} needs {count} devices, there are {len(devices)}")
    return jax.make_mesh(tuple(shape), MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:count])


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
