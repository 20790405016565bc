"""What models do at step 0 and in their first steps, measured for the claims of docs/what_the_numbers_say.md.

python -m benchmarks.claims --json benchmarks/results/claims.json      about ten minutes on two cores
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import deepinit
from deepinit import Geometry
from deepinit.nn import Decoder
from deepinit.recipe import FrozenMap, Recipe
from deepinit.signal.predict import predict
from deepinit.signal.probe import probe
from deepinit.signal.watch import unigram_entropy
from deepinit.train import data
from deepinit.train.config import DataConfig

WIDE = Geometry(12, 64, 2, 168, 256, max_seq_len=64)
"""Forward passes: two heads of 32, SwiGLU of 168; ReLU of 256."""
NARROW = Geometry(48, 32, 2, 128, 256, max_seq_len=32, mlp="relu")
"""Training without warm-up."""
FORWARD: tuple[tuple[str, str | None, dict[str, Any], str, tuple[int, ...], int], ...] = (
    ("xavier", "pre", {}, "swiglu", (12, 80, 200), 2),
    ("small_init", "pre", {}, "swiglu", (80,), 2),
    ("small_init_scaled", "pre", {}, "swiglu", (12, 80, 200), 2),
    ("peri_ln", None, {}, "swiglu", (80,), 1),
    ("glorot_normal", "none", {}, "relu", (12,), 3),
    ("deepnorm", None, {}, "swiglu", (12, 100, 200), 3),
    ("post_ln", None, {}, "relu", (12, 48, 100), 6),
    ("rezero", None, {}, "swiglu", (100,), 1),
    ("fixup", None, {}, "relu", (12,), 1),
    ("modern", "pre", {"embed_std": 0.02}, "swiglu", (100,), 1),
    ("xavier", "pre", {}, "swiglu", (100,), 2),
    ("small_init_scaled", "pre", {}, "swiglu", (100,), 2),
)
"""scheme, norm, hyperparameters, MLP, depths, seeds."""
TRAINED = ("post_ln", "deepnorm", "rezero", "xavier", "small_init_scaled")


def recipe_of(name: str, norm: str | None, args: dict[str, Any], g: Geometry, unit: bool = True) -> Recipe:
    """A recipe whose stream starts at variance 1, where `unit`."""
    r = deepinit.recipe(name, g, norm=norm, **args)
    if not unit:
        return r
    return dataclasses.replace(r, multipliers=FrozenMap({**r.multipliers, "embed": 1 / r.weights["token_embed"].std}))


def forward() -> list[dict[str, Any]]:
    """A row for each scheme, depth and seed: the stream, its gradient, the loss; beside the prediction."""
    rows = []
    for name, norm, args, mlp, depths, seeds in FORWARD:
        for depth in depths:
            g = WIDE.replace(num_layers=depth, mlp=mlp, d_ff=168 if mlp == "swiglu" else 256)
            recipe = recipe_of(name, norm, args, g, unit=name != "modern")
            options = {"positions": "none", "norm": "rmsnorm" if mlp == "swiglu" else "layernorm"}
            model = Decoder.from_recipe(recipe, **options)
            for seed in range(seeds):
                params = deepinit.init_sharded(model, recipe, seed=seed)
                tokens = np.random.default_rng(seed).integers(0, g.vocab_size, (2, 65), np.int32)
                m = probe(model, recipe, params, tokens, lambda grads, p: grads, None, effects=0)
                p = predict(recipe, tokens[:, :-1], exponents=False, **options)
                q = m.roles["attn_q"].gradient
                rows.append({
                    "scheme": name, "norm": recipe.residual.norm, "mlp": mlp, "depth": depth, "seed": seed,
                    "variance": plain(m.layer_variance), "predicted": plain(p.layer_variance),
                    "correlation": plain(m.layer_correlation[-1:])[0], "ratio": m.gradient_ratio,
                    "input_ratio": float(m.gradient[0] / m.gradient[-1]),
                    "q_gradient": [float(q.min()), float(q.max())], "loss": m.loss, "predicted_loss": p.loss,
                    "zero": {role: float(s.zero_gradient.mean()) for role, s in m.roles.items()},
                })  # fmt: skip
            print(name, depth, flush=True)
    return rows


def plain(values: Any) -> list[float | None]:
    """Numbers to 5 digits, null where not finite."""
    return [float(f"{v:.5g}") if np.isfinite(v) else None for v in values]


def training(steps: int = 80, seeds: int = 3, rate: float = 1e-3) -> dict[str, Any]:
    """Losses of 48 layers under Adam at a constant rate, no warm-up, no clipping; seeds under one vmap."""
    text = data.load(DataConfig(seq_len=32), batch_size=8, eval_batch_size=1, eval_batches=1)
    batches = np.stack([np.stack([text.train[seeds * i + s]["tokens"] for i in range(steps)]) for s in range(seeds)])
    out: dict[str, Any] = {"unigram": unigram_entropy(text.text.tokens), "steps": steps, "rate": rate, "losses": {}}
    for name in TRAINED:
        recipe = recipe_of(name, None, {}, NARROW)
        model = Decoder.from_recipe(recipe, positions="none", norm="layernorm", remat="full")
        params = [deepinit.init_sharded(model, recipe, seed=s) for s in range(seeds)]
        tx = optax.adam(rate, 0.9, 0.98)

        def run(params: Any, tokens: jax.Array, model: Any = model, tx: Any = tx) -> jax.Array:
            def loss(p: Any, batch: jax.Array) -> jax.Array:
                logits = model.apply({"params": p}, batch[:, :-1])
                return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

            def step(carry: Any, batch: jax.Array) -> Any:
                p, state = carry
                value, grads = jax.value_and_grad(loss)(p, batch)
                updates, state = tx.update(grads, state)
                return (optax.apply_updates(p, updates), state), value

            return jax.lax.scan(step, (params, tx.init(params)), tokens)[1]

        stacked = jax.tree.map(lambda *x: jnp.stack(x), *params)
        losses = np.asarray(jax.jit(jax.vmap(run))(stacked, batches))
        out["losses"][name] = [plain(np.array([x[0], x[-20:].mean(), x.max()])) for x in losses]
        print("trained", name, flush=True)
    return out


def main() -> None:
    """Measure, and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    began = time.process_time()
    found = {"jax": jax.__version__, "training": training(), "forward": forward()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(r) for r in found.pop("forward"))
    options.json.write_text(json.dumps(found)[:-1] + f', "forward": [\n{lines}\n]}}\n')
    print(f"{time.process_time() - began:.0f} CPU-seconds")


if __name__ == "__main__":
    main()
