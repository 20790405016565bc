"""What the modules of a model share: sizes, closures, residual rule, multipliers, options; how a weight is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import linen

from deepinit.errors import ConfigError, unknown
from deepinit.geometry import Geometry, Role
from deepinit.laws import Constant
from deepinit.recipe import FrozenMap, Residual
from deepinit.roles import role_of

if TYPE_CHECKING:
    from deepinit.recipe import Recipe

CHOICES = {
    "norm": ("rmsnorm", "layernorm"),
    "positions": ("rope", "learned", "none"),
    "remat": ("none", "full", "dots"),
}


class Part(linen.Module):
    """A module that passes all of its settings on to its own parts."""

    geometry: Geometry
    initializer: Callable[..., Callable[..., Any]]
    """(role, layer) -> closure; the layer may be traced."""
    residual: Residual = Residual()
    multipliers: Mapping[str, float] = FrozenMap()
    norm: str = "rmsnorm"
    norm_offset: bool = False
    """Norms multiply by 1 + w, and w starts where the law of norm_scale says."""
    norm_eps: float = 1e-6
    positions: str = "rope"
    rope_theta: float = 10_000.0
    bias: bool = False
    qk_norm: bool = False
    dropout: float = 0.0
    scan: bool = True
    """Layers in one `nn.scan`: compile time does not grow with depth."""
    remat: str = "none"
    """`full` keeps nothing of a layer for the backward pass, `dots` its matrix products."""
    fused_qkv: bool = False
    """One product for q, k and v. The leaves stay apart, so every law and every checkpoint stays as it is."""
    fused_gate_up: bool = False
    vocab_multiple: int = 1
    """The vocabulary is padded to a multiple of this; padded logits are masked."""
    dtype: Any = "float32"
    param_dtype: Any = "float32"
    deterministic: bool = True

    OPTIONS: ClassVar[tuple[str, ...]] = (
        "norm", "norm_offset", "norm_eps", "positions", "rope_theta", "bias", "qk_norm", "dropout", "scan", "remat",
        "fused_qkv", "fused_gate_up", "vocab_multiple", "dtype", "param_dtype",
    )  # fmt: skip

    @classmethod
    def from_recipe(cls, recipe: Recipe, *, sampler: str = "portable", **options: Any) -> Self:
        """The module of this recipe: its geometry, closures, residual rule and multipliers.

        Options are the fields listed above. One that contradicts what the scheme requires is refused.
        """
        fields = {f.name for f in dataclasses.fields(cls)} - {"parent", "name"}
        for name, value in options.items():
            if name not in fields:
                raise unknown("model option", name, sorted(fields))
            if value not in CHOICES.get(name, (value,)):
                raise unknown(f"model.{name}", value, CHOICES[name])
        for name, needed in recipe.requires.items():
            if hasattr(recipe.geometry, name):
                continue  # the recipe has checked its own sizes
            choices = needed if isinstance(needed, tuple) else (needed,)
            if name not in fields:
                raise ConfigError(f"scheme {recipe.name} needs {name} {needed}, which {cls.__name__} does not have")
            if options.setdefault(name, choices[0]) not in choices:
                raise ConfigError(f"scheme {recipe.name} needs model.{name} {needed}, got {options[name]}")
        if options.get("norm_offset") and recipe.weights[Role.NORM_SCALE] == Constant(1.0):
            raise ConfigError(
                "model.norm_offset: a norm that multiplies by 1 + w starts at w = 0, the scheme says 1; "
                "use recipe.with_norm_offset()"
            )
        return cls(
            geometry=recipe.geometry,
            initializer=recipe.initializer if sampler == "portable" else recipe.with_sampler(sampler),
            residual=recipe.residual,
            multipliers=recipe.multipliers,
            **options,
        )

    def shared(self) -> dict[str, Any]:
        """The settings that a part inherits."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(Part) if f.name not in ("parent", "name")}

    @property
    def vocab_padded(self) -> int:
        """Rows of the token embedding: the vocabulary rounded up to `vocab_multiple`."""
        return -(-self.geometry.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def compute(self) -> Any:
        """The dtype of activations."""
        return jnp.dtype(self.dtype)

    def weight(self, name: str, shape: Sequence[int], axes: Sequence[str | None], layer: Any = None) -> jax.Array:
        """A parameter, in the compute dtype. Its name declares its role; `axes` are its logical axes."""
        role = role_of(name)
        if role is None:
            raise ConfigError(f"{name}: a parameter is named by its role, with a qualifier before it if it needs one")
        closure = self.initializer(role, layer)
        boxed = linen.with_logical_partitioning(closure, tuple(axes))
        made: Any = self.param(str(name), boxed, tuple(shape), jnp.dtype(self.param_dtype))
        return made.astype(self.compute)

    def factor(self, name: str) -> float:
        """A forward multiplier of the recipe: 1 where it has none."""
        return self.multipliers.get(name, 1.0)

    def scaled(self, x: jax.Array, name: str) -> jax.Array:
        """x times the forward multiplier of this name."""
        factor = self.factor(name)
        return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)

    def shifted(self, x: jax.Array, place: str, layer: Any) -> jax.Array:
        """x plus a learnable scalar, where the residual rule has them (Fixup)."""
        if not self.residual.shift:
            return x
        return x + self.weight(f"{place}_{Role.BRANCH_SHIFT}", (), (), layer)
