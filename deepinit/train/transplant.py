"""Which leaf of a saved state becomes which leaf of ours: the same one, or a layer of a stack, or a stack of layers.

A scanned stack keeps its layers in one leaf under `layers` (or in a few, under `layers_0_2`, ...), an unrolled one
under `layers_0`, `layers_1`, ...: the values are the same, so that a checkpoint of either goes on in the other, bit for
bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from deepinit import roles
from deepinit.errors import ConfigError
from deepinit.roles import Leaf

Leaves = Mapping[str, Any]
Stacks = Mapping[str, list[Leaf]]
"""Canonical path -> the stacked leaves of a saved state."""


@dataclass(frozen=True)
class Origin:
    """Where a leaf of ours comes from."""

    paths: tuple[str, ...]
    """In the saved state; more than one for a stack that was saved unrolled; none: it keeps its initial values."""
    row: int | None = None
    """Of a saved stack."""

    def __str__(self) -> str:
        if not self.paths:
            return "initial"
        if self.row is not None:
            return f"{self.paths[0]}[{self.row}]"
        return self.paths[0] if len(self.paths) == 1 else f"{self.paths[0]} ... {self.paths[-1]}"


def flat(tree: Any) -> Iterator[tuple[str, Any]]:
    """Leaves with their paths, the same for a state and for what orbax says of a saved one."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        yield "/".join(roles.names(path)), leaf


def plan(saved: Leaves, wanted: Leaves, where: str, partial: bool = False) -> dict[str, Origin]:
    """The origin of every wanted leaf. Values are arrays or what has their shape and dtype.

    Args:
      saved: leaves of the checkpoint, by path.
      wanted: leaves that are to be filled.
      where: the checkpoint, for the error.
      partial: whether saved leaves may be left over.

    Raises:
      ConfigError: a leaf is missing, left over, or of another shape or type: one line with every such path, and both
        shapes. (Orbax would cast in silence.)
    """
    origins: dict[str, Origin] = {}
    used: set[str] = set()
    wrong: list[str] = []
    stacks: dict[str, list[Leaf]] = {}
    for path in saved:
        if (place := roles.locate(path)).stacked:
            stacks.setdefault(place.canonical, []).append(place)
    for path, leaf in wanted.items():
        origin = find(path, leaf, saved, stacks)
        if origin is None:
            wrong.append(f"has no {path}, here {describe(leaf)}")
            continue
        used.update(origin.paths)
        old = saved[origin.paths[0]]
        there = old.shape[1:] if origin.row is not None else tuple(old.shape)
        if len(origin.paths) > 1 or (origin.paths[0] != path and origin.row is None):
            there = (len(origin.paths), *old.shape)
        if tuple(there) != tuple(leaf.shape) or old.dtype != leaf.dtype:
            wrong.append(f"{path} is {list(there)} {old.dtype} there, {describe(leaf)} here")
        elif origin.row is not None and origin.row >= old.shape[0]:
            wrong.append(f"has no {path}, here {describe(leaf)}: {origin.paths[0]} is {describe(old)}")
        origins[path] = origin
    if not partial:
        wrong += [
            f"has {path}, {describe(leaf)}, which this run lacks" for path, leaf in saved.items() if path not in used
        ]
        wrong += leftover_layers(saved, wanted, origins)
    if wrong:
        raise ConfigError(f"{where} does not fit: {'; '.join(wrong)}; was it made with other model options?")
    return origins


def find(path: str, leaf: Any, saved: Leaves, stacks: Stacks) -> Origin | None:
    """The origin of one leaf, by names and layers alone."""
    if path in saved:
        return Origin((path,))
    place = roles.locate(path)
    if place.layer is not None:
        found = [
            (stack.path, *divmod(place.layer - stack.start, stack.step)) for stack in stacks.get(place.canonical, ())
        ]
        rows = [(stack, row) for stack, row, rest in found if row >= 0 and not rest]
        here = [(stack, row) for stack, row in rows if row < saved[stack].shape[0]]
        for stack, row in [*here, *rows][:1]:  # one that ends too early tells more than none
            return Origin((stack,), row)
    if place.stacked:
        layers = [roles.unrolled(place.canonical, layer) for layer in place.rows(leaf.shape)]
        if there := tuple(itertools.takewhile(saved.__contains__, layers)):
            return Origin(there)
    return None


def leftover_layers(saved: Leaves, wanted: Leaves, origins: Mapping[str, Origin]) -> list[str]:
    """Stacks of which some layers would be left behind."""
    taken: dict[str, int] = {}
    for origin in origins.values():
        if origin.row is not None:
            taken[origin.paths[0]] = max(taken.get(origin.paths[0], 0), origin.row + 1)
    return [
        f"{path} has {saved[path].shape[0]} layers there, {count} here"
        for path, count in taken.items()
        if count < saved[path].shape[0]
    ]


def describe(leaf: Any) -> str:
    """Shape and type."""
    return f"{list(leaf.shape)} {leaf.dtype}"


# ---------------------------------------------------------------------------------------------- moving


def targets(saved: Leaves, wanted: Leaves, origins: Mapping[str, Origin]) -> dict[str, jax.ShapeDtypeStruct]:
    """How to read the saved leaves that are needed: their own shapes, laid out like the leaves that they become."""
    out = {}
    for path, origin in origins.items():
        sharding = wanted[path].sharding
        if isinstance(sharding, NamedSharding):
            spec = tuple(sharding.spec)
            if origin.row is not None:
                sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *spec))
            elif origin.paths[0] != path:
                sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec[1:]))
        for old in origin.paths:
            out[old] = jax.ShapeDtypeStruct(saved[old].shape, saved[old].dtype, sharding=sharding)
    return out


def assemble(read: Leaves, wanted: Leaves, origins: Mapping[str, Origin]) -> dict[str, Any]:
    """Our leaves from those that were read: layers are taken from stacks, or stacked, in one compiled copy."""
    out = {path: read[origin.paths[0]] for path, origin in origins.items() if origin.paths == (path,)}
    moved = {path: origin for path, origin in origins.items() if path not in out}
    if not moved:
        return out

    def move(read: dict[str, Any]) -> dict[str, Any]:
        return {
            path: jnp.stack([read[p] for p in o.paths]) if o.row is None else read[o.paths[0]][o.row]
            for path, o in moved.items()
        }

    needed = {p: read[p] for o in moved.values() for p in o.paths}
    layouts = {path: wanted[path].sharding for path in moved}
    return out | jax.jit(move, out_shardings=layouts)(needed)


def select(paths: Iterable[str], patterns: Iterable[str]) -> dict[str, bool]:
    """Which paths a list of globs takes; each must take one.

    Raises:
      ConfigError: a pattern takes nothing.
    """
    import fnmatch

    paths = list(paths)
    taken = dict.fromkeys(paths, False)
    for pattern in patterns:
        hits = fnmatch.filter(paths, pattern)
        if not hits:
            raise ConfigError(f"train.load_paths: {pattern!r} takes no leaf; one of them is {paths[0]!r}")
        taken |= dict.fromkeys(hits, True)
    return taken
