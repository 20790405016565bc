"""Any weight of an initial state again, from its index alone, in NumPy: without the model, jax or the other weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinit import laws, sampler
from deepinit.errors import ConfigError
from deepinit.geometry import EXPERTS, LAYER_MATRICES, VECTORS, Role
from deepinit.laws import Distribution
from deepinit.recipe import Recipe

if TYPE_CHECKING:
    from deepinit.views import View

CHUNK = 1 << 22
"""Weights that are drawn at a time."""
DRAWN = (laws.Normal, laws.TruncatedNormal, laws.Uniform, laws.Sign, laws.Constant)


def replay(
    recipe: Recipe, role: str, index: Any, *, layer: int | None = None, seed: int = 0, stack: str = ""
) -> np.ndarray:
    """float32 values of the role's leaf at flat row-major indices into one layer of it, bit for bit as initialized.

    `layer` (0-based) is needed for a role that stands in every layer; `stack` is `encoder` or `decoder` where there are
    two. A leaf stored in another dtype holds these values cast to it.

    Raises:
      ConfigError: a law that is not replayed (orthogonal, external), a layer that is missing or not there, an index
        beyond the leaf.
    """
    role = Role.of(role)
    law, g = recipe.weights[role], recipe.geometry
    index = np.asarray(index)
    if law.layered or role in LAYER_MATRICES:
        if layer is None:
            raise ConfigError(f"replay: {role} stands in every layer; say which layer")
        if not 0 <= layer < g.num_layers:
            raise ConfigError(f"replay: layer {layer}: the layers are 0 to {g.num_layers - 1}")
        law = law.at(layer)
    if role in VECTORS and not isinstance(law, laws.Constant):
        raise ConfigError(f"replay: {role} is the role of several leaves; only matrices and constants are replayed")
    if role not in VECTORS:
        size = math.prod(g.matrix(role)) * (g.num_experts if role in EXPERTS and role is not Role.ROUTER else 1)
        if index.size and not (index.min() >= 0 and index.max() < size):
            raise ConfigError(
                f"replay: index {index.min()} to {index.max()}: {role} has {size} entries, 0 to {size - 1}"
            )
    return redrawn(law, f"{stack}/{role}" if stack else role, index, layer=layer, seed=seed)


def redrawn(law: Distribution, slot: str, index: Any, *, layer: int | None = None, seed: int = 0) -> np.ndarray:
    """float32 values of the leaf with this slot (`deepinit.roles.Leaf.slot`); see `replay`."""
    index = np.asarray(index, np.uint64)
    law = law.at(layer) if law.layered and layer is not None else law
    if isinstance(law, laws.Constant):
        return np.full(index.shape, law.value, np.float32)
    key = sampler.slot_words(seed, slot)
    if layer is not None:
        key = sampler.fold(key, np.uint32(layer))
    words = (index >> np.uint64(32)).astype(np.uint32), (index & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    match law:
        case laws.Normal():
            return sampler.values(key, words, np.asarray(law.std, np.float32), "normal")
        case laws.TruncatedNormal():
            return sampler.values(key, words, np.asarray(law.sigma, np.float32), "normal", law.cut)
        case laws.Uniform():
            return sampler.values(key, words, np.asarray(law.bound, np.float32), "uniform")
        case laws.Sign():
            return np.copysign(np.asarray(law.std, np.float32), sampler.values(key, words, np.float32(1.0), "uniform"))
    raise ConfigError(f"replay: {slot} has law {type(law).__name__}, which is not drawn from single indices")


# --- whole trees -------------------------------------------------------------------------------------------------


def drawable(view: View, recipe: Recipe) -> bool:
    """Whether the weights of this part can be drawn again one by one."""
    role = view.leaf.role
    if role is None or role not in recipe.weights or recipe.project:
        return False
    law = recipe.law_at(view.leaf.canonical, role)
    deep = len(law.parameter) if isinstance(law.parameter, tuple) else math.inf
    return isinstance(law, DRAWN) and view.depth <= deep


def expected(view: View, recipe: Recipe, layer: Any, index: Any, seed: int, dtype: Any) -> np.ndarray:
    """The weights of one view at (row of `take`, flat canonical index), in the dtype in which they are stored."""
    role = view.leaf.role
    assert role is not None
    law = recipe.law_at(view.leaf.canonical, role)
    layer, index = np.asarray(layer), np.asarray(index, np.int64)
    if view.expert is not None:
        index = index + view.expert * view.n
    out = np.zeros(index.shape, np.float32)
    for row in np.unique(layer):
        at = layer == row
        out[at] = redrawn(law, view.leaf.slot, index[at], layer=view.layer(int(row)), seed=seed)
    if role in (Role.TOKEN_EMBED, Role.LM_HEAD):  # one row a token: beyond the vocabulary they are zero
        out[index >= view.n // view.canonical[0] * recipe.geometry.vocab_size] = 0.0
    return out.astype(dtype)


def different(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Where two arrays of one dtype differ in a bit; the sign of a zero does not count."""
    return (found != wanted) | (np.isnan(found) & ~np.isnan(wanted))


