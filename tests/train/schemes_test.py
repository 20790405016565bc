"""Schemes in training: every one takes steps; parametrizations at base size; decay; nGPT, experts, Admin."""

import collections
import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinit
from deepinit import Role, calibration, cli, initializers, roles
from deepinit.errors import ConfigError
from deepinit.nn import Decoder
from deepinit.projection import project
from deepinit.schemes.registry import scheme_names, undecided
from deepinit.sharded_init import abstract_params
from deepinit.train import metrics, optimizer, step
from deepinit.train.birth import born
from deepinit.train.config import load
from deepinit.train.loop import train

FLAGS = """--model.num-layers 2 --model.d-model 32 --model.num-heads 2 --model.d-ff 48 --model.max-seq-len 32
    --data.seq-len 16 --train.batch-size 8 --optimizer.warmup-steps 1"""
TEXT = b"".join(b"%d times %d is %d. " % (i, j, i * j) for i in range(30) for j in range(30))
BASE = {"base_width": 32, "base_depth": 2}
NAMES = [n for n in scheme_names() if n != "external"]
TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"


def config_of(scheme, flags=""):
    args = " ".join(f"--scheme.args.{k} {BASE[k]}" for k in undecided(scheme, ()))
    return load([], f"{FLAGS} --scheme.name {scheme} {args} {flags}".split())


def batch_of(seed=0, size=8, length=16):
    """Text, as a step takes it: in one part."""
    rng = np.random.default_rng(seed)
    rows = [np.frombuffer(TEXT[i : i + length + 1], np.uint8) for i in rng.integers(0, 9000, size)]
    return {"tokens": np.stack(rows)[None].astype(np.int32), "weights": np.ones((1, size, length), np.float32)}


def no_initializer(role, layer=None):
    """What a forward pass needs of an initializer: nothing."""
    return initializers.zeros


@functools.cache
def gradients(model):
    """Loss and gradient, compiled once for all schemes of one structure."""
    return jax.jit(functools.partial(step.gradients, model))


def stepped(config, steps):
    """(losses, parameters before, parameters after) of some steps with the scheme's own optimizer."""
    recipe = config.check()
    model = Decoder.from_recipe(recipe, **config.model_options())
    first = params = deepinit.init_sharded(model, recipe)
    deepinit.verify(params, recipe, seed=0)
    run = gradients(model.clone(initializer=no_initializer, own_laws=()))
    tx = optimizer.make(config, recipe, params)
    state, losses = tx.init(params), []
    for i in range(steps):
        loss, _, grads = run(params, batch_of(i))
        assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))
        updates, state = tx.update(grads, state, params)
        params = project(optimizer.apply_updates(params, updates), recipe)
        losses.append(float(loss))
    return losses, first, params


# By the command, with the demo's config in small. What must be told more says so in one line, and takes what it names.
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_command_trains_every_scheme(name, tmp_path, capsys):
    run, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_bytes(TEXT)
    flags = f"""--config {TINY} {FLAGS} --scheme.name {name} --train.steps 20 --train.eval-every 0
        --train.eval-batches 1 --train.checkpoint-every 20 --data.files {text} --train.run-dir {run}""".split()
    while (status := cli.main(["train", *flags])) == 2:
        [line] = capsys.readouterr().err.splitlines()
        field, value = re.search(rf"(scheme\.args\.\w+): scheme {name} needs .*; nearest: (\d+)", line).groups()
        assert f"--{field}" not in flags
        flags += [f"--{field}", value]
    assert status == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"run: {run}"
    assert json.loads((run / "init.json").read_text())["ok"]
    rows = metrics.read(run / "metrics.jsonl")
    recipe = deepinit.recipe(name, config_of(name).geometry())
    factors = any(gate for _, gate in recipe.residual.gates) or len(recipe.gains) > 0
    assert ("gates" in rows[-1]) == factors  # case B25: what gates have become is in every run's log, by layer
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 20
    assert np.isfinite(losses).all()
    # ln 256 = 5.55; the largest is that of unit tables without a norm behind them, or of enlarged logits (minicpm: 8)
    assert losses[0] < 8 * max(1, recipe.multipliers.get("logits", 1))
    assert np.mean(losses[-3:]) < losses[0]


def structure(recipe):
    """What of a recipe makes modules: all but its numbers."""
    rule = recipe.residual
    gates = [(k, gate.shape, gate.share) for k, gate in (*rule.gates, *recipe.gains.items()) if gate]
    return rule.norm, rule.placements, rule.inner_norm, rule.sphere, rule.shift, *gates, recipe.requires


