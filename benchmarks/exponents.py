"""Growth of the first update with depth: drawn models at 6, 24 and 96 layers against the rule, by group of parameters.

    python -m benchmarks.exponents --json benchmarks/results/exponents.json      some minutes on two cores

Each group's step of SGD and of Adam (the sign of the gradient) is followed to the logits, to first order.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import deepinit
from deepinit import Geometry, roles, sharded_init
from deepinit.geometry import VECTORS, Role
from deepinit.laws import Normal
from deepinit.nn import Decoder
from deepinit.recipe import FrozenMap, Laws, Recipe
from deepinit.report.pages import table
from deepinit.signal import growth
from deepinit.signal.probe import pushforward

GEOMETRY = Geometry(num_layers=6, d_model=32, num_heads=2, d_ff=128, vocab_size=96, max_seq_len=32, mlp="relu")
OPTIONS = {"positions": "none", "norm": "layernorm"}
DEPTHS, SEEDS, BATCH = growth.DEPTHS, 12, 8
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepNorm": ("deepnorm", {}),
    "DeepNorm, rates by depth": ("deepnorm", {"updates": "depth", "base_depth": 6}),
    "Megatron, sqrt(2/(5d))": ("megatron", {"std": "sqrt(2/(5d))", "embed_std": 1.0}),
    "ReZero": ("rezero", {}),
    "Fixup": ("fixup", {"scalar_lr": 1.0}),
    "T-Fixup": ("tfixup_decoder", {}),
    "SkipInit, 1/sqrt(R)": ("skipinit", {"start": "1/sqrt(R)", "base": "xavier_normal"}),
    "Depth-muP": ("depth_mup", {"base_width": 32, "base_depth": 1, "std": 0.18}),
    "CompleteP": ("completep", {"base_width": 32, "base_depth": 1, "std": 0.18}),
    "zero outputs": ("zero_out", {}),
    "Xavier, pre-norm": ("xavier", {}),
    "Peri-LN": ("peri_ln", {"std": 0.18}),
    "Sub-LN": ("subln", {}),
    "Post-LN": ("post_ln", {}),
}
PROMISED = (
    "DeepNorm",
    "Megatron, sqrt(2/(5d))",
    "ReZero",
    "Fixup",
    "T-Fixup",
    "SkipInit, 1/sqrt(R)",
    "Depth-muP",
    "CompleteP",
)
"""Where the rule is held to be within 0.15, for what `held` says."""
TWO_POWERS = ("Fixup",)
"""Whose attention and MLP shrink by different powers of the depth, and mix by sizes that no rule of powers knows."""
GROUPS = {
    "matrices": lambda role: role in growth.MATRICES,
    "attention": lambda role: role in growth.MATRICES and role.startswith("attn"),
    "mlp": lambda role: role in growth.MATRICES and role.startswith("mlp"),
    "norm_gains": lambda role: role == Role.NORM_SCALE,
    "gates": lambda role: role in (Role.RESIDUAL_GATE, Role.BRANCH_SCALE),
    "shifts": lambda role: role == Role.BRANCH_SHIFT,
}


def held(scheme: str, group: str) -> bool:
    """Whether the rule is held to be good for a group: matrices together or, of two powers, by branch; gains, gates."""
    if group in ("matrices", "attention", "mlp"):
        return scheme in PROMISED and (group == "matrices") != (scheme in TWO_POWERS)
    return scheme in PROMISED


def recipe_at(name: str, args: dict[str, Any], depth: int) -> Recipe:
    """A scheme on a stream that starts at variance 1, read by a random head: so that depth alone differs."""
    r = deepinit.recipe(name, GEOMETRY.replace(num_layers=depth), **args)
    head = Normal(GEOMETRY.d_model**-0.5)  # some schemes' own head is 0, or falls with depth
    unit = {**r.multipliers, "embed": 1 / r.weights["token_embed"].std}
    return dataclasses.replace(
        r, weights=Laws({**r.weights, Role.LM_HEAD: head}, r.leaves), multipliers=FrozenMap(unit)
    )


def measured(name: str, args: dict[str, Any], depth: int) -> dict[str, tuple[float, float]]:
    """Group -> RMS change of the logits by one (SGD, Adam) step at rate 1, the geometric mean over seeds."""
    recipe = recipe_at(name, args, depth)
    model = Decoder.from_recipe(recipe, **OPTIONS)
    shapes = roles.unboxed(sharded_init.abstract_params(model))
    draw, _ = sharded_init.plan(model, shapes, 0)
    leaves = [leaf for leaf, _ in roles.leaves(shapes)]
    inside = [leaf.canonical.startswith("layers/") for leaf in leaves]
    groups = [g for g, has in GROUPS.items() if any(has(leaf.role) and i for leaf, i in zip(leaves, inside))]
    rates = [recipe.update_at(leaf.canonical, leaf.role).lr for leaf in leaves]
    picks = jnp.asarray(
        [[GROUPS[g](leaf.role) * i * rate for leaf, i, rate in zip(leaves, inside, rates)] for g in groups]
    )
    tree = jax.tree.structure(shapes)

    def sizes(keys: Any, tokens: jax.Array) -> jax.Array:
        params = draw(keys)

        def logits(p: Any) -> jax.Array:
            return model.apply({"params": p}, tokens[:, :-1])

        def loss(p: Any) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(logits(p), tokens[:, 1:]).mean()

        grads, push = jax.grad(loss)(params), pushforward(logits, params)

        def effect(pick: jax.Array, sign: jax.Array) -> jax.Array:
            some = jax.tree.unflatten(tree, list(pick))
            direction = jax.tree.map(lambda m, g: m * jnp.where(sign, jnp.sign(g), g), some, grads)
            return jnp.sqrt(jnp.mean(jnp.square(push(direction))))

        return jax.lax.map(
            lambda x: effect(*x), (jnp.repeat(picks, 2, 0), jnp.tile(jnp.array([False, True]), len(groups)))
        )

    keys = jax.tree.map(lambda *k: np.stack(k), *(sharded_init.plan(model, shapes, s)[1] for s in range(SEEDS)))
    tokens = np.random.default_rng(1).integers(0, GEOMETRY.vocab_size, (SEEDS, BATCH, 33), np.int32)
    found = np.asarray(jax.jit(jax.vmap(sizes))(keys, tokens), np.float64)
    with np.errstate(divide="ignore"):
        mean = np.exp(np.log(found).mean(0)).reshape(-1, 2)
    return {g: (float(s), float(a)) for g, (s, a) in zip(groups, mean)}


def study(path: Path | None) -> list[dict[str, Any]]:
    """A row for each scheme, group and optimizer; kept as they come, so that a run goes on where another ended."""
    assert set(VECTORS) >= {Role.NORM_SCALE, Role.RESIDUAL_GATE}
    rows = json.loads(path.read_text())["rows"] if path and path.exists() else []
    done = {r["scheme"] for r in rows}
    for label, (name, args) in SCHEMES.items():
        if label in done:
            continue
        rule = growth.exponents(lambda depth, n=name, a=args: recipe_at(n, a, depth), DEPTHS, OPTIONS)
        sizes = [measured(name, args, depth) for depth in DEPTHS]
        for group in sizes[0]:
            for i, optimizer in enumerate(("sgd", "adam")):
                moved = [s[group][i] for s in sizes]
                if min(moved) <= 0 or group not in rule or math.isnan(rule[group][i]):
                    continue
                slope = float(np.polyfit(np.log(DEPTHS), np.log(moved), 1)[0])
                facts = {"scheme": label, "group": group, "optimizer": optimizer}
                rows.append({**facts, "sizes": moved, "measured": slope, "rule": float(rule[group][i])})
        print(label, flush=True)
        if path:
            write(path, rows)
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows, and by which jax."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(r) for r in rows)
    path.write_text(f'{{"jax": "{jax.__version__}", "rows": [\n{lines}\n]}}\n')


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table: rule and measurement side by side."""
    lines = []
    for scheme, group in dict.fromkeys((r["scheme"], r["group"]) for r in rows):
        cells = []
        for optimizer in ("sgd", "adam"):
            own = [r for r in rows if (r["scheme"], r["group"], r["optimizer"]) == (scheme, group, optimizer)]
            cells += [f"{own[0]['rule']:+.2f}", f"{own[0]['measured']:+.2f}"] if own else ["-", "-"]
        lines.append([f"{scheme}, {group.replace('_', ' ')}", *cells])
    return table(("scheme, group", "SGD: rule", "measured", "Adam: rule", "measured"), lines)


def main() -> None:
    """Run the study, print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(markdown(study(options.json)))


if __name__ == "__main__":
    main()
