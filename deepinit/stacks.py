"""How the layers of a scanned model lie in its tree, and trees brought into the order of the layers.

Layers that are alike are one stack, `layers`. Where routed and dense layers take turns, a scan's body is one period of
them, and each block of the body has a stack of its own, `layers_START_STEP`; dense layers before the first period and
after the last are a stack each. So there are at most `moe_every` + 2 stacks, whatever the depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from deepinit import roles
from deepinit.geometry import Geometry, Role
from deepinit.roles import STACK, Leaf


def runs(g: Geometry) -> tuple[tuple[range, ...], ...]:
    """The scans of a stack, in order: of each, the layers of every block of its body. All layers stand in one."""
    if not g.mixed:
        return ((range(g.num_layers),),)
    n = g.moe_every
    start, end = g.first_dense // n * n, g.num_layers // n * n
    found = (range(start),), tuple(range(start + i, end, n) for i in range(n)), (range(end, g.num_layers),)
    return tuple(run for run in found if run[0])


def named(g: Geometry) -> dict[str, range]:
    """Name in the tree -> the layers, of every stack of a scanned model."""
    stacks = [layers for run in runs(g) for layers in run]
    if len(stacks) == 1:
        return {STACK: stacks[0]}
    return {f"{STACK}_{layers.start}_{layers.step}": layers for layers in stacks}


def scanned(tree: Mapping[str, Any], g: Geometry, join: Callable[[Sequence[Any]], Any]) -> dict[str, Any]:
    """The tree of a scanned model from that of an unrolled one: `join` makes one leaf of those of several layers."""
    import jax

    alone = {f"{STACK}_{i}" for i in range(g.num_layers)}
    rest = {name: part for name, part in tree.items() if name not in alone}
    if len(rest) == len(tree):
        return rest  # it is scanned already
    return rest | {
        name: jax.tree.map(lambda *xs: join(xs), *(tree[f"{STACK}_{i}"] for i in layers))
        for name, layers in named(g).items()
    }


def in_order(pieces: Sequence[tuple[Leaf, Any]]) -> Any:
    """(layers, ...) in the order of the layers, from what several stacks and unrolled layers hold of one leaf."""
    if len(pieces) == 1 and pieces[0][0].stacked:
        return pieces[0][1]
    import jax
    import jax.numpy as jnp

    xp: Any = jnp if any(isinstance(x, jax.Array) for _, x in pieces) else np
    layers = [layer or 0 for leaf, x in pieces for layer in leaf.rows(np.shape(x))]
    rows = xp.concatenate([x if leaf.stacked else xp.asarray(x)[None] for leaf, x in pieces])
    return rows[np.argsort(layers)]


def layered(tree: Any, among: Sequence[Role] = ()) -> dict[str, Any]:
    """Canonical path -> array of every leaf; one inside the stack has all of its layers along the first axis.

    `among`: only leaves of these roles.
    """
    pieces: dict[str, list[tuple[Leaf, Any]]] = {}
    for leaf, x in roles.leaves(tree):
        if not among or leaf.role in among:
            pieces.setdefault(leaf.canonical, []).append((leaf, x))
    return {path: in_order(p) if p[0][0].at(0) is not None else p[0][1] for path, p in pieces.items()}


def apart(tree: Any) -> Iterator[tuple[str, int | None, Any]]:
    """(canonical path, layer, array) of every leaf, those of a stack layer by layer; None outside of the stack."""
    for leaf, x in roles.leaves(tree):
        for i, layer in enumerate(leaf.rows(np.shape(x))):
            yield leaf.canonical, layer, x[i] if leaf.stacked else x