# Only values change: leaves, shapes, dtypes, logical axes (and so every sharding) are those of the structure.
def test_schemes_of_one_structure_have_one_tree():
    first, alike = {}, collections.Counter()
    for name in NAMES:
        recipe = config_of(name).check()
        tree = abstract_params(Decoder.from_recipe(recipe, **config_of(name).model_options()))
        shapes = jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
        assert shapes == first.setdefault(structure(recipe), shapes), name
        alike[structure(recipe)] += 1
    assert max(alike.values()) > 30


# --- parametrizations --------------------------------------------------------------------------------------------


# cases B60, B61: at base width and depth, the standard scheme bit for bit: init, forward, and a step
@pytest.mark.parametrize("name", ["mup", "depth_mup", "completep", "completed_p"])
def test_at_base_size_it_is_the_standard_scheme(name):
    ours, standard = config_of(name), config_of("fixed_normal")
    for a, b in zip(stepped(ours, 1), stepped(standard, 1)):
        same(a, b)
    logits = []
    for config in (ours, standard):
        recipe = config.check()
        model = Decoder.from_recipe(recipe, **config.model_options())
        params = deepinit.init_sharded(model, recipe)
        logits.append(jax.jit(lambda p, m=model: m.apply({"params": p}, batch_of()["tokens"][0]))(params))
    same(*logits)


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("name", ["mup", "completep"])
def test_at_another_size_it_is_not(name):
    flags = "--scheme.args.base_width 16"
    assert stepped(config_of(name, flags), 1)[0] != stepped(config_of("fixed_normal"), 1)[0]


# --- decay -------------------------------------------------------------------------------------------------------


def decayed(flags, scheme="fixed_normal"):
    """Role -> by what share a step with no gradient shrinks its first matrix."""
    config = config_of(scheme, f"--optimizer.schedule constant {flags}")
    recipe = config.check()
    model = Decoder.from_recipe(recipe, **config.model_options())
    params = deepinit.init_sharded(model, recipe)
    tx = optimizer.make(config, recipe, params)
    still = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(still, tx.init(params), params)
    out = {}
    for (path, w), u in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(updates)):
        w, u = np.asarray(w, np.float64), np.asarray(u, np.float64)
        out[roles.role_of(path)] = -(u * w).sum() / (w * w).sum()
    return out


# lr 0.01, weight_decay 0.2, and a scheme that has hidden matrices at lr 1/2, decay 2
def test_decoupled_decay_follows_the_rate():
    shares = decayed("--optimizer.lr 0.01 --optimizer.weight-decay 0.2")
    assert shares[Role.ATTN_Q] == pytest.approx(0.002, rel=1e-5)
    assert shares[Role.NORM_SCALE] == 0
    muP = decayed("--optimizer.lr 0.01 --optimizer.weight-decay 0.2 --scheme.args.base_width 16", "mup")
    assert muP[Role.ATTN_Q] == pytest.approx(0.002, rel=1e-5)  # 1/2 x 2: lr times decay knows no width
    plain = decayed(
        "--optimizer.lr 0.01 --optimizer.weight-decay 0.2 --scheme.args.base_width 16 --scheme.args.decay plain", "mup"
    )
    assert plain[Role.ATTN_Q] == pytest.approx(0.001, rel=1e-5)


@pytest.mark.parametrize("lr", ["0.01", "0.001"])
def test_independent_decay_does_not(lr):
    flags = f"--optimizer.lr {lr} --optimizer.weight-decay 0.02 --optimizer.decay independent"
    assert decayed(flags)[Role.ATTN_Q] == pytest.approx(0.02, rel=1e-5)
    assert decayed(flags, "umup")[Role.ATTN_Q] == pytest.approx(0.02, rel=1e-5)  # rate and decay: their product is 1


# In the gradient it goes through Adam's moments: a step of size lr, whatever the size of the decay.
def test_coupled_decay_is_a_gradient():
    for decay in ("0.1", "10"):
        config = config_of("fixed_normal", f"--optimizer.decay coupled --optimizer.weight-decay {decay}")
        recipe = config.check()
        model = Decoder.from_recipe(recipe, **config.model_options())
        params = deepinit.init_sharded(model, recipe)
        tx = optimizer.make(config.replace(optimizer__schedule="constant", optimizer__clip_norm=0.0), recipe, params)
        updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
        size = np.abs(updates["layers"]["mlp"]["mlp_up"])
        assert np.median(size) == pytest.approx(1e-3, rel=0.01)
        assert not updates["final_norm"]["norm_scale"].any()


