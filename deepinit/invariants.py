"""What every parameter received against what its law says, measured on the mesh, judged on the host.

One compiled pass takes from every leaf partial sums, extremes and digest lanes. The tolerance follows from the number
of entries, the law's kurtosis and a false-alarm rate below 1e-6 a model: the sample's mean square over n entries is
close to chi-square with 2n / (kurtosis - 1) degrees of freedom (exact for a normal), and Wilson and Hilferty's cube
root (1931) turns that into a standard normal z far into both tails.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from deepinit import digests, laws, roles
from deepinit.geometry import EMBEDDINGS, EXPERTS, LAYER_MATRICES, Role
from deepinit.laws import Constant, External, Factor, Orthogonal, Sign
from deepinit.recipe import Recipe
from deepinit.roles import Leaf

FALSE_ALARM = 1e-6
COARSE_BITS = 0x1FFF  # the float32 mantissa bits that float16 and bfloat16 lack
SAMPLE = 1 << 12


@dataclass(frozen=True)
class Row:
    """The verdict on one leaf, or on one layer of a leaf whose law differs from layer to layer."""

    path: str
    role: str
    law: str
    shape: tuple[int, ...]
    dtype: str
    layer: int | None
    n: int
    expected_std: float | None
    measured_std: float
    measured_mean: float
    max_abs: float
    z: float
    """Standard errors between measured and expected, of the test that is furthest off."""
    ok: bool
    reason: str = ""
    formula: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data; numbers that are not finite become null."""
        plain = dataclasses.asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in plain.items()}


@dataclass(frozen=True)
class Verdict:
    """All rows, the digest, and whether every row is ok."""

    rows: tuple[Row, ...]
    digest: str
    scheme: str
    threshold: float
    """Largest |z| that passes."""
    wall_seconds: float = field(default=0.0, compare=False)

    @property
    def ok(self) -> bool:
        """Whether every leaf holds what its law says."""
        return all(r.ok for r in self.rows)

    @property
    def bad(self) -> tuple[Row, ...]:
        """The rows that fail."""
        return tuple(r for r in self.rows if not r.ok)

    def summary(self) -> str:
        """One line."""
        leaves = len({r.path for r in self.rows})
        if self.ok:
            worst = max((abs(r.z) for r in self.rows if math.isfinite(r.z)), default=0.0)
            return f"{leaves} leaves as {self.scheme} says; largest deviation {worst:.1f} standard errors"
        return f"{len({r.path for r in self.bad})} of {leaves} leaves are not what {self.scheme} says"

    def table(self) -> str:
        """The rows that fail, a line each."""
        lines = [self.summary()]
        for r in self.bad:
            where = r.path if r.layer is None else f"{r.path}[layer {r.layer}]"
            expected = "?" if r.expected_std is None else f"{r.expected_std:.6g}"
            lines.append(
                f"  {where} ({r.role}, {r.law}): expected std {expected}, found {r.measured_std:.6g}, "
                f"z {r.z:+.1f}: {r.reason}"
            )
        return "\n".join(lines)


def verify(params: Any, recipe: Recipe, *, strict: bool = False, raises: bool = True) -> tuple[Row, ...]:
    """Check every leaf of a parameter tree against the recipe.

    Args:
      params: the tree, boxed or not, sharded or not.
      recipe: what the leaves should hold.
      strict: leaves without a role, whose own initializer is out of our hands, fail too.
      raises: False returns the rows also where some fail.

    Raises:
      AssertionError: some leaf is not what its law says; the message is the table of those.
    """
    verdict = inspect(params, recipe, strict=strict)
    if raises:
        chex.assert_equal(len(verdict.bad), 0, custom_message=verdict.table())
    return verdict.rows


