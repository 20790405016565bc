"""Coordinate check: do the first steps move every part of the model by the same amount at every width and depth?

For each size of a grid some seeds are drawn and trained for a few steps under one vmap. What is sized, t steps in: the
stream after the first, middle and last layer, the logits, the attention logits, and, at the first step, what each
role's own update does. Slopes are of log size against log width or log depth.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.special import stdtr, stdtrit

from deepinit import roles, sharded_init, stacks
from deepinit.geometry import Role
from deepinit.nn import Decoder
from deepinit.nn.losses import cross_entropy
from deepinit.nn.stats import COLLECTION, STREAM, mean_square
from deepinit.recipe import Recipe
from deepinit.signal.grid import Grid
from deepinit.signal.probe import key, pushforward
from deepinit.train import optimizer
from deepinit.train.config import OptimizerConfig

PLACES = ("first", "middle", "last")
FLAT = 0.15
"""Largest |slope| of a change that is level."""
FLAT_SIZE = 0.10
"""Largest |slope| of an activation's size over width."""
SURE = 0.99
"""A slope out of bounds fails if it is out with this probability; below it there is no verdict."""


@dataclass(frozen=True)
class Slope:
    """One quantity along one axis."""

    axis: str
    """`width` or `depth`."""
    quantity: str
    step: int
    sizes: tuple[float, ...]
    """Geometric mean over the seeds, by width or depth."""
    slope: float
    half_width: float
    """Of its 95% interval, from the scatter between seeds."""
    low: float
    high: float
    """What passes; low is -inf where growth alone is the fault."""
    confidence: float
    """Probability that the slope lies on the side of the bounds where it was found."""

    @property
    def ok(self) -> bool | None:
        """Whether the slope passes; None where it is out of bounds and the scatter between seeds leaves it open."""
        if self.low <= self.slope <= self.high:
            return True
        return False if self.confidence >= SURE else None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        bounds = {k: v if math.isfinite(v) else None for k, v in (("low", self.low), ("high", self.high))}
        return {**dataclasses.asdict(self), **bounds, "sizes": list(self.sizes), "ok": self.ok}


@dataclass(frozen=True)
class Outcome:
    """A coordinate check of one scheme."""

    scheme: str
    grid: Grid
    slopes: tuple[Slope, ...]
    seconds: float

    def ok(self, axis: str) -> bool | None:
        """Whether nothing fails along this axis; None where it was not run."""
        found = [s.ok for s in self.slopes if s.axis == axis]
        return False not in found if found else None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "scheme": self.scheme,
            "width_ok": self.ok("width"),
            "depth_ok": self.ok("depth"),
            "grid": dataclasses.asdict(self.grid),
            "slopes": [s.to_json() for s in self.slopes],
            "seconds": self.seconds,
        }


def check(
    scheme: str, recipe_at: Callable[[int, int], Recipe], grid: Grid, options: Mapping[str, Any] | None = None
) -> Outcome:
    """Run the grid for one scheme.

    Args:
      scheme: its name, for the report.
      recipe_at: (width, depth) -> recipe; its vocabulary and longest sequence are those of the grid.
      grid: sizes, steps, seeds, optimizer.
      options: of `deepinit.nn.Decoder`.
    """
    began = time.perf_counter()
    runs = {size: run(recipe_at(*size), grid, options or {}) for size in grid.points}
    slopes: list[Slope] = []
    if grid.widths:
        slopes += fits("width", grid.widths, [runs[w, grid.shallow] for w in grid.widths])
    if grid.depths:
        slopes += fits("depth", grid.depths, [runs[grid.narrow, d] for d in grid.depths])
    return Outcome(scheme, grid, tuple(slopes), time.perf_counter() - began)


# --- one size ----------------------------------------------------------------------------------------------------


