"""Which role a leaf has, read from the name that its module gave it.

A module names a leaf by its role (`attn_q`, `norm_scale`), or by a qualifier and the role (`mlp_up_bias`): the name is
the declaration. Leaves of a stack live under `layers` (one leading layer axis) or `layers_0`, `layers_1`, ...
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from deepinit.geometry import VECTORS, Role

STACK = "layers"
_LAYER = re.compile(rf"{STACK}_(\d+)$")


@dataclass(frozen=True)
class Leaf:
    """Where a leaf stands: its path, its role (None: unmanaged), its slot, and its layer or layers."""

    path: str
    """As in the tree: `layers_3/attention/attn_q`."""
    canonical: str
    """The same for scanned and unrolled stacks: `layers/attention/attn_q`."""
    role: Role | None
    slot: str
    """What its random key is made from: a matrix's role, after the name of its stack if there are several; else the
    canonical path."""
    layer: int | None
    """Of an unrolled stack."""
    stacked: bool
    """Whether the first axis is that of the layers."""


def role_of(path: str | Iterable[Any]) -> Role | None:
    """The role that a leaf's name declares; None for a name that is no role."""
    name = names(path)[-1]
    if name in Role._value2member_map_:
        return Role(name)
    for role in VECTORS:  # a matrix has a name of its own; only vectors come several to a layer
        if name.endswith(f"_{role}"):
            return role
    return None


def names(path: str | Iterable[Any]) -> list[str]:
    """The parts of a path: `a/b/c`, or jax's key path."""
    if isinstance(path, str):
        return path.split("/")
    return [str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p)))) for p in path]


def locate(path: str | Iterable[Any]) -> Leaf:
    """What a path says of its leaf."""
    parts = names(path)
    layer, stacked, canonical = None, False, []
    for part in parts:
        if match := _LAYER.match(part):
            layer, part = int(match[1]), STACK
        elif part == STACK:
            stacked = True
        canonical.append(part)
    role = role_of(parts)
    stack = [p for p in canonical[:-1] if p in ("encoder", "decoder")]
    slot = "/".join(canonical if role is None or role in VECTORS else [*stack, parts[-1]])
    return Leaf("/".join(parts), "/".join(canonical), role, slot, layer, stacked)


def unboxed(tree: Any) -> Any:
    """The tree with flax's metadata boxes taken off, no sharding constraint applied."""
    import jax
    from flax.core import meta

    def is_box(x: Any) -> bool:
        return isinstance(x, meta.AxisMetadata)

    def take(x: Any) -> Any:
        if not is_box(x):
            return x
        return x.unbox(apply_constraint=False) if isinstance(x, meta.Partitioned) else x.unbox()

    return jax.tree.map(take, tree, is_leaf=is_box)


def leaves(tree: Any) -> list[tuple[Leaf, Any]]:
    """Every leaf of a parameter tree with where it stands, boxes taken off."""
    import jax

    return [(locate(path), x) for path, x in jax.tree.leaves_with_path(unboxed(tree))]
