"""A scheme at one geometry, as frozen data: a law for every role, a residual rule, multipliers, optimizer factors.

Nothing here touches an array, so a recipe of a 405B model costs what one of a tiny model costs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from deepinit import laws
from deepinit.errors import ConfigError, unknown
from deepinit.geometry import OUTPUTS, UPS, VALUES, VECTORS, Geometry, Role
from deepinit.laws import Constant, Distribution, External, Numbers

V = TypeVar("V")
NORMS = ("pre", "post", "none", "sandwich", "sub", "reordered")
GAINS = {
    "s_qk": "on unit queries and keys",
    "s_uv": "on what the MLP's up and gate matrices give",
    "s_z": "on the logits",
    "head": "on the output of every head",
    "smear": "on the embedding of the token before, which is added to a token's own",
    "backout": "on the stream in the middle of the stack, which is taken off its output",
}


class FrozenMap(Mapping[str, V], Generic[V]):
    """A mapping that can be hashed; two are equal if they hold the same."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, V] | None = None, **more: V):
        self._items = {str(k): v for k, v in {**(items or {}), **more}.items()}

    def __getitem__(self, key: str) -> V:
        try:
            return self._items[str(key)]
        except KeyError:
            raise KeyError(f"{key!r} is not here; there are {', '.join(self._items)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"FrozenMap({self._items!r})"


class Laws(FrozenMap[Distribution]):
    """Laws by role. A leaf that has a law of its own is found by its name too, but is none of the keys."""

    __slots__ = ("_leaves",)

    def __init__(self, laws: Mapping[str, Distribution], leaves: Mapping[str, Distribution] | None = None):
        super().__init__(laws)
        self._leaves = dict(leaves or {})

    def __getitem__(self, key: str) -> Distribution:
        return self._leaves[key] if key in self._leaves else super().__getitem__(key)


@dataclass(frozen=True)
class Gate:
    """A learnable factor."""

    value: Numbers
    """Initial value of what is stored; a tuple has one per layer, or one per residual addition."""
    shape: str = "scalar"
    """`scalar`; `channel`: one per feature of the stream; `head`: one per head; `key`: one per feature of every key
    head; `hidden`: one per feature inside the MLP, up and gate; `vocab`."""
    share: str = "sublayer"
    """`sublayer`: one for each residual addition; `mlp`: one for the MLP's only; `layer`: one for each layer; `model`:
    one."""
    role: Role = Role.RESIDUAL_GATE
    scale: float = 1.0
    """The factor that acts is `scale` times what is stored, which sets how fast it learns (nGPT)."""
    name: str = ""
    """What the scheme's source calls it."""


@dataclass(frozen=True)
class Residual:
    """x <- norm_post(skip * skip_gate * x + branch * gate * F(scale_in * norm_pre(x))).

    `norm` places the norms: `pre` inside the branch, `post` on the sum, `none`, `sandwich` at both ends of the branch,
    `sub` before the branch and again before its output matrix, `reordered` on the branch's output. `skip`, `branch` and
    `scale_in` are one number, one per layer, or one per residual addition. With `shift`, a learnable scalar (0 at
    first) is added before every matrix and activation of a branch (Fixup). `skip_gate` is learnable on the skip; shared
    by a layer, it acts at the layer's head, and with it `x0_gate` on the stack's input, which is added to the stream.
    """

    norm: str = "pre"
    skip: Numbers = 1.0
    branch: Numbers = 1.0
    scale_in: Numbers = 1.0
    gate: Gate | None = None
    shift: bool = False
    skip_gate: Gate | None = None
    x0_gate: Gate | None = None
    placements: tuple[str, ...] = ()
    """Attention's and the MLP's placement of the norms, where it is not `norm` for both."""
    inner_norm: bool = False
    """Under `post`, the branch reads a normed x too; the first layer is plain `pre`, without skip and outer norm
    (Keel)."""
    sphere: bool = False
    """x <- U(x + |gate| (U(F(x)) - x)), U to unit length: the stream stays on the unit sphere (nGPT)."""

    def __post_init__(self) -> None:
        for place in (self.norm, *self.placements):
            if place not in NORMS:
                raise unknown("residual norm", place, NORMS)
        if len(self.placements) not in (0, 2):
            raise ConfigError(f"placements: {self.placements} are not attention's and the MLP's")
        if self.inner_norm and self.norm != "post":
            raise ConfigError(f"inner_norm: the outer norm makes norm 'post', not {self.norm!r}")

    @property
    def gates(self) -> tuple[tuple[str, Gate | None], ...]:
        """The learnable factors, by field."""
        return ("gate", self.gate), ("skip_gate", self.skip_gate), ("x0_gate", self.x0_gate)

    def placement(self, kind: str) -> str:
        """Where the norms stand at the addition of this kind: `attn`, `mlp`, or `block` for both in one."""
        return self.placements[kind == "mlp"] if self.placements else self.norm

    def final_norm(self, num_layers: int) -> bool:
        """Whether the stack needs a norm behind it: there are norms, and the last one is not on the last sum."""
        ends_normed = self.placement("mlp") == "post" and not (self.inner_norm and num_layers == 1)
        return self.norm != "none" and not ends_normed

    @property
    def formula(self) -> str:
        """The rule in a line, its numbers filled in."""
        gates = {"g": self.gate, "w": self.skip_gate, "u": self.x0_gate}
        start = ", ".join(f"{name} = {laws.show(gate.value)}" for name, gate in gates.items() if gate)
        steps = [self.step(kind) for kind in ("attn", "mlp")]
        if self.skip_gate and self.skip_gate.share == "layer":
            steps = [f"x <- w x{' + u x0' if self.x0_gate else ''}", *steps]
        rule = "; ".join(dict.fromkeys(steps)) + (" (layer 1: x <- x + F(N(x)))" if self.inner_norm else "")
        return rule + (f", {start} at first" if start else "")

    def step(self, kind: str) -> str:
        """One addition: `attn` or `mlp`."""
        if self.sphere:
            return "x <- U(x + g (U(F(x)) - x))"
        norm = self.placement(kind)
        x = "x" if self.skip == 1.0 else f"{laws.show(self.skip)} x"
        if self.skip_gate and self.skip_gate.share in ("sublayer", kind):
            x = f"w {x}"
        inner = "N(x)" if norm in ("pre", "sandwich", "sub") or self.inner_norm else "x"
        if self.scale_in != 1.0:
            inner = f"{laws.show(self.scale_in)} {inner}"
        f = f"F({inner})"
        if norm in ("sandwich", "reordered"):
            f = f"N({f})"
        if self.gate:
            f = f"g {f}"
        if self.branch != 1.0:
            f = f"{laws.show(self.branch)} {f}"
        return f"x <- N({x} + {f})" if norm == "post" else f"x <- {x} + {f}"

    def replace(self, **changes: Any) -> Residual:
        """The same rule with other parts."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Update:
    """Factors on the optimizer's settings for one role; all 1 in the standard parametrization."""

    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0


@dataclass(frozen=True)
class Recipe:
    """What a scheme says at one geometry. Made by `deepinit.recipe(name, geometry)`."""

    weights: Mapping[str, Distribution]
    residual: Residual = Residual()
    multipliers: Mapping[str, float] = field(default_factory=FrozenMap)
    """`embed` on the token embedding, `logits` on the head's output, `attention` on the scores; a role's name for a
    factor on that matrix's output."""
    updates: Mapping[str, Update] = field(default_factory=FrozenMap)
    """By role, or by the end of a leaf's path (`final_norm/norm_scale`), which wins over the role: see `update_at`."""
    requires: Mapping[str, Any] = field(default_factory=FrozenMap)
    """Model options that the scheme presupposes, such as `bias: False`; a tuple lists all that will do."""
    leaves: Mapping[str, Distribution] = field(default_factory=FrozenMap)
    """Laws of single leaves by the end of their path (`post_norm/norm_scale`), which win over the role's: `law_at`."""
    gains: Mapping[str, Gate] = field(default_factory=FrozenMap)
    """Learnable factors that the scheme's structure has apart from the residual rule, by place: `GAINS`."""
    project: str = ""
    """`rows`: every matrix is brought to unit vectors along d_model after init and after each step (nGPT)."""
    calibrate: str = ""
    """`skip`: the skip's factors are to be measured on data before the first step (Admin): `Recipe.calibrated`."""
    invariants: tuple[str, ...] = ()
    """Laws of the model as a whole that the scheme declares: names in `deepinit.structure.DECLARED`."""
    changes: tuple[str, ...] = ()
    """What is no longer as the scheme says, in words; empty for a scheme as it is."""
    name: str = ""
    args: Mapping[str, Any] = field(default_factory=FrozenMap)
    """The hyperparameters that were given."""
    geometry: Geometry = None  # type: ignore[assignment]
    source: str = ""
    version: int = 1
    """Raised whenever the numbers of a scheme change: `gpt2@1`."""

    def completed(self, **facts: Any) -> Recipe:
        """The recipe with name, geometry and source, a law and an update for every role, checked as a whole."""
        g: Geometry = facts["geometry"]
        known = {Role.of(r): law for r, law in self.weights.items()}
        vectors = {
            Role.NORM_SCALE: Constant(1.0),
            Role.BIAS: Constant(0.0),
            Role.RESIDUAL_GATE: Constant(1.0),
            Role.BRANCH_SCALE: Constant(1.0),
            Role.BRANCH_SHIFT: Constant(0.0),
        }
        rule = self.residual
        if rule.gate:
            vectors[rule.gate.role] = Constant(rule.gate.value)
        leaves = dict(self.leaves) | gate_leaves(rule, self.gains, g)
        laws_ = vectors | known
        if missing := [r for r in g.roles if r not in laws_]:
            raise ConfigError(f"scheme {facts['name']}: no law for {', '.join(missing)}")
        multipliers = {"embed": 1.0, "logits": 1.0, "attention": g.head_dim**-0.5} | dict(self.multipliers)
        singled_out = {k: u for k, u in self.updates.items() if k not in Role._value2member_map_}
        recipe = dataclasses.replace(
            self,
            weights=Laws({r: laws_[r] for r in g.roles}, leaves),
            multipliers=FrozenMap(multipliers),
            updates=FrozenMap({r: self.updates.get(r, Update()) for r in g.roles} | singled_out),
            requires=FrozenMap(self.requires),
            leaves=FrozenMap(leaves),
            gains=FrozenMap(self.gains),
            **facts,
        )
        recipe.validate()
        return recipe

    def validate(self) -> None:
        """Refuse what cannot train: a branch with two factors that are exactly zero, laws of another depth."""
        g = self.geometry
        gate = self.residual.gate
        zero = [r for r in self.weights if self.weights[r] == Constant(0.0) and r not in (Role.BIAS, Role.BRANCH_SHIFT)]
        gated = [gate.role] if gate and not any(every(gate.value)) else []
        for branch in ((VALUES[0], Role.ATTN_OUT), (UPS[0], Role.MLP_DOWN), (UPS[1], Role.EXPERT_DOWN)):
            factors = [r for r in branch if r in zero] + gated
            if len(factors) > 1:
                raise ConfigError(
                    f"scheme {self.name}: {' and '.join(factors)} are both exactly zero in one branch; "
                    f"neither would ever receive a gradient"
                )
        for role, law in {**self.weights, **self.leaves}.items():
            bad = [n for n in every(law.parameter) if not (math.isfinite(n) and n > 0)]
            if bad and not isinstance(law, Constant | External):
                raise ConfigError(f"scheme {self.name}: {role} has std {laws.show(bad[0])}, not a positive number")
        for key, wanted in self.requires.items():
            options = wanted if isinstance(wanted, tuple) else (wanted,)
            if hasattr(g, key) and getattr(g, key) not in options:
                needed = " or ".join(map(repr, options))
                raise ConfigError(f"scheme {self.name} needs model.{key} {needed}; got {getattr(g, key)!r}")
        for what, numbers, sizes in [
            *((r, law.parameter, (g.num_layers,)) for r, law in {**self.weights, **self.leaves}.items()),
            *((k, getattr(self.residual, k), (g.num_layers, g.num_residuals)) for k in ("skip", "branch", "scale_in")),
            *((k, gate.value, (g.num_layers, g.num_residuals)) for k, gate in self.residual.gates if gate),
        ]:
            if isinstance(numbers, tuple) and len(numbers) not in sizes:
                raise ConfigError(
                    f"scheme {self.name}: {what} has {len(numbers)} entries, the model {g.num_layers} layers"
                )
        if self.residual.placements and g.parallel:
            raise ConfigError(f"scheme {self.name}: attention and MLP have norms of their own, not one addition")
        if self.residual.norm == "none" and self.residual.scale_in != 1.0:
            raise ConfigError(f"scheme {self.name}: scale_in scales a norm's output, and there is no norm")

    def calibrated(self, skip: tuple[float, ...], note: str) -> Recipe:
        """The recipe with measured factors on the skip, one for each residual addition; `note` says on what."""
        gate = self.residual.skip_gate
        assert gate is not None
        rule = self.residual.replace(skip_gate=dataclasses.replace(gate, value=skip))
        leaves = {k: v for k, v in self.leaves.items() if not k.endswith(f"skip_{gate.role}")}
        leaves |= gate_leaves(rule, self.gains, self.geometry)
        made = dataclasses.replace(
            self,
            weights=Laws(self.weights, leaves),
            residual=rule,
            leaves=FrozenMap(leaves),
            calibrate="",
            changes=(*self.changes, note),
        )
        made.validate()
        return made

    @property
    def outputs(self) -> tuple[Role, ...]:
        """The roles of this geometry that write into the stream."""
        return tuple(r for r in OUTPUTS if self.geometry.count(r))

    def law_at(self, path: str, role: str) -> Distribution:
        """The law of the leaf at this path (`layers/attn_residual/post_norm/norm_scale`): its own, or its role's."""
        return nearest_end(self.leaves, path, self.weights[role])

    def stored_at(self, path: str, role: str) -> Distribution:
        """The law of what that leaf holds: `law_at`, or what the projection makes of it."""
        if self.project and role not in VECTORS:
            return laws.Unit(self.geometry.d_model, "length 1 along d_model")
        return self.law_at(path, role)

    def update_at(self, path: str, role: str) -> Update:
        """The optimizer factors of the leaf at this path: its own, or its role's."""
        return nearest_end(self.updates, path, self.updates[role])

    def with_norm_offset(self) -> Recipe:
        """The same for norms that multiply by 1 + w: w starts at 0 where the gain starts at 1."""
        scale = self.weights[Role.NORM_SCALE]
        if self.requires.get("norm_offset"):
            return self
        if not isinstance(scale, Constant):
            raise ConfigError(f"scheme {self.name}: norm_scale is {scale}, which has no 1 + w form")

        def moved(law: Distribution) -> Distribution:
            return Constant(laws.each(lambda v: v - 1.0, law.parameter), law.formula)

        gains = {k: moved(law) for k, law in self.leaves.items() if k.endswith(Role.NORM_SCALE)}
        leaves = FrozenMap({**self.leaves, **gains})
        return dataclasses.replace(
            self,
            weights=Laws({**self.weights, Role.NORM_SCALE: moved(scale)}, leaves),
            leaves=leaves,
            requires=FrozenMap({**self.requires, "norm_offset": True}),
        )

    def initializer(self, role: str, layer: Any = None, *, sampler: str = "portable") -> Callable[..., Any]:
        """The closure (key, shape, dtype=None, out_sharding=None) -> array for one role.

        `layer` may be traced; it is needed where the role's law has one entry per layer. `sampler` is `portable` (the
        same bits everywhere) or `jax` (the stock draws of jax.random).
        """
        from deepinit import initializers

        return initializers.of_role(self, role, layer, sampler)

    def with_sampler(self, sampler: str) -> Callable[..., Callable[..., Any]]:
        """`initializer` with the sampler already chosen."""
        return functools.partial(self.initializer, sampler=sampler)

    def to_json(self) -> dict[str, Any]:
        """Plain data, from which `Recipe.from_json` makes an equal recipe."""
        plain = dataclasses.asdict
        return {
            "name": self.name,
            "version": self.version,
            "args": {k: list(v) if isinstance(v, tuple) else v for k, v in self.args.items()},
            "source": self.source,
            "geometry": plain(self.geometry),
            "weights": {r: law.to_json() for r, law in self.weights.items()},
            "residual": plain(self.residual) | {"formula": self.residual.formula},
            "multipliers": dict(self.multipliers),
            "updates": {r: plain(u) for r, u in self.updates.items()},
            "requires": {k: list(v) if isinstance(v, tuple) else v for k, v in self.requires.items()},
            "leaves": {k: law.to_json() for k, law in self.leaves.items()},
            "gains": {k: plain(gate) for k, gate in self.gains.items()},
            "project": self.project,
            "calibrate": self.calibrate,
            "invariants": list(self.invariants),
            "changes": list(self.changes),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Recipe:
        """The recipe that `to_json` wrote, from the dict or from parsed JSON text."""
        residual = {k: numbers(v) for k, v in data["residual"].items() if k != "formula"}
        for kind in ("gate", "skip_gate", "x0_gate"):
            if residual.get(kind):
                residual[kind] = gate_from(residual[kind])
        leaves = {k: laws.from_json(law) for k, law in data["leaves"].items()}
        return cls(
            weights=Laws({r: laws.from_json(law) for r, law in data["weights"].items()}, leaves),
            residual=Residual(**residual),
            multipliers=FrozenMap(data["multipliers"]),
            updates=FrozenMap({r: Update(**u) for r, u in data["updates"].items()}),
            requires=FrozenMap({k: numbers(v) for k, v in data["requires"].items()}),
            leaves=FrozenMap(leaves),
            gains=FrozenMap({k: gate_from(v) for k, v in data["gains"].items()}),
            project=data["project"],
            calibrate=data["calibrate"],
            invariants=tuple(data.get("invariants", ())),
            changes=tuple(data["changes"]),
            name=data["name"],
            args=FrozenMap({k: numbers(v) for k, v in data["args"].items()}),
            geometry=Geometry(**data["geometry"]),
            source=data["source"],
            version=data["version"],
        )


def every(numbers: Numbers) -> tuple[float, ...]:
    """The number, or all of them, as a tuple."""
    return numbers if isinstance(numbers, tuple) else (numbers,)


def numbers(value: Any) -> Any:
    """JSON's lists as tuples."""
    return tuple(value) if isinstance(value, list) else value


def gate_leaves(rule: Residual, gains: Mapping[str, Gate], g: Geometry) -> dict[str, Distribution]:
    """Laws of the leaves of learnable factors, by the ends of their paths."""
    named = [gate for _, gate in rule.gates if gate and gate.name] + [gain for gain in gains.values() if gain.name]
    leaves: dict[str, Distribution] = {gate.name: Constant(gate.value) for gate in named}
    for qualifier, gate in (("skip", rule.skip_gate), ("x0", rule.x0_gate)):
        if gate and isinstance(gate.value, tuple) and len(gate.value) > g.num_layers:  # one for each addition
            for i, kind in enumerate(g.additions):
                leaves[f"{kind}_residual/{qualifier}_{gate.role}"] = Constant(gate.value[i :: g.sublayers])
        elif gate:
            leaves[f"{qualifier}_{gate.role}"] = Constant(gate.value)
    return leaves | {f"{name}_{gain.role}": Constant(gain.value) for name, gain in gains.items()}


def gate_from(data: Mapping[str, Any]) -> Gate:
    """The gate that `to_json` wrote."""
    return Gate(**{**data, "value": numbers(data["value"]), "role": Role(data["role"])})


def end_of(keys: Container[str], path: str) -> str | None:
    """The key that is the longest end of the path, whole parts only."""
    parts = path.split("/")
    ends = ("/".join(parts[start:]) for start in range(len(parts)))
    return next((end for end in ends if end in keys), None)


def nearest_end(entries: Mapping[str, V], path: str, otherwise: V) -> V:
    """The entry whose key is the longest end of the path."""
    key = end_of(entries, path)
    return otherwise if key is None else entries[key]
