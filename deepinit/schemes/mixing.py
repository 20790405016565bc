"""Recipes changed by role, or put together from the weights of one scheme and the residual rule of another.

Both return a recipe like any other, with what was changed in `changes`; a pair that cannot work is refused with the
reason, one that can but is odd is allowed and says so there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from deepinit.errors import ConfigError, unknown
from deepinit.geometry import OUTPUTS, Geometry, Role
from deepinit.laws import Constant, Distribution, Normal, TruncatedNormal, Uniform, show
from deepinit.recipe import FrozenMap, Laws, Recipe, Residual, Update
from deepinit.schemes.registry import convert, entry, recipe

LAW_KEYS = ("law", "std", "cut", "value")
LAWS = ("normal", "uniform", "truncated", "constant")
UPDATE_KEYS = ("lr", "weight_decay", "eps")


# --- by role -----------------------------------------------------------------------------------------------------


def overridden(made: Recipe, overrides: Mapping[str, Mapping[str, Any]]) -> Recipe:
    """The recipe with other numbers for some roles: `{"attn_out": {"std": 0.003}, "lm_head": {"value": 0.0}}`.

    A role takes `std` (of the values drawn), `law` (normal, uniform or truncated, by default the scheme's own kind),
    `cut` in sigmas, or `value` for a constant; and `lr`, `weight_decay`, `eps`, factors on the optimizer's settings.

    Raises:
      ConfigError: unknown role or key, a wrong value, or a result that cannot train.
    """
    weights, updates, changes = dict(made.weights), dict(made.updates), list(made.changes)
    for name, given in overrides.items():
        if name not in Role._value2member_map_:
            raise unknown("scheme.overrides: role", name, weights)
        role = Role(name)
        if role not in weights:
            raise unknown(f"scheme.overrides: these sizes have no {role}; role", role, weights)
        if not isinstance(given, Mapping):
            raise ConfigError(f"scheme.overrides.{role}: {given!r} is not a mapping such as {{std: 0.02}}")
        for key in given:
            if key not in (*LAW_KEYS, *UPDATE_KEYS):
                raise unknown(f"scheme.overrides.{role}: key", key, (*LAW_KEYS, *UPDATE_KEYS))
        if given.keys() & set(LAW_KEYS):
            weights[role] = law_from(f"scheme.overrides.{role}", weights[role], given)
        if factors := {k: number(f"scheme.overrides.{role}.{k}", given[k]) for k in UPDATE_KEYS if k in given}:
            updates[role] = dataclasses.replace(updates.get(role, Update()), **factors)
        changes.append(f"{role}: " + ", ".join(f"{k} {v}" for k, v in given.items()))
    changed = dataclasses.replace(
        made, weights=Laws(weights, made.leaves), updates=FrozenMap(updates), changes=tuple(changes)
    )
    changed.validate()
    return changed


def law_from(where: str, own: Distribution, given: Mapping[str, Any]) -> Distribution:
    """The law that `given` describes, what it leaves out taken from the scheme's own."""
    own_kind = {TruncatedNormal: "truncated", Uniform: "uniform", Constant: "constant"}.get(type(own), "normal")
    kind = given.get("law", "constant" if "value" in given else "normal" if own_kind == "constant" else own_kind)
    if kind not in LAWS:
        raise unknown(f"{where}.law", kind, LAWS)
    odd = [k for k in given if k in LAW_KEYS and k in {"constant": ("std", "cut")}.get(kind, ("value",))]
    if odd:
        raise ConfigError(f"{where}.{odd[0]}: a {kind} law has none")
    if kind == "constant":
        return Constant(number(f"{where}.value", given.get("value", 0.0)), "given")
    if "std" not in given and own_kind == "constant":
        raise ConfigError(f"{where}: the scheme has a constant here; give the std of the {kind} law")
    std = number(f"{where}.std", given["std"]) if "std" in given else own.std
    formula = "given" if "std" in given else own.formula
    if kind == "truncated" or "cut" in given:
        if kind == "uniform":
            raise ConfigError(f"{where}.cut: a uniform law has none")
        cut = number(f"{where}.cut", given.get("cut", own.cut if isinstance(own, TruncatedNormal) else 3.0))
        return TruncatedNormal(std, cut, formula) if cut else Normal(std, formula)
    return Uniform(std, formula) if kind == "uniform" else Normal(std, formula)


def number(where: str, value: Any) -> float:
    """The value as a float."""
    return convert(where, value, float)


# --- two schemes -------------------------------------------------------------------------------------------------


def mixed(
    weights: str,
    residual: str,
    geometry: Geometry,
    *,
    norm: str | None = None,
    weights_args: Mapping[str, Any] | None = None,
    residual_args: Mapping[str, Any] | None = None,
) -> Recipe:
    """The laws, multipliers and updates of one scheme with the residual rule of another: `mixed("gpt2", "rezero", g)`.

    Raises:
      ConfigError: a scheme whose weights and rule are one piece, or two that undo each other.
    """
    laws = recipe(weights, geometry, **(weights_args or {}))
    rule = recipe(residual, geometry, norm=norm, **(residual_args or {}))
    refuse_one_piece(laws, rule)
    gates: dict[str, Distribution] = {
        r: rule.weights[r] for r in (Role.RESIDUAL_GATE, Role.BRANCH_SCALE, Role.BRANCH_SHIFT)
    }
    leaves, gains = {**laws.leaves, **rule.leaves}, {**laws.gains, **rule.gains}
    made = dataclasses.replace(
        laws,
        weights=Laws({**laws.weights, **gates}, leaves),
        leaves=FrozenMap(leaves),
        gains=FrozenMap(gains),
        residual=rule.residual,
        calibrate=rule.calibrate,
        requires=FrozenMap({**rule.requires, **laws.requires}),
        source=f"{laws.source}; residual rule of {rule.name}: {rule.source}",
        changes=(*laws.changes, f"residual rule of {rule.name}", *remarks(laws, rule)),
    )
    made.validate()
    return made


def refuse_one_piece(laws: Recipe, rule: Recipe) -> None:
    """Refuse weights that were made for another rule, and a rule that was made for other weights."""
    own = laws.residual
    if "pre" not in entry(laws.name).norms or own != Residual(norm=own.norm):
        raise ConfigError(
            f"scheme {laws.name}: its weights belong to its own rule {own.formula}; they do not go with {rule.name}'s"
        )
    r = rule.residual
    standard = all(u == Update() for u in rule.updates.values())
    constant = r.skip == 1.0 and r.branch == 1.0 and not r.shift and r.skip_gate is None and r.x0_gate is None
    if not (standard and constant) or rule.project:
        raise ConfigError(
            f"scheme {rule.name}: its rule {r.formula} belongs to its own weights and rates; "
            f"it does not go with {laws.name}"
        )
    if r.scale_in != 1.0 and by_depth(laws):
        raise ConfigError(
            f"schemes {laws.name} and {rule.name} both shrink branches with depth, "
            f"which {rule.source} advises against; take weights without a divisor, such as fixed_normal"
        )


def by_depth(laws: Recipe) -> bool:
    """Whether the output matrices know the depth."""
    g = laws.geometry
    deeper = recipe(laws.name, g.replace(num_layers=4 * g.num_layers), **laws.args).weights
    return any(laws.weights[r] != deeper[r] for r in OUTPUTS if r in laws.weights)


def remarks(laws: Recipe, rule: Recipe) -> list[str]:
    """What is allowed and worth knowing."""
    said = []
    gate = rule.residual.gate
    if gate and by_depth(laws):
        said.append(
            "outputs are divided by depth and gated as well: branches start smaller than either scheme has them"
        )
    if rule.residual.norm == "none":
        table = laws.weights[Role.TOKEN_EMBED].scaled(laws.multipliers["embed"])
        said.append(f"no norm: the stream keeps the size of the embedding, std {show(table.std)}")
    return said
