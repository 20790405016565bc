"""What a drawn model does at step 0, measured on its mesh in one compiled pass over the scanned stack.

Forward and backward once, with statistics kept and the stream's gradient tapped; the first step of SGD and of the
configured optimizer; and, to first order, what each role's step alone does to the logits of some tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from deepinit import roles, stacks
from deepinit.geometry import VECTORS, Role
from deepinit.nn.losses import cross_entropy
from deepinit.nn.stats import COLLECTION, TAPS
from deepinit.recipe import Recipe
from deepinit.roles import STACK, Leaf
from deepinit.sharding import unrolled
from deepinit.signal.measured import Measured, RoleSignal

FACTORS = (Role.RESIDUAL_GATE, Role.BRANCH_SCALE)
EFFECT_TOKENS = 64
"""Positions of a sequence on whose logits a role's step is followed."""
ByRole = dict[str, jax.Array]


def probe(
    model: Any,
    recipe: Recipe,
    params: Any,
    tokens: Any,
    update: Callable[[Any, Any], Any],
    rates: Any,
    *,
    effects: int = 1,
) -> Measured:
    """Measure one batch; under `jax.set_mesh`, on parameters laid out as they train.

    Args:
      model: a `deepinit.nn.Decoder`; dropout is off.
      recipe: that of the model.
      params: its parameters.
      tokens: (B, T + 1) whole numbers, each row T inputs and their T targets.
      update: (gradients, parameters) -> what the configured optimizer's first step adds.
      rates: the tree of an SGD step's learning rates.
      effects: sequences on whose first logits each role's step is followed; 0: none.
    """
    run = jax.jit(lambda p, t: measure(model, p, t, update, rates, effects)).lower(params, tokens).compile()
    began = time.perf_counter()
    found = jax.block_until_ready(run(params, tokens))
    seconds = time.perf_counter() - began
    return collect(jax.device_get(found), params, recipe, np.shape(tokens), seconds)


def measure(model: Any, params: Any, tokens: jax.Array, update: Any, rates: Any, effects: int) -> dict[str, Any]:
    """Everything that a probe keeps, small arrays only; traced under jit."""
    taps = taps_of(model)
    value = jax.value_and_grad(lambda p, t: observed_loss(model, p, t, tokens), argnums=(0, 1), has_aux=True)
    (loss, seen), (grads, tapped) = value(params, taps)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    steps = {"optimizer": update(grads, params)}
    if rates is not None:
        steps["sgd"] = jax.tree.map(lambda r, g: -r * g, rates, grads)
    out = {
        "loss": loss,
        "stats": seen["stats"],
        "logits": seen["logits"],
        "gradient2": by_layer(tapped),
        "weight2": by_role(params, square),
        "role_gradient2": by_role(grads, square),
        "zero": by_role(grads, lambda g: (g == 0).astype(jnp.float32)),
        "step2": {name: by_role(step, square) for name, step in steps.items()},
        "gates": gates(params),
    }
    if effects:
        short = tokens[:effects, : min(EFFECT_TOKENS, tokens.shape[1] - 1)]
        out["effects"] = {name: effect_by_role(model, params, step, short) for name, step in steps.items()}
    return out


