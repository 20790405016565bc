"""Which part of which stored array holds the matrices of one role, whatever their axes, and in which order.

Our own modules keep one role a leaf, its axes in the order of the law. Other trees fuse, stack and transpose: a view
says how. The canonical order is layers, experts, inputs, outputs (of a head: vocabulary, inputs), in which a flat index
means the same weight in every tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinit.geometry import Role
from deepinit.roles import Leaf

LETTERS = {
    "L": "layers",
    "E": "experts",
    "i": "inputs of the matrix",
    "o": "outputs of the matrix",
    "S": "one index for each of several roles",
    "1": "an axis of one entry",
    "x": "any other axis, in order",
}


@dataclass(frozen=True)
class View:
    """One role's part of one stored array."""

    leaf: Leaf
    array: int
    """Its place among the arrays of the tree."""
    shape: tuple[int, ...]
    """Of the stored array."""
    axes: str
    """A letter for each stored axis; see `LETTERS`."""
    cut: tuple[int, int, int] | None = None
    """(axis, start, stop) of this role's part, where the array holds several."""
    expert: int | None = None
    """Of a leaf that holds one expert's matrix."""

    @property
    def whole(self) -> bool:
        """Whether the array holds this role alone, its axes in canonical order."""
        return self.cut is None and self.order == tuple(range(len(self.shape)))

    @property
    def part(self) -> tuple[int, ...]:
        """Shape of the part, its axes as stored."""
        sizes = list(self.shape)
        if self.cut:
            sizes[self.cut[0]] = self.cut[2] - self.cut[1]
        return tuple(sizes)

    @property
    def order(self) -> tuple[int, ...]:
        """The stored axes in canonical order; those of one entry come first and are dropped."""
        inside = "Eoix" if self.leaf.role is Role.LM_HEAD else "Eiox"
        return tuple(k for letter in "S1L" + inside for k, a in enumerate(self.axes) if a == letter)

    @property
    def canonical(self) -> tuple[int, ...]:
        """Shape of one layer, in canonical order."""
        return tuple(self.part[k] for k in self.order if self.axes[k] not in "S1L")

    @property
    def layers(self) -> int:
        """Layers stacked in this part; 1 where there are none."""
        return self.part[self.axes.index("L")] if "L" in self.axes else 1

    @property
    def n(self) -> int:
        """Entries of one layer."""
        return math.prod(self.canonical)

    @property
    def depth(self) -> int:
        """Layers that a law must have for it: one more than its last; 1 outside of the stack."""
        return (self.layer(self.layers - 1) or 0) + 1

    def layer(self, i: int) -> int | None:
        """The layer of the i-th row of `take`; None outside of the stack."""
        return self.leaf.at(i)

    def take(self, x: Any) -> Any:
        """(layers, *canonical), from the stored array; works for jax and numpy."""
        if self.whole and self.leaf.stacked:
            return x
        if self.cut:
            x = x[tuple(slice(*self.cut[1:]) if k == self.cut[0] else slice(None) for k in range(len(self.shape)))]
        return x.transpose(self.order).reshape(self.layers, *self.canonical)

    def put(self, values: Any) -> Any:
        """What `take` was given, of this part: (layers, *canonical) -> the part as stored."""
        moved = values.reshape([self.part[k] for k in self.order])
        return moved.transpose(np.argsort(self.order).tolist())

    def positions(self, layer: Any, index: Any) -> np.ndarray:
        """(count, stored axes) indices into the stored array, of flat canonical indices into one layer each."""
        canonical = np.unravel_index(np.asarray(index, np.int64), self.canonical or (1,))
        found = np.zeros((len(np.atleast_1d(index)), len(self.shape)), np.int64)
        k = 0
        for axis in self.order:
            if self.axes[axis] == "L":
                found[:, axis] = layer
            elif self.axes[axis] not in "S1":
                found[:, axis] = canonical[k]
                k += 1
        if self.cut:
            found[:, self.cut[0]] += self.cut[1]
        return found

    def flat(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The inverse of `positions`: (layer, flat canonical index)."""
        moved = positions.astype(np.int64)
        if self.cut:
            moved[:, self.cut[0]] -= self.cut[1]
        layer = moved[:, self.axes.index("L")] if "L" in self.axes else np.zeros(len(moved), np.int64)
        inside = [moved[:, k] for k in self.order if self.axes[k] not in "S1L"]
        return layer, np.ravel_multi_index(inside, self.canonical) if inside else np.zeros(len(moved), np.int64)


def on_device(arrays: Sequence[Any]) -> list[Any]:
    """Arrays of jax, those of numpy put on the default device."""
    return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in arrays]
