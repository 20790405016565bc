"""Schemes by name: a scheme is a function (Geometry, *, hyperparameters) -> Recipe, registered with its source."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from deepinit.errors import ConfigError, nearest, unknown
from deepinit.geometry import Geometry
from deepinit.recipe import NORMS, FrozenMap, Recipe

Maker = Callable[..., Recipe]


@dataclass(frozen=True)
class Scheme:
    """A registered scheme: the function, and what is said about it."""

    name: str
    make: Maker
    source: str
    aliases: Mapping[str, Mapping[str, Any]]
    """Other names, each with the hyperparameters that it presets."""
    family: str
    norms: tuple[str, ...]
    """Norm placements that it accepts, the default first."""
    verified: bool
    """Whether a second, independent source confirms the numbers."""
    version: int
    choose: tuple[str, ...] = ()
    """Hyperparameters whose default serves tables only: a run must give them."""

    @property
    def doc(self) -> str:
        """The function's docstring: formula, source at the line, pitfalls."""
        return inspect.getdoc(self.make) or ""

    @property
    def summary(self) -> str:
        """The docstring's first line."""
        return self.doc.partition("\n")[0]

    @functools.cached_property
    def hyperparameters(self) -> dict[str, Any]:
        """Name -> default; a hyperparameter without a default maps to `inspect.Parameter.empty`."""
        parameters = list(inspect.signature(self.make).parameters.values())[1:]
        return {p.name: p.default for p in parameters}

    @functools.cached_property
    def hints(self) -> dict[str, Any]:
        """Name -> type of the hyperparameter."""
        return typing.get_type_hints(self.make)


_SCHEMES: dict[str, Scheme] = {}
_ALIASES: dict[str, str] = {}


def register(
    name: str,
    *,
    source: str,
    aliases: Iterable[str] | Mapping[str, Mapping[str, Any]] = (),
    norm: str | tuple[str, ...] = NORMS,
    family: str = "",
    verified: bool = True,
    version: int = 1,
    choose: tuple[str, ...] = (),
) -> Callable[[Maker], Maker]:
    """Register a function (Geometry, *, hyperparameters) -> Recipe under a name.

    Args:
      name: what the flag says.
      source: the paper, with its section or equation, or the code, with its line.
      aliases: other names; as a mapping, each name with hyperparameters that it presets.
      norm: the norm placement that the scheme needs, or all that it accepts with the default first.
      family: by default the name of the module that the function stands in.
      verified: False where no second source confirms the numbers.
      version: raised whenever the numbers change.
      choose: hyperparameters whose default serves tables only; `undecided` names those that a run has not given.

    Raises:
      ConfigError: another function has the name already.
    """
    norms = (norm,) if isinstance(norm, str) else tuple(norm)
    for place in norms:
        if place not in NORMS:
            raise unknown(f"scheme {name}: norm", place, NORMS)
    given = aliases if isinstance(aliases, Mapping) else {a: {} for a in aliases}
    presets = {alias: FrozenMap(hyper) for alias, hyper in given.items()}

    def add(make: Maker) -> Maker:
        own = family or make.__module__.rpartition(".")[2]
        scheme = Scheme(name, make, source, FrozenMap(presets), own, norms, verified, version, choose)
        for taken in (name, *presets):
            owner = _SCHEMES.get(_ALIASES.get(taken, taken))
            if owner and (owner.make.__module__, owner.name) != (make.__module__, name):
                raise ConfigError(f"scheme {taken!r} is registered already, by {owner.make.__module__}")
        _SCHEMES[name] = scheme
        _ALIASES.update(dict.fromkeys(presets, name))
        return make

    return add


def scheme_names() -> tuple[str, ...]:
    """The registered names, family by family, without aliases."""
    return tuple(_SCHEMES)


def schemes() -> tuple[Scheme, ...]:
    """All registered schemes, family by family."""
    return tuple(_SCHEMES.values())


