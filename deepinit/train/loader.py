"""Frozen dataclasses in sections, from YAML files and flags, strictly: nothing unknown, misplaced or mistyped passes.

A config is a dataclass whose fields are sections; a section is a dataclass whose fields are values.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import math
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from deepinit.errors import ConfigError, nearest, unknown
from deepinit.recipe import FrozenMap

C = TypeVar("C")
# YAML 1.1 reads 1e-3 as text, since it has no dot.
_SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@functools.cache
def types_of(section: Any) -> dict[str, Any]:
    """Field names and their types, annotations resolved."""
    return typing.get_type_hints(section)


def is_mapping(kind: Any) -> bool:
    """Whether a field holds free names and values."""
    return typing.get_origin(kind) is FrozenMap


def names_of(kind: Any) -> int:
    """How many free names come before a value of this field."""
    return 1 + names_of(typing.get_args(kind)[0]) if is_mapping(kind) else 0


# ---------------------------------------------------------------------------------------------- building


def build(root: Callable[..., C], data: Any) -> C:
    """The config from nested mappings."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"expected sections, got {str(data)[:60]!r}")
    sections = {}
    for name, fields in data.items():
        kind = types_of(root).get(name)
        if kind is None:
            raise ConfigError(f"{name!r} is not a section{nearest(name, types_of(root))}")
        if not isinstance(fields, Mapping):
            raise ConfigError(f"{name}: expected a section, got {fields!r}; write {name}.{example(kind)}")
        known = types_of(kind)
        for key in fields:
            if key not in known:
                raise unknown_field(root, name, str(key))
        sections[name] = kind(**{key: convert(known[key], value, f"{name}.{key}") for key, value in fields.items()})
    return root(**sections)


def example(section: type) -> str:
    """A field of the section, for error messages: its name if it has one."""
    return "name" if "name" in types_of(section) else next(iter(types_of(section)))


def unknown_field(root: Any, section: str, key: str) -> ConfigError:
    """An error naming the nearest field: of this section, or of the very name in another."""
    sections = types_of(root)
    homes = [f"{s}.{key}" for s in sections if key in types_of(sections[s])]
    near = f"; did you mean {' or '.join(homes)}?" if homes else nearest(key, types_of(sections[section]))
    return ConfigError(f"{section}.{key}: section {section!r} has no field {key!r}{near}")


def convert(kind: Any, value: Any, path: str) -> Any:
    """`value` as the type that the field at `path` declares; an error where it is of another."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(value, str) and kind is not str and _SCIENTIFIC.fullmatch(value):
        value = float(value)
    if origin is Literal:
        if isinstance(value, str) and value in args:
            return value
        raise unknown(f"{path}:", value, args)
    if origin is tuple:
        if isinstance(value, str) and args[0] is not str:
            value = [yaml.safe_load(part) for part in value.split(",")]
        items = list(value) if isinstance(value, list | tuple) else [value]
        kinds = [args[0]] * len(items) if args[-1] is ... else args
        if len(items) != len(kinds):
            raise ConfigError(f"{path}: needs {len(kinds)} values, got {value!r}")
        return tuple(convert(k, item, f"{path}[{i}]") for i, (k, item) in enumerate(zip(kinds, items)))
    if is_mapping(kind):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}: expected names and values, got {value!r}")
        inner = args[0]
        return FrozenMap(
            {str(k): convert(inner, v, f"{path}.{k}") if is_mapping(inner) else free(v, f"{path}.{k}")
             for k, v in value.items()}
        )  # fmt: skip
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ConfigError(f"{path}: {value} is not finite")
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if type(value) is kind:
        return value
    raise ConfigError(f"{path}: expected {_NAMES[kind]}, got {value!r}")


def free(value: Any, path: str) -> Any:
    """A value whose type is for its reader to judge, made hashable."""
    if isinstance(value, list | tuple):
        return tuple(free(v, path) for v in value)
    if isinstance(value, str) and _SCIENTIFIC.fullmatch(value):
        return float(value)
    if value is None or isinstance(value, Mapping):
        raise ConfigError(f"{path}: expected a value, got {value!r}")
    return value


def plain(value: Any) -> Any:
    """A config as nested dicts and lists, ready for YAML or JSON."""
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, tuple) else value


# ---------------------------------------------------------------------------------------------- files


class _Strict(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise ConfigError(f"line {key.start_mark.line + 1}: key {key.value!r} is given twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse(text: str) -> Any:
    """YAML text as plain data; a one-line error where it is not YAML."""
    try:
        return yaml.load(text, _Strict)
    except yaml.MarkedYAMLError as e:
        line = f"line {e.problem_mark.line + 1}: " if e.problem_mark else ""
        raise ConfigError(f"{line}not YAML: {e.problem or e.context}") from None
    except (yaml.YAMLError, ValueError) as e:
        raise e if isinstance(e, ConfigError) else ConfigError(f"not YAML: {' '.join(str(e).split())}") from None


def read(path: str) -> Any:
    """A config file as plain data; an empty one is an empty config."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        folder = Path(path).parent
        names = [str(p) for p in sorted(folder.glob("*.y*ml"))] if folder.is_dir() else []
        close = difflib.get_close_matches(path, names, 1, cutoff=0.5)
        raise ConfigError("no such config file" + (f"; did you mean {close[0]}?" if close else "")) from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot be read: {getattr(e, 'strerror', None) or e}") from None
    data = parse(text)
    return {} if data is None else data


