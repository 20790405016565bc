"""What models do at step 0 and in their first steps, measured for the claims of docs/what_the_numbers_say.md.

python -m benchmarks.claims --json benchmarks/results/claims.json      about ten minutes on two cores
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import deepinit
from deepinit import Geometry, roles, sharded_init
from deepinit.laws import TruncatedNormal
from deepinit.nn import Decoder
from deepinit.recipe import FrozenMap, Recipe
from deepinit.signal.measured import Measured
from deepinit.signal.predict import Prediction, predict
from deepinit.signal.probe import collect, measure
from deepinit.signal.watch import unigram_entropy
from deepinit.train import data
from deepinit.train.config import DataConfig

WIDE = Geometry(12, 64, 2, 168, 256, max_seq_len=64)
"""Forward passes: two heads of 32, SwiGLU of 168; ReLU of 256."""
NARROW = Geometry(48, 32, 2, 128, 256, max_seq_len=32, mlp="relu")
"""Training without warm-up."""
FORWARD: tuple[tuple[str, str | None, dict[str, Any], str, tuple[int, ...], int], ...] = (
    ("xavier", "pre", {}, "swiglu", (12, 80, 100, 200), 2),
    ("small_init", "pre", {}, "swiglu", (80,), 2),
    ("small_init_scaled", "pre", {}, "swiglu", (12, 80, 100, 200), 2),
    ("peri_ln", None, {}, "swiglu", (100,), 2),
    ("subln", None, {}, "swiglu", (100,), 2),
    ("glorot_normal", "none", {}, "relu", (12,), 3),
    ("deepnorm", None, {}, "swiglu", (12, 100, 200), 3),
    ("post_ln", None, {}, "relu", (12, 48, 100), 6),
    ("xavier", "pre", {}, "relu", (12, 100), 2),
    ("rezero", None, {}, "swiglu", (100,), 1),
    ("fixup", None, {}, "relu", (12,), 1),
    ("modern", "pre", {"embed_std": 0.02}, "swiglu", (100,), 2),
)
"""scheme, norm, hyperparameters, MLP, depths, seeds."""
TRAINED = ("post_ln", "deepnorm", "rezero", "xavier", "small_init_scaled")
LAYERS = (0, 1, 2, 3, 5, 8, 16, 32, 48, 80, 100, 160)
"""Those of which the stream's variance is kept, besides the last."""


def recipe_of(name: str, norm: str | None, args: dict[str, Any], g: Geometry, unit: bool = True) -> Recipe:
    """A recipe whose stream starts at variance 1, where `unit`."""
    r = deepinit.recipe(name, g, norm=norm, **args)
    if not unit:
        return r
    return dataclasses.replace(r, multipliers=FrozenMap({**r.multipliers, "embed": 1 / r.weights["token_embed"].std}))


# --- a pass forward and backward ---------------------------------------------------------------------------------


def passes() -> list[dict[str, Any]]:
    """A row for each scheme, depth and seed: the stream, its gradient, the loss; beside the prediction."""
    rows = []
    for name, norm, args, mlp, depths, seeds in FORWARD:
        for depth in depths:
            g = WIDE.replace(num_layers=depth, mlp=mlp, d_ff=168 if mlp == "swiglu" else 256)
            recipe = recipe_of(name, norm, args, g, unit=name != "modern")
            options = {"positions": "none", "norm": "rmsnorm" if mlp == "swiglu" else "layernorm"}
            model = Decoder.from_recipe(recipe, **options)
            shapes = roles.unboxed(sharded_init.abstract_params(model))
            draw = jax.jit(sharded_init.plan(model, shapes, 0)[0])
            look = jax.jit(lambda p, t, model=model: measure(model, p, t, lambda grads, p: grads, None, 0))
            for seed in range(seeds):
                params = draw(sharded_init.plan(model, shapes, seed)[1])
                tokens = np.random.default_rng(seed).integers(0, g.vocab_size, (2, 65), np.int32)
                m = collect(jax.device_get(look(params, tokens)), params, recipe, tokens.shape, math.nan)
                p = predict(recipe, tokens[:, :-1], exponents=False, **options)
                rows.append({"scheme": name, "norm": recipe.residual.norm, "mlp": mlp, "depth": depth, "seed": seed,
                             **kept(m, p)})  # fmt: skip
            print(name, depth, flush=True)
    return rows


def kept(m: Measured, p: Prediction) -> dict[str, Any]:
    """The numbers of a pass that are kept."""
    at = [*(i for i in LAYERS if i < m.layers), m.layers]
    added = np.sqrt(m.branch[1::2] / m.variance[2::2])
    q, down = m.roles["attn_q"].gradient, m.roles["mlp_down"].gradient
    return {
        "layers": at, "variance": plain(m.layer_variance[at]), "predicted": plain(p.layer_variance[at]),
        "branch": plain(m.branch[[0, 1, m.layers - 2, m.layers - 1, -2, -1]]),
        "relative": plain(added[[i - 1 for i in at[1:]]]), "correlation": number(m.correlation[-1]),
        "ratio": number(m.gradient_ratio), "input_ratio": number(m.gradient[0] / m.gradient[-1]),
        "q_gradient": plain([q.min(), q.max()]), "down_gradient": plain([down[0], down[-1]]),
        "loss": number(m.loss), "predicted_loss": number(p.loss),
        "zero": {role: number(s.zero_gradient.mean()) for role, s in m.roles.items()},
    }  # fmt: skip


def number(value: Any) -> float | None:
    """A number to 5 digits, null where not finite."""
    return float(f"{value:.5g}") if np.isfinite(value) else None