def resolve(name: str) -> tuple[Scheme, dict[str, Any]]:
    """The scheme of a name, an alias or `package.module:name`, and the hyperparameters that the name presets.

    Raises:
      ConfigError: no such scheme, or no such module.
    """
    module, colon, own = str(name).rpartition(":")
    if colon:
        try:
            importlib.import_module(module)
        except ImportError as e:
            raise ConfigError(f"scheme {name!r}: cannot import {module!r} ({e})") from None
    if own in _SCHEMES:
        return _SCHEMES[own], {}
    if own in _ALIASES:
        scheme = _SCHEMES[_ALIASES[own]]
        return scheme, dict(scheme.aliases[own])
    raise unknown("scheme", own, (*_SCHEMES, *_ALIASES))


def entry(name: str) -> Scheme:
    """The scheme of a name or an alias."""
    return resolve(name)[0]


def undecided(name: str, args: Iterable[str]) -> tuple[str, ...]:
    """The hyperparameters that a run of this scheme must choose and that are not among `args`.

    A muP without the width at which its settings were tuned is no muP: the default serves tables only.
    """
    scheme, presets = resolve(name)
    return tuple(k for k in scheme.choose if k not in (*args, *presets))


def recipe(name: str, geometry: Geometry, *, norm: str | None = None, **hyperparameters: Any) -> Recipe:
    """What the scheme `name` says at this geometry.

    `norm` chooses among the placements that the scheme accepts; by default it is the scheme's own.

    Raises:
      ConfigError: unknown scheme or hyperparameter, a value of the wrong type, a norm that the scheme does not accept.
    """
    scheme, presets = resolve(name)
    args = presets | {k: checked(scheme, k, v) for k, v in hyperparameters.items()}
    if missing := [k for k, v in scheme.hyperparameters.items() if v is inspect.Parameter.empty and k not in args]:
        raise ConfigError(f"scheme {scheme.name}: {' and '.join(missing)} must be given; there is no sensible default")
    made = scheme.make(geometry, **args)
    if norm is not None:
        made = placed(scheme, made, norm)
    return made.completed(
        name=scheme.name, geometry=geometry, source=scheme.source, args=FrozenMap(args), version=scheme.version
    )


def placed(scheme: Scheme, made: Recipe, norm: str) -> Recipe:
    """The recipe with the norm placement asked for, if the scheme accepts it."""
    if norm not in NORMS:
        raise unknown("norm", norm, NORMS)
    if norm not in scheme.norms:
        wanted = " or ".join(map(repr, scheme.norms))
        raise ConfigError(
            f"scheme {scheme.name} needs norm {wanted} ({made.residual.formula}, {scheme.source}); got {norm!r}"
        )
    return dataclasses.replace(made, residual=dataclasses.replace(made.residual, norm=norm))


def checked(scheme: Scheme, key: str, value: Any) -> Any:
    """The value of a hyperparameter, converted to its type."""
    if key not in scheme.hyperparameters:
        owners = [s.name for s in _SCHEMES.values() if key in s.hyperparameters]
        hint = f" ({key!r} is an option of {', '.join(owners[:3])})" if owners else ""
        raise ConfigError(
            f"scheme {scheme.name}: option {key!r} is unknown{nearest(key, scheme.hyperparameters)}{hint}"
        )
    return convert(f"scheme {scheme.name}: {key}", value, scheme.hints[key])


def convert(what: str, value: Any, hint: Any) -> Any:
    """The value as the type that the hint names: a Literal, a union, bool, int, float or str."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if isinstance(value, str) and (literals := [o for o in options if typing.get_origin(o) is Literal]):
            return convert(what, value, literals[0])
        for option in options:
            try:
                return convert(what, value, option)
            except ConfigError:
                continue
        raise ConfigError(f"{what}: {value!r} is not {word(hint)}")
    if origin is Literal:
        if value not in options or isinstance(value, bool):
            raise unknown(what, value, options)
        return value
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ConfigError(f"{what}: {value!r} is not a finite number")
        return float(value)
    if hint is types.NoneType and value is None:
        return value
    if isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(f"{what}: {value!r} is not {word(hint)}")


def word(hint: Any) -> str:
    """A type in plain words."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, options))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(word, options))
    names = {float: "a number", int: "a whole number", bool: "true or false", str: "a text", types.NoneType: "nothing"}
    return names.get(hint, str(hint))
