"""AdamW with factors and decay by role, and the learning-rate schedules.

Which parameters decay follows from their roles, as the modules declared them: never from a name pattern or a rank.
Moments are float32 whatever the parameters are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from deepinit import roles
from deepinit.errors import ConfigError
from deepinit.geometry import EMBEDDINGS, VECTORS, Role
from deepinit.recipe import Recipe
from deepinit.train.config import Config, OptimizerConfig

Schedule = Callable[[Any], jax.Array]
RoleOf = Callable[[Any], Role | None]


class Group(NamedTuple):
    """Factors that some parameters share: on lr, weight_decay (0: none) and eps."""

    lr: float
    weight_decay: float
    eps: float

    @property
    def label(self) -> str:
        """A name by which an optimizer state and its checkpoint keep the group."""
        return f"lr {self.lr:.9g}, decay {self.weight_decay:.9g}, eps {self.eps:.9g}"


def schedule(config: Config) -> Schedule:
    """Learning rate of the update with this count (0 for the first), as a float32.

    Warm-up is lr (count + 1) / warmup_steps: the first update is not wasted on a rate of 0. After it, with r the
    min_lr_ratio: `cosine`, lr (r + (1 - r) (1 + cos(pi t)) / 2), t from 0 after the warm-up to 1 at `steps`
    (Loshchilov & Hutter 2017); `wsd`, lr until the last decay_steps, then a line to r lr (Hu et al. 2024, MiniCPM);
    `constant`, lr.
    """
    o, steps = config.optimizer, config.train.steps
    warmup, decay, low = o.warmup_steps, config.decay_steps, o.min_lr_ratio

    def lr(count: Any) -> jax.Array:
        count = jnp.asarray(count).astype(jnp.float32)
        rising = jnp.minimum((count + 1) / max(warmup, 1), 1)
        match o.schedule:
            case "cosine":
                t = jnp.clip((count - warmup) / max(steps - warmup, 1), 0, 1)
                falling = low + (1 - low) * (1 + jnp.cos(jnp.pi * t)) / 2
            case "wsd":
                t = jnp.clip((count + 1 - (steps - decay)) / decay, 0, 1)
                falling = 1 - (1 - low) * t
            case _:
                falling = jnp.ones((), jnp.float32)
        return o.lr * rising * falling

    return lr


def decays(role: Role, config: OptimizerConfig) -> bool:
    """Whether parameters of this role decay: matrices do; norms, biases, gates, branch scales and shifts never."""
    return role not in VECTORS and (config.decay_embeddings or role not in EMBEDDINGS)


def groups(
    params: Any, recipe: Recipe, config: OptimizerConfig, role_of: RoleOf = roles.role_of, gains: bool = True
) -> Any:
    """The tree with a `Group` for every parameter; boxed trees give that of the unboxed.

    Args:
      params: arrays or their shapes.
      recipe: its `updates` hold the factors by role.
      config: says whether embeddings decay.
      role_of: path -> role, by default read from the leaf's name.
      gains: whether the model's norms have gains, which must not decay.

    Raises:
      ConfigError: a parameter has no role; or nothing decays although the scheme has it, or everything although there
        are norms.
    """

    def group(path: Any, _: Any) -> Group:
        role = role_of(path)
        if role is None:
            raise ConfigError(f"parameter {'/'.join(roles.names(path))} has no role: the optimizer cannot place it")
        update = recipe.update_at(roles.locate(path).canonical, role)
        return Group(update.lr, update.weight_decay if decays(role, config) else 0.0, update.eps)

    tree = jax.tree.map_with_path(group, roles.unboxed(params))
    decaying = any(u.weight_decay for name, u in recipe.updates.items() if roles.role_of(name) not in VECTORS)
    if config.weight_decay and decaying:
        mask = [g.weight_decay > 0 for g in jax.tree.leaves(tree, is_leaf=is_group)]
        if not any(mask):
            raise ConfigError("optimizer.weight_decay: no parameter would decay; are the roles right?")
        if all(mask) and gains and recipe.residual.norm != "none":
            raise ConfigError("optimizer.weight_decay: every parameter would decay, norms too; are the roles right?")
    return tree


def is_group(x: Any) -> bool:
    """Whether a node of a tree is a `Group` (which jax would else walk into)."""
    return isinstance(x, Group)


def decay_mask(params: Any, recipe: Recipe, config: OptimizerConfig, role_of: RoleOf = roles.role_of) -> Any:
    """The tree with True where weight decay applies."""
    return jax.tree.map(lambda g: g.weight_decay > 0, groups(params, recipe, config, role_of), is_leaf=is_group)


def make(config: Config, recipe: Recipe, params: Any, role_of: RoleOf = roles.role_of) -> optax.GradientTransformation:
    """Clipping by global norm, then Adam with weight decay for each group of parameters.

    The update of a parameter is -lr f_lr (m / (sqrt(v) + eps f_eps) + weight_decay f_decay w), with f the factors of
    its role: decay is `decoupled` (Loshchilov & Hutter 2019) and its rate follows the group's learning rate. Where it
    is `independent`, the second term is divided by the schedule's peak, so that no peak moves it (Wortsman et al. 2023,
    arXiv:2309.14322); where it is `coupled`, weight_decay f_decay w is added to the gradient and goes through the
    moments, as Adam with an L2 loss has it.

    Args:
      config: the run's settings.
      recipe: gives the factors by role.
      params: the parameters or their shapes.
      role_of: path -> role.
    """
    o, lr = config.optimizer, schedule(config)
    tree = groups(params, recipe, o, role_of, config.model.norm_gain)

    def adamw(g: Group) -> optax.GradientTransformation:
        rate = o.weight_decay * g.weight_decay
        if o.decay == "independent":
            rate = rate / o.lr if o.lr else 0.0
        decay = optax.add_decayed_weights(rate) if rate else optax.identity()
        adam = optax.scale_by_adam(*o.betas, eps=o.eps * g.eps, mu_dtype=jnp.float32)
        order = (decay, adam) if o.decay == "coupled" else (adam, decay)
        return optax.chain(*order, optax.scale_by_learning_rate(lambda count: lr(count) * g.lr))

    kinds = {g.label: g for g in jax.tree.leaves(tree, is_leaf=is_group)}
    labels = jax.tree.map(lambda g: g.label, tree, is_leaf=is_group)
    by_role = optax.partition({label: adamw(kinds[label]) for label in sorted(kinds)}, labels)
    return in_float32(optax.chain(clipped(o.clip_norm) if o.clip_norm else optax.identity(), by_role))


def clipped(most: float) -> optax.GradientTransformation:
    """Gradients times most / norm where their global norm is above `most`.

    One factor for all: `optax.clip_by_global_norm` divides every entry, which XLA keeps as another tree in memory.
    """

    def clip(grads: Any, _: Any) -> Any:
        factor = jnp.minimum(most / norm(grads), 1)
        return jax.tree.map(lambda g: g * factor, grads)

    return optax.stateless(clip)


def norm(tree: Any) -> jax.Array:
    """Global norm, from a sum of float32 squares for each layer of each leaf.

    Statistics by role take the same sums: XLA counts once for both, and keeps no tree of squares in memory.
    """
    sums = [jnp.sum(jnp.square(x.astype(jnp.float32)), leaf.within(x.ndim)) for leaf, x in roles.leaves(tree)]
    # without a barrier XLA makes one sum of two, and has other squares for it than statistics have
    return jnp.sqrt(sum(map(jnp.sum, jax.lax.optimization_barrier(sums))))


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same transformation, its state and arithmetic in float32 whatever the parameters are."""

    def up(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer count
            return inner.update(up(grads), state, up(params))

    return optax.GradientTransformation(lambda params: inner.init(up(params)), update)


def apply_updates(params: Any, updates: Any) -> Any:
    """Parameters plus float32 updates, the sum in float32, each in the parameter's own type."""
    return jax.tree.map(lambda p, u: (p.astype(jnp.float32) + u).astype(p.dtype), params, updates)


def state_shardings(tx: optax.GradientTransformation, params: Any, shardings: Any, scalar: Any) -> tuple[Any, Any]:
    """(shapes, shardings) of the optimizer's state: moments lie as their parameters do, counts are replicated."""

    def hole(x: Any) -> bool:
        return isinstance(x, optax.MaskedNode)  # where a group's state leaves out the parameters of the others

    shapes = jax.eval_shape(tx.init, params)
    placed = optax.tree.map_params(
        tx,
        lambda x, sharding: x if hole(x) else sharding,
        shapes,
        shardings,
        transform_non_params=lambda _: scalar,
        is_leaf=hole,
    )
    return shapes, placed
