"""One optimizer step as one jitted program: accumulate, clip, update, or change nothing if a number is not finite.

Shapes: A parts of a batch, B sequences in a part, T tokens. The loss is the mean over tokens of all parts, so that
taking a batch in parts does not change it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deepinit import stacks
from deepinit.nn.losses import cross_entropy
from deepinit.sharding import batch_sharding, unrolled
from deepinit.train import optimizer
from deepinit.train.data import Reader
from deepinit.train.optimizer import Schedule

Metrics = dict[str, jax.Array]


class TrainState(struct.PyTreeNode):
    """Everything that a step changes, and that a checkpoint keeps."""

    params: Any
    opt_state: Any
    step: jax.Array
    """() int32: steps done; the next one takes the batch and the dropout key of this number."""
    bad_steps: jax.Array
    """() int32: steps among them that were not finite and changed nothing."""
    bad_in_row: jax.Array
    """() int32: how many of the last steps, without a good one between."""


def layout(params: Any, placed: Any, tx: optax.GradientTransformation, mesh: Mesh) -> tuple[TrainState, TrainState]:
    """(shapes, shardings) of the state of parameters, or of their shapes, that are `placed` so: moments lie as their
    parameters do, all scalars on every device.
    """
    scalar: Any = NamedSharding(mesh, PartitionSpec())
    number: Any = jax.ShapeDtypeStruct((), np.int32)
    moments, moments_placed = optimizer.state_shardings(tx, params, placed, scalar)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    state = TrainState(shapes, moments, number, number, number)
    return state, TrainState(placed, moments_placed, scalar, scalar, scalar)


def create(
    params: Any, tx: optax.GradientTransformation, mesh: Mesh, shardings: TrainState | None = None
) -> tuple[TrainState, TrainState]:
    """The state at step 0 and its shardings, those of `layout`."""
    if shardings is None:
        shardings = layout(params, jax.tree.map(lambda x: x.sharding, params), tx, mesh)[1]
    opt_state = jax.jit(tx.init, out_shardings=shardings.opt_state)(params)
    counters = [jax.device_put(np.int32(0), shardings.step) for _ in range(3)]  # three, since each is donated
    return TrainState(params, opt_state, *counters), shardings


def released(state: TrainState) -> TrainState:
    """The shapes, types and layouts of a state whose memory is given back, so that another can take its place."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    for x in jax.tree.leaves(state):
        x.delete()
    return shapes


def loss_sums(model: Any, params: Any, batch: Any, key: Any = None) -> tuple[jax.Array, jax.Array]:
    """(sum of the targets' losses in nats, number of targets), both float32; with a key, dropout is on."""
    return objective(model, params, batch, key)[1]


def objective(model: Any, params: Any, batch: Any, key: Any = None) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """What is minimized, and `loss_sums`: the same loss, plus, times the targets, what the experts' load costs."""
    inputs_BT, targets_BT = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    options: dict[str, Any] = {"deterministic": key is None, "rngs": {} if key is None else {"dropout": key}}
    mask_BT = batch["segments"][:, :-1] if "segments" in batch else None
    in_parts = getattr(model, "loss_chunks", 1) > 1
    if in_parts:
        options["loss_of"] = targets_BT, batch["weights"]
    if balanced := getattr(model, "balance_loss", 0.0):
        out, kept = model.apply({"params": params}, inputs_BT, mask_BT, mutable=["losses"], **options)
    else:
        out = model.apply({"params": params}, inputs_BT, mask_BT, **options)
    loss = out if in_parts else jnp.sum(cross_entropy(out, targets_BT) * batch["weights"])
    targets = jnp.sum(batch["weights"])
    total = loss + targets * sum(map(jnp.sum, jax.tree.leaves(kept))) if balanced else loss
    return total, (loss, targets)