def inspect(params: Any, recipe: Recipe, *, strict: bool = False) -> Verdict:
    """The verdict on a parameter tree, its digest included, in one pass over the parameters."""
    leaves = roles.leaves(params)
    arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for _, x in leaves]
    measured = jax.device_get(digests.replicated(arrays, measure(arrays, tuple(leaf.stacked for leaf, _ in leaves))))
    tests = sum(len(m["lanes"]) for m in measured) + len(leaves)
    threshold = normal_tail(FALSE_ALARM / (3 * max(tests, 1)))
    twins = equal_layers(leaves, measured)
    rows: list[Row] = []
    for (leaf, x), m in zip(leaves, measured):
        rows += judge(leaf, x, m, recipe, threshold, twins, strict)
    rows += count_matrices(leaves, recipe)
    return Verdict(tuple(rows), digests.combine(leaves, [m["lanes"] for m in measured]), recipe.name, threshold)


# --- measuring, on the devices ------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("stacked",))
def measure(arrays: Sequence[jax.Array], stacked: tuple[bool, ...]) -> list[dict[str, jax.Array]]:
    """Partial sums, extremes, coarse entries and digest lanes of every leaf, per layer."""
    return [measure_leaf(x, s) for x, s in zip(arrays, stacked)]


def measure_leaf(x: jax.Array, stacked: bool) -> dict[str, jax.Array]:
    """`total` and `square` are (layers, rows): float32 within a row only, so that the host can add up in float64."""
    rows = x if stacked else x[None]
    wide = rows.astype(jnp.float32)
    lead, inner = min(2, rows.ndim - 1), tuple(range(1, rows.ndim))
    over = tuple(range(max(lead, 1), rows.ndim))
    sample = corner(rows)
    out = {
        "lanes": digests.lanes(x, stacked),
        "total": wide.sum(over).reshape(rows.shape[0], -1),
        "square": jnp.square(wide).sum(over).reshape(rows.shape[0], -1),
        "low": rows.min(inner).astype(jnp.float32),
        "high": rows.max(inner).astype(jnp.float32),
    }
    if x.dtype == jnp.float32:
        word = jax.lax.bitcast_convert_type(sample, np.uint32)
        coarse = (word & np.uint32(COARSE_BITS)) == np.uint32(0)
        out["coarse"] = jnp.mean((coarse & (sample != np.float32(0))).astype(jnp.float32), 1)
    elif x.dtype.itemsize == 2:
        out["sample"] = sample.astype(jnp.float32)
    return out


def corner(rows: jax.Array) -> jax.Array:
    """(layers, at most SAMPLE entries): whole last axes from the beginning of every layer."""
    take, room = [], SAMPLE
    for size in reversed(rows.shape[1:]):
        take.append(slice(0, min(size, max(room, 1))))
        room //= size
    return rows[(slice(None), *reversed(take))].reshape(rows.shape[0], -1)


# --- judging, on the host -----------------------------------------------------------------------------------------


def normal_tail(p: float) -> float:
    """z with two-sided tail probability p."""
    from scipy import stats

    return float(stats.norm.isf(p / 2))


