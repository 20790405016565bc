"""The prediction against drawn models: schemes x depths x widths x MLPs, on random tokens and on real text.

    python -m benchmarks.predictor --json benchmarks/results/predictor.json      about an hour on two cores

Every configuration is drawn twice with seeds of its own. What is recorded is the raw comparison; `summary` makes the
table of it.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import deepinit
from deepinit import Geometry, initializers, roles, sharded_init
from deepinit.errors import ConfigError
from deepinit.nn import Decoder
from deepinit.recipe import Recipe
from deepinit.report.pages import table
from deepinit.signal import checks
from deepinit.signal.predict import Prediction, predict
from deepinit.train import data
from deepinit.train.config import DataConfig

SCHEMES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("xavier", {}), ("glorot_uniform", {}), ("he_normal", {}), ("lecun_normal", {}), ("torch_linear_default", {}),
    ("fixed_normal", {"std": 0.05}), ("gpt2", {}), ("megatron", {"std": 0.1, "embed_std": 1.0}), ("small_init", {}),
    ("small_init_scaled", {}), ("wang_init", {}), ("spike_no_more", {}), ("modern", {}), ("modern_small", {}),
    ("peri_ln", {}), ("sandwich_ln", {}), ("depth_scaled_sandwich", {}), ("subln", {}), ("layernorm_scaling",
    {"std": 0.08}), ("normformer", {"std": 0.06}), ("olmo2", {}), ("olmo_mitchell", {}), ("olmo_core_fan_in", {}),
    ("torchtitan_llama3", {}), ("lingua_disabled", {}), ("lingua_current_depth", {}), ("palm", {}), ("t5x", {}),
    ("gemma", {}), ("nanodo", {}), ("minicpm", {}), ("depth_mup", {"base_width": 64, "std": 0.1}), ("umup", {}),
    ("completep", {"base_width": 64, "std": 0.3}), ("layerscale", {"value": 0.1, "std": 0.1}),
    ("tfixup_decoder", {}), ("skipinit", {"start": "1/sqrt(R)", "base": "xavier_normal"}), ("deepnorm", {}),
    ("post_ln", {}), ("keel", {"std": 0.1}), ("admin", {}), ("rezero", {}),
)  # fmt: skip
DEPTHS, WIDTHS, MLPS = (12, 80, 200), (64, 128), ("gelu", "relu", "swiglu")
POSITIONS, BATCH = 64, 4
VOCAB = 256
PER_SCHEME = 4
"""Configurations of a scheme, times random tokens and text, times two seeds."""


def configurations(seed: int) -> list[dict[str, Any]]:
    """Fresh settings, drawn at random but so that every scheme sees several depths, widths and MLPs."""
    rng, out = random.Random(seed), []
    for name, args in SCHEMES:
        cells = [(depth, width, mlp) for depth in DEPTHS for width in WIDTHS for mlp in MLPS]
        for depth, width, mlp in rng.sample(cells, PER_SCHEME):
            heads = width // 16
            out.append({
                "scheme": name, "args": args, "depth": depth, "width": width, "mlp": mlp,
                "kv": rng.choice([heads, heads, heads // 2, 1]), "tied": rng.random() < 0.25,
                "positions": rng.choice(["rope", "rope", "none", "learned"]), "qk_norm": rng.random() < 0.25,
                "norm": "layernorm" if mlp != "swiglu" and rng.random() < 0.5 else "rmsnorm",
                "parallel": rng.random() < 0.1, "experts": 4 if rng.random() < 0.1 else 0,
                "seed": rng.randrange(2**31),
            })  # fmt: skip
    rng.shuffle(out)
    return out


def setting(c: dict[str, Any]) -> tuple[Recipe, dict[str, Any]]:
    """(recipe, model options) of a configuration."""
    d_ff = round(8 * c["width"] / 24) * 8 if c["mlp"] == "swiglu" else 4 * c["width"]
    g = Geometry(
        c["depth"], c["width"], c["width"] // 16, d_ff, VOCAB, c["kv"], max_seq_len=POSITIONS, mlp=c["mlp"],
        tied_embeddings=c["tied"], parallel=c["parallel"], num_experts=c["experts"],
    )  # fmt: skip
    recipe = deepinit.recipe(c["scheme"], g, **c["args"])
    options = {"positions": c["positions"], "norm": c["norm"]}
    if "qk_norm" not in recipe.requires:
        options["qk_norm"] = c["qk_norm"]
    return recipe, options


def batches(c: dict[str, Any], text: Any) -> dict[str, np.ndarray]:
    """(B, T + 1) tokens of each kind."""
    rng = np.random.default_rng(c["seed"])
    drawn = rng.integers(0, VOCAB, (BATCH, POSITIONS + 1), np.int32)
    if text is None:
        return {"random": drawn}
    return {"random": drawn, "text": np.asarray(text.train[int(rng.integers(1, 1000))]["tokens"], np.int32)}


def examine(c: dict[str, Any], text: Any) -> list[dict[str, Any]]:
    """Predict and draw one configuration, on random tokens and on text."""
    recipe, options = setting(c)
    model = Decoder.from_recipe(recipe, **options)
    shapes = roles.unboxed(sharded_init.abstract_params(model))
    draw, _ = sharded_init.plan(model, shapes, 0)
    draw, run = jax.jit(draw), forward(model.clone(initializer=no_draw))
    rows = []
    for kind, tokens in batches(c, text).items():
        p = predict(recipe, tokens[:, :-1], exponents=False, **options)
        for k in range(2):
            seed = c["seed"] + 7 * k + (kind == "text")
            params = draw(sharded_init.plan(model, shapes, seed)[1])
            m = jax.device_get(run(params, tokens))
            rows.append({**c, "tokens": kind, "draw": k, **compared(p, m, tokens[:, 1:])})
    return rows


def no_draw(role: str, layer: Any = None) -> Any:
    """An initializer that is never asked: models that differ in their laws alone compile once."""
    return initializers.zeros


@functools.cache
def forward(model: Any) -> Any:
    """(params, tokens) -> statistics, compiled."""

    def run(params: Any, tokens: jax.Array) -> dict[str, Any]:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        logits, kept = model.apply({"params": params}, inputs, mutable=["stats"])
        own = jnp.take_along_axis(logits, inputs[..., None], -1)
        others = (jnp.sum(logits**2) - jnp.sum(own**2)) / (logits.size - own.size)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
        layers = kept["stats"]["layers"]
        return {
            "x0": kept["stats"]["embed_ms"], "stream": layers["stream_ms"].ravel(),
            "corr": layers["stream_corr"].ravel()[-1], "spread": others, "own": own.mean(), "loss": loss,
            "branch": jnp.stack([v["branch_ms"] for k, v in sorted(layers.items()) if k.endswith("_residual")]),
        }  # fmt: skip

    return jax.jit(run)


def compared(p: Prediction, m: dict[str, Any], targets: np.ndarray) -> dict[str, Any]:
    """Numbers of one comparison."""
    top, spread = float(m["stream"][-1]), float(m["spread"])
    out = {
        "variance": p.variance[-1], "measured": top, "sd": checks.variance_sd(p) if not p.forward.fixed_size else 0.0,
        "share": 1 - p.kept[-1] ** 2 * p.variance[0] / p.variance[-1], "amplification": p.amplification,
        "fixed": p.forward.fixed_size, "normless": p.forward.normless, "correlation": p.correlation[-1],
        "measured_correlation": float(m["corr"]), "logits": p.logit_variance, "measured_logits": spread,
        "logits_sd": checks.logit_sd(p), "own": p.own_logit, "measured_own": float(m["own"]), "loss": p.loss,
        "measured_loss": float(m["loss"]), "loss_sd": checks.loss_sd(p, targets),
        "branch": p.branch[-1], "measured_branch": float(m["branch"][-1, -1]),
    }  # fmt: skip
    return {k: v if isinstance(v, bool) else float(v) for k, v in out.items()}


# --- the table ---------------------------------------------------------------------------------------------------


def z_of(row: dict[str, Any]) -> float:
    """Of the variance at the top."""
    off = math.log(row["measured"] / row["variance"]) if row["normless"] else row["measured"] / row["variance"] - 1
    return off / row["sd"]


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those whose last variance says something: no norm sets it, branches have a share, nothing is amplified."""
    return [r for r in rows if not r["fixed"] and r["share"] >= 0.05 and r["amplification"] <= checks.AMPLIFIED]


