"""How fast is a model born? A decoder of 335 M parameters, truncated at 2 sigmas, compiled once, against stock draws of
the same shapes, torch's, and a constant fill; and how much memory each holds at its peak, in a process of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import deepinit
from benchmarks.harness import Costs, Race, Rival, child, forget_peak, peak_bytes
from deepinit import Geometry, roles, sharded_init

SIZES = {
    "num_layers": 24, "d_model": 1024, "num_heads": 16, "d_ff": 4096, "vocab_size": 32768, "mlp": "gelu",
    "tied_embeddings": True,
}  # fmt: skip
STOCK, FILL, OURS = "jax.random.truncated_normal, jit", "constant fill (write floor)", "deepinit"
FLAX = "Flax's model.init, jit, scanned"


class Case:
    """A tree and the ways to fill it; each way is (function, argument) for `jax.jit`."""

    def __init__(self, sizes: dict[str, Any]):
        self.recipe = recipe = deepinit.recipe("megatron", Geometry(**sizes), cut=2)
        model = deepinit.nn.Decoder.from_recipe(recipe)
        theirs = deepinit.nn.Decoder.from_recipe(recipe, sampler="jax")
        shapes = roles.unboxed(sharded_init.abstract_params(model))
        leaves = [leaf for leaf, _ in roles.leaves(shapes)]
        matrix = [leaf.role is not None and recipe.law_at(leaf.path, leaf.role).std > 0 for leaf in leaves]
        self.sizes = [x.shape for x in jax.tree.leaves(shapes)]
        self.count = sum(x.size for x in jax.tree.leaves(shapes))
        self.ways: dict[str, tuple[Callable[[Any], Any], Any]] = {
            OURS: sharded_init.plan(model, shapes, 0),
            STOCK: (lambda key: [stock(key, i, x, matrix[i]) for i, x in enumerate(jax.tree.leaves(shapes))],
                    jax.random.key(0)),
            FLAX: (lambda key: roles.unboxed(theirs.init(key, jnp.zeros((1, 1), jnp.int32))["params"]),
                   jax.random.key(0)),
            FILL: (lambda value: jax.tree.map(lambda x: jnp.full(x.shape, value, x.dtype), shapes), np.float32(1)),
        }  # fmt: skip

    def compiled(self, way: str) -> tuple[Any, Any]:
        """The program, and its argument."""
        f, argument = self.ways[way]
        jit = sharded_init.jitted if way == OURS else jax.jit
        return jit(f).lower(argument).compile(), argument


def stock(key: Any, i: int, x: Any, random: bool) -> Any:
    """A leaf as a Flax user draws it."""
    if not random:
        return jnp.zeros(x.shape, x.dtype)
    return jax.random.truncated_normal(jax.random.fold_in(key, i), -2, 2, x.shape, x.dtype) * np.float32(0.02)


def memory(way: str, sizes: dict[str, Any]) -> dict[str, float]:
    """The peak over what was held before compiling, by the parameters' bytes."""
    jax.block_until_ready(jax.jit(jnp.sin)(jnp.ones(8)))
    base = forget_peak()
    case = Case(sizes)
    program, argument = case.compiled(way)
    kept = jax.block_until_ready(program(argument))
    return {"peak": (peak_bytes() - base) / sum(x.nbytes for x in jax.tree.leaves(kept))}


def run(rounds: int, torch: str = "", sizes: dict[str, Any] = SIZES) -> Race:
    """M values per CPU-second; peak memory by the parameters' bytes."""
    case = Case(sizes)
    programs = {way: case.compiled(way) for way in case.ways}
    cases: dict[str, Any] = {way: lambda f=f, x=x: jax.block_until_ready(f(x)) for way, (f, x) in programs.items()}
    if torch:  # a list of matrices, as torch keeps them: every layer its own
        shapes = [list(s[1:]) for s in case.sizes if len(s) > 2 for _ in range(s[0])]
        rows = json.dumps(shapes + [list(s) for s in case.sizes if len(s) == 2 and s[0] != sizes["num_layers"]])
        cases |= Rival("benchmarks.with_torch", "init", rows, python=torch).cases
    count = case.count / 1e6
    race = Race(f"{count:.1f} M parameters, truncated at 2 sigmas", "M", count, cases).run(rounds)
    for way in case.ways:
        race.add(way, Costs(child("-m", "benchmarks.init", way, json.dumps(sizes))))
    for way in (w for w in cases if w not in case.ways):
        race.add(way, Costs(child("-m", "benchmarks.with_torch", "rss", way, rows, python=torch)))
    race.target("deepinit against stock jitted JAX, times its speed", race.ratio(STOCK, OURS), at_least=5)
    if torch:
        for way, bound in (("torch normal_", 1.1), ("torch trunc_normal_", 20)):
            race.target(f"against {way}, times its speed", race.ratio(way, OURS), at_least=bound)
    race.target("time of a constant fill", race.ratio(OURS, FILL), at_most=2.2)
    race.target("peak memory over the base, of the parameters", race.median(OURS, "peak"), at_most=1.15)
    share = programs[OURS][0].memory_analysis().temp_size_in_bytes / (4 * case.count)
    race.target("temporaries of the compiled init, of the parameters", share, at_most=0.01)
    return race


if __name__ == "__main__":
    print("\n" + json.dumps(memory(sys.argv[1], json.loads(sys.argv[2]))))
