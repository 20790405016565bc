"""Any weight of an initial state again, from its index alone, in NumPy: without the model, jax or the other weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from deepinit import laws, sampler
from deepinit.errors import ConfigError
from deepinit.geometry import EXPERTS, LAYER_MATRICES, VECTORS, Role
from deepinit.recipe import Recipe


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
    if isinstance(law, laws.Constant):
        return np.full(index.shape, law.value, np.float32)
    if role in VECTORS:
        raise ConfigError(f"replay: {role} is the role of several leaves; only matrices and constants are replayed")
    size = math.prod(g.matrix(role)) * (g.num_experts if role in EXPERTS and role is not Role.ROUTER else 1)
    if index.size and not (index.min() >= 0 and index.max() < size):
        raise ConfigError(f"replay: index {index.min()} to {index.max()}: {role} has {size} entries, 0 to {size - 1}")
    index = index.astype(np.uint64)
    key = sampler.slot_words(seed, f"{stack}/{role}" if stack else role)
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
    raise ConfigError(f"replay: {role} has law {type(law).__name__}, which is not drawn from single indices")
