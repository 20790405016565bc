"""Which role a leaf has, read from the name that its module gave it.

A module names a leaf by its role (`attn_q`, `norm_scale`), or by a qualifier and the role (`mlp_up_bias`): the name is
the declaration. Leaves of a stack live under `layers` (one leading layer axis), or `layers_0`, `layers_1`, ..., or,
where not all layers are alike, under `layers_START_STEP`: the leading axis of `layers_1_2` holds layers 1, 3, 5, ...
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from deepinit.geometry import EMBEDDINGS, VECTORS, Role

STACK = "layers"
_LAYERS = re.compile(rf"{STACK}(?:_(\d+)(?:_([1-9]\d*))?)?$")


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
    """Whether the first axis is that of layers."""
    start: int = 0
    step: int = 1
    """Of a stacked leaf: its row i is layer start + step i."""

    def at(self, row: int) -> int | None:
        """The layer of a row of the first axis, or of an unrolled leaf; None outside of the stack."""
        return self.start + self.step * row if self.stacked else self.layer

    def rows(self, shape: Sequence[int]) -> tuple[int | None, ...]:
        """The layers that an array of this shape holds, in its order: one for each row of a stacked leaf, else one."""
        return tuple(self.at(i) for i in range(shape[0] if self.stacked else 1))

    def within(self, ndim: int) -> tuple[int, ...]:
        """Of an array of so many axes, all but that of layers."""
        return tuple(range(int(self.stacked), ndim))


def role_of(path: str | Iterable[Any]) -> Role | None:
    """The role that a leaf's name declares; None for a name that is no role."""
    name = names(path)[-1]
    if name in Role._value2member_map_:
        return Role(name)
    for role in (*VECTORS, *EMBEDDINGS):  # a matrix has a name of its own; vectors and tables may be several
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
    layer, stacked, start, step, canonical = None, False, 0, 1, []
    for part in parts:
        if match := _LAYERS.match(part):
            first, by = match.groups()
            if first and not by:
                layer = int(first)
            else:
                stacked, start, step = True, int(first or 0), int(by or 1)
            part = STACK
        canonical.append(part)
    role = role_of(parts)
    stack = [p for p in canonical[:-1] if p in ("encoder", "decoder")]
    slot = "/".join([*stack, role] if parts[-1] == role and role not in VECTORS else canonical)
    return Leaf("/".join(parts), "/".join(canonical), role, slot, layer, stacked, start, step)


def unrolled(canonical: str, layer: int | None) -> str:
    """The path in an unrolled stack: `.../layers/x` and 3 -> `.../layers_3/x`; with None, as it is."""
    if layer is None:
        return canonical
    return "/".join(f"{STACK}_{layer}" if part == STACK else part for part in canonical.split("/"))


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
    """Every leaf of a parameter tree of any kind with where it stands, boxes taken off."""
    return [(locate(path), x) for path, x in flat(tree)]


def flat(tree: Any) -> list[tuple[list[str], Any]]:
    """(parts of the path, array) of a tree: dicts, boxes, an `nnx.State`, the `nnx.Param`s of an NNX module."""
    import jax

    return [(names(unwrapped(path)), x) for path, x in jax.tree.leaves_with_path(state_of(tree))]


def state_of(tree: Any) -> Any:
    """The parameters of an NNX module as a state; anything else as it is."""
    if any(c.__module__.startswith("flax.nnx") and c.__name__ == "Module" for c in type(tree).__mro__):
        from flax import nnx

        return nnx.state(tree, nnx.Param)
    return tree


def unwrapped(path: Iterable[Any]) -> list[Any]:
    """A path of jax without the attribute `value` that a box or a variable adds at its end."""
    parts = list(path)
    while parts and getattr(parts[-1], "name", None) == "value":
        parts.pop()
    return parts


def joined(parts: Iterable[str]) -> str:
    """The path as text."""
    return "/".join(parts)