def observed_loss(model: Any, params: Any, taps: Any, tokens: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
    """(mean loss, statistics and facts of the logits) of inputs tokens[:, :-1] and targets tokens[:, 1:]."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits, kept = model.apply({"params": params, TAPS: taps}, inputs, mutable=[COLLECTION])
    losses = cross_entropy(logits, targets)
    row = jnp.arange(logits.shape[-1])
    here = row == inputs[..., None]  # found by comparing: looked up by index, a split vocabulary would be gathered
    own = jnp.sum(jnp.where(here, logits, 0.0), -1)
    other = jnp.where(here | (row >= model.geometry.vocab_size), 0.0, logits)
    spread = jnp.sum(jnp.square(other)) / (inputs.size * max(model.geometry.vocab_size - 1, 1))
    return losses.mean(), {"stats": kept[COLLECTION], "logits": (spread, own.mean())}


def taps_of(model: Any) -> dict[str, Any]:
    """Zeros that make every layer of the model, and its stack's input, tell the gradient that passes."""
    g, zero = model.geometry, jnp.zeros(())
    if model.scan:
        inside = {name: {"gradient": jnp.zeros(len(layers))} for name, layers in stacks.named(g).items()}
    else:
        inside = {f"{STACK}_{i}": {"gradient": zero} for i in range(g.num_layers)}
    return {"gradient": zero, **inside}


def by_layer(taps: Mapping[str, Any]) -> jax.Array:
    """(L + 1,) from the tree of taps."""
    found = stacks.layered(taps)
    return jnp.concatenate([found["gradient"][None], found[f"{STACK}/gradient"]])


# --- sums by role ------------------------------------------------------------------------------------------------


def square(x: jax.Array) -> jax.Array:
    """x^2 in float32."""
    return jnp.square(x.astype(jnp.float32))


def key(leaf: Leaf) -> str:
    """What a leaf is counted under: its role; a vector outside the stack, by module; without a role, its path."""
    if leaf.role is None:
        return leaf.canonical
    return (
        str(leaf.role)
        if inside(leaf.canonical) or leaf.role not in VECTORS
        else "/".join(leaf.canonical.split("/")[-2:])
    )


def by_role(tree: Any, f: Callable[[jax.Array], jax.Array]) -> ByRole:
    """Sums of f over the entries of each role, (layers that have it,) inside the stack, (1,) outside."""
    sums: dict[str, dict[str, tuple[Leaf, jax.Array]]] = {}
    for leaf, x in roles.leaves(tree):
        total = jnp.sum(f(x), axis=leaf.within(x.ndim))
        stacks_of = sums.setdefault(key(leaf), {})
        name = leaf.path.partition("/")[0] if leaf.at(0) is not None else ""  # one stack, or one unrolled layer
        stacks_of[name] = leaf, (stacks_of[name][1] if name in stacks_of else jnp.zeros(())) + total
    return {k: stacks.in_order(list(of.values())) for k, of in sums.items()}


def sizes(tree: Any) -> dict[str, int]:
    """Entries that each role has in a layer that has it."""
    counts: dict[str, dict[str, int]] = {}
    for leaf, x in roles.leaves(tree):
        counts.setdefault(key(leaf), {})[leaf.canonical] = int(np.prod(x.shape[int(leaf.stacked) :]))
    return {k: sum(v.values()) for k, v in counts.items()}


def layers_of(tree: Any) -> dict[str, tuple[int, ...]]:
    """The layers that have a role; none outside the stack."""
    found: dict[str, set[int]] = {}
    for leaf, x in roles.leaves(tree):
        found.setdefault(key(leaf), set()).update(i for i in leaf.rows(x.shape) if i is not None)
    return {k: tuple(sorted(v)) for k, v in found.items()}


def gates(params: Any) -> dict[str, jax.Array]:
    """Mean absolute value of every learnable factor, by canonical path and layer."""

    def size(path: str, x: jax.Array) -> jax.Array:
        return jnp.abs(x.astype(jnp.float32)).reshape(len(x) if inside(path) else 1, -1).mean(1)

    return {path: size(path, x) for path, x in stacks.layered(params, FACTORS).items()}


def inside(canonical: str) -> bool:
    """Whether a leaf is one of a layer's."""
    return canonical.startswith(f"{STACK}/")


def effect_by_role(model: Any, params: Any, step: Any, tokens: jax.Array) -> ByRole:
    """RMS change of the logits by each role's part of a step, to first order."""
    leaves = roles.leaves(params)
    names = list(dict.fromkeys(key(leaf) for leaf, _ in leaves))
    picks = np.asarray([[key(leaf) == name for leaf, _ in leaves] for name in names], np.float32)
    tree = jax.tree.structure(params)
    model = model.clone(dispatch="dense")  # jax differentiates a ragged product once only

    def logits(p: Any) -> jax.Array:
        return model.apply({"params": p}, tokens)[..., : model.geometry.vocab_size]

    push = pushforward(logits, params)

    def one(_: None, pick: jax.Array) -> tuple[None, jax.Array]:
        some = jax.tree.unflatten(tree, list(pick))
        moved = push(jax.tree.map(lambda m, u, p: (m * u).astype(p.dtype), some, step, params))
        return None, jnp.sqrt(jnp.mean(square(moved)))

    return dict(zip(names, jax.lax.scan(one, None, jnp.asarray(picks), unroll=unrolled())[1]))


def pushforward(f: Callable[[Any], Any], at: Any) -> Callable[[Any], Any]:
    """direction -> derivative of f along it, from two reverse passes: custom gradients have no forward mode."""
    y, pull = jax.vjp(f, at)
    _, push = jax.vjp(lambda cotangent: pull(cotangent)[0], jax.tree.map(jnp.zeros_like, y))
    return lambda direction: push(direction)[0]


# --- on the host -------------------------------------------------------------------------------------------------


def collect(found: Mapping[str, Any], params: Any, recipe: Recipe, shape: tuple[int, ...], seconds: float) -> Measured:
    """The numbers of a pass as a `Measured`."""
    stats, names = stacks.layered(found["stats"]), recipe.geometry.additions
    branch = np.stack([stats[f"{STACK}/{kind}_residual/branch_ms"] for kind in names], 1).ravel()
    count, held = sizes(params), layers_of(params)
    steps = {name: {k: np.asarray(v) for k, v in step.items()} for name, step in found["step2"].items()}
    signals = {}
    with np.errstate(divide="ignore", invalid="ignore"):
        for role, weight2 in found["weight2"].items():
            weight2 = np.asarray(weight2, np.float64)
            ratio = {name: np.where(s[role] > 0, np.sqrt(s[role] / weight2), 0.0) for name, s in steps.items()}
            effect = {name: float(e[role]) for name, e in found.get("effects", {}).items()}
            signals[role] = RoleSignal(
                weight_rms=np.sqrt(weight2 / count[role]),
                gradient=np.sqrt(np.asarray(found["role_gradient2"][role], np.float64)),
                zero_gradient=np.asarray(found["zero"][role]) / count[role],
                sgd_update=ratio.get("sgd", np.full(len(weight2), np.nan)),
                update=ratio["optimizer"],
                sgd_effect=effect.get("sgd", math.nan),
                effect=effect.get("optimizer", math.nan),
                layers=held[role],
            )

    def stream(what: str) -> np.ndarray:
        """Of the stack's input, and after each addition."""
        return np.concatenate([np.ravel(stats[f"embed_{what}"]), np.ravel(stats[f"{STACK}/stream_{what}"])])

    return Measured(
        scheme=recipe.name,
        layers=recipe.geometry.num_layers,
        batch=shape[0],
        seq_len=shape[1] - 1,
        variance=stream("ms").astype(np.float64),
        branch=branch.astype(np.float64),
        correlation=stream("corr").astype(np.float64),
        entropy=np.ravel(stats[f"{STACK}/attention/entropy"]),
        scores=np.ravel(stats[f"{STACK}/attention/scores"]),
        gradient=np.sqrt(np.asarray(found["gradient2"], np.float64)),
        roles=signals,
        gates={path: np.asarray(v) for path, v in found["gates"].items()},
        loss=float(found["loss"]),
        logit_variance=float(found["logits"][0]),
        own_logit=float(found["logits"][1]),
        seconds=seconds,
    )


def observer(model: Any, recipe: Recipe, tx: Any, mesh: Any) -> Callable[[Any, Any], Callable[[], Measured]]:
    """For a training run: (state, batch) -> a function that waits for the numbers of the step about to be taken.

    One more forward and backward pass over the batch's first part, without dropout; nothing is changed.
    """

    def look(params: Any, opt_state: Any, tokens: jax.Array) -> dict[str, Any]:
        return measure(model, params, tokens, lambda g, p: tx.update(g, opt_state, p)[0], None, 0)

    run = jax.jit(look, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def observe(state: Any, batch: Any) -> Callable[[], Measured]:
        shape, shapes = (
            batch["tokens"].shape[1:],
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state.params),
        )
        found = run(state.params, state.opt_state, batch["tokens"][0])
        return lambda: collect(jax.device_get(found), shapes, recipe, shape, math.nan)

    return observe
