"""The geometry of a parameter tree, read off its shapes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from deepinit.errors import ConfigError
from deepinit.geometry import Geometry, Role, nearest_divisor
from deepinit.interop import trees
from deepinit.interop.tables import OWN
from deepinit.interop.trees import Table
from deepinit.roles import locate

Layers = frozenset[int]

HEAD = 64
"""Width of a head where the tree does not show it: GPT-2's, and that of most models of its size."""


def table_of(params: Any, table: Any = None) -> Table:
    """The table given, our own for leaves that are named by roles, or the preset that knows the names."""
    if table is not None:
        return Table.of(table)
    paths = [path for path, _ in trees.flat(params)]
    return OWN if trees.named_by_roles([locate(p) for p in paths]) else trees.guessed(paths)


def geometry_of(params: Any, table: Any = None, given: Mapping[str, Any] | None = None) -> tuple[Geometry, list[str]]:
    """(geometry, what was assumed): `given` fields win, the rest is read off the shapes of the matrices.

    Raises:
      ConfigError: sizes that the tree does not show and nobody gave.
    """
    rules = table_of(params, table)
    shapes = by_role(params, rules)
    known, assumed = read_off(shapes), []
    known |= {k: v for k, v in (given or {}).items() if v is not None}
    if "num_heads" not in known and "heads_x_width" in known:
        whole = known["heads_x_width"]
        known["num_heads"] = whole // known.get("head_dim", nearest_divisor(min(HEAD, whole), whole))
        assumed.append(f"heads of width {whole // known['num_heads']}; give model.num_heads if that is not so")
    heads = known.get("num_heads")
    if heads and "heads_x_width" in known:
        known.setdefault("head_dim", known["heads_x_width"] // heads)
    if known.get("head_dim") and "kv_x_width" in known:
        known.setdefault("num_kv_heads", known["kv_x_width"] // known["head_dim"])
    fields = {f.name for f in dataclasses.fields(Geometry)}
    required = ("num_layers", "d_model", "num_heads", "d_ff", "vocab_size")
    if missing := [name for name in required if name not in known]:
        raise ConfigError(f"model.{missing[0]}: the tree does not show it; give --model.{missing[0].replace('_', '-')}")
    return Geometry(**{k: v for k, v in known.items() if k in fields}), assumed


def by_role(params: Any, table: Table) -> dict[Role, tuple[dict[str, list[int]], Layers]]:
    """Role -> (sizes by axis letter, the layers that have it)."""
    found: dict[Role, tuple[dict[str, list[int]], Layers]] = {}
    for path, x in trees.flat(params):
        path = path.replace(".", "/")
        leaf = locate(path)
        rule = table.rule(path)
        if rule is None or not rule.roles or not rule.axes:
            continue
        shape, axes = tuple(x.shape), rule.axes
        expert = trees.number(table.expert, path)
        if len(axes) + 1 == len(shape):
            axes = axes[: table.layer_axis] + "L" + axes[table.layer_axis :]
        if len(axes) != len(shape):
            continue
        sizes: dict[str, list[int]] = {}
        for letter, n in zip(axes, shape):
            sizes.setdefault(letter, []).append(n)
        if len(rule.roles) > 1 and "S" not in axes:
            sizes["o"][0] //= len(rule.roles)
        layer = trees.number(table.layer, path)
        here = range(leaf.start, leaf.start + leaf.step * sizes["L"][0], leaf.step) if "L" in sizes else [layer]
        for role in rule.roles:
            before, layers = found.get(role, ({}, frozenset()))
            if expert is not None:
                sizes["E"] = [max(expert + 1, *before.get("E", [0]), 0)]
            found[role] = (sizes, layers | {i for i in here if i is not None})
    return found


def read_off(shapes: Mapping[Role, tuple[dict[str, list[int]], Layers]]) -> dict[str, Any]:
    """What the shapes of the matrices say of the sizes, and which layers are routed."""
    depth = max((max(layers) + 1 for _, layers in shapes.values() if layers), default=0)
    known: dict[str, Any] = {"num_layers": depth or None}
    if Role.TOKEN_EMBED in shapes:
        sizes = shapes[Role.TOKEN_EMBED][0]
        known |= {"vocab_size": math.prod(sizes["i"]), "d_model": math.prod(sizes["o"])}
    elif Role.ATTN_Q in shapes:
        known |= {"d_model": math.prod(shapes[Role.ATTN_Q][0]["i"])}
    if Role.POS_EMBED in shapes:
        known["max_seq_len"] = math.prod(shapes[Role.POS_EMBED][0]["i"])
    for role, whole, count in (
        (Role.ATTN_Q, "heads_x_width", "num_heads"), (Role.ATTN_K, "kv_x_width", "num_kv_heads"),
    ):  # fmt: skip
        if role in shapes:
            outs = shapes[role][0]["o"]
            known[whole] = math.prod(outs)
            if len(outs) == 2:
                known |= {count: outs[0], "head_dim": outs[1]}
    for role in (Role.MLP_UP, Role.EXPERT_UP):
        if role in shapes:
            known["d_ff"] = math.prod(shapes[role][0]["o"])
    if Role.EXPERT_UP in shapes:
        known["num_experts"] = shapes[Role.EXPERT_UP][0]["E"][0]
        if routed := sorted(shapes[Role.EXPERT_UP][1]):
            known |= rule_of(routed, depth)
    gated = Role.MLP_GATE in shapes or Role.EXPERT_GATE in shapes
    known |= {"mlp": "swiglu" if gated else "gelu", "tied_embeddings": Role.LM_HEAD not in shapes}
    return {k: v for k, v in known.items() if v is not None}


def rule_of(routed: Sequence[int], depth: int) -> dict[str, int]:
    """`moe_every` and the least `first_dense` by which these layers, and no others of so many, are routed.

    Raises:
      ConfigError: there are none such.
    """
    for every in range(1, depth + 1):
        chosen = [i for i in range(depth) if (i + 1) % every == 0]
        before = len(chosen) - len(routed)
        if before >= 0 and chosen[before:] == list(routed):
            return {"moe_every": every, "first_dense": chosen[before - 1] + 1 if before else 0}
    raise ConfigError(f"model.moe_every: layers {list(routed)} of {depth} are routed, which no moe_every says")