def gradients(model: Any, params: Any, batch: Any, key: Any = None) -> tuple[jax.Array, jax.Array, Any]:
    """(mean loss, number of targets, gradient of the mean loss in float32) of a batch of A parts.

    Every part's loss is divided by the targets of all, so that every token counts the same. It is the loss that is
    divided: quotients of a summed gradient would be another tree in memory.
    """
    count = jnp.maximum(jnp.sum(batch["weights"]), 1)

    def share(p: Any, piece: Any, own: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        total, (loss, tokens) = objective(model, p, piece, own)
        return total / count, (loss / count, tokens)

    def part(carry: Any, xs: Any) -> tuple[Any, None]:
        i, piece = xs
        own = None if key is None else jax.random.fold_in(key, i)
        (_, sums), grads = jax.value_and_grad(share, has_aux=True)(params, piece, own)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return jax.tree.map(jnp.add, carry, (*sums, grads)), None

    zero = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    parts = len(batch["tokens"])
    found, _ = jax.lax.scan(
        part, (jnp.zeros(()), jnp.zeros(()), zero), (jnp.arange(parts), batch), unroll=parts == 1 or unrolled()
    )
    return found


def train_step(
    model: Any,
    tx: optax.GradientTransformation,
    lr: Schedule,
    seed: int,
    dropout: bool,
    project: Callable[[Any], Any] = lambda params: params,
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """The pure function (state, batch) -> (state, metrics); `project` is applied to the parameters after each update.

    A loss or gradient that is not finite leaves parameters and optimizer as they were, and is counted. The dropout key
    follows from (seed, step, part) alone, so that a resumed run draws the masks of an uninterrupted one.
    """

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(dropout_key(seed), state.step) if dropout else None
        loss, tokens, grads = gradients(model, state.params, batch, key)
        norm = optimizer.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        new = project(optimizer.apply_updates(state.params, updates)), opt_state
        old = state.params, state.opt_state
        params, opt_state = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
        bad = (~finite).astype(jnp.int32)
        after = TrainState(params, opt_state, state.step + 1, state.bad_steps + bad, (state.bad_in_row + bad) * bad)
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "lr": lr(state.step - state.bad_steps),
            "tokens": tokens,
            "bad_steps": after.bad_steps,
            "bad_in_row": after.bad_in_row,
        }
        return after, metrics

    return step


def dropout_key(seed: int) -> jax.Array:
    """The key of all dropout in a run, of one implementation whatever the process default is."""
    key = jax.random.key(seed % 2**32, impl="threefry2x32")
    return jax.random.fold_in(key, seed // 2**32)


def jitted(step: Callable[..., Any], shardings: TrainState, mesh: Mesh) -> Any:
    """The step compiled for a mesh: the state is donated and keeps its layout, batches (A, B, ...) split along B.

    On CPUs XLA would copy the moments before each update, for want of an order between their readers and their writer
    that its default analysis does not look for.
    """
    scalar = NamedSharding(mesh, PartitionSpec())
    batch = batch_sharding(mesh, ndim=3, axis=1)
    flags = {"xla_cpu_copy_insertion_use_region_analysis": True} if mesh.devices.flat[0].platform == "cpu" else None
    return jax.jit(
        step,
        in_shardings=(shardings, batch),
        out_shardings=(shardings, scalar),
        donate_argnums=0,
        compiler_options=flags,
    )


def put(batch: dict[str, np.ndarray], parts: int, mesh: Mesh) -> dict[str, jax.Array]:
    """A host batch of A x B sequences on the devices, as (A, B, ...)."""
    return place(lambda rows: {k: v[list(rows)] for k, v in batch.items()}, len(batch["tokens"]), parts, mesh)


def place(read: Reader, size: int, parts: int, mesh: Mesh) -> dict[str, jax.Array]:
    """A batch of size = A x B sequences on the devices, as (A, B, ...), of which this process reads only its own rows.

    `read(rows)` gives those rows; their `id`s stay on the host.
    """
    sharding = batch_sharding(mesh, ndim=3, axis=1)
    shape = (parts, size // parts)
    index = np.arange(size).reshape(shape)
    mine = sharding.addressable_devices_indices_map((*shape, 1)).values()
    rows = sorted({int(row) for at in mine for row in index[() if at is None else at[:2]].flat})
    where = np.full(size, -1)
    where[rows] = np.arange(len(rows))
    batch = read(rows)

    def put(values: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(
            (*shape, *values.shape[1:]), sharding, lambda at: values[where[index[() if at is None else at[:2]]]]
        )

    return {name: put(values) for name, values in batch.items() if name != "id"}


def evaluator(model: Any, mesh: Mesh) -> Callable[[Any, Any], float]:
    """A function (params, [(size, read)]) -> mean loss over the targets of the batches, dropout off."""
    scalar = NamedSharding(mesh, PartitionSpec())
    run = jax.jit(
        lambda params, batch: loss_sums(model, params, jax.tree.map(lambda x: x[0], batch)), out_shardings=scalar
    )

    def evaluate(params: Any, batches: Any) -> float:
        sums = [run(params, place(read, size, 1, mesh)) for size, read in batches]
        losses, tokens = np.asarray(jax.device_get(sums), np.float64).T
        return float(losses.sum() / max(tokens.sum(), 1))

    return evaluate


def stream_variance(model: Any, params: Any, tokens_BT: Any) -> list[float]:
    """Mean square of the stream after the embedding and after each layer."""
    layout = jax.tree.leaves(params)[0].sharding
    scalar = NamedSharding(layout.mesh, PartitionSpec()) if isinstance(layout, NamedSharding) else None
    run = jax.jit(lambda p, x: model.apply({"params": p}, x, mutable=["stats"])[1]["stats"], out_shardings=scalar)
    stats = stacks.layered(jax.device_get(run(params, tokens_BT)))
    return [float(np.ravel(stats["embed_ms"])[0]), *map(float, stats["layers/stream_ms"][:, -1])]
