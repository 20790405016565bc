"""Planted faults on three kinds of tree, and healthy trees: every fault is to be found and named, no tree accused.

`python -m benchmarks.faults [--write docs/faults.md] [--healthy 200] [--quick]` prints the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import deepinit
from benchmarks import trees as made
from deepinit import Geometry, laws, replays
from deepinit.interop import trees
from deepinit.invariants import Row, Verdict, inspect
from deepinit.recipe import Recipe
from deepinit.report.pages import table
from deepinit.schemes import registry
from deepinit.views import View

DENSE = Geometry(6, 256, 4, 512, 512, mlp="swiglu", num_kv_heads=2)
EXPERTS = dataclasses.replace(DENSE, num_experts=4, d_ff=256)
Matrix = np.ndarray
Fault = Callable[[Matrix, View, Recipe], Matrix]


@dataclasses.dataclass(frozen=True)
class Plant:
    """One fault: where it is put, what is done there, and the test that should speak."""

    name: str
    role: str
    do: Fault
    test: tuple[str, ...]
    layer: int | None = 2
    """None: in every layer."""
    scheme: str = "modern_small"
    experts: bool = False
    single: bool = False
    """Whether one leaf has it, where there are several of the role."""
    seeded: bool = False
    """Whether only the draw itself, and no statistic, can show it."""


def infinite(x: Matrix, v: View, r: Recipe) -> Matrix:
    """One value that is infinite."""
    x = x.copy()
    x.flat[5] = np.inf
    return x


def cut_at_2(v: View, r: Recipe) -> laws.Distribution:
    """The right std, cut at 2 sigmas."""
    return laws.TruncatedNormal(std_of(v, r), 2.0)


def times(factor: float) -> Fault:
    """Values times a factor."""
    return lambda x, v, r: x * np.float32(factor)


def drawn(law: Callable[[View, Recipe], laws.Distribution], dtype: Any = np.float32) -> Fault:
    """Other values, of another law."""

    def do(x: Matrix, v: View, r: Recipe) -> Matrix:
        seed = zlib.crc32(v.leaf.path.encode())
        values = replays.redrawn(law(v, r), "planted", np.arange(x.size).reshape(x.shape), layer=0, seed=seed)
        return values.astype(dtype).astype(np.float32)

    return do


def std_of(v: View, r: Recipe) -> float:
    """The std that the leaf should have."""
    return float(np.mean(r.weights[v.leaf.role or ""].std))


def coarse(x: Matrix, v: View, r: Recipe) -> Matrix:
    """A draw in bfloat16: 7 bits of mantissa before it is scaled."""
    std = np.float32(std_of(v, r))
    return (x / std).astype(jnp.bfloat16).astype(np.float32) * np.float32(jnp.bfloat16(std))


def bit(x: Matrix, v: View, r: Recipe) -> Matrix:
    """The lowest bit of one of the weights that are drawn again."""
    x = np.ascontiguousarray(x)
    x.reshape(-1).view(np.uint32)[0] ^= 1
    return x


def wild(x: Matrix, v: View, r: Recipe) -> Matrix:
    """One value at the absolute bound of 2."""
    x = x.copy()
    x.flat[7] = 2.0
    return x


def nan(x: Matrix, v: View, r: Recipe) -> Matrix:
    """One value that is none."""
    x = x.copy()
    x.flat[3] = np.nan
    return x


def ratio(other: str) -> Fault:
    """The std of another role."""
    return lambda x, v, r: x * np.float32(np.mean(r.weights[other].std) / std_of(v, r))


def one(x: Matrix) -> Matrix:
    return np.ones_like(x)


ROOT = 12**0.5  # of the residual additions
PLANTS = (
    Plant("std 3% too large in one leaf of 65k", "attn_q", times(1.03), ("std",)),
    Plant("std 3% too small in one leaf of 131k", "mlp_up", times(0.97), ("std", "extreme")),
    Plant("leaf times 1.1", "mlp_down", times(1.1), ("std",)),
    Plant("one layer zero", "attn_v", times(0.0), ("zero",)),
    Plant("no residual scaling, one layer", "attn_out", times(ROOT), ("std",)),
    Plant("no residual scaling at all", "attn_out", times(ROOT), ("std",), layer=None),
    Plant("no residual scaling in the MLP", "mlp_down", times(ROOT), ("std",), layer=None),
    Plant("residual scaling twice", "mlp_down", times(1 / ROOT), ("std",), layer=None),
    Plant("L for 2L", "attn_out", times(2**0.5), ("std",), layer=None),
    Plant("q and out swapped", "attn_q", ratio("attn_out"), ("std",)),
    Plant("gate scaled instead of down", "mlp_gate", times(1 / ROOT), ("std",), layer=None),
    Plant("values off by a constant", "attn_k", lambda x, v, r: x + np.float32(0.1 * std_of(v, r)), ("mean", "std")),
    Plant("absolute values", "attn_k", lambda x, v, r: np.abs(x), ("mean",)),
    Plant("NaN", "mlp_up", nan, ("finite",)),
    Plant("infinity", "mlp_up", infinite, ("finite",)),
    Plant("absolute bounds: a value of 2", "attn_v", wild, ("bound", "std")),
    Plant("not truncated", "attn_q", drawn(lambda v, r: laws.Normal(std_of(v, r))), ("bound", "kurtosis")),
    Plant("cut at 2 sigma for 3", "attn_q", drawn(cut_at_2), ("extreme", "kurtosis")),
    Plant("uniform for normal", "mlp_up", drawn(lambda v, r: laws.Uniform(std_of(v, r))), ("extreme", "kurtosis")),
    Plant("truncation corrected where it is not", "lm_head", times(1 / 0.98658), ("std", "bound")),
    Plant("truncation at 2 not corrected", "attn_k", times(0.8796), ("std", "extreme"), layer=None),
    Plant("a draw in bfloat16", "attn_q", coarse, ("precision", "std")),
    Plant("heads as inputs", "attn_q", times((256 / 4) ** 0.5), ("std",), layer=None),
    Plant("layers among the inputs", "mlp_up", times(6**-0.5), ("std",), layer=None),
    Plant("d_ff for d_model", "mlp_gate", times(0.5**0.5), ("std",), layer=None),
    Plant("embedding by Xavier's fans", "token_embed", times((2 / 768) ** 0.5 / 0.0395), ("std",)),
    Plant("embedding of std 1", "token_embed", times(25.3), ("std",)),
    Plant("untied head of std 1", "lm_head", times(25.3), ("std",)),
    Plant("head zero", "lm_head", times(0.0), ("zero",)),
    Plant("norm of 1 + w at 1", "norm_scale", lambda x, v, r: one(x), ("constant",), layer=None, scheme="gemma"),
    Plant("norm of w at 0", "norm_scale", times(0.0), ("constant",)),
    Plant("norm drawn", "norm_scale", drawn(lambda v, r: laws.Normal(0.02)), ("constant",), single=True),
    Plant("one expert's std", "expert_up", times(1.05), ("std", "extreme"), experts=True, single=True),
    Plant("experts among the inputs", "expert_down", times(0.5), ("std",), experts=True, layer=None),
    Plant("two roles' std exchanged in the experts", "expert_gate", ratio("expert_down"), ("std",), experts=True),
    Plant("one bit", "attn_out", bit, ("replay",), seeded=True),
    Plant("the draw of another seed", "mlp_up", drawn(lambda v, r: r.weights["mlp_up"]), ("replay",), seeded=True),
)  # fmt: skip


def llama(g: Geometry) -> dict[str, Any]:
    """A safetensors file in the names of Hugging Face's Llama: unrolled, outputs first."""
    d, f, q, kv = g.d_model, g.d_ff, g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
    sizes = {
        "model.embed_tokens.weight": (g.vocab_size, d),
        "lm_head.weight": (g.vocab_size, d),
        "model.norm.weight": (d,),
    }
    for i in range(g.num_layers):
        at = f"model.layers.{i}."
        sizes |= {f"{at}{n}_layernorm.weight": (d,) for n in ("input", "post_attention")}
        kernels = {"q": (q, d), "k": (kv, d), "v": (kv, d), "o": (d, q)}
        sizes |= {f"{at}self_attn.{n}_proj.weight": s for n, s in kernels.items()}
        ups = {"gate": (f, d), "up": (f, d), "down": (d, f)}
        if not g.num_experts:
            sizes |= {f"{at}mlp.{n}_proj.weight": s for n, s in ups.items()}
            continue
        sizes[f"{at}block_sparse_moe.gate.weight"] = (g.num_experts, d)
        for e in range(g.num_experts):
            w = {"w1": ups["gate"], "w3": ups["up"], "w2": ups["down"]}
            sizes |= {f"{at}block_sparse_moe.experts.{e}.{n}.weight": s for n, s in w.items()}
    return abstract(sizes)