# ---------------------------------------------------------------------------------------------- flags


def flags(root: type, arguments: Iterable[str]) -> Iterator[dict[str, Any]]:
    """`--section.field value` and `--section.field=value` as nested dicts, one a flag; dash and underscore alike.

    A switch alone is on: `--model.qk-norm`. Named values come one by one or together: `--scheme.args.base_width 256`,
    `--scheme.args '{base_width: 256, base_depth: 2}'`.
    """
    rest = list(arguments)
    while rest:
        name, equals, text = rest.pop(0).partition("=")
        if not name.startswith("--"):
            raise ConfigError(f"{name!r} is not a flag; flags are --section.field value")
        path = name[2:].replace("-", "_").split(".")
        section = types_of(root).get(path[0])
        if section is None:
            raise ConfigError(f"{name}: {path[0]!r} is not a section{nearest(path[0], types_of(root))}")
        if len(path) == 1:
            raise ConfigError(f"{name}: a section, not a field; did you mean {name}.{example(section)}?")
        kind = types_of(section).get(path[1])
        if kind is None:
            raise unknown_field(root, path[0], path[1])
        if not equals:
            if rest and not rest[0].startswith("--"):
                text = rest.pop(0)
            elif kind is bool:
                text = "true"
            else:
                raise ConfigError(f"{name}: needs a value")
        value: Any = text if takes_text(kind) else _scalar(text, name)
        missing = 2 + names_of(kind) - len(path)
        if missing and not (missing > 0 and isinstance(value, dict)):
            raise ConfigError(f"{name}: write --{path[0]}.{path[1]}{'.name' * names_of(kind)} value")
        for key in reversed(path):
            value = {key: value}
        yield value


def takes_text(kind: Any) -> bool:
    """Whether a flag's text is taken as it stands: `--train.run-dir 7` is a folder named 7."""
    return kind is str or typing.get_origin(kind) is Literal


def _scalar(text: str, name: str) -> Any:
    try:
        return parse(text)
    except ConfigError as e:
        raise ConfigError(f"{name}: {text!r} is {str(e).removeprefix('line 1: ')}") from None


# ---------------------------------------------------------------------------------------------- documentation


def docs(section: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, in one line."""
    (body,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(body, ast.ClassDef)
    out = {}
    for field, below in zip(body.body, body.body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            out[ast.unparse(field.target)] = " ".join(str(below.value.value).split())
    return out


def show_type(kind: Any) -> str:
    """A type in short, for --help."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "|".join(args)
    if origin is tuple:
        return f"[{', '.join('...' if a is ... else show_type(a) for a in args)}]"
    return "names and values" if is_mapping(kind) else kind.__name__
