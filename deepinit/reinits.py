"""A recipe's initial values for a parameter tree of any kind: the same bits that our own modules get.

Each matrix is drawn in canonical order (`deepinit.views`) from (seed, role, layer) and then brought into the axes in
which the tree keeps it. So a Linen model, its NNX twin and a safetensors file of it receive the same weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from deepinit import initializers, projection, sampler
from deepinit import roles as roles_of
from deepinit.errors import ConfigError
from deepinit.geometry import VECTORS, Role
from deepinit.interop import trees
from deepinit.interop.trees import STACKED_EXPERTS
from deepinit.laws import Constant, External, Factor
from deepinit.recipe import Recipe
from deepinit.views import View, on_device


def reinit(params: Any, recipe: Recipe, *, roles: Any = None, seed: int = 0) -> Any:
    """A tree like `params` with the initial values of `recipe`; layouts, dtypes, boxes and containers are kept.

    Args:
      params: a Linen tree (boxed or not, scanned or not), an `nnx.State` or its pure dict, an NNX module, or any dict
        of arrays or of `jax.ShapeDtypeStruct`s.
      recipe: at the tree's own sizes.
      roles: `{regex: role}` or a `deepinit.interop.Table`, where the leaves are not named by their roles and no preset
        knows them.
      seed: of the draws.

    Returns:
      The same kind of tree; of an NNX module, a new module. Leaves without a role keep their values.

    Raises:
      ConfigError: a leaf without a rule or a shape that cannot hold its matrix; a recipe whose law is the caller's.
    """
    state = roles_of.state_of(params)
    tree = trees.viewed(state, recipe.geometry, roles)
    managed = [v for v in tree.views if v.leaf.role and v.leaf.role in recipe.weights]
    layouts = {v.array: getattr(tree.arrays[v.array], "sharding", None) for v in managed}
    meshed = {i: s if isinstance(s, NamedSharding) else None for i, s in layouts.items()}

    def draw() -> dict[int, jax.Array]:
        return assembled(managed, recipe, seed, {i: tree.arrays[i].dtype for i in layouts})

    new = dict(enumerate(tree.arrays)) | jax.jit(draw, out_shardings=meshed if any(meshed.values()) else None)()
    return rebuilt(params, state, [new[i] for i in range(len(new))])


def assembled(views: Sequence[View], recipe: Recipe, seed: int, dtypes: Mapping[int, Any]) -> dict[int, jax.Array]:
    """Array -> its values, put together from its parts; what one slot holds in all layers is drawn at once."""
    slots: dict[Any, list[View]] = defaultdict(list)
    for view in views:
        slots[view.leaf.slot, view.canonical, view.expert, str(dtypes[view.array])].append(view)
    parts: dict[int, list[tuple[View, jax.Array]]] = defaultdict(list)
    for members in slots.values():
        layers = [v.layer(i) for v in members for i in range(v.layers)]
        drawn = projected(values(members[0], layers, recipe, seed, dtypes[members[0].array]), members[0], recipe)
        start = 0
        for view in members:
            parts[view.array].append((view, view.put(drawn[start : start + view.layers])))
            start += view.layers
    made = {}
    for i, pieces in parts.items():
        pieces.sort(key=lambda piece: piece[0].cut or ())
        view = pieces[0][0]
        made[i] = jnp.concatenate([x for _, x in pieces], view.cut[0]) if view.cut else pieces[0][1]
        if made[i].shape != view.shape:
            raise ConfigError(f"{view.leaf.path}: its roles fill {made[i].shape} of {view.shape}")
    return made


def values(view: View, layers: Sequence[int | None], recipe: Recipe, seed: int, dtype: Any) -> jax.Array:
    """(layers, *canonical) values of one slot; a layer is None outside of the stack."""
    leaf, role, shape = view.leaf, view.leaf.role, view.canonical
    assert role is not None
    law = recipe.law_at(leaf.canonical, role)
    if isinstance(law, External):
        raise ConfigError(f"reinit: scheme {recipe.name} leaves {role} to the caller")
    if isinstance(law, Constant) and not law.layered and role not in (Role.TOKEN_EMBED, Role.LM_HEAD):
        return jnp.full((len(layers), *shape), np.asarray(law.value, np.float32), dtype)
    slot = leaf.slot
    if isinstance(law, Factor) and law.side == "right" and slot.endswith(role):
        slot = slot.removesuffix(role) + law.partner
    key = sampler.slot_words(seed, slot)
    inside = layers[0] is not None
    at = np.asarray([layer or 0 for layer in layers], np.uint32)
    folded: Any = sampler.fold(key, at) if inside else [np.asarray([k]) for k in key]
    if view.expert is not None:
        shape = (recipe.geometry.num_experts, *shape)

    def one(words: Any, layer: Any) -> jax.Array:
        where = layer if inside else None
        own = role in VECTORS or law is not recipe.weights[role]
        closure = initializers.of_law(law, where) if own else recipe.initializer(role, where)
        drawn = closure(jax.random.wrap_key_data(words, impl="threefry2x32"), shape, dtype)
        return drawn if view.expert is None else drawn[view.expert]

    return jax.vmap(one)(jnp.asarray(np.stack(folded, -1)), jnp.asarray(at, np.int32))


def projected(drawn: jax.Array, view: View, recipe: Recipe) -> jax.Array:
    """The values as the recipe's `project` has them, whatever axes stand for d_model; without one, as they are."""
    role, width = view.leaf.role, recipe.geometry.d_model
    axis = projection.axis_of(role) if recipe.project and role else None
    if axis is None:
        return drawn
    experts = recipe.geometry.num_experts if role in STACKED_EXPERTS and view.expert is None else 1
    matrix = (-1, width) if axis == -1 else (len(drawn) * experts, width, -1)
    return projection.to_unit(drawn.reshape(matrix), axis if axis == -1 else -2).reshape(drawn.shape)


# --- containers --------------------------------------------------------------------------------------------------


def rebuilt(params: Any, state: Any, arrays: Sequence[Any]) -> Any:
    """The container again, with other arrays in it."""
    new = jax.tree.unflatten(jax.tree.structure(state), on_device(arrays))
    if state is params:
        return new
    from flax import nnx

    parts: Any = nnx.split(params, nnx.Param, ...)
    return nnx.merge(parts[0], new, parts[2])