def nnx(g: Geometry) -> dict[str, Any]:
    """An NNX state's pure dict in the names of flax's gemma: unrolled, keys and values in one leaf, heads first."""
    d, f, n, k, h = g.d_model, g.d_ff, g.num_heads, g.num_kv_heads, g.head_dim
    sizes: dict[str, tuple[int, ...]] = {"embedder/input_embedding": (g.vocab_size, d), "final_norm/scale": (d,),
                                         "lm_head": (d, g.vocab_size)}  # fmt: skip
    for i in range(g.num_layers):
        at = f"layers/{i}/"
        sizes |= {f"{at}pre_attention_norm/scale": (d,), f"{at}pre_ffw_norm/scale": (d,)}
        sizes |= {f"{at}attn/q_einsum/w": (n, d, h), f"{at}attn/kv_einsum/w": (2, k, d, h)}
        sizes |= {f"{at}attn/attn_vec_einsum/w": (n, h, d)}
        if g.num_experts:
            sizes |= {f"{at}moe/router": (d, g.num_experts), f"{at}moe/gate": (g.num_experts, d, f)}
            sizes |= {f"{at}moe/up": (g.num_experts, d, f), f"{at}moe/down": (g.num_experts, f, d)}
        else:
            sizes |= {f"{at}mlp/{x}_proj/kernel": (d, f) for x in ("gate", "up")}
            sizes[f"{at}mlp/down_proj/kernel"] = (f, d)
    return abstract(sizes)


