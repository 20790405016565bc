"""A recipe and the options of its model as the numbers that a forward pass depends on at step 0.

Read once from the recipe, so that the prediction knows no scheme by name. Mean squares throughout, not stds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from deepinit.errors import ConfigError, unknown
from deepinit.geometry import Role
from deepinit.laws import Constant, Distribution, External, Factor, Numbers
from deepinit.recipe import Gate, Recipe

Array = np.ndarray
INDIFFERENT = (
    "scan", "remat", "fused_qkv", "fused_gate_up", "vocab_multiple", "loss_chunks", "param_dtype", "sampler", "dtype",
    "dropout", "deterministic", "norm_gain", "bias", "balance_loss", "dispatch", "attention",
)  # fmt: skip
"""Options of the decoder that leave every variance at step 0 as it is (biases start at 0)."""


@dataclass(frozen=True)
class Options:
    """The options of `deepinit.nn.Decoder` that a variance depends on, with its defaults."""

    norm: str = "rmsnorm"
    norm_offset: bool = False
    norm_eps: float = 1e-6
    positions: str = "rope"
    rope_theta: float = 10_000.0
    qk_norm: bool = False
    v_norm: bool = False
    embed_norm: bool = False
    value_embed: bool = False
    logit_softcap: float = 0.0
    experts_per_token: int = 2

    @classmethod
    def of(cls, recipe: Recipe, given: Mapping[str, Any]) -> tuple[Options, tuple[str, ...]]:
        """The options given, the rest as the scheme wants them; and what the scheme wants that is not followed."""
        known = {f.name for f in dataclasses.fields(cls)}
        values, not_followed = {}, []
        for name, wanted in recipe.requires.items():
            if name in known:
                values[name] = wanted[0] if isinstance(wanted, tuple) else wanted
            elif name not in INDIFFERENT and not hasattr(recipe.geometry, name):
                not_followed.append(f"{name} {wanted}")
        for name, value in given.items():
            if name in known:
                values[name] = value
            elif name not in INDIFFERENT:
                raise unknown("model option", name, (*sorted(known), *INDIFFERENT))
        return cls(**values), tuple(not_followed)


class Addition(NamedTuple):
    """One residual addition: x <- norm_post(skip x + constant gate F(scale_in norm_pre(x)))."""

    kind: str
    """`attn`, `mlp`, or `block` for both in one."""
    layer: int
    """0-based."""
    norm: str
    """Placement of the norms."""
    reads_norm: bool
    """Whether the branch reads a normed stream."""
    skip: float
    constant: float
    gate: float
    """The learnable factor as it is at first (its RMS); 1 without one."""
    scale_in: float
    sphere: bool = False
    """x <- U(x + gate (U(F(x)) - x)) instead."""

    @property
    def branch(self) -> float:
        """The factor on the branch."""
        return self.constant * self.gate

    @property
    def output_normed(self) -> bool:
        """Whether the branch's own size is normed away."""
        return self.norm in ("sandwich", "reordered")


