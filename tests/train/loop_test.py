"""Whole runs of a tiny model: the folder, resuming, refusals, bad steps, interruptions."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from deepinit.errors import ConfigError
from deepinit.recipe import Recipe
from deepinit.train import birth, metrics
from deepinit.train.checkpoint import Checkpoints
from deepinit.train.config import Config, load
from deepinit.train.loop import train

FLAGS = """--model.num-layers 2 --model.d-model 16 --model.num-heads 2 --model.d-ff 32 --model.dropout 0.1
    --data.seq-len 16 --scheme.name megatron --optimizer.warmup-steps 4 --optimizer.lr 1e-2
    --train.steps 20 --train.batch-size 8 --train.accumulate 2 --train.eval-every 10 --train.eval-batches 2
    --train.checkpoint-every 10"""
TEXT = b"".join(b"%d times %d is %d. " % (i, j, i * j) for i in range(30) for j in range(30))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a text and, after `straight`, a run; programs are kept in it, as those of runs are."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_bytes(TEXT)
    jax.config.update("jax_enable_compilation_cache", True)
    yield folder
    jax.config.update("jax_enable_compilation_cache", False)


def config_of(home, run, flags=""):
    here = (
        f"--data.files {home / 'text.txt'} --train.run-dir {home / run} --train.compilation-cache {home / 'programs'}"
    )
    return load([], f"{FLAGS} {here} {flags}".split())


def numbers(folder):
    """What must not depend on how often a run was interrupted: all of the metrics but the times."""
    times = ("tokens_per_s", "flops_per_s", "step_s", "compile_s")
    rows = metrics.read(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in times} for row in rows]


@pytest.fixture(scope="module")
def straight(home):
    """20 steps without interruption, with everything switched on."""
    assert train(config_of(home, "straight", "--train.profile [3,4] --train.tensorboard true")) == 0
    return home / "straight"


def test_the_folder_of_a_run(straight, home):
    for name in ("config.yaml", "recipe.json", "init.json", "metrics.jsonl", "checkpoints"):
        assert (straight / name).exists()
    config = load([straight / "config.yaml"])
    assert config == config_of(home, "straight", "--train.profile [3,4] --train.tensorboard true")
    assert Recipe.from_json(json.loads((straight / "recipe.json").read_text())) == config.recipe()
    init = json.loads((straight / "init.json").read_text())
    assert init["ok"]
    assert init["scheme"] == "megatron"
    assert init["versions"]["jax"] == jax.__version__
    assert {"path", "role", "expected_std", "measured_std", "z", "ok"} <= set(init["rows"][0])
    assert Checkpoints(straight / "checkpoints").manager.all_steps() == [10, 20]
    assert any((straight / "profile").rglob("*.xplane.pb"))
    assert any((straight / "tensorboard").iterdir())


def test_the_metrics_of_a_run(straight):
    rows = metrics.read(straight / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 21))
    assert all({"step", "loss", "lr", "grad_norm", "tokens_per_s"} <= set(row) for row in steps)
    assert [row["step"] for row in rows if "eval_loss" in row] == [10, 20]
    assert steps[0]["loss"] == pytest.approx(np.log(256), rel=0.03)
    assert rows[-1]["eval_loss"] < steps[0]["loss"] - 1
    # cases B67 and B80: lr by optimizer steps, from 1/warmup; the compile time apart from the steps'
    assert [row["lr"] for row in steps[:4]] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert ["compile_s" in row for row in steps] == [True] + [False] * 19
    assert [row["tokens"] for row in steps[:2]] == [128, 256]


# cases B52 and B69: data, rates, dropout and losses to the last bit
# case B54: a run that goes on draws nothing anew
def test_ten_and_ten_is_twenty(straight, home, capsys):
    assert train(config_of(home, "halves", "--train.stop-at 10")) == 0
    assert numbers(home / "halves") == [row for row in numbers(straight) if row["step"] <= 10]
    state = home / "halves" / "checkpoints"
    saved = Checkpoints(state).manager.restore(10)
    counts = [np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(saved["state"]) if "count" in str(path[-1])]
    assert counts
    assert all(count == 10 for count in counts)

    with (home / "halves" / "metrics.jsonl").open("a") as f:
        f.write('{"step": 11, "loss": 1.0}\n{"step": 12, "lo')  # of a run that was killed after its checkpoint
    assert train(config_of(home, "halves")) == 0
    assert "resumed after step 10" in capsys.readouterr().out
    assert numbers(home / "halves") == numbers(straight)


@pytest.mark.parametrize("rule", ["--model.moe-every 2", pytest.param("--model.first-dense 1", marks=pytest.mark.slow)])
def test_dense_and_routed_layers_in_one_run(home, rule, capsys):
    flags = f"--model.num-layers 3 --model.num-experts 2 --model.remat full --model.dropout 0 {rule} --train.profile []"
    flags += " --train.steps 4 --train.eval-every 2 --train.checkpoint-every 2"
    name = f"mixed-{rule.split()[0][8:]}"
    assert train(config_of(home, name, flags)) == 0
    assert train(config_of(home, f"{name}-halves", f"{flags} --train.stop-at 2")) == 0
    shutil.copytree(home / f"{name}-halves", home / f"{name}-unrolled")
    assert train(config_of(home, f"{name}-halves", flags)) == 0
    assert numbers(home / f"{name}-halves") == numbers(home / name)
    assert (
        train(config_of(home, f"{name}-unrolled", f"{flags} --model.scan false")) == 0
    )  # the same state, layer by layer
    assert capsys.readouterr().out.count("resumed after step 2") == 2
    losses = [[row["loss"] for row in numbers(home / run) if "loss" in row] for run in (name, f"{name}-unrolled")]
    assert losses[0][:2] == losses[1][:2]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_run_from_before_a_field_of_the_sizes_was_there_goes_on(straight, home, capsys):
    shutil.copytree(straight, home / "older")
    recipe = json.loads((home / "older" / "recipe.json").read_text())
    del recipe["geometry"]["moe_every"], recipe["geometry"]["first_dense"]
    (home / "older" / "recipe.json").write_text(json.dumps(recipe))
    assert train(config_of(home, "older")) == 0
    assert "is finished: step 20 of 20" in capsys.readouterr().out
    recipe["geometry"]["num_layers"] = 3
    (home / "older" / "recipe.json").write_text(json.dumps(recipe))
    with pytest.raises(ConfigError, match=r"geometry\.num_layers 3 there, 2 here"):
        train(config_of(home, "older"))


def test_a_finished_run_says_so(straight, home, capsys):
    before = (straight / "metrics.jsonl").read_text()
    assert train(config_of(home, "straight")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "is finished: step 20 of 20" in lines[0]
    assert lines[-1] == f"run: {straight}"
    assert (straight / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ("--scheme.name gpt2", "scheme.name megatron there, gpt2 here"),
        ("--scheme.args.std 0.01", "scheme.args.std unset there, 0.01 here"),
        ("--train.seed 1", "train.seed 0 there, 1 here"),
        ("--model.num-layers 3", "model.num_layers 2 there, 3 here"),
        ("--model.param-dtype bfloat16 --model.dtype bfloat16", "model.dtype float32 there, bfloat16 here"),
    ],
)
def test_a_run_of_another_initialization_is_refused(straight, home, flags, shown):
    before = (straight / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=shown) as e:
        train(config_of(home, "straight", flags))
    assert "\n" not in str(e.value)
    assert (straight / "config.yaml").read_text() == before


# case B76: a scanned run goes on unrolled
def test_another_structure_goes_on(straight, home, capsys):
    shutil.copytree(straight, home / "unrolled")
    more = "--train.steps 22 --train.eval-every 0"
    assert train(config_of(home, "unrolled", f"--model.scan false {more}")) == 0
    assert "changed since the last start: model.scan True -> False" in capsys.readouterr().out
    rows = [row for row in numbers(home / "unrolled") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 23))
    assert rows[-1]["loss"] == pytest.approx(rows[-3]["loss"], rel=0.1)


def test_another_mesh_goes_on(straight, home, capsys):
    shutil.copytree(straight, home / "meshes")
    flags = "--train.steps 22 --train.eval-every 0 --mesh.fsdp 2 --optimizer.lr 2e-2"
    assert train(config_of(home, "meshes", flags)) == 0
    out = capsys.readouterr().out
    assert "changed since the last start: mesh.fsdp 1 -> 2" in out
    assert "changed since the last start: optimizer.lr 0.01 -> 0.02" in out
    rows = [row for row in numbers(home / "meshes") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 23))
    assert rows[-1]["loss"] == pytest.approx(rows[-3]["loss"], rel=0.1)


# case B72
def test_a_new_run_from_the_parameters_of_another(straight, home, capsys):
    flags = f"--train.load-from {straight} --train.load params --train.steps 5 --train.eval-every 0"
    assert train(config_of(home, "finetuned", flags)) == 0
    out = capsys.readouterr().out
    assert f"leaves from {straight / 'checkpoints' / '20'}, " in out
    record = json.loads((home / "finetuned" / "origins.json").read_text())
    assert record["checkpoint"] == str(straight / "checkpoints" / "20")
    origins = record["leaves"]
    assert {origins[path] == path for path in origins if path.startswith("params/")} == {True}
    assert {origins[path] for path in origins if not path.startswith("params/")} == {"initial"}
    rows = [row for row in numbers(home / "finetuned") if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[0]["loss"] < numbers(straight)[0]["loss"] - 1


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ("--scheme.name gpt2", "is of another scheme: name megatron there, gpt2 here"),
        ("--model.num-layers 3", r"params/layers/\S+ is \[2, .* there, \[3, .* here"),
        ("--model.d-ff 64", r"params/layers/mlp/mlp_up is \[2, 16, 32\] float32 there, \[2, 16, 64\] float32 here"),
    ],
)
def test_another_model_is_not_started_from(straight, home, flags, shown):
    more = f"--train.load-from {straight} --train.load params {flags}"
    with pytest.raises(ConfigError, match=shown):
        train(config_of(home, f"refused{abs(hash(flags))}", more))


def test_too_many_bad_steps_stop_the_run(home, capsys):
    """A rate of 1e38 leaves parameters finite after the first step, and no later gradient."""
    flags = "--optimizer.lr 1e38 --optimizer.weight-decay 0 --optimizer.warmup-steps 0 --train.checkpoint-every 1"
    assert train(config_of(home, "bad", f"{flags} --train.max-bad-steps 3 --train.eval-every 0")) == 1
    out = capsys.readouterr().out
    assert "3 steps in a row were not finite; the checkpoint of step 1 is kept" in out
    assert out.splitlines()[-1] == f"run: {home / 'bad'}"
    assert Checkpoints(home / "bad" / "checkpoints").manager.all_steps() == [1]
    rows = numbers(home / "bad")
    assert [row["bad_steps"] for row in rows] == [0, 1, 2, 3]
    assert [row["grad_norm"] is None for row in rows] == [False, True, True, True]


def test_a_wrong_leaf_stops_the_run_with_the_table(home, capsys, monkeypatch):
    real = birth.init_shapes

    def tampered(*args):
        params = real(*args)
        return {**params, "lm_head": params["lm_head"] * 1.1}

    monkeypatch.setattr(birth, "init_shapes", tampered)
    assert train(config_of(home, "wrong")) == 1
    out = capsys.readouterr().out
    assert "lm_head" in out
    assert out.splitlines()[-1] == f"run: {home / 'wrong'}"
    init = json.loads((home / "wrong" / "init.json").read_text())
    assert not init["ok"]
    assert [row["path"] for row in init["rows"] if not row["ok"]] == ["lm_head"]
    assert not (home / "wrong" / "metrics.jsonl").exists()


def test_a_new_folder_for_every_run(tmp_path, monkeypatch):
    from deepinit.train import folder

    monkeypatch.chdir(tmp_path)
    made = {folder.of(Config()) for _ in range(3)}
    assert len(made) == 3
    assert all(f.parent.name == "runs" and f.name.startswith("small_init_scaled-") for f in made)


# ---------------------------------------------------------------------------------------------- real processes


MAIN = "import sys; from deepinit.cli import main; sys.exit(main(sys.argv[1:]))"


def start(config, folder, code=MAIN):
    """A run in a process of its own."""
    path = folder.with_suffix(".yaml")
    path.write_text(config.to_yaml())
    command = [sys.executable, "-c", code, "train", "--config", str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(process, folder, done):
    """Until the metrics hold a step."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if any(row["step"] >= done for row in metrics.read(folder / "metrics.jsonl")):
            return
        time.sleep(0.005)
    out, err = process.communicate()
    raise AssertionError(f"no step {done}: {out}\n{err[-2000:]}")