def run(recipe: Recipe, grid: Grid, options: Mapping[str, Any]) -> dict[tuple[str, int], np.ndarray]:
    """(quantity, step) -> size for each seed, (S,)."""
    model = Decoder.from_recipe(recipe, **{**options, "scan": True})
    shapes = roles.unboxed(sharded_init.abstract_params(model))
    plans = [sharded_init.plan(model, shapes, seed) for seed in range(grid.seeds)]
    keys = jax.tree.map(lambda *k: np.stack(k), *(k for _, k in plans))
    tokens = task(grid)
    leaves = [leaf for leaf, _ in roles.leaves(shapes)]
    names = sorted({key(leaf) for leaf in leaves})
    picks = jnp.asarray([[key(leaf) == name for leaf in leaves] for name in names], jnp.float32)
    tree = jax.tree.structure(shapes)

    def one(params: Any, own_tokens: jax.Array) -> Any:
        tx = transformation(grid, recipe, params)

        def step(carry: Any, batch: jax.Array) -> Any:
            params, state, first, count = carry
            seen = observe(model, params, own_tokens[0])
            updates, state = tx.update(jax.grad(lambda p: mean_loss(model, p, batch))(params), state, params)
            first = jax.tree.map(lambda f, u: jnp.where(count == 0, u.astype(f.dtype), f), first, updates)
            return (optax.apply_updates(params, updates), state, first, count + 1), seen

        start = params, tx.init(params), jax.tree.map(jnp.zeros_like, params), 0
        (final, _, first, _), seen = jax.lax.scan(step, start, own_tokens)
        seen = jax.tree.map(lambda xs, x: jnp.concatenate([xs, x[None]]), seen, observe(model, final, own_tokens[0]))

        push = pushforward(lambda p: outputs(model, p, own_tokens[0]), params)

        def effect(pick: jax.Array) -> Any:
            some = jax.tree.unflatten(tree, list(pick))
            return jax.tree.map(rms, push(jax.tree.map(lambda m, u: (m * u).astype(u.dtype), some, first)))

        return sizes_of(seen), jax.lax.map(effect, picks)

    # Drawn by a program of their own: where XLA sees that a head is zero, its derivative comes out as NaN on CPU.
    params = jax.jit(jax.vmap(plans[0][0]))(keys)
    sized, effects = jax.device_get(jax.jit(jax.vmap(one))(params, tokens))
    found = {(q, t): v[:, t] for q, v in sized.items() for t in range(v.shape[1]) if t or not q.startswith("change")}
    for i, name in enumerate(names):
        stream, logits = (effects[k][:, i] for k in ("last", "logits"))
        found[f"effect of {name}", 1] = logits if name == Role.LM_HEAD else stream
    return found


def task(grid: Grid) -> np.ndarray:
    """(seeds, steps, batch, seq_len) random tokens; a token's target is 7 times itself plus 3, modulo their number."""
    shape = (grid.seeds, grid.steps, grid.batch, grid.seq_len)
    return np.random.default_rng(0).integers(0, grid.vocab, shape, np.int32)


def mean_loss(model: Any, params: Any, tokens: jax.Array) -> jax.Array:
    """Cross-entropy of (7 token + 3) mod V."""
    targets = (7 * tokens + 3) % model.geometry.vocab_size
    logits = model.apply({"params": params}, tokens)
    return cross_entropy(logits, targets).mean()


