"""Healthy initial trees of every scheme, made without modules: for audits and planted faults."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinit import replays
from deepinit.geometry import VECTORS
from deepinit.interop import trees
from deepinit.recipe import Recipe
from deepinit.reinits import reinit


def own(recipe: Recipe) -> dict[str, Any]:
    """Abstract leaves as our scanned decoder names them, with the norms and the gates of the recipe's structure."""
    g, rule = recipe.geometry, recipe.residual
    d, f, L = g.d_model, g.d_ff, g.num_layers
    heads, kv = (d, g.num_heads, g.head_dim), (d, g.num_kv_heads, g.head_dim)
    kernels = {"attn_q": heads, "attn_k": kv, "attn_v": kv, "attn_out": (g.num_heads, g.head_dim, d)}
    kernels |= {"mlp_up": (d, f), "mlp_down": (f, d)} | ({"mlp_gate": (d, f)} if g.gated else {})
    inside: dict[str, tuple[int, ...]] = {f"block/{name}": shape for name, shape in kernels.items()}
    norms = {"none": (), "post": ("norm",), "pre": ("norm",), "reordered": ("post_norm",),
             "sandwich": ("norm", "post_norm"), "sub": ("norm", "inner_norm")}[rule.norm]  # fmt: skip
    for addition in ("attn_residual", "mlp_residual"):
        inside |= {f"{addition}/{name}/norm_scale": (d,) for name in norms}
        if rule.gate and rule.gate.share != "layer":
            inside[f"{addition}/{rule.gate.role}"] = (d,) if rule.gate.shape == "channel" else ()
    if rule.gate and rule.gate.share == "layer":
        inside[str(rule.gate.role)] = ()
    for qualifier, gate in (("skip", rule.skip_gate), ("x0", rule.x0_gate)):
        if gate:
            inside[f"{qualifier}_{gate.role}"] = (d,) if gate.shape == "channel" else ()
    sizes = {f"layers/{name}": (L, *shape) for name, shape in inside.items()} | {"token_embed": (g.vocab_size, d)}
    if not g.tied_embeddings:
        sizes["lm_head"] = (g.vocab_size, d)
    if rule.norm not in ("post", "none"):
        sizes["final_norm/norm_scale"] = (d,)
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}


def healthy(tree: Any, recipe: Recipe, seed: int, table: Any = None) -> dict[str, np.ndarray]:
    """The tree with the recipe's values, drawn in NumPy where the laws allow it, as `reinit` has them."""
    seen = trees.viewed(tree, recipe.geometry, table)
    if not all(replays.drawable(v, recipe) for v in seen.views):
        return {k: np.asarray(x) for k, x in trees.flat(reinit(tree, recipe, roles=table, seed=seed))}
    made = {path: np.empty(x.shape, x.dtype) for path, x in trees.flat(tree)}
    for view in seen.views:
        layers, index = np.repeat(np.arange(view.layers), view.n), np.tile(np.arange(view.n), view.layers)
        role = view.leaf.role
        law = recipe.law_at(view.leaf.canonical, role or "")
        if role in VECTORS and not law.layered:
            drawn = np.full((view.layers, *view.canonical), law.parameter, np.float32)
        else:
            drawn = replays.expected(view, recipe, layers, index, seed, np.float32)
        part = view.put(drawn.reshape(view.layers, *view.canonical))
        if view.cut:
            at = [slice(None)] * len(view.shape)
            at[view.cut[0]] = slice(*view.cut[1:])
            made[view.leaf.path][tuple(at)] = part
        else:
            made[view.leaf.path] = np.array(part, order="C")  # which, unlike ascontiguousarray, keeps a scalar's shape
    return made