def plain(values: Any) -> list[float | None]:
    """Such numbers."""
    return [number(v) for v in values]


# --- the first steps ---------------------------------------------------------------------------------------------


def training(steps: int = 80, seeds: int = 3, rate: float = 1e-3) -> dict[str, Any]:
    """Losses of 48 layers under Adam at a constant rate, no warm-up, no clipping; seeds under one vmap."""
    text = data.load(DataConfig(seq_len=32), batch_size=8, eval_batch_size=1, eval_batches=1)
    batches = np.stack([np.stack([text.train[seeds * i + s]["tokens"] for i in range(steps)]) for s in range(seeds)])
    out: dict[str, Any] = {"unigram": number(unigram_entropy(text.text.tokens)), "steps": steps, "rate": rate}
    out["losses"] = {}
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
        out["losses"][name] = [plain([x[0], x[-20:].mean(), x.max()]) for x in losses]
        print("trained", name, flush=True)
    return out


# --- without a model ---------------------------------------------------------------------------------------------


def closed_form() -> dict[str, Any]:
    """What follows from recipes and predictions: 64 positions, an input of variance 1 unless it says otherwise."""
    alone = {"positions": "none", "exponents": False, "seq_len": 64}

    def wide(d: int, depth: int = 12, mlp: str = "swiglu") -> Geometry:
        f = round(8 * d / 24) * 8 if mlp == "swiglu" else 4 * d
        return Geometry(depth, d, d // 32, f, 50257, max_seq_len=64, mlp=mlp)

    def from_one(name: str, g: Geometry, norm: str | None = "pre", **args: Any) -> Prediction:
        return predict(deepinit.recipe(name, g, norm=norm, **args), input_variance=1.0, **alone)

    bases = {
        "xavier, swiglu": ("xavier", 64, "swiglu", {}), "xavier, relu": ("xavier", 64, "relu", {}),
        "sqrt(2/(5d))": ("small_init", 64, "swiglu", {}), "he": ("he_normal", 64, "swiglu", {}),
        "sqrt(2/d)": ("fixed_normal", 64, "swiglu", {"std": (2 / 64) ** 0.5}),
        **{f"0.02 at {d}": ("fixed_normal", d, "swiglu", {}) for d in (64, 4096, 8192)},
    }  # fmt: skip
    branch = {k: number(from_one(n, wide(d, 1, mlp), **a).branch.mean()) for k, (n, d, mlp, a) in bases.items()}
    top = {
        k: number(from_one(n, wide(d, 80, mlp), **a).variance[-1])
        for k, (n, d, mlp, a) in bases.items()
        if not k.startswith("0.02")
    }
    deep, level = from_one("xavier", wide(64, 1000)), from_one("small_init_scaled", wide(64, 80))
    half = np.arange(500, 1001)
    relative = deep.relative_update[1::2]
    swamped = {}
    for name, args in (("modern", {"embed_std": 0.02}), ("gpt2", {})):
        p = predict(deepinit.recipe(name, wide(4096, 80), **args), **alone)
        swamped[name] = plain([p.variance[0], p.variance[2], p.variance[-1]])
    table = {}
    for depth in (12, 32, 80, 200, 1000):
        r = deepinit.recipe("deepnorm", Geometry(depth, 768, 12, 3072, 50257, mlp="gelu"))
        beta = r.weights["attn_v"].std / r.weights["attn_q"].std
        table[depth] = plain([r.residual.skip, beta, (2 * depth) ** -0.5])
    stacks = {}
    for name, stack in (("deepnorm_encdec_encoder", "encoder"), ("deepnorm_encdec_decoder", "decoder")):
        g = Geometry(12, 768, 12, 3072, 50257, mlp="gelu", stack=stack, encoder_layers=12, decoder_layers=12)
        r = deepinit.recipe(name, g)
        stacks[stack] = plain([r.residual.skip, r.weights["attn_v"].std / r.weights["attn_q"].std])
    without = {}
    for name, mlp in (("xavier", "swiglu"), ("xavier", "relu"), ("he_normal", "relu")):
        p = from_one(name, wide(64, 80, mlp), norm="none")
        without[f"{name}, {mlp}"] = {"by layer": plain(p.layer_variance[:6]), "overflow": p.overflow["float32"]}
    at_768 = deepinit.recipe("deepnorm", Geometry(12, 768, 12, 3072, 50257, mlp="gelu"))
    return {
        "branch": branch, "top": top, "deepnorm": table, "stacks": stacks, "without_norm": without,
        "relative": {"xavier": plain(relative[[0, 15, 79, 499, 999]]),
                     "tail": number(np.polyfit(np.log(half), np.log(relative[half - 1]), 1)[0]),
                     "scaled": plain([level.relative_update[1::2].min(), level.relative_update[1::2].max()])},
        "scaled": {d: number(from_one("small_init_scaled", wide(64, d)).variance[-1]) for d in (12, 80, 200, 1000)},
        "swamped": swamped, "beta": plain([at_768.weights["attn_out"].std, table[12][1]]),
        "truncated": [TruncatedNormal.from_sigma(1.0, cut).std for cut in (2.0, 3.0)],
        "head": {d: number(d * 0.02**2 / 2) for d in (64, 4096, 8192)},
    }  # fmt: skip


def main() -> None:
    """Measure, and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    began = time.process_time()
    found = {"jax": jax.__version__, "closed_form": closed_form(), "training": training(), "passes": passes()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(r) for r in found.pop("passes"))
    options.json.write_text(json.dumps(found)[:-1] + f', "passes": [\n{lines}\n]}}\n')
    print(f"{time.process_time() - began:.0f} CPU-seconds")


if __name__ == "__main__":
    main()
