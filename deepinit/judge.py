"""Measures against laws, on the host: one row a leaf, and rows for what only many leaves together show."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinit import deviations, diagnosis
from deepinit.deviations import mean_square, std_deviation
from deepinit.geometry import EMBEDDINGS, EXPERTS, LAYER_MATRICES, Role
from deepinit.laws import Constant, Distribution, External, Factor, Numbers, Orthogonal, Sign, Unit
from deepinit.measure import EXPERT_KERNELS, Measured
from deepinit.recipe import Recipe
from deepinit.verdict import Row, whole
from deepinit.views import View

TESTS = 4
"""Two-sided tests of one layer of one leaf: mean square, mean, extreme, kurtosis."""
UNMANAGED = "own initializer, unmanaged"


@dataclass(frozen=True)
class Finding:
    """What the tests say of one layer."""

    z: float
    test: str
    reason: str = ""


@dataclass
class Pool:
    """Sums over many leaves, each entry in units of its own std."""

    n: float = 0.0
    total: float = 0.0
    square: float = 0.0
    spread: float = 0.0
    """Sum of kurtosis - 1."""

    def add(self, law: Distribution, n: int, total: float, square: float) -> None:
        """One more layer of one more leaf."""
        std = number(law.std)
        self.n += n
        self.total += total / std
        self.square += square / std**2
        self.spread += n * (law.kurtosis - 1)

    def finding(self, allowed: float, what: str) -> Finding:
        """The pooled mean square and mean."""
        kurtosis = 1 + self.spread / self.n
        z, mean = std_deviation(self.square / self.n, self.n, kurtosis), self.total / math.sqrt(self.n)
        if abs(z) > allowed:
            ratio = math.sqrt(self.square / self.n)
            return Finding(z, "pool", f"std over {what} is {ratio:.5g} times what it should be")
        if abs(mean) > allowed:
            return Finding(mean, "pool", f"mean over {what} is {self.total / self.n:.3g} std, should be 0")
        return Finding(z if abs(z) > abs(mean) else mean, "pool")


@dataclass
class Judge:
    """Judges the leaves of one tree, one after the other, and keeps what the pooled tests need."""

    recipe: Recipe
    threshold: float
    strict: bool = False
    twins: dict[tuple[str, int | None], str] = field(default_factory=dict)
    replays: dict[int, str] = field(default_factory=dict)
    """View -> what is wrong with the weights that were drawn again."""
    products: dict[int, list[str]] = field(default_factory=dict)
    """View -> layer by layer, what is wrong with its product with the matrix that it was drawn together with."""
    pools: dict[Role, Pool] = field(default_factory=lambda: defaultdict(Pool))
    allowances: dict[Role, float] = field(default_factory=lambda: defaultdict(float))

    def rows(self, index: int, view: View, x: Any, m: Measured) -> list[Row]:
        """The rows of one leaf: one, or one per layer where the law differs from layer to layer."""
        leaf, recipe = view.leaf, self.recipe
        law = recipe.stored_at(leaf.canonical, leaf.role) if leaf.role and leaf.role in recipe.weights else None
        square = np.asarray(m["square"], np.float64)
        n, padding = drawn(view, recipe, square)
        make = row_maker(view, x, m, n)
        everything = slice(0, view.layers)
        if law is None:
            reason = UNMANAGED if self.strict else f"({UNMANAGED})"
            return [make(None, Finding(0.0, "role", reason), None, everything)]
        if isinstance(law, External):
            finite = np.isfinite(square).all()
            found = Finding(0.0, "finite", "(given by the caller)" if finite else "not finite")
            return [make(None, found, law, everything)]
        depth = len(law.parameter) if isinstance(law.parameter, tuple) else 0
        if depth and view.depth > depth:
            found = Finding(math.inf, "count", f"the law has {depth} layers, the leaf more")
            return [make(None, found, law, everything)]
        total = np.asarray(m["total"], np.float64).sum(1)
        sums = square.sum(1)
        laws = [law.at(view.layer(i) or 0) for i in range(view.layers)]
        findings = [self.layer(view, laws[i], x.dtype, n, total[i], sums[i], m, i, padding) for i in range(view.layers)]
        for i, reason in enumerate(self.products.get(index, ())):
            if reason and not findings[i].reason:
                findings[i] = Finding(math.inf, "product", reason)
        if index in self.replays:
            findings[0] = Finding(math.inf, "replay", self.replays[index])
        if law.layered and leaf.stacked:
            return [make(view.layer(i), f, laws[i], slice(i, i + 1)) for i, f in enumerate(findings)]
        worst = max(range(view.layers), key=lambda i: (bool(findings[i].reason), abs(findings[i].z)))
        found, own = findings[worst], laws[worst]
        if found.reason and found.reason[0] != "(" and leaf.stacked and found.test != "replay":
            found = Finding(found.z, found.test, f"layer {view.layer(worst)}: {found.reason}")
        if not found.reason and view.layers > 1 and independent(own):  # too small for one layer
            pool = Pool()
            for i in range(view.layers):
                pool.add(laws[i], n, total[i], sums[i])
            over = pool.finding(self.threshold + quantization(x.dtype, view.layers * n, own), "all layers")
            found = over if over.reason else found
        return [make(None, found, own, everything)]

    def layer(
        self, view: View, law: Distribution, dtype: Any, n: int, total: float, square: float, m: Measured, i: int,
        padding: Sequence[int],
    ) -> Finding:  # fmt: skip
        """One layer of one leaf."""
        found = judge_layer(law, dtype, n, total, square, m, i, self.threshold)
        role, layer = view.leaf.role, view.layer(i)
        if found.test == "std" and found.reason and role:
            ratio = math.sqrt(square / n) / number(law.std)
            error = math.sqrt((law.kurtosis - 1) / (4 * n))
            hint = diagnosis.explained(ratio, error, role, self.recipe, layer)
            found = Finding(found.z, found.test, found.reason + hint)
        if found.reason:
            return found
        if padding[i]:
            return Finding(math.inf, "padding", f"{padding[i]} rows beyond the vocabulary are not zero")
        place = (view.leaf.canonical, layer)
        if place in self.twins and law.std:
            return Finding(math.inf, "duplicate", self.twins[place])
        if role and law.std and independent(law):
            self.pools[role].add(law, n, total, square)
            self.allowances[role] = max(self.allowances[role], float(epsilon(dtype)))
        return found

    def pooled(self) -> Iterator[Row]:
        """Rows for a role, or for the model, whose leaves are each near enough and together are not."""
        model, rounding = Pool(), 0.0
        for role, pool in self.pools.items():
            model = Pool(model.n + pool.n, model.total + pool.total, model.square + pool.square,
                         model.spread + pool.spread)  # fmt: skip
            rounding = max(rounding, self.allowances[role])
            yield from self.pool_row(role, pool, self.allowances[role], f"all of {role}")
        if len(self.pools) > 1:
            yield from self.pool_row("", model, rounding, "the whole model")

    def pool_row(self, role: str, pool: Pool, ulp: float, what: str) -> Iterator[Row]:
        """A row, if the pooled entries are off."""
        allowed = self.threshold + ulp / 2 / math.sqrt(max(pool.spread, 1e-9) / (4 * pool.n**2)) * (ulp > 1e-6)
        if (found := pool.finding(allowed, what)).reason:
            yield whole(role, found.test, found.reason, z=found.z, n=int(pool.n), path="(pool)",
                        expected_std=1.0, measured_std=math.sqrt(pool.square / pool.n))  # fmt: skip


def row_maker(view: View, x: Any, m: Measured, n: int) -> Callable[..., Row]:
    """make(layer, finding, law, part): a row on some layers of one leaf."""
    total, square = (np.asarray(m[k], np.float64).sum(1) for k in ("total", "square"))
    with np.errstate(invalid="ignore"):  # values that are not finite
        std = np.sqrt(np.maximum(square / n - (total / n) ** 2, 0))
    peak = np.maximum(np.abs(m["low"]), np.abs(m["high"]))

    def make(layer: int | None, found: Finding, law: Distribution | None, part: slice) -> Row:
        count = len(total[part])
        return Row(
            path=view.leaf.path,
            role=view.leaf.role or "",
            law=type(law).__name__ if law else "own initializer",
            shape=view.part,
            dtype=str(x.dtype),
            layer=view.leaf.layer if layer is None else layer,
            n=n * count,
            expected_std=None if law is None or isinstance(law, External) else float(np.mean(law.std)),
            measured_std=float(np.sqrt(np.mean(std[part] ** 2))),
            measured_mean=float(total[part].sum() / (n * count)),
            max_abs=float(peak[part].max()),
            z=found.z,
            ok=not found.reason or found.reason.startswith("("),
            reason=found.reason,
            formula=law.formula if law else "",
            test=found.test,
        )

    return make


# --- one layer ---------------------------------------------------------------------------------------------------


def judge_layer(
    law: Distribution, dtype: Any, n: int, total: float, square: float, m: Measured, i: int, threshold: float
) -> Finding:
    """What the tests say of one layer of a leaf; no reason if it is what the law says."""
    low, high = float(m["low"][i]), float(m["high"][i])
    if not (math.isfinite(square) and math.isfinite(low) and math.isfinite(high)):
        return Finding(math.inf, "finite", "not finite")
    if isinstance(law, Constant):
        value = float(np.asarray(law.value, np.float32).astype(dtype).astype(np.float32))
        if low == high == value:
            return Finding(0.0, "constant")
        return Finding(math.inf, "constant", f"should be exactly {value:g}, lies in [{low:g}, {high:g}]")
    if square == 0:
        return Finding(-math.inf, "zero", "all zero")
    if isinstance(law, Factor):  # its entries have no law of their own; that of the product is `joint`'s to judge
        return Finding(0.0, "finite")
    std, ulp = number(law.std), float(epsilon(dtype))
    ratio, mean_z, peak = math.sqrt(square / n) / std, total / math.sqrt(n) / std, max(-low, high)
    if isinstance(law, Orthogonal):  # the Frobenius norm of a semi-orthogonal matrix is no random number
        z = (ratio - 1) / 1e-4
        return Finding(z, "norm", "" if abs(ratio - 1) < 1e-3 + ulp else "its singular values are not all the gain")
    if isinstance(law, Unit) and abs(ratio - 1) > 2e-5 + ulp:  # nor is a sum of lengths that are all 1
        return Finding((ratio - 1) / 1e-5, "norm", f"vectors along d_model are {ratio:.5g} long, should be 1")
    if isinstance(law, Unit):
        return Finding(mean_z, "mean", "" if abs(mean_z) <= threshold else f"mean is {total / n:.3g}, should be 0")
    if isinstance(law, Sign):
        if max(abs(ratio - 1), abs(peak / std - 1)) > 1e-4 + ulp:
            return Finding(math.inf, "constant", f"should be exactly +-{std:g}")
        return Finding(mean_z, "mean", "" if abs(mean_z) <= threshold else f"mean is {total / n:.3g}, should be 0")
    return judge_draw(law, dtype, n, ratio, mean_z, peak, total / n, m, i, threshold)


def judge_draw(
    law: Distribution, dtype: Any, n: int, ratio: float, mean_z: float, peak: float, mean: float, m: Measured, i: int,
    threshold: float,
) -> Finding:  # fmt: skip
    """Independent entries: mean square, mean, bound, extreme, kurtosis, precision."""
    ulp, bound = float(epsilon(dtype)), number(law.bound)
    std_z = mean_square(law, ratio**2, n)
    allowed = threshold + quantization(dtype, n, law)
    if abs(std_z) > allowed:
        return Finding(std_z, "std", f"std is {ratio:.4g} times what it should be")
    if abs(mean_z) > allowed:
        return Finding(mean_z, "mean", f"mean is {mean:.3g}, should be 0")
    if peak > bound * (1 + ulp) * (1 + 1e-6):
        return Finding(math.inf, "bound", f"|w| reaches {peak:.6g}, the law ends at {bound:.6g}")
    extreme_z = deviations.extreme(law, peak, n, ulp)
    if abs(extreme_z) > threshold:
        side = "only reaches" if extreme_z < 0 else "reaches"
        return Finding(extreme_z, "extreme", f"|w| {side} {peak:.6g} among {n} entries")
    sample = float(np.asarray(m["fourth"][i], np.float64).sum() / n) / (ratio * number(law.std)) ** 4
    shape_z = deviations.kurtosis(law, sample, n)
    if abs(shape_z) > threshold + ulp * math.sqrt(n) * (ulp > 1e-6):
        return Finding(shape_z, "kurtosis", f"kurtosis is {sample:.3f}, that of the law {law.kurtosis:.3f}")
    if reason := coarse(m, i, n):
        return Finding(math.inf, "precision", reason)
    zs = {"std": std_z, "mean": mean_z, "extreme": extreme_z, "kurtosis": shape_z}
    furthest = max(zs, key=lambda k: abs(zs[k]))
    return Finding(zs[furthest], furthest)


def number(numbers: Numbers) -> float:
    """The one number of a law at one layer."""
    assert not isinstance(numbers, tuple)
    return float(numbers)


def independent(law: Distribution) -> bool:
    """Whether the entries are drawn one by one, so that their squares can be pooled."""
    return not isinstance(law, Orthogonal | Sign | Unit | Factor | External | Constant)


def epsilon(dtype: Any) -> float:
    """The relative rounding of a storage dtype."""
    import jax.numpy as jnp

    return float(jnp.finfo(dtype).eps)


def quantization(dtype: Any, n: int, law: Distribution) -> float:
    """What rounding to a storage dtype may add to z: half an ulp of relative std, in standard errors."""
    ulp = epsilon(dtype)
    return 0.0 if ulp < 1e-6 else ulp / 2 / math.sqrt((law.kurtosis - 1) / (4 * n))


def coarse(m: Measured, i: int, n: int) -> str:
    """Why these values look drawn in low precision and not drawn in float32 and cast last, if they do."""
    if "coarse" in m and n >= 64 and m["coarse"][i] > 0.5:
        return "drawn in low precision: the float32 values have no low bits"
    if "corner" in m and (size := m["corner"][i].size) >= 2048:
        distinct = len(np.unique(m["corner"][i]))  # a bfloat16 draw has 128; float32 cast to bfloat16 over 500 of 2048
        if distinct <= 160:
            return f"drawn in low precision: {distinct} distinct values among {size}"
    return ""


# --- the tree ----------------------------------------------------------------------------------------------------


def drawn(view: View, recipe: Recipe, square: np.ndarray) -> tuple[int, list[int]]:
    """(entries drawn in one layer, rows that should be zero and are not): a vocabulary's padding is not drawn."""
    vocab, shape = recipe.geometry.vocab_size, view.canonical
    if view.leaf.role in (Role.TOKEN_EMBED, Role.LM_HEAD) and len(shape) > 1 and shape[0] > vocab:
        return view.n // shape[0] * vocab, [int((square[:, vocab:] != 0).sum())]
    return view.n, [0] * view.layers