@dataclass(frozen=True)
class Forward:
    """What a decoder computes at step 0, in numbers."""

    recipe: Recipe
    options: Options
    additions: tuple[Addition, ...]
    heads: tuple[tuple[float, float], ...]
    """(w, u) of each layer: x <- w x + u x0 at its head, x0 the stack's input."""
    not_followed: tuple[str, ...]

    @classmethod
    def of(cls, recipe: Recipe, options: Mapping[str, Any]) -> Forward:
        """Read a recipe.

        Raises:
          ConfigError: a part of it is outside the theory: weights of the caller, joint laws, a second stack.
        """
        g, rule = recipe.geometry, recipe.residual
        if g.stack != "single":
            raise ConfigError(f"model.stack: the prediction knows no encoder and no cross-attention; got {g.stack!r}")
        for role, law in recipe.weights.items():
            if isinstance(law, External | Factor) and g.count(role):
                what = "given by the caller" if isinstance(law, External) else f"drawn together with {law.partner}"
                raise ConfigError(f"scheme {recipe.name}: {role} is {what}, which the prediction does not cover")
        chosen, not_followed = Options.of(recipe, options)
        n, names = g.num_residuals, g.additions
        skip, constant = spread(rule.skip, g.num_layers, n), spread(rule.branch, g.num_layers, n)
        scale_in, gate = spread(rule.scale_in, g.num_layers, n), np.ones(n)
        if rule.gate:
            gate = initial(recipe, rule.gate, n)
        w, u = np.ones(g.num_layers), np.zeros(g.num_layers)
        if rule.skip_gate:
            factor = initial(recipe, rule.skip_gate, n)
            match rule.skip_gate.share:
                case "layer":
                    w = factor[:: len(names)]
                case "mlp":
                    skip = np.where([kind == "mlp" for kind in names * g.num_layers], skip * factor, skip)
                case _:
                    skip = skip * factor
        if rule.x0_gate:
            u = initial(recipe, rule.x0_gate, n)[:: len(names)]
        additions = []
        for s in range(n):
            kind, layer = names[s % len(names)], s // len(names)
            norm = rule.placement(kind)
            plain = rule.inner_norm and layer == 0  # Keel's first layer is pre-norm
            norm = "pre" if plain else norm
            reads = norm in ("pre", "sub", "sandwich") or rule.inner_norm
            own = 1.0 if plain else float(skip[s])
            factors = (own, float(constant[s]), float(gate[s]), float(scale_in[s]))
            additions.append(Addition(kind, layer, norm, reads, *factors, rule.sphere))
        return cls(recipe, chosen, tuple(additions), tuple(zip(w.tolist(), u.tolist())), not_followed)

    @property
    def normless(self) -> bool:
        """Whether no norm stands anywhere in the stack, so that the stream's size acts back on the branches."""
        return not self.recipe.residual.sphere and all(a.norm == "none" for a in self.additions)

    @property
    def fixed_size(self) -> bool:
        """Whether the last addition is normed, so that the last variance says nothing."""
        return self.recipe.residual.sphere or self.additions[-1].norm == "post"

    @property
    def identity(self) -> bool:
        """Whether no addition adds anything."""
        return not any(a.branch and self.writes(a) for a in self.additions)

    def writes(self, a: Addition) -> bool:
        """Whether an output matrix of the addition is not zero."""
        parts = {"attn": ("attn_out",), "mlp": ("mlp_down",), "block": ("attn_out", "mlp_down")}[a.kind]
        return any(self.gain(role)[a.layer] > 0 for role in parts)

    def mean_square(self, role: str) -> Array:
        """E w^2 of a role's entries: one number, or one per layer."""
        if self.recipe.project == "rows":  # unit vectors along d_model
            return np.asarray(1 / self.recipe.geometry.d_model)
        return mean_square(self.recipe.weights[role])

    def gain(self, role: str) -> Array:
        """(L,): fan_in E w^2 factor^2, by which a matrix multiplies a mean square; in a routed layer an expert's."""
        g = self.recipe.geometry
        if role.startswith("mlp") and g.num_experts:
            expert = self.gain(role.replace("mlp", "expert"))
            return np.where(self.routed, expert, self.own_gain(role)) if g.mixed else expert
        return self.own_gain(role)

    def own_gain(self, role: str) -> Array:
        """`gain` of the matrices of this very role."""
        g = self.recipe.geometry
        square = self.mean_square(role) * self.recipe.multipliers.get(role, 1.0) ** 2
        if role.endswith(("_gate", "_up")):
            square = square * self.place_gain("s_uv")
        return np.broadcast_to(g.fan_in(role) * square, g.num_layers)

    @property
    def routed(self) -> Array:
        """(L,): whether a layer has a mixture of experts in the place of its MLP."""
        g = self.recipe.geometry
        return np.array([g.routed(layer) for layer in range(g.num_layers)])

    def norm_gain(self, path: str) -> Array:
        """(L,): squared gain of the norm at this path; of `final_norm`, the same number L times."""
        law = self.recipe.law_at(f"{path}/{Role.NORM_SCALE}", Role.NORM_SCALE)
        return np.broadcast_to(mean_square(law, float(self.options.norm_offset)), self.recipe.geometry.num_layers)

    def read_gain(self, kind: str) -> Array:
        """(L,): squared gain of the norm that a branch reads through."""
        return self.norm_gain(f"layers/{kind}_residual/{'inner_norm' if self.recipe.residual.inner_norm else 'norm'}")

    def place_gain(self, place: str) -> Array:
        """(L,): square of the learnable factor at a place, as it is at first; 1 without one."""
        gain = self.recipe.gains.get(place)
        if gain is None:
            return np.ones(self.recipe.geometry.num_layers)
        return np.square(gain.scale * spread(gain.value, self.recipe.geometry.num_layers))

    @property
    def final_norm(self) -> bool:
        """Whether a norm stands between the stack and the head."""
        return self.recipe.residual.final_norm(self.recipe.geometry.num_layers)

    @property
    def rope_theta(self) -> float | None:
        """Base of the rotary wavelengths; None without them."""
        return self.options.rope_theta if self.options.positions == "rope" else None

    @property
    def embed_variance(self) -> float:
        """Mean square of a looked-up token."""
        return float(self.mean_square(Role.TOKEN_EMBED)) * self.recipe.multipliers["embed"] ** 2

    @property
    def position_variance(self) -> float:
        """Mean square of a learned position."""
        if self.options.positions != "learned":
            return 0.0
        return float(self.mean_square(Role.POS_EMBED))

    @property
    def head_variance(self) -> float:
        """Mean square of an entry of the head, the logits' factors included."""
        role = Role.TOKEN_EMBED if self.recipe.geometry.tied_embeddings else Role.LM_HEAD
        factor = self.recipe.multipliers["logits"] ** 2 * float(self.place_gain("s_z")[0])
        return float(self.mean_square(role)) * factor


def mean_square(law: Distribution, offset: float = 0.0) -> Array:
    """E (w + offset)^2: one number, or one per layer."""
    return np.square(law.std) + np.square(np.asarray(law.mean) + offset)


def centered(law: Distribution) -> bool:
    """Whether entries have mean 0, as the theory presumes of a matrix."""
    return not isinstance(law, Constant) or not np.any(law.value)


def spread(numbers: Numbers, num_layers: int, additions: int = 0) -> Array:
    """(N,): one number for each addition (or each layer), from one for all, one per layer, or one for each."""
    values, count = np.atleast_1d(np.asarray(numbers, float)), additions or num_layers
    if len(values) == 1:
        return np.full(count, values[0])
    return np.repeat(values, count // len(values))


def initial(recipe: Recipe, gate: Gate, additions: int) -> Array:
    """(N,): what a gate's factor is at first."""
    law, value = recipe.weights[gate.role], gate.value
    if gate is recipe.residual.gate and isinstance(law, Constant):  # which an override by role changes
        value = law.value
    return gate.scale * spread(value, recipe.geometry.num_layers, additions)
