"""Roles for trees whose leaves are not named by them: an ordered table from regular expressions to roles and axes.

A rule matches whole parts at the end of a path (`attn/query/kernel`, parts joined by `/`; a dot in a stored name is a
`/`). The first rule that matches a leaf is the leaf's rule; a leaf without one is an error that lists all of them. What
a rule says is a role, or several side by side, and optionally a letter for each axis (`deepinit.views.LETTERS`):

    "query/kernel": "attn_q"                            axes found from the shape: inputs before outputs
    "c_proj/weight": "attn_out | o i"                   a kernel of torch, outputs first
    "qkv/kernel": "attn_q attn_k attn_v | i o"          side by side along the outputs
    "kv_einsum/w": "attn_k attn_v | S o i o"            one index of S for each role, heads before inputs
    "post_norm/scale": "norm_scale @ post_norm/norm_scale"    the law of a leaf that the recipe singles out
    "frozen/.*": None                                   unmanaged
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinit import roles
from deepinit.errors import ConfigError
from deepinit.geometry import EXPERTS, LAYER_MATRICES, VECTORS, Geometry, Role
from deepinit.roles import Leaf
from deepinit.views import LETTERS, View

PARTS = "mlp|moe|ffn|feed_?forward|attn|attention"  # MlpBlock_0 is no layer
LAYER = rf"(?i)(?:^|/)(?:(?!{PARTS})\w*(?:layer|block)s?|h)[_/](\d+)(?=/)"
EXPERT = r"(?:^|/)experts?[_/](\d+)(?=/)"
STACKED_EXPERTS = tuple(r for r in EXPERTS if r is not Role.ROUTER)
SCALARS = (Role.RESIDUAL_GATE, Role.BRANCH_SCALE, Role.BRANCH_SHIFT)


@dataclass(frozen=True)
class Rule:
    """What the leaves are whose paths end like this."""

    pattern: str
    roles: tuple[Role, ...]
    """Side by side in one array; none: unmanaged."""
    axes: str = ""
    """A letter for each axis of one layer; empty: found from the shape."""
    like: str = ""
    """Where our own modules have this leaf, if its law is not its role's: `post_norm/norm_scale`."""

    @classmethod
    def of(cls, pattern: str, says: Any) -> Rule:
        """A rule from its text, a role, or None; see the head of this module.

        Raises:
          ConfigError: a pattern that is no regular expression, an unknown role, a letter that means nothing.
        """
        if isinstance(says, Rule):
            return dataclasses.replace(says, pattern=pattern)
        try:
            re.compile(pattern)
        except re.error as e:
            raise ConfigError(f"roles: {pattern!r} is no regular expression: {e}") from None
        text, _, like = str(says or "").partition("@")
        text, _, axes = text.partition("|")
        axes = axes.replace(" ", "")
        for letter in axes:
            if letter not in LETTERS:
                known = ", ".join(f"{k} ({v})" for k, v in LETTERS.items())
                raise ConfigError(f"roles: {pattern!r}: axis {letter!r} is unknown; known: {known}")
        return cls(pattern, tuple(Role.of(word) for word in text.split()), axes, like.strip())

    @functools.cached_property
    def ends(self) -> re.Pattern[str]:
        """Matches a path that ends like this."""
        return re.compile(rf"(?:^|/)(?:{self.pattern})$")


