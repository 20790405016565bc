"""Sizes over width and depth in a model's first steps: level under muP and CompleteP, not under the standard.

A slope is of log rms against log width (or depth), the mean over seeds, after each of four Adam steps.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinit
from deepinit.nn import Decoder
from deepinit.train import optimizer, step
from deepinit.train.config import load

pytestmark = pytest.mark.slow

WIDTHS, DEPTHS = (64, 128, 256, 512), (2, 4, 16, 64)
STEPS, SEEDS, HEAD = 4, 3, 16
LEVEL = 0.1
# A tenth of the base's std a step. At 0.01, half of it, width 64 is too far from wide: the slope comes to -0.3.
LR = 0.002


@functools.cache
def sizes(scheme, width, depth, args, lr):
    """(seeds, steps + 1, 3): rms of the stream after the middle and the last layer, and of the logits, by step."""
    flags = f"""--scheme.name {scheme} --model.d-model {width} --model.num-layers {depth} --model.d-ff {2 * width}
        --model.num-heads {width // HEAD} --optimizer.lr {lr} --optimizer.schedule constant --optimizer.warmup-steps 1
        --optimizer.weight-decay 0 --optimizer.clip-norm 0"""
    config = load([], [*flags.split(), *(part for k, v in args for part in (f"--scheme.args.{k}", str(v)))])
    recipe = config.recipe()
    model = Decoder.from_recipe(recipe, **config.model_options())
    tx = optimizer.make(config, recipe, jax.eval_shape(lambda: deepinit.init_sharded(model, recipe)))

    @jax.jit
    def look(params, tokens):
        logits, kept = model.apply({"params": params}, tokens, mutable=["stats"])
        stream = kept["stats"]["layers"]["stream_ms"][:, -1]
        return jnp.sqrt(jnp.stack([stream[(depth - 1) // 2], stream[-1], jnp.mean(logits**2)]))

    @jax.jit
    def update(params, state, tokens):
        batch = {"tokens": tokens[None], "weights": jnp.ones((1, tokens.shape[0], tokens.shape[1] - 1))}
        updates, state = tx.update(step.gradients(model, params, batch)[2], state, params)
        return optimizer.apply_updates(params, updates), state

    out = []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        tokens = [jnp.asarray(rng.integers(0, 256, (4, 17)), jnp.int32) for _ in range(STEPS)]
        params = deepinit.init_sharded(model, recipe, seed=seed)
        state, seen = tx.init(params), [look(params, tokens[0])]
        for batch in tokens:
            params, state = update(params, state, batch)
            seen.append(look(params, tokens[0]))
        out.append(seen)
    return np.asarray(out, np.float64)


def slopes(scheme, along, lr, **args):
    """(steps + 1, 3)."""
    over_width = along == WIDTHS
    at = [sizes(scheme, n if over_width else 32, 2 if over_width else n, tuple(args.items()), lr) for n in along]
    logs = np.log(np.stack(at)).mean(1)  # (points, steps + 1, 3)
    return np.polyfit(np.log(along), logs.reshape(len(along), -1), 1)[0].reshape(STEPS + 1, 3)


# cases B58, B60
def test_mup_is_level_over_width_and_the_standard_scheme_is_not():
    mup = slopes("mup", WIDTHS, LR, base_width=64, base_head_dim=HEAD)
    assert np.abs(mup[:, :2]).max() <= LEVEL, mup
    assert mup[0, 2] == pytest.approx(-0.5, abs=0.1)  # a readout that is not zero: its logits shrink at first
    assert mup[1:, 2].max() <= LEVEL
    standard = slopes("fixed_normal", WIDTHS, LR)
    assert np.abs(standard[1:, :2]).max() > 3 * LEVEL, standard
    assert standard[1:, 2].max() > 3 * LEVEL


def test_mup_with_a_zero_readout_has_no_logits_at_first():
    seen = sizes("mup", 64, 2, (("base_width", 64), ("zero_readout", True)), LR)
    assert (seen[:, 0, 2] == 0).all()
    assert (seen[:, 1:, 2] > 0).all()


# case B62
def test_completep_is_level_over_depth_and_the_standard_scheme_is_not():
    completep = slopes("completep", DEPTHS, LR, base_width=32, base_depth=2, base_head_dim=HEAD)
    assert np.abs(completep[:, :2]).max() <= LEVEL, completep
    assert completep[:, 2].max() <= LEVEL
    standard = slopes("fixed_normal", DEPTHS, LR)
    assert np.abs(standard[1:, :2]).max() > 3 * LEVEL, standard