def line(name: str, z: np.ndarray, error: np.ndarray) -> tuple[str, ...]:
    """A row of the table."""
    return (
        name, str(len(z)), f"{np.median(np.abs(error)):.1%}", f"{np.quantile(np.abs(error), 0.95):.1%}",
        f"{z.mean():+.2f}", f"{z.std():.2f}", f"{np.abs(z).max():.1f}", f"{(np.abs(z) > 4).mean():.1%}",
    )  # fmt: skip


COLUMNS = ("", "n", "median error", "95%", "z mean", "z sd", "worst z", "z above 4")


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The table: all, then by kind."""
    out, good = [], judged(rows)

    def variance(name: str, some: list[dict[str, Any]]) -> None:
        if len(some) > 1:
            z = np.array([z_of(r) for r in some])
            out.append(line(name, z, np.array([r["measured"] / r["variance"] - 1 for r in some])))

    normed = [r for r in good if not r["normless"]]
    variance("Var(x_L), all with norms", normed)
    both: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for r in normed:
        both.setdefault((r["seed"], r["tokens"]), []).append(r)
    means = [(np.mean([z_of(r) for r in v]) * len(v) ** 0.5, np.mean([r["measured"] / r["variance"] - 1 for r in v]))
             for v in both.values()]  # fmt: skip
    out.append(line("- mean of the two draws", *np.array(means).T))
    for kind in ("random", "text"):
        variance(f"- {kind} tokens", [r for r in normed if r["tokens"] == kind])
    for key, values in (
        ("depth", DEPTHS),
        ("width", WIDTHS),
        ("mlp", MLPS),
        ("positions", ("rope", "none", "learned")),
    ):
        for value in values:
            variance(f"- {key} {value}", [r for r in normed if r[key] == value])
    variance("- grouped-query heads", [r for r in normed if r["kv"] < r["width"] // 16])
    variance("- QK-norm", [r for r in normed if r["qk_norm"]])
    variance("- parallel block", [r for r in normed if r["parallel"]])
    variance("- experts", [r for r in normed if r["experts"]])
    variance("Var(x_L), no norm (ln)", [r for r in good if r["normless"]])
    for name, some in (("logit variance, untied", [r for r in rows if not r["tied"]]),
                       ("logit variance, tied", [r for r in rows if r["tied"]])):  # fmt: skip
        some = [r for r in some if r["logits"] > 0 and r["amplification"] <= checks.AMPLIFIED]
        error = np.array([r["measured_logits"] / r["logits"] - 1 for r in some])
        out.append(line(name, error / np.array([r["logits_sd"] for r in some]), error))
    for tied in (False, True):
        some = [r for r in rows if r["tied"] == tied and 0 < r["logits"] <= checks.WIDEST and r["loss_sd"] > 0
                and r["amplification"] <= checks.AMPLIFIED]  # fmt: skip
        off = np.array([r["measured_loss"] - r["loss"] for r in some])
        z = off / np.array([r["loss_sd"] for r in some])
        out.append(
            line(f"loss at step 0, {'tied' if tied else 'untied'}", z, off / np.array([r["loss"] for r in some]))
        )
    return out


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table as Markdown."""
    return table(COLUMNS, summary(rows))