@dataclass(frozen=True)
class Table:
    """Rules in order, and how paths say the layer and the expert."""

    rules: tuple[Rule, ...]
    name: str = ""
    layer: str = LAYER
    """One group: the number of the layer."""
    expert: str = EXPERT
    layer_axis: int = 0
    """Where a stack of layers has its axis."""
    outputs_first: bool = False
    """Whether kernels without axes of their own are stored as torch has them."""
    complete: bool = False
    """Whether a rule that matches nothing is an error: so in a table made for one tree."""

    @classmethod
    def of(cls, says: Any, **options: Any) -> Table:
        """A table from `{regex: role}`, from the name of a preset, or a table."""
        if isinstance(says, Table):
            return says
        if isinstance(says, str):
            from deepinit.interop.tables import preset

            return preset(says)
        if not isinstance(says, Mapping):
            raise ConfigError(f"roles: {says!r} is neither a mapping from regex to role nor the name of a table")
        options = {"complete": True, **options}
        return cls(tuple(Rule.of(pattern, text) for pattern, text in says.items()), **options)

    def rule(self, path: str) -> Rule | None:
        """The first rule that matches."""
        return next((r for r in self.rules if r.ends.search(path)), None)

    def knows(self, paths: Sequence[str]) -> bool:
        """Whether every leaf has a rule, and some rule names a role."""
        found = [self.rule(p) for p in paths]
        return all(found) and any(r.roles for r in found if r)


@dataclass(frozen=True)
class Tree:
    """The arrays of a parameter tree, and what they hold."""

    arrays: list[Any]
    leaves: list[Leaf]
    """Of each array, by its own path alone: what its digest goes by."""
    views: list[View]
    """What each role's part is; an array that is no weight (of integers) has none."""


# --- any container -----------------------------------------------------------------------------------------------


def flat(tree: Any) -> list[tuple[str, Any]]:
    """(path, array) of a tree of any kind: dicts, boxes, `nnx.State`, an NNX module (its `nnx.Param`s)."""
    return [(roles.joined(path), x) for path, x in roles.flat(tree)]


def viewed(params: Any, geometry: Geometry, table: Any = None) -> Tree:
    """What a tree holds: by the names of its leaves, by a table, or by the preset that knows all of its names.

    Raises:
      ConfigError: a leaf without a rule, a rule without a leaf, a shape that cannot hold its role's matrix.
    """
    found = flat(params)
    located = [roles.locate(path) for path, _ in found]
    arrays = [x for _, x in found]
    if table is None and named_by_roles(located):
        return Tree(arrays, located, own(located, arrays))
    if table is None:
        table = guessed([path for path, _ in found])
    return Tree(arrays, located, tabled(found, geometry, Table.of(table)))


def named_by_roles(located: Sequence[Leaf]) -> bool:
    """Whether a tree's leaves are named by their roles; that some are called `bias` says nothing."""
    found = {leaf.role for leaf in located if leaf.role}
    return bool(found - {Role.BIAS}) or (bool(found) and all(leaf.role for leaf in located))


def own(located: Sequence[Leaf], arrays: Sequence[Any]) -> list[View]:
    """The views of a tree whose leaves are named by their roles."""
    made = []
    for i, (leaf, x) in enumerate(zip(located, arrays)):
        if is_weight(x):
            axes = ("L" if leaf.stacked else "") + "x" * (len(np.shape(x)) - leaf.stacked)
            made.append(View(leaf, i, tuple(np.shape(x)), axes))
    return made


def is_weight(x: Any) -> bool:
    """Whether an array holds real numbers."""
    import jax.numpy as jnp

    return jnp.issubdtype(x.dtype, jnp.floating)


def guessed(paths: Sequence[str]) -> Table:
    """The preset that knows all of these names."""
    from deepinit.interop.tables import TABLES

    names = [path.replace(".", "/") for path in paths]
    for table in TABLES.values():
        if table.knows(names):
            return table
    raise ConfigError(
        f"no leaf of this tree is named by a role ({paths[0] if paths else 'it is empty'}, ...) and no preset knows "
        f"all of its names; give roles={{regex: role}}, or start from one of {', '.join(TABLES)}"
    )


# --- by table ----------------------------------------------------------------------------------------------------