def test_a_save_that_fails_in_the_background_stops_the_run(home):
    """A file may not grow beyond 64 kB, as on a full disk: heard of at a later step, not at the end."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY)); "
    flags = "--model.d-model 64 --train.steps 10000 --train.checkpoint-every 10 --train.eval-every 0"
    process = start(config_of(home, "full", flags), home / "full", limit + MAIN)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    why, last = out.splitlines()[-2:]
    assert why.startswith(f"checkpoint in {home / 'full' / 'checkpoints'} could not be written")
    assert last == f"run: {home / 'full'}"
    assert metrics.read(home / "full" / "metrics.jsonl")[-1]["step"] < 10000


# cases B52 and B69
@pytest.mark.slow
def test_killed_interrupted_and_resumed_is_uninterrupted(home, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "true")
    # Steps of tens of milliseconds, so that the run is there to be killed.
    flags = "--model.d-model 64 --data.seq-len 64 --train.batch-size 32 --train.checkpoint-every 5 --train.eval-every 0"
    flags += f" --train.compilation-cache {home / 'cache'}"
    whole = start(config_of(home, "whole", flags), home / "whole")
    out, err = whole.communicate(timeout=300)
    assert whole.returncode == 0, err
    assert out.splitlines()[-1] == f"run: {home / 'whole'}"

    folder, config = home / "broken", config_of(home, "broken", flags)
    killed = start(config, folder)
    wait_for(killed, folder, 8)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL

    stopped = start(config, folder)
    wait_for(stopped, folder, 12)
    os.kill(stopped.pid, signal.SIGINT)
    out, err = stopped.communicate(timeout=300)
    assert stopped.returncode == 128 + signal.SIGINT, err
    assert f"to resume: deepinit train --config {folder / 'config.yaml'}" in out

    resumed = start(config, folder)
    out, err = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, err
    assert "resumed after step" in out
    assert numbers(folder) == numbers(home / "whole")
    assert any((home / "cache").iterdir())
