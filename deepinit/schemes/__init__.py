"""Every scheme of the field, by family. Importing this package fills the registry, in the order of `FAMILIES`."""

import importlib

from deepinit.schemes.registry import Scheme, entry, recipe, register, resolve, scheme_names, schemes

FAMILIES = (
    "classical", "residual", "norm_placement", "deepnorm", "gated", "norm_free",
    "labs", "google", "speedrun", "transfer", "joint",
)  # fmt: skip
for family in FAMILIES:
    importlib.import_module(f"{__name__}.{family}")

__all__ = ["FAMILIES", "Scheme", "entry", "recipe", "register", "resolve", "scheme_names", "schemes"]