def main() -> None:
    """Run what is missing of the study, then print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="rows, kept as they come; a run goes on where another ended")
    parser.add_argument("--seed", type=int, default=2025)
    parser.add_argument("--limit", type=int, default=0, help="configurations; 0: all")
    options = parser.parse_args()
    rows = read(options.json) if options.json and options.json.exists() else []
    done = {r["seed"] for r in rows}
    todo = configurations(options.seed)[: options.limit or None]
    text = data.load(DataConfig(seq_len=POSITIONS), batch_size=BATCH, eval_batch_size=1, eval_batches=1)
    began = time.process_time()
    for i, c in enumerate(todo):
        if c["seed"] in done:
            continue
        try:
            rows += examine(c, text)
        except ConfigError as e:
            print(f"{c['scheme']}: left out, {e}")
            continue
        if options.json and (i % 5 == 0 or i == len(todo) - 1):
            write(options.json, rows, options.seed)
            print(f"{i + 1} of {len(todo)}, {time.process_time() - began:.0f} CPU-seconds", flush=True)
        jax.clear_caches() if i % 40 == 39 else None
    if options.json:
        write(options.json, rows, options.seed)
    print(markdown(rows))


def write(path: Path, rows: list[dict[str, Any]], seed: int) -> None:
    """Rows and how they were made, numbers to 5 digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(rows[0])
    short = [[float(f"{r[c]:.5g}") if isinstance(r[c], float) else r[c] for c in columns] for r in rows]
    lines = ",\n".join(json.dumps(r, separators=(",", ":")) for r in short)
    head = f'{{"seed": {seed}, "jax": "{jax.__version__}", "columns": {json.dumps(columns)}, "rows": [\n'
    path.write_text(f"{head}{lines}\n]}}\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a study."""
    data = json.loads(path.read_text())
    return [dict(zip(data["columns"], row)) for row in data["rows"]]


if __name__ == "__main__":
    main()