def complaint(view: View, layer: np.ndarray, index: np.ndarray, found: Any, wanted: Any, wrong: Any, seed: int) -> str:
    """What is wrong with some weights of a leaf."""
    first = int(np.flatnonzero(wrong)[0])
    at = view.layer(int(layer[first]))
    where = f"index {int(index[first])}" + ("" if at is None else f" of layer {at}")
    return (
        f"{int(wrong.sum())} of {wrong.size} weights are not those drawn with seed {seed}: {where} holds "
        f"{float(found[first]):.9g}, the draw is {float(wanted[first]):.9g}"
    )


def compare(
    views: Sequence[View],
    measures: Sequence[Mapping[str, np.ndarray]],
    samples: Sequence[tuple[np.ndarray, np.ndarray] | None],
    arrays: Sequence[Any],
    recipe: Recipe,
    seed: int,
) -> tuple[dict[int, str], int]:
    """(view -> complaint, weights compared) for the sampled weights that `measure` brought along."""
    complaints, count = {}, 0
    for i, (view, m, at) in enumerate(zip(views, measures, samples)):
        if at is None:
            continue
        layer, index = at
        wanted = expected(view, recipe, layer, index, seed, arrays[view.array].dtype)
        wrong = different(np.asarray(m["sampled"]), wanted)
        count += wrong.size
        if wrong.any():
            complaints[i] = complaint(view, layer, index, m["sampled"], wanted, wrong, seed)
    return complaints, count


def compare_all(views: Sequence[View], arrays: Sequence[Any], recipe: Recipe, seed: int) -> tuple[dict[int, str], int]:
    """(view -> complaint, weights compared) for every weight that this process holds, each replica once."""
    complaints: dict[int, str] = {}
    count = 0
    for i, view in enumerate(views):
        if not drawable(view, recipe):
            continue
        for start, block in blocks(arrays[view.array]):
            positions = np.stack(np.unravel_index(np.arange(block.size), block.shape or (1,)), 1)
            positions = (positions + start)[:, : len(view.shape)]
            kept = np.ones(block.size, bool)
            if view.cut:
                axis, low, high = view.cut
                kept = (positions[:, axis] >= low) & (positions[:, axis] < high)
            if not kept.any():
                continue
            layer, index = view.flat(positions[kept])
            found = block.reshape(-1)[kept]
            wanted = expected(view, recipe, layer, index, seed, found.dtype)
            wrong = different(found, wanted)
            count += wrong.size
            if wrong.any():
                complaints.setdefault(i, complaint(view, layer, index, found, wanted, wrong, seed))
    return complaints, count


def blocks(x: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(where it starts, values) of the pieces of an array that are here, a few million entries at a time."""
    if hasattr(x, "addressable_shards"):
        shards = {str(s.index): s for s in x.addressable_shards}.values()  # replicas once
        pieces = [([s.indices(n)[0] for s, n in zip(shard.index, x.shape)], shard.data) for shard in shards]
    else:
        pieces = [([0] * np.ndim(x), x)]
    for start, piece in pieces:
        rows = max(1, CHUNK // max(1, math.prod(piece.shape[1:]))) if piece.ndim else 1
        for low in range(0, piece.shape[0] if piece.ndim else 1, rows):
            block = np.asarray(piece[low : low + rows] if piece.ndim else piece)
            offset = np.asarray([start[0] + low, *start[1:]] if piece.ndim else [0], np.int64)
            yield offset, block
