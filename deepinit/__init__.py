"""deepinit: weight initialization for JAX/Flax pre-training, proven before step 0.

Names are imported on first use, so that `import deepinit` costs milliseconds and leaves jax alone.
"""

from __future__ import annotations

import importlib
from typing import Any

# Bound here and now: the module deepinit.recipe, imported later, would take the function's name.
from deepinit.schemes.registry import recipe

_WHERE = {
    "deepinit.errors": ("ConfigError",),
    "deepinit.geometry": ("Geometry", "Role"),
    "deepinit.recipe": ("Gate", "Recipe", "Residual", "Update"),
    "deepinit.schemes.registry": ("register", "scheme_names"),
    "deepinit.sharding": ("make_mesh",),
    "deepinit.sharded_init": ("init_sharded",),
    "deepinit.births": ("assert_birth_invariants",),
    "deepinit.forecasts": ("forecast",),
    "deepinit.audits": ("audit",),
    "deepinit.invariants": ("verify",),
    "deepinit.digests": ("digest",),
    "deepinit.reinits": ("reinit",),
    "deepinit.replays": ("replay",),
    "deepinit.signal.predict": ("predict",),
}
_MODULES = ("initializers", "interop", "laws", "nn", "roles", "sampler", "schemes")
_HOME = {name: module for module, names in _WHERE.items() for name in names}

__version__ = "0.1.0"
__all__ = ["__version__", "recipe", *sorted(_HOME), *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"deepinit.{name}")
    else:
        raise AttributeError(f"module 'deepinit' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
