"""What must be true of every initialization, as one call for a user's own tests: `assert_birth_invariants`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from deepinit import digests, roles, sharded_init, sharding, stacks
from deepinit.collectives import moved
from deepinit.errors import ConfigError
from deepinit.geometry import VECTORS
from deepinit.recipe import Recipe
from deepinit.sharded_init import abstract_params, init_sharded

SHARE = 0.01
"""Temporaries that a compiled init may take, as a share of the shards."""


@dataclass(frozen=True)
class Fact:
    """One invariant, and whether it holds."""

    name: str
    ok: bool
    said: str


def assert_birth_invariants(
    mesh: Mesh | Sequence[Mesh] | None = None, *, model: Any, recipe: Recipe, seed: int = 0
) -> tuple[Fact, ...]:
    """Initialize a model in every way that must not matter, and compare.

    One digest over the meshes, scanned or unrolled, with and without remat, with a padded vocabulary, and over the
    processes; half as many layers are the first half of the stack; replicas equal and shards different; no collective
    and no full-size temporary in the compiled init.

    Args:
      mesh: one or several; None: one device alone.
      model: a Linen decoder of ours; small sizes will do.
      recipe: of its geometry.
      seed: of the draws.

    Raises:
      AssertionError: a line for each invariant that does not hold.
    """
    meshes = [] if mesh is None else [mesh] if isinstance(mesh, Mesh) else list(mesh)
    facts = tuple(birth_invariants(meshes, model, recipe, seed))
    if broken := [f for f in facts if not f.ok]:
        raise AssertionError("\n".join(f"{f.name}: {f.said}" for f in broken))
    return facts


def birth_invariants(meshes: Sequence[Mesh], model: Any, recipe: Recipe, seed: int) -> Iterator[Fact]:
    """The facts, one after the other."""
    params = init_sharded(model, recipe, None, seed)
    digest = digests.digest(params)

    def same(name: str, other: Any) -> Fact:
        found = digests.digest(other)
        return Fact(name, found == digest, f"digest {found}, on one device {digest}")

    for mesh in meshes:
        where = " x ".join(f"{axis} {n}" for axis, n in mesh.shape.items() if n > 1) or "one device"
        there = init_sharded(model, recipe, mesh, seed)
        yield same(f"mesh {where}", there)
        yield replicas(f"replicas on {where}", there)
        yield shards(f"shards on {where}", there, recipe)
        yield from compiled(where, model, recipe, mesh, seed)
    yield same("scan", init_sharded(model.clone(scan=not model.scan), recipe, None, seed))
    yield same(
        "remat", init_sharded(model.clone(remat="full" if model.remat == "none" else "none"), recipe, None, seed)
    )
    yield same(
        "padded vocabulary", init_sharded(model.clone(vocab_multiple=model.vocab_padded + 7), recipe, None, seed)
    )
    yield prefix(model, recipe, params, seed)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        here = np.frombuffer(bytes.fromhex(digest), np.uint8)
        every = np.asarray(multihost_utils.process_allgather(here))
        yield Fact("processes", bool((every == every[0]).all()), f"digests of {len(every)} processes")


def replicas(name: str, params: Any) -> Fact:
    """All copies of a shard hold the same bits."""
    for path, x in roles.flat(params):
        seen: dict[str, bytes] = {}
        for shard in x.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            if seen.setdefault(str(shard.index), bits) != bits:
                return Fact(name, False, f"copies of {roles.joined(path)}{list(shard.index)} differ")
    return Fact(name, True, "copies hold the same bits")


def shards(name: str, params: Any, recipe: Recipe) -> Fact:
    """No two shards of one drawn matrix hold the same bits."""
    for path, x in roles.flat(params):
        leaf = roles.locate(path)
        if leaf.role is None or leaf.role in VECTORS or not np.any(recipe.weights[leaf.role].std):
            continue
        pieces = {str(s.index): np.asarray(s.data) for s in x.addressable_shards}
        drawn = [p.tobytes() for p in pieces.values() if p.any()]  # a shard may be nothing but padding
        if len(set(drawn)) < len(drawn):
            return Fact(name, False, f"two shards of {roles.joined(path)} hold the same bits")
    return Fact(name, True, "pairwise different")


def compiled(where: str, model: Any, recipe: Recipe, mesh: Mesh, seed: int) -> Iterator[Fact]:
    """What the compiler made of the sharded init: no collective, and temporaries far below a shard."""
    boxed = abstract_params(model)
    shapes, layout = roles.unboxed(boxed), sharding.param_shardings(boxed, mesh)
    draw, keys = sharded_init.plan(model, shapes, seed, sharded_init.pairs(recipe))
    program = sharded_init.jitted(draw, layout).lower(keys).compile()
    found = sorted({kind for kind, _ in moved(program.as_text() or "")})
    yield Fact(f"collectives on {where}", not found, ", ".join(found) or "none")
    memory = program.memory_analysis()
    if memory is not None:
        share = memory.temp_size_in_bytes / max(memory.output_size_in_bytes, 1)
        room = max(SHARE, 4096 / max(memory.output_size_in_bytes, 1))  # of a toy, a page is more than that
        yield Fact(f"temporaries on {where}", share <= room, f"{share:.2%} of the shards")


def prefix(model: Any, recipe: Recipe, params: Any, seed: int) -> Fact:
    """A stack of half the depth is the first half of the whole one, each weight in units of its law's std."""
    from deepinit.schemes import registry

    name, g = "depth prefix", recipe.geometry
    half = max(g.num_layers // 2, g.routed_layers[0] + 1 if g.mixed else 0)  # which has a routed layer too
    if half in (0, g.num_layers):
        return Fact(name, True, "one layer" if not half else "no part of these layers is such a stack")
    small = g.replace(num_layers=half)
    try:
        shallow = registry.recipe(recipe.name, small, norm=recipe.residual.norm, **recipe.args)
    except ConfigError:  # a recipe that was made by hand, or changed by role
        shallow = dataclasses.replace(recipe, geometry=small)
    if shallow.requires.get("norm_offset") != recipe.requires.get("norm_offset"):
        shallow = shallow.with_norm_offset()
    there = init_sharded(type(model).from_recipe(shallow, **options(model)), shallow, None, seed)
    whole = {(path, layer): x for path, layer, x in stacks.apart(params)}
    for path, layer, x in stacks.apart(there):
        role = roles.role_of(path)
        if role is None or role in VECTORS or role not in shallow.weights:
            continue
        a, b = (float(np.asarray(r.weights[role].at(layer or 0).std)) for r in (recipe, shallow))
        if not np.isfinite(a):
            continue
        if not np.allclose(np.asarray(whole[path, layer]) * b, np.asarray(x) * a, rtol=1e-5, atol=0.0):
            return Fact(name, False, f"{path} of {half} layers is not the beginning of the whole")
    return Fact(name, True, f"{half} layers are the first of {g.num_layers}")


def options(model: Any) -> dict[str, Any]:
    """The options of a decoder, for another of its kind."""
    return {name: getattr(model, name) for name in model.OPTIONS}