def tabled(found: Sequence[tuple[str, Any]], geometry: Geometry, table: Table) -> list[View]:
    """The views of a tree by its table."""
    weights = [(i, path.replace(".", "/"), x) for i, (path, x) in enumerate(found) if is_weight(x)]
    ruled = [(i, path, x, table.rule(path)) for i, path, x in weights]
    if rest := [path for _, path, _, rule in ruled if rule is None]:
        shown = ", ".join(rest[:8]) + (f" and {len(rest) - 8} more" if len(rest) > 8 else "")
        raise ConfigError(f"roles: {len(rest)} of {len(ruled)} leaves are matched by no rule: {shown}")
    if table.complete:
        used = {rule.pattern for *_, rule in ruled if rule}
        for rule in table.rules:
            if rule.pattern not in used:
                raise ConfigError(f"roles: {rule.pattern!r} matches no leaf, or only leaves that an earlier rule has")
    made = [v for i, path, x, rule in ruled if rule for v in parts(i, path, found[i][0], x, rule, geometry, table)]
    return told_apart(made)


def parts(index: int, path: str, stored: str, x: Any, rule: Rule, g: Geometry, table: Table) -> Iterator[View]:
    """The view of each role that an array holds."""
    layer, expert = (number(pattern, path) for pattern in (table.layer, table.expert))
    bare = re.sub(r"/\d+(?=/|$)", "", re.sub(r"_\d+(?=/|$)", "", path))
    shape = tuple(x.shape)
    if not rule.roles:
        yield View(Leaf(stored, bare, None, bare, layer, False), index, shape, "x" * len(shape))
        return
    if g.mixed and layer is None and rule.roles[0] in LAYER_MATRICES:
        raise ConfigError(
            f"{path}: a stack of layers; where dense and routed layers mix (model.moe_every, model.first_dense), only "
            f"trees that number their layers can be read, and our own"
        )
    axes = fitted(path, shape, rule, g, table, layer is None, expert is None)
    stack = [s for s in ("encoder", "decoder") if g.stack == s]
    for k, role in enumerate(rule.roles):
        canonical = f"{bare}/{rule.like or role}"
        slot = canonical if role in VECTORS else "/".join([*stack, role])
        leaf = Leaf(stored, canonical, role, slot, layer, "L" in axes)
        yield View(leaf, index, shape, axes, cut(path, shape, rule, axes, k, g), expert)


def number(pattern: str, path: str) -> int | None:
    """The number in a path."""
    match = re.search(pattern, path)
    return int(match[1]) if match else None