# --- nGPT --------------------------------------------------------------------------------------------------------


def test_ngpt_decays_nothing_and_stays_on_the_sphere():
    config = config_of("ngpt")
    recipe = config.check()
    birth = born(config)
    mask = optimizer.decay_mask(birth.params, recipe, config.optimizer)
    assert not any(jax.tree.leaves(mask))
    tx = optimizer.make(config, recipe, birth.params)
    pure = step.train_step(
        birth.model, tx, optimizer.schedule(config), 0, False, lambda params: project(params, recipe)
    )
    with jax.set_mesh(birth.mesh):
        state, shardings = step.create(jax.tree.map(jnp.copy, birth.params), tx, birth.mesh)
        run = step.jitted(pure, shardings, birth.mesh)
        for i in range(3):
            state, metrics = run(state, {k: jnp.asarray(v) for k, v in batch_of(i).items()})
    assert float(metrics["loss"]) < np.log(256) + 1
    table, up = (np.asarray(x, np.float64) for x in (state.params["lm_head"], state.params["layers"]["mlp"]["mlp_up"]))
    assert np.abs(np.linalg.norm(table, axis=1) - 1).max() < 1e-6
    assert np.abs(np.linalg.norm(up, axis=1) - 1).max() < 1e-6
    assert (up != np.asarray(birth.params["layers"]["mlp"]["mlp_up"])).any()


# --- experts -----------------------------------------------------------------------------------------------------


def test_the_loss_of_the_load_is_minimized_and_not_reported():
    found = {}
    for weight in ("0", "0.5"):
        config = config_of("megatron", f"--model.num-experts 4 --model.balance-loss {weight}")
        recipe = config.check()
        model = Decoder.from_recipe(recipe, **config.model_options())
        params = deepinit.init_sharded(model, recipe)
        loss, _, grads = gradients(model.clone(initializer=no_initializer))(params, batch_of())
        found[weight] = float(loss), np.asarray(grads["layers"]["mlp"]["router"])
    assert found["0"][0] == pytest.approx(found["0.5"][0], rel=1e-6)
    assert np.abs(found["0.5"][1] - found["0"][1]).max() > 1e-4


# --- Admin -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("admin")
    (folder / "text.txt").write_bytes(TEXT)
    return folder


def run_of(home, name, flags=""):
    files = f"--data.files {home / 'text.txt'} --train.run-dir {home / name}"
    steps = "--train.steps 4 --train.eval-every 0 --train.eval-batches 1 --train.checkpoint-every 2"
    return config_of("admin", f"--scheme.args.growth measured {files} {steps} {flags}")


# case B28: measured, kept with the run and its checkpoints, taken up again, lent to the same stack, refused elsewhere
def test_a_run_keeps_what_it_measured(home, capsys):
    assert train(run_of(home, "first", "--train.stop-at 2")) == 0
    measured = calibration.read(home / "first" / calibration.FILE)
    assert measured.skip[0] == 1.0
    assert len(measured.skip) == 4
    kept = json.loads((home / "first" / "recipe.json").read_text())
    assert kept["residual"]["skip_gate"]["value"] == list(measured.skip)
    assert kept["calibrate"] == ""
    init = json.loads((home / "first" / "init.json").read_text())
    rows = {(r["path"], r["layer"]): r for r in init["rows"] if r["path"].endswith("skip_residual_gate")}
    assert rows["layers/mlp_residual/skip_residual_gate", 1]["measured_mean"] == pytest.approx(measured.skip[3])

    assert train(run_of(home, "first")) == 0  # it goes on from its own numbers
    assert "resumed after step 2" in capsys.readouterr().out

    path = home / "first" / calibration.FILE
    lent = born(run_of(home, "second", f"--scheme.calibration {path}"))
    assert lent.calibration == measured
    with pytest.raises(ConfigError, match="measured at num_layers 2, this model has 4; measure it anew"):
        run_of(home, "third", f"--model.num-layers 4 --scheme.calibration {path}").check()
    with pytest.raises(ConfigError, match="scheme small_init measures nothing"):
        load([], ["--scheme.name", "small_init", "--scheme.calibration", str(path)]).check()
