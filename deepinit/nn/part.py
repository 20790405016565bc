"""What the modules of a model share: sizes, closures, residual rule, factors, options; how a weight is made."""

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
from deepinit.nn.attend import WAYS
from deepinit.recipe import FrozenMap, Gate, Residual, end_of
from deepinit.roles import role_of

if TYPE_CHECKING:
    from deepinit.recipe import Recipe

CHOICES = {
    "norm": ("rmsnorm", "layernorm"),
    "positions": ("rope", "learned", "none"),
    "remat": ("none", "full", "dots"),
    "dispatch": ("sorted", "dense"),
    "attention": WAYS,
}


class Part(linen.Module):
    """A module that passes all of its settings on to its own parts."""

    geometry: Geometry
    initializer: Callable[..., Callable[..., Any]]
    """(role, layer) -> closure; the layer may be traced."""
    residual: Residual = Residual()
    multipliers: Mapping[str, float] = FrozenMap()
    gains: Mapping[str, Gate] = FrozenMap()
    """Learnable factors by place: `deepinit.recipe.GAINS`."""
    own_laws: tuple[str, ...] = ()
    """Ends of the paths of leaves that have a law of their own: the initializer is asked for them by that end."""
    norm: str = "rmsnorm"
    norm_offset: bool = False
    """Norms multiply by 1 + w, and w starts where the law of norm_scale says."""
    norm_eps: float = 1e-6
    norm_gain: bool = True
    """Norms multiply by a learnable gain (and LayerNorm adds a bias)."""
    embed_norm: bool = False
    """A norm on the embedding."""
    positions: str = "rope"
    rope_theta: float = 10_000.0
    bias: bool = False
    qk_norm: bool = False
    v_norm: bool = False
    value_embed: bool = False
    """Every other layer, the last among them, adds a row of a table of its own to its values, by token."""
    logit_softcap: float = 0.0
    """Logits become cap tanh(logits / cap); 0: as they are."""
    experts_per_token: int = 2
    """How many of `num_experts` a token goes to."""
    balance_loss: float = 0.0
    """Weight of the loss that evens out the load of the experts."""
    dispatch: str = "sorted"
    """How tokens come to their experts: `sorted` by expert into ragged products, or `dense`, every one to each."""
    dropout: float = 0.0
    scan: bool = True
    """Layers in one `nn.scan`: compile time does not grow with depth."""
    remat: str = "none"
    """`full` keeps nothing of a layer for the backward pass, `dots` its matrix products."""
    attention: str = "auto"
    """How: `plain`, in `blocks` (CPU), by `cudnn` (GPU) or `splash` (TPU), or `auto`, the fastest that applies."""
    fused_qkv: bool = False
    """One product for q, k and v. The leaves stay apart, so every law and every checkpoint stays as it is."""
    fused_gate_up: bool = False
    vocab_multiple: int = 1
    """The vocabulary is padded to a multiple of this; padded logits are masked."""
    loss_chunks: int = 1
    """Parts of a sequence whose logits the loss holds in turn; 1: all at once."""
    dtype: Any = "float32"
    param_dtype: Any = "float32"
    deterministic: bool = True

    OPTIONS: ClassVar[tuple[str, ...]] = (
        "norm", "norm_offset", "norm_eps", "norm_gain", "embed_norm", "positions", "rope_theta", "bias", "qk_norm",
        "v_norm", "value_embed", "logit_softcap", "experts_per_token", "balance_loss", "dispatch", "dropout", "scan",
        "remat", "attention", "fused_qkv", "fused_gate_up", "vocab_multiple", "loss_chunks", "dtype", "param_dtype",
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
            gains=recipe.gains,
            own_laws=tuple(recipe.leaves),
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
        closure = self.closure("/".join((*self.path, str(name))), role, layer)
        boxed = linen.with_logical_partitioning(closure, tuple(axes))
        made: Any = self.param(str(name), boxed, tuple(shape), jnp.dtype(self.param_dtype))
        return made.astype(self.compute)

    def closure(self, path: str, role: str, layer: Any = None) -> Callable[..., Any]:
        """The closure of the leaf at this path: that of its own law, or of its role."""
        return self.initializer(end_of(self.own_laws, path) or role, layer)

    def gain(self, place: str, layer: Any = None) -> jax.Array | None:
        """The learnable factor that acts at this place, in the compute dtype; None where there is none."""
        gain = self.gains.get(place)
        if gain is None:
            return None
        g = self.geometry
        shape, axes = {
            "scalar": ((), ()),
            "channel": ((g.d_model,), ("features",)),
            "head": ((g.num_heads, 1), ("heads", None)),
            "key": ((g.num_kv_heads, g.head_dim), ("kv_heads", "head_dim")),
            "hidden": ((1 + g.gated, g.d_ff), (None, "mlp")),
            "vocab": ((self.vocab_padded,), ("vocab",)),
        }[gain.shape]
        stored = self.weight(f"{place}_{gain.role}", shape, axes, layer)
        return stored if gain.scale == 1.0 else stored * jnp.asarray(gain.scale, stored.dtype)

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