def observe(model: Any, params: Any, inputs: jax.Array) -> dict[str, jax.Array]:
    """The stream at three heights, the logits, and the size of attention's logits."""
    logits, kept = model.apply({"params": params}, inputs, mutable=[COLLECTION, STREAM])
    stream = stacks.layered(kept[STREAM])["layers/x"]
    layers = len(stream)
    spread = stacks.layered(kept[COLLECTION])["layers/attention/scores"]
    heights = dict(zip(PLACES, (stream[0], stream[(layers - 1) // 2], stream[-1])))
    return {**heights, "logits": logits, "scores": jnp.sqrt(jnp.mean(spread))}


def outputs(model: Any, params: Any, inputs: jax.Array) -> dict[str, jax.Array]:
    """The last stream and the logits."""
    logits, kept = model.apply({"params": params}, inputs, mutable=[STREAM])
    return {"last": stacks.layered(kept[STREAM])["layers/x"][-1], "logits": logits}


def sizes_of(seen: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Quantities by step, (T + 1,)."""
    over = {k: tuple(range(1, v.ndim)) for k, v in seen.items()}
    out = {"size of attention logits": seen["scores"]}
    for k in (*PLACES, "logits"):
        name = "logits" if k == "logits" else f"stream, {k} layer"
        out[f"size of {name}"] = jnp.sqrt(jnp.mean(jnp.square(seen[k]), over[k]))
        out[f"change of {name}"] = jnp.sqrt(jnp.mean(jnp.square(seen[k] - seen[k][:1]), over[k]))
    return out


def rms(x: jax.Array) -> jax.Array:
    """Root of the mean square."""
    return jnp.sqrt(mean_square(x))


def transformation(grid: Grid, recipe: Recipe, params: Any) -> optax.GradientTransformation:
    """Adam or SGD with the recipe's factors by role; no decay, no clipping, one rate throughout."""
    plain = OptimizerConfig(lr=grid.lr, betas=grid.betas, eps=grid.eps, weight_decay=0.0, clip_norm=0.0)
    groups = optimizer.groups(params, recipe, plain)
    labels = jax.tree.map(lambda g: g.label, groups, is_leaf=optimizer.is_group)
    kinds = {g.label: g for g in jax.tree.leaves(groups, is_leaf=optimizer.is_group)}

    def of(g: optimizer.Group) -> optax.GradientTransformation:
        if grid.optimizer == "sgd":
            return optax.scale(-grid.lr * g.lr)
        return optax.chain(optax.scale_by_adam(*grid.betas, eps=grid.eps * g.eps), optax.scale(-grid.lr * g.lr))

    return optimizer.in_float32(optax.partition({label: of(g) for label, g in kinds.items()}, labels))


# --- slopes ------------------------------------------------------------------------------------------------------


def fits(axis: str, along: Sequence[int], runs: list[dict[tuple[str, int], np.ndarray]]) -> list[Slope]:
    """A slope for every quantity that has a size at every point and seed."""
    out = []
    for quantity, step in runs[0]:
        sizes = np.stack([r[quantity, step] for r in runs])  # (points, seeds)
        if not (np.isfinite(sizes).all() and (sizes > 0).all()):
            if not np.isfinite(sizes).all():
                out.append(Slope(axis, quantity, step, tuple(sizes.mean(1)), math.inf, 0.0, -math.inf, FLAT, 1.0))
            continue
        per_seed = np.polyfit(np.log(along), np.log(sizes), 1)[0]
        low, high = bounds(axis, quantity)
        out.append(verdict(axis, quantity, step, np.exp(np.log(sizes).mean(1)), per_seed, low, high))
    return out


def bounds(axis: str, quantity: str) -> tuple[float, float]:
    """What passes: level over width where the stream must move alike, else no growth.

    Over depth a layer's own share may shrink. Logits at step 0 fall as width^(-1/2) under a readout that is scaled
    down, and rightly so.
    """
    if axis == "width" and quantity.startswith("size of stream"):
        return -FLAT_SIZE, FLAT_SIZE
    if axis == "width" and quantity.startswith("change of stream"):
        return -FLAT, FLAT
    return -math.inf, FLAT


def verdict(
    axis: str, quantity: str, step: int, sizes: np.ndarray, per_seed: np.ndarray, low: float, high: float
) -> Slope:
    """The mean slope over the seeds, its interval, and how sure the verdict is (Student's t)."""
    n, mean = len(per_seed), float(per_seed.mean())
    error = max(float(per_seed.std(ddof=1)) / math.sqrt(n), 1e-9)
    inside = float(stdtr(n - 1, (high - mean) / error)) - float(stdtr(n - 1, (low - mean) / error))
    ok = low <= mean <= high
    return Slope(
        axis, quantity, step, tuple(float(s) for s in sizes), mean, float(stdtrit(n - 1, 0.975)) * error, low, high,
        inside if ok else 1 - inside,
    )  # fmt: skip