def duplicates(views: Sequence[View], measures: Sequence[Measured]) -> dict[tuple[str, int | None], str]:
    """(path, layer) -> the complaint that another layer, or another expert of it, holds the same values.

    Rows with equal sums and equal sums of squares hold equal values, but for a chance below any here.
    """
    seen: dict[tuple[str, bytes], list[tuple[int | None, int]]] = defaultdict(list)
    for view, m in zip(views, measures):
        if view.leaf.role is None or (view.leaf.layer is None and not view.leaf.stacked and view.expert is None):
            continue
        for i in range(view.layers):
            total, square = np.asarray(m["total"][i]), np.asarray(m["square"][i])
            stacked = view.leaf.role in EXPERT_KERNELS and len(view.canonical) > 2
            experts = view.canonical[0] if stacked else 1
            for e, (t, q) in enumerate(zip(total.reshape(experts, -1), square.reshape(experts, -1))):
                if q.any():
                    place = (view.layer(i), e if stacked else view.expert or 0)
                    seen[view.leaf.canonical, t.tobytes() + q.tobytes()].append(place)
    found = {}
    for (path, _), places in seen.items():
        if len(places) > 1:
            (layer, expert), (other, another) = places[:2]
            what = f"layers {layer} and {other}" if layer != other else f"experts {expert} and {another}"
            for layer, _ in places:
                found[path, layer] = f"{what} hold the same values"
    return found


def count_matrices(views: Sequence[View], recipe: Recipe) -> list[Row]:
    """A row for every matrix role that a whole model should hold more or fewer of."""
    g = recipe.geometry
    found: Counter[Role] = Counter()
    for view in views:
        if role := view.leaf.role:
            stacked = role in EXPERTS and role is not Role.ROUTER and view.expert is None
            found[role] += view.layers * (g.num_experts if stacked else 1)
    if not any(found[r] for r in EMBEDDINGS):
        return []  # a part of a model: nothing is said about how many there should be
    rows = []
    for role in (*LAYER_MATRICES, Role.LM_HEAD):
        wanted = g.count(role) if role in g.roles else 0
        if found[role] != wanted:
            reason = f"the geometry has {wanted} of these matrices, the tree {found[role]}"
            rows.append(whole(role, "count", reason))
    return rows