def std_deviation(ratio: float, n: int, kurtosis: float) -> float:
    """z of a sample mean square over n entries that is `ratio` times the expected one."""
    degrees = 2 * n / (kurtosis - 1)
    spread = 2 / (9 * degrees)
    return (ratio ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def judge(
    leaf: Leaf, x: Any, m: dict[str, np.ndarray], recipe: Recipe, threshold: float, twins: dict[str, str], strict: bool
) -> list[Row]:
    """The rows of one leaf: one, or one per layer where the law differs from layer to layer."""
    total, square = (np.asarray(m[k], np.float64) for k in ("total", "square"))
    layers = len(total)
    law = recipe.law_at(leaf.canonical, leaf.role) if leaf.role and leaf.role in recipe.weights else None
    n, padding = entries(leaf, x, recipe, square)
    std = np.sqrt(np.maximum(square.sum(1) / n - (total.sum(1) / n) ** 2, 0))
    peak = np.maximum(np.abs(m["low"]), np.abs(m["high"]))

    def row(layer: int | None, z: float, reason: str, law: laws.Distribution | None, part: slice) -> Row:
        mean = float(total[part].sum() / (n * len(total[part])))
        return Row(
            path=leaf.path,
            role=leaf.role or "",
            law=type(law).__name__ if law else "own initializer",
            shape=tuple(x.shape),
            dtype=str(x.dtype),
            layer=leaf.layer if layer is None else layer,
            n=n * len(total[part]),
            expected_std=None if law is None or isinstance(law, External) else float(np.mean(law.std)),
            measured_std=float(np.sqrt(np.mean(std[part] ** 2))),
            measured_mean=mean,
            max_abs=float(peak[part].max()),
            z=z,
            ok=not reason or reason.startswith("("),
            reason=reason,
            formula=law.formula if law else "",
        )

    everything = slice(0, layers)
    if law is None:
        note = "own initializer, unmanaged"
        return [row(None, 0.0, note if strict else f"({note})", None, everything)]
    if isinstance(law, External):
        finite = np.isfinite(square).all()
        return [row(None, 0.0, "(given by the caller)" if finite else "not finite", law, everything)]
    depth = len(law.parameter) if isinstance(law.parameter, tuple) else 0
    if depth and (layers if leaf.stacked else (leaf.layer or 0) + 1) > depth:
        return [row(None, math.inf, f"the law has {depth} layers, the leaf more", law, everything)]
    found = []
    for i in range(layers):
        own = law.at(i if leaf.stacked else leaf.layer or 0)
        z, reason = judge_layer(own, x.dtype, n, total[i].sum(), square[i].sum(), m, i, threshold)
        if not reason and padding[i]:
            reason = f"{padding[i]} rows beyond the vocabulary are not zero"
        place = f"{leaf.canonical} {i if leaf.stacked else leaf.layer}"
        if not reason and place in twins and own.std:
            reason = twins[place]
        found.append((z, reason, own))
    if law.layered and leaf.stacked:
        return [row(i, z, reason, own, slice(i, i + 1)) for i, (z, reason, own) in enumerate(found)]
    worst = max(range(layers), key=lambda i: (bool(found[i][1]), abs(found[i][0])))
    z, reason, own = found[worst]
    if reason and leaf.stacked:
        reason = f"layer {worst}: {reason}"
    if not reason and layers > 1 and own.std and not isinstance(own, Orthogonal | Sign):  # too small for one layer
        pooled = std_deviation(square.sum() / (layers * n * number(own.std) ** 2), layers * n, own.kurtosis)
        if abs(pooled) > threshold + quantization(x.dtype, layers * n, own):
            z, reason = pooled, "std over all layers is off"
    return [row(None, z, reason, own, everything)]


def number(numbers: laws.Numbers) -> float:
    """The one number of a law at one layer."""
    assert not isinstance(numbers, tuple)
    return float(numbers)


def judge_layer(
    law: laws.Distribution,
    dtype: Any,
    n: int,
    total: float,
    square: float,
    m: dict[str, np.ndarray],
    i: int,
    threshold: float,
) -> tuple[float, str]:
    """(z, reason) of one layer of a leaf; no reason if it is what the law says."""
    low, high = float(m["low"][i]), float(m["high"][i])
    if not (math.isfinite(square) and math.isfinite(low) and math.isfinite(high)):
        return math.inf, "not finite"
    if isinstance(law, Constant):
        value = float(np.asarray(law.value, np.float32).astype(dtype).astype(np.float32))
        exact = low == high == value
        return (0.0, "") if exact else (math.inf, f"should be exactly {value:g}, lies in [{low:g}, {high:g}]")
    if isinstance(law, Factor):
        return math.inf, f"its law is that of its product with {law.partner}, which is not checked here"
    std, bound = number(law.std), number(law.bound)
    if square == 0:
        return -math.inf, "all zero"
    ratio, mean_z, peak = math.sqrt(square / n) / std, total / math.sqrt(n) / std, max(-low, high)
    ulp = float(jnp.finfo(dtype).eps)
    if isinstance(law, Orthogonal):  # the Frobenius norm of a semi-orthogonal matrix is no random number
        return (ratio - 1) / 1e-4, "" if abs(ratio - 1) < 1e-3 + ulp else "its singular values are not all the gain"
    if isinstance(law, Sign):
        if max(abs(ratio - 1), abs(peak / std - 1)) > 1e-4 + ulp:
            return math.inf, f"should be exactly +-{std:g}"
        return mean_z, "" if abs(mean_z) <= threshold else f"mean is {total / n:.3g}, should be 0"
    std_z = std_deviation(ratio**2, n, law.kurtosis)
    allowed = threshold + quantization(dtype, n, law)
    if abs(std_z) > allowed:
        return std_z, f"std is {ratio:.4g} times what it should be"
    if abs(mean_z) > allowed:
        return mean_z, f"mean is {total / n:.3g}, should be 0"
    if peak > bound * (1 + ulp) * (1 + 1e-6):
        return math.inf, f"|w| reaches {peak:.6g}, the law ends at {bound:.6g}"
    if reason := coarse(m, i, n):
        return math.inf, reason
    return (std_z if abs(std_z) > abs(mean_z) else mean_z), ""


def quantization(dtype: Any, n: int, law: laws.Distribution) -> float:
    """What rounding to a storage dtype may add to z: half an ulp of relative std, in standard errors."""
    ulp = float(jnp.finfo(dtype).eps)
    return 0.0 if ulp < 1e-6 else ulp / 2 / math.sqrt((law.kurtosis - 1) / (4 * n))


def coarse(m: dict[str, np.ndarray], i: int, n: int) -> str:
    """Why these values look drawn in low precision and not drawn in float32 and cast last, if they do."""
    if "coarse" in m and n >= 64 and m["coarse"][i] > 0.5:
        return "drawn in low precision: the float32 values have no low bits"
    if "sample" in m and (size := m["sample"][i].size) >= 2048:
        distinct = len(np.unique(m["sample"][i]))  # a bfloat16 draw has 128; float32 cast to bfloat16 over 500 of 2048
        if distinct <= 160:
            return f"drawn in low precision: {distinct} distinct values among {size}"
    return ""


def entries(leaf: Leaf, x: Any, recipe: Recipe, square: np.ndarray) -> tuple[int, list[int]]:
    """(entries drawn in one layer, rows that should be zero and are not): a vocabulary's padding is not drawn."""
    n = int(np.prod(x.shape[int(leaf.stacked) :], dtype=np.int64))
    vocab, width = recipe.geometry.vocab_size, recipe.geometry.d_model
    if leaf.role in (Role.TOKEN_EMBED, Role.LM_HEAD) and x.shape[-1] == width and x.shape[-2] > vocab:
        return vocab * width, [int((square[:, vocab:] != 0).sum())]
    return n, [0] * len(square)


def equal_layers(leaves: Sequence[tuple[Leaf, Any]], measured: Sequence[dict[str, np.ndarray]]) -> dict[str, str]:
    """`canonical layer` -> the complaint that another layer of this leaf holds the same values."""
    seen: dict[tuple[str, bytes], list[int]] = defaultdict(list)
    for (leaf, _), m in zip(leaves, measured):
        for i, row in enumerate(np.asarray(m["lanes"])):
            layer = i if leaf.stacked else leaf.layer
            if layer is not None:
                seen[leaf.canonical, row.tobytes()].append(layer)
    return {
        f"{path} {layer}": f"layers {twins[0]} and {twins[1]} hold the same values"
        for (path, _), twins in seen.items()
        for layer in twins
        if len(twins) > 1
    }


def count_matrices(leaves: Sequence[tuple[Leaf, Any]], recipe: Recipe) -> list[Row]:
    """A row for every matrix role that a whole model should hold more or fewer of."""
    g = recipe.geometry
    found: Counter[Role] = Counter()
    for leaf, x in leaves:
        if leaf.role:
            experts = g.num_experts if leaf.role in EXPERTS and leaf.role is not Role.ROUTER else 1
            found[leaf.role] += (x.shape[0] if leaf.stacked else 1) * experts
    if not any(found[r] for r in EMBEDDINGS):
        return []  # a part of a model: nothing is said about how many there should be
    rows = []
    for role in (*LAYER_MATRICES, Role.LM_HEAD):
        wanted = g.count(role) if role in g.roles else 0
        if found[role] != wanted:
            reason = f"the geometry has {wanted} of these matrices, the tree {found[role]}"
            rows.append(Row("(model)", role, "count", (), "", None, 0, None, 0.0, 0.0, 0.0, math.inf, False, reason))
    return rows