def linen(g: Geometry, scheme: str) -> dict[str, Any]:
    """Our scanned decoder."""
    tree = made.own(deepinit.recipe(scheme, g))
    if g.num_experts:
        L, e, d, f = g.num_layers, g.num_experts, g.d_model, g.d_ff
        tree = {k: x for k, x in tree.items() if "mlp_up" not in k and "mlp_down" not in k and "mlp_gate" not in k}
        tree |= abstract({"layers/block/router": (L, d, e), "layers/block/expert_gate": (L, e, d, f),
                          "layers/block/expert_up": (L, e, d, f),
                          "layers/block/expert_down": (L, e, f, d)})  # fmt: skip
    return tree


def abstract(sizes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Name -> shape and dtype."""
    import jax

    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}


NNX_ROLES = {
    **{r.pattern: r for r in trees.Table.of("flax_gemma").rules},
    "lm_head": "lm_head | i o", "moe/router": "router", "moe/gate": "expert_gate", "moe/up": "expert_up",
    "moe/down": "expert_down",
}  # fmt: skip
KINDS: dict[str, tuple[Callable[[Geometry, str], dict[str, Any]], Any]] = {
    "Linen, scanned": (linen, None),
    "NNX": (lambda g, s: nnx(g), dataclasses.replace(trees.Table.of(NNX_ROLES), complete=False)),
    "safetensors": (lambda g, s: llama(g), "hf_llama"),
}


def healthy(kind: str, scheme: str, g: Geometry, seed: int) -> tuple[dict[str, np.ndarray], Recipe]:
    """A tree of one kind with a scheme's values."""
    make, names = KINDS[kind]
    recipe = deepinit.recipe(scheme, g)
    return made.healthy(make(g, scheme), recipe, seed, names), recipe


def planted(params: dict[str, np.ndarray], recipe: Recipe, kind: str, plant: Plant) -> tuple[dict[str, Any], set[str]]:
    """(the tree with the fault, the paths that have it)."""
    out, hit = dict(params), set()
    for view in trees.viewed(params, recipe.geometry, KINDS[kind][1]).views:
        if view.leaf.role != plant.role:
            continue
        whole = np.array(out[view.leaf.path])
        part = np.array(view.take(whole))
        for i in range(view.layers):
            layer = view.layer(i)
            if plant.layer is None or layer is None or layer == plant.layer:
                part[i] = plant.do(part[i], view, recipe)
                hit.add(view.leaf.path)
        at = [slice(None)] * whole.ndim
        if view.cut:
            at[view.cut[0]] = slice(*view.cut[1:])
        whole[tuple(at)] = view.put(part)
        out[view.leaf.path] = whole
        if hit and plant.single:
            break
    return out, hit


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What was said of one fault on one kind of tree."""

    name: str
    kind: str
    found: bool
    """Whether it was named: a planted leaf or its role, by a test that speaks of it."""
    test: str
    said: str

    @classmethod
    def of(cls, name: str, kind: str, named: Sequence[Row], verdict: Verdict) -> Outcome:
        """From the rows that name the fault."""
        rows = [*named, *verdict.bad]
        return cls(name, kind, bool(named), rows[0].test if rows else "", rows[0].reason if rows else "nothing")


COPIES = (
    ("two layers equal", "attn_q", "duplicate"),
    ("two experts equal", "expert_up", "duplicate"),
    ("a matrix too few", "attn_out", "count"),
)
NAMES = (*(plant.name for plant in PLANTS), *(name for name, _, _ in COPIES))


def faults(kinds: Sequence[str] = tuple(KINDS)) -> Iterator[Outcome]:
    """Every fault on every kind of tree."""
    cache: dict[tuple[str, str, bool], Any] = {}

    def tree(kind: str, scheme: str, experts: bool) -> Any:
        key = (kind, scheme, experts)
        if key not in cache:
            cache[key] = healthy(kind, scheme, EXPERTS if experts else DENSE, 0)
        return cache[key]

    for plant, kind in itertools.product(PLANTS, kinds):
        params, recipe = tree(kind, plant.scheme, plant.experts)
        broken, hit = planted(params, recipe, kind, plant)
        verdict = inspect(broken, recipe, roles=KINDS[kind][1], seed=0 if plant.seeded else None)
        named = [r for r in verdict.bad if r.path in hit and r.role == plant.role and r.test in plant.test]
        yield Outcome.of(plant.name, kind, named, verdict)
    for (name, role, test), kind in itertools.product(COPIES, kinds):
        params, recipe = tree(kind, "modern_small", role.startswith("expert"))
        verdict = inspect(copied(params, recipe, kind, role, test), recipe, roles=KINDS[kind][1])
        yield Outcome.of(name, kind, [r for r in verdict.bad if r.role == role and r.test == test], verdict)


def copied(params: dict[str, np.ndarray], recipe: Recipe, kind: str, role: str, test: str) -> dict[str, Any]:
    """One layer, or one expert, in the place of another; or a leaf left out."""
    out = {k: np.array(x) for k, x in params.items()}
    own = [v for v in trees.viewed(params, recipe.geometry, KINDS[kind][1]).views if v.leaf.role == role]
    first = own[0]
    if test == "count":
        if first.leaf.stacked:
            out[first.leaf.path] = out[first.leaf.path][:-1]
        else:
            del out[first.leaf.path]
        return out if not first.leaf.stacked else {k: x for k, x in out.items() if k != first.leaf.path}
    if role.startswith("expert") and first.expert is not None:
        out[own[1].leaf.path] = out[first.leaf.path]
    elif role.startswith("expert"):
        x = out[first.leaf.path]
        stacked = first.leaf.stacked
        x[(slice(0, 1), 2) if stacked else 2] = x[(slice(0, 1), 0) if stacked else 0]
    elif first.leaf.stacked:
        out[first.leaf.path][3] = out[first.leaf.path][1]
    else:
        out[own[3].leaf.path] = out[own[1].leaf.path]
    return out


def innocents(count: int) -> Iterator[tuple[str, int, Verdict]]:
    """(scheme, seed, verdict) of healthy trees of all schemes, by the statistics alone; one seed after the other."""
    g = Geometry(4, 64, 4, 160, 128)
    recipes = [deepinit.recipe(s.name, g) for s in registry.schemes() if s.name != "external"]  # that is the caller's
    for i in range(count):
        recipe, seed = recipes[i % len(recipes)], i // len(recipes)
        yield recipe.name, seed, inspect(made.healthy(made.own(recipe), recipe, seed), recipe)


def accusations(count: int) -> list[str]:
    """What was said of healthy trees that should not have been."""
    return [
        f"{name}, seed {seed}: {verdict.bad[0].path} {verdict.bad[0].reason}"
        for name, seed, verdict in innocents(count)
        if not verdict.ok
    ]


def page(outcomes: Sequence[Outcome], count: int, accused: Sequence[str]) -> str:
    """The results as a page of Markdown."""
    kinds = list(dict.fromkeys(o.kind for o in outcomes))
    names = list(dict.fromkeys(o.name for o in outcomes))
    missed = sum(not o.found for o in outcomes)
    lines = [
        "# Planted faults",
        "",
        "Written by `python -m benchmarks.faults --write docs/faults.md`; `tests/planted_test.py` asserts it.",
        "",
        f"{len(names)} kinds of fault, each planted in {len(kinds)} kinds of tree ({'; '.join(kinds)}) of 6 layers of "
        "width 256, and looked for by `deepinit.verify` with the recipe and, for the two that no statistic can show, "
        f"the seed: {missed} of {len(outcomes)} missed. Found means that a row names the leaf, its role, and a test "
        f"that speaks of this fault. {count} healthy trees of all registered schemes (4 layers of width 64), each "
        f"scheme with several seeds: {len(accused)} accused.",
        "",
    ]
    roles = {plant.name: plant.role for plant in PLANTS} | {name: role for name, role, _ in COPIES}
    rows = []
    for name in names:
        own = {o.kind: o for o in outcomes if o.name == name}
        tests = [own[k].test if own[k].found else "MISSED" for k in kinds]
        rows.append([name, roles[name], *tests, own[kinds[0]].said])
    lines.append(table(("fault", "role", *kinds, "what was said first"), rows))
    return "\n".join([*lines, "", *(f"- accused: {a}" for a in accused)]).rstrip() + "\n"


def main() -> int:
    """The table; 1 where a fault is not found or a healthy tree is accused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--healthy", type=int, default=200, help="how many healthy trees")
    parser.add_argument("--quick", action="store_true", help="the first kind of tree alone, and 20 healthy trees")
    parser.add_argument("--write", metavar="FILE", type=Path, help="write the table there, as Markdown")
    options = parser.parse_args()
    outcomes = []
    for o in faults(tuple(KINDS)[:1] if options.quick else tuple(KINDS)):
        outcomes.append(o)
        print(f"{'found ' if o.found else 'MISSED'}  {o.name:44} {o.kind:16} {o.said[:110]}", flush=True)
    count = 20 if options.quick else options.healthy
    accused, missed = accusations(count), sum(not o.found for o in outcomes)
    names = {o.name for o in outcomes}
    print(f"{len(names)} faults: {missed} missed; {count} healthy trees: {len(accused)} accused")
    print("\n".join(accused))
    if options.write:
        options.write.write_text(page(outcomes, count, accused), encoding="utf-8")
    return 1 if missed or accused else 0


if __name__ == "__main__":
    sys.exit(main())