def cut(path: str, shape: tuple[int, ...], rule: Rule, axes: str, k: int, g: Geometry) -> tuple[int, int, int] | None:
    """(axis, start, stop) of the k-th role of an array that holds several."""
    if len(rule.roles) == 1:
        return None
    if "S" in axes:
        axis = axes.index("S")
        if shape[axis] != len(rule.roles):
            raise ConfigError(
                f"{path}: axis {axis} of {shape} should have one index for each of {len(rule.roles)} roles"
            )
        return axis, k, k + 1
    outs = [a for a, letter in enumerate(axes) if letter == "o"]
    unit = math.prod(shape[a] for a in outs[1:])
    widths = [g.fan_out(r) // unit for r in rule.roles]
    start = sum(widths[:k])
    return outs[0], start, start + widths[k]


def fitted(
    path: str, shape: tuple[int, ...], rule: Rule, g: Geometry, table: Table, unlayered: bool, unexperted: bool
) -> str:
    """A letter for each axis, such that the fans are the role's; an axis of layers is put in where there is one.

    Raises:
      ConfigError: no way to read the shape as the role's matrix.
    """
    role = rule.roles[0]
    if role in VECTORS:
        return vector_axes(shape, role, g, table, unlayered)
    wanted = [rule.axes] if rule.axes else list(readings(len(shape), table.outputs_first))
    if not rule.axes and len(rule.roles) > 1:
        raise ConfigError(f"{path}: {' '.join(rule.roles)} in one array: say which axis is which, as in '... | i o'")
    for axes in stacked(wanted, shape, role, g, table, unlayered, unexperted):
        if len(axes) == len(shape) and holds(shape, axes, rule, g):
            return axes
    fan_in, fan_out = g.matrix(role)
    what = f"axes {' '.join(rule.axes)!r} of " if rule.axes else ""
    raise ConfigError(
        f"{path}: {what}shape {shape} cannot hold the {fan_in} x {fan_out} matrix (inputs x outputs) of "
        f"{' + '.join(rule.roles)} at this geometry"
    )


def vector_axes(shape: tuple[int, ...], role: Role, g: Geometry, table: Table, unlayered: bool) -> str:
    """Axes of a vector: all alike, but that of the layers."""
    least = 1 if role in SCALARS and shape != (g.d_model,) else 2
    if not unlayered or len(shape) < least or g.num_layers not in shape:
        return "x" * len(shape)
    at = table.layer_axis if table.layer_axis < len(shape) else 0
    axis = at if shape[at] == g.num_layers else shape.index(g.num_layers)
    return "x" * axis + "L" + "x" * (len(shape) - axis - 1)


def readings(rank: int, outputs_first: bool) -> Iterator[str]:
    """Every way to read a shape as one matrix: inputs first, outputs first, then the axes mixed."""
    blocks = [("i" * k + "o" * (n - k), n) for n in range(2, rank + 1) for k in range(1, n)]
    first = [a for a, _ in blocks]
    second = [a[::-1] for a in first]
    ordered = [*second, *first] if outputs_first else [*first, *second]
    mixed = ["".join(p) for n in range(2, rank + 1) for p in itertools.product("io", repeat=n) if len(set(p)) == 2]
    yield from dict.fromkeys([*ordered, *mixed])


def stacked(
    wanted: Sequence[str], shape: tuple[int, ...], role: Role, g: Geometry, table: Table, unlayered: bool,
    unexperted: bool,
) -> Iterator[str]:  # fmt: skip
    """The axes wanted, as they are and with axes of layers, experts and single entries put in."""
    letters = "1"
    if role in STACKED_EXPERTS and unexperted and g.num_experts:
        letters += "E"
    if unlayered:
        letters += "L"
    for extra in range(len(shape)):
        found = []
        for axes in wanted:
            if len(axes) + extra == len(shape):
                for put in itertools.product(letters, repeat=extra):
                    new = [c for c in put if c != "1"]
                    if len(set(new)) == len(new) and not set(new) & set(axes):
                        found += [woven(axes, put, at) for at in itertools.combinations(range(len(shape)), extra)]
        yield from sorted(dict.fromkeys(found), key=lambda a: "L" in a and a.index("L") != table.layer_axis)


def woven(axes: str, put: Sequence[str], at: Sequence[int]) -> str:
    """The axes with letters put in at some places."""
    rest, extra = iter(axes), dict(zip(at, put))
    return "".join(extra[k] if k in extra else next(rest) for k in range(len(axes) + len(at)))


def holds(shape: tuple[int, ...], axes: str, rule: Rule, g: Geometry) -> bool:
    """Whether these axes hold the matrices of the rule's roles."""
    size: dict[str, int] = defaultdict(lambda: 1)
    for n, letter in zip(shape, axes):
        size[letter] *= n
    role = rule.roles[0]
    if size["1"] != 1 or ("L" in axes and size["L"] != g.num_layers) or ("E" in axes and size["E"] != g.num_experts):
        return False
    fan_in, fan_out = g.matrix(role)
    if role is Role.POS_EMBED:
        return size["o"] == fan_out
    if role is Role.TOKEN_EMBED:
        return size["i"] >= fan_in and size["o"] == fan_out
    if role is Role.LM_HEAD:
        return size["i"] == fan_in and size["o"] >= fan_out
    if "S" in axes:
        return size["i"] == fan_in and all(size["o"] == g.fan_out(r) for r in rule.roles)
    return size["i"] == fan_in and size["o"] == sum(g.fan_out(r) for r in rule.roles)


def told_apart(made: list[View]) -> list[View]:
    """Slots made different where one role stands twice in a layer, so that no two leaves draw the same values."""
    count = Counter((v.leaf.slot, v.leaf.layer, v.leaf.stacked, v.expert) for v in made)
    twice = {slot for (slot, *_), n in count.items() if n > 1}
    return [
        dataclasses.replace(v, leaf=dataclasses.replace(v.leaf, slot=v.leaf.canonical)) if v.leaf.slot in twice else v
        for v in made
    ]
