"""Parameters born sharded: abstract shapes -> layouts -> one jitted init without a collective.

Every leaf is drawn from (seed, slot, layer): scanned or unrolled, one device or any mesh, the same bits, and the first
500 layers of 1000 are those of a 500-layer model. An unrolled stack is drawn as one stacked array a slot and then taken
apart, so that compile time does not grow with depth.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from jax.sharding import Mesh

from deepinit import initializers, roles, sampler, sharding
from deepinit.errors import ConfigError
from deepinit.laws import Factor
from deepinit.projection import project
from deepinit.recipe import Recipe
from deepinit.roles import Leaf


def init_sharded(model: linen.Module, recipe: Recipe, mesh: Mesh | None = None, seed: int = 0) -> Any:
    """The initial parameters of a model on a mesh, as a plain tree of arrays; `mesh=None` means one device.

    A leaf without a role keeps its module's own initializer (`verify` lists it as unmanaged).

    Raises:
      ConfigError: the model's sizes are not the recipe's, or the mesh does not divide a leaf.
    """
    if model.geometry != recipe.geometry:
        raise ConfigError(f"the model has geometry {model.geometry}, the recipe {recipe.geometry}")
    return init_shapes(abstract_params(model), model, recipe, mesh, seed)


def init_shapes(boxed: Any, model: linen.Module, recipe: Recipe, mesh: Mesh | None, seed: int) -> Any:
    """`init_sharded` where the model's `abstract_params` are there already."""
    shapes = roles.unboxed(boxed)
    shared = pairs(recipe)
    draw, keys = plan(model, shapes, seed, apart={*shared, *shared.values()})

    def whole(keys: Any) -> Any:
        return project(draw(keys), recipe)

    if mesh is None:
        params = jitted(whole)(keys)
    else:
        layout = sharding.param_shardings(boxed, mesh)
        check_divisible(shapes, layout)
        params = jitted(whole, layout)(keys)
    return with_pairs(model, params, seed, shared) if shared else params


def jitted(draw: Callable[[Any], Any], layout: Any = None) -> Any:
    """A draw to be compiled for a layout; on CPUs with AVX-512's wide integers (the same bits a fifth sooner)."""
    flags = {"xla_cpu_prefer_vector_width": 512} if jax.default_backend() == "cpu" else None
    return jax.jit(draw, out_shardings=layout, compiler_options=flags)


def abstract_params(model: linen.Module) -> Any:
    """Shapes, dtypes and logical axes of the parameters; nothing is drawn and nothing allocated."""
    quick = model.clone(initializer=lambda role, layer=None: initializers.zeros)
    return jax.eval_shape(quick.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]


def check_divisible(shapes: Any, layout: Any) -> None:
    """Refuse a mesh that does not divide a leaf, naming the leaf, before anything compiles."""
    for (path, x), s in zip(jax.tree.leaves_with_path(shapes), jax.tree.leaves(layout)):
        for size, axes in zip(x.shape, s.spec):
            names = (axes,) if isinstance(axes, str) else axes or ()
            parts = int(np.prod([s.mesh.shape[a] for a in names]))
            if size % parts:
                raise ConfigError(
                    f"mesh.{'*'.join(names)}: {parts} does not divide {size}, an axis of "
                    f"{roles.locate(path).path} {x.shape}; nearest that it divides: "
                    f"{max(size // parts, 1) * parts} and {(size // parts + 1) * parts}"
                )


def pairs(recipe: Recipe) -> dict[str, str]:
    """Role -> the role whose key it shares, since the two are drawn together."""
    return {r: law.partner for r, law in recipe.weights.items() if isinstance(law, Factor) and law.side == "right"}


def with_pairs(model: Any, params: Any, seed: int, shared: Mapping[str, str]) -> Any:
    """The tree with the matrices that are drawn together, from one key for both.

    One device draws each of them whole, and then it is laid out: on a mesh every device would decompose them all.
    """
    found, structure = jax.tree.flatten_with_path(params)
    alone = sharding.make_mesh(devices=jax.local_devices()[:1])
    for slot, members in slots([roles.locate(path) for path, _ in found]).items():
        *stack, role = slot.split("/")
        if role not in (*shared, *shared.values()):
            continue
        located = [(roles.locate(found[i][0]), found[i][1]) for i in members]
        words = slot_keys(seed, "/".join([*stack, shared.get(role, role)]), located)
        with jax.set_mesh(alone):
            drawn = jax.jit(functools.partial(draw_slot, model, located))(words)
        for i, made in zip(members, drawn):
            path, old = found[i]
            found[i] = path, jax.make_array_from_callback(old.shape, old.sharding, np.asarray(made).__getitem__)
    return jax.tree.unflatten(structure, [x for _, x in found])


