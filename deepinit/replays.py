"""Any weight of an initial state again, from its index alone, in NumPy: without the model, jax or the other weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinit import laws, sampler
from deepinit.errors import ConfigError
from deepinit.geometry import Role
from deepinit.recipe import Recipe


def replay(
    recipe: Recipe, role: str, index: Any, *, layer: int | None = None, seed: int = 0, stack: str = ""
) -> np.ndarray:
    """float32 values of the role's leaf at flat row-major indices into one layer of it, bit for bit as initialized.

    `layer` (0-based) is needed for a role that stands in every layer; `stack` is `encoder` or `decoder` where there are
    two. A leaf stored in another dtype holds these values cast to it.

    Raises:
      ConfigError: a law that is not replayed (orthogonal, external), or a missing layer.
    """
    role = Role.of(role)
    law = recipe.weights[role]
    index = np.asarray(index, np.uint64)
    if law.layered:
        if layer is None:
            raise ConfigError(f"replay: {role} has one law per layer; say which layer")
        law = law.at(layer)
    if isinstance(law, laws.Constant):
        return np.full(index.shape, law.value, np.float32)
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
