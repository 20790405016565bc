"""Two parameter trees, leaf by leaf."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinit import roles, stacks
from deepinit.interop.sources import Source


def compared(a: Source, b: Source) -> tuple[list[dict[str, Any]], list[str]]:
    """(a row for every path of either tree, what their records say of them).

    A row has `path`, `same` (bit for bit), `difference` in words and the two `std`s. A stack and its layers one by one
    are the same leaf: `layers/x` against `layers_0/x`, ...
    """
    left, right = (
        {roles.unrolled(path, layer): np.asarray(x) for path, layer, x in stacks.apart(s.params)} for s in (a, b)
    )
    rows = []
    for path in [*left, *(p for p in right if p not in left)]:
        x, y = left.get(path), right.get(path)
        stds = [None if v is None else float(np.asarray(v, np.float64).std()) for v in (x, y)]
        rows.append({"path": path, "same": not (said := difference(x, y)), "difference": said, "std": stds})
    return rows, list(records(a, b))


def difference(x: np.ndarray | None, y: np.ndarray | None) -> str:
    """In what two leaves differ; nothing if they are the same bits."""
    if x is None or y is None:
        return "only there" if x is None else "only here"
    if x.shape != y.shape:
        return f"shape {x.shape} and {y.shape}"
    if x.dtype != y.dtype:
        cast = x.astype(y.dtype) if x.dtype.itemsize > y.dtype.itemsize else x
        other = y.astype(x.dtype) if y.dtype.itemsize > x.dtype.itemsize else y
        same = np.array_equal(cast, other)
        return f"{x.dtype} and {y.dtype}" + (", one cast to the other" if same else ", and other values")
    if x.tobytes() == y.tobytes():
        return ""
    count = int((x != y).sum())
    if not count:
        return "signs of zeros"
    spread = [float(v.astype(np.float64).std()) for v in (x, y)]
    ratio = f", std {spread[1] / spread[0]:.6g} times" if spread[0] and spread[1] else ""
    return f"{count} of {x.size} values{ratio}"


def records(a: Source, b: Source) -> Any:
    """What the recipes and the certificates of two trees say of each other."""
    if a.recipe and b.recipe:
        if a.recipe == b.recipe:
            yield f"one recipe: {a.recipe.name}@{a.recipe.version}"
        else:
            from deepinit.train.folder import differences

            for path, old, new in differences(a.recipe.to_json(), b.recipe.to_json()):
                yield f"recipe: {path} {old} here, {new} there"
    for name, source in (("here", a), ("there", b)):
        if source.certificate:
            yield f"{name}: certificate of {source.certificate['scheme']}, seed {source.certificate['seed']}"