def slots(leaves: Sequence[Leaf]) -> dict[str, list[int]]:
    """Slot -> the places of its leaves, of all that have a role."""
    groups: dict[str, list[int]] = defaultdict(list)
    for i, leaf in enumerate(leaves):
        if leaf.role is not None:
            groups[leaf.slot].append(i)
    return groups


def plan(model: Any, shapes: Any, seed: int, apart: Collection[str] = ()) -> tuple[Any, Any]:
    """(draw, keys): draw(keys) makes the tree; keys are its only input, so another seed compiles nothing anew.

    `apart`: roles that are zero for now, since they are drawn elsewhere.
    """
    located = [(roles.locate(path), x) for path, x in jax.tree.leaves_with_path(shapes)]
    groups = slots([leaf for leaf, _ in located])
    own = [i for i, (leaf, _) in enumerate(located) if leaf.role is None]
    for slot, members in groups.items():
        check_slot(slot, [located[i] for i in members])
    keys = {slot: slot_keys(seed, slot, [located[i] for i in members]) for slot, members in groups.items()}
    keys[""] = np.asarray(sampler.seed_words(seed))  # for leaves without a role

    def draw(keys: Any) -> Any:
        out: dict[int, Any] = {}
        if own:  # the rest of this init is dead code to the compiler
            rng = jax.random.wrap_key_data(keys[""], impl="threefry2x32")
            whole = model.init(rng, jnp.zeros((1, 1), jnp.int32))["params"]
            ready = jax.tree.leaves(roles.unboxed(whole))
            out |= {i: ready[i] for i in own}
        for slot, members in groups.items():
            if slot.rpartition("/")[2] in apart:
                out |= {i: jnp.zeros(located[i][1].shape, located[i][1].dtype) for i in members}
            else:
                out |= dict(zip(members, draw_slot(model, [located[i] for i in members], keys[slot])))
        return jax.tree.unflatten(jax.tree.structure(shapes), [out[i] for i in range(len(located))])

    return draw, keys


def check_slot(slot: str, members: list[tuple[Leaf, Any]]) -> None:
    """Two leaves with one key would hold the same values."""
    layers = [layer for leaf, x in members for layer in leaf.rows(x.shape)]
    if len(set(layers)) < len(layers):
        paths = " and ".join(leaf.path for leaf, _ in members[:3])
        raise ConfigError(f"{paths} would draw from one key ({slot}): a matrix role stands once in a layer")


def slot_keys(seed: int, slot: str, members: list[tuple[Leaf, Any]]) -> np.ndarray:
    """Key words of a slot: (2,), or (layers, 2), one leaf after the other."""
    base = sampler.slot_words(seed, slot)
    layers = [layer for leaf, x in members for layer in leaf.rows(x.shape)]
    if layers[0] is None:
        return np.asarray(base, np.uint32)
    return np.stack(sampler.fold(base, np.asarray(layers, np.uint32)), axis=-1)


def draw_slot(model: Any, members: list[tuple[Leaf, Any]], words: Any) -> list[Any]:
    """The arrays of one slot: one leaf, some stacked leaves, or one leaf for every layer of an unrolled stack."""
    leaf, x = members[0]

    def one(words: Any, layer: Any, shape: tuple[int, ...]) -> Any:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return model.closure(leaf.canonical, leaf.role, layer)(key, shape, x.dtype)

    def drawn(words: Any, layers: Any, shape: tuple[int, ...]) -> Any:
        return jax.vmap(lambda w, layer: one(w, layer, shape))(words, jnp.asarray(layers, jnp.int32))

    rows = [leaf.rows(x.shape) for leaf, x in members]
    if rows[0][0] is None:
        return [one(words, None, x.shape)]
    if not leaf.stacked:  # all at once, then taken apart
        stack = drawn(words, [layer for (layer,) in rows], x.shape)
        return [stack[i] for i in range(len(members))]
    ends = np.cumsum([len(layers) for layers in rows])
    parts = zip(rows, ends, (x.shape[1:] for _, x in members))
    return [drawn(words[end - len(layers) : end], layers, shape) for layers, end, shape in parts]
