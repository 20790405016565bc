"""Probes of a training run: what is kept, what is said, and that the run itself is the same."""

import json

import numpy as np
import pytest

from deepinit.train import metrics
from deepinit.train.config import load
from deepinit.train.loop import train

pytestmark = pytest.mark.slow

FLAGS = """--model.num-layers 2 --model.d-model 16 --model.num-heads 2 --model.d-ff 32 --model.max-seq-len 32
    --data.seq-len 16 --optimizer.warmup-steps 0 --optimizer.schedule constant --train.batch-size 8
    --train.checkpoint-every 0 --train.eval-every 0"""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"%d times %d is %d. " % (i, j, i * j) for i in range(60) for j in range(60)))
    return path


def run(folder, text, flags):
    assert train(load([], f"{FLAGS} --data.files {text} --train.run-dir {folder} {flags}".split())) == 0
    return [r for r in metrics.read(folder / "metrics.jsonl") if "loss" in r]


def probes(folder):
    return [json.loads(line) for line in (folder / "probe.jsonl").read_text().splitlines()]


def test_a_rate_that_is_too_high_is_told_by_role_and_layer(tmp_path, text, capsys):
    run(tmp_path, text, "--scheme.name megatron --optimizer.lr 0.5 --train.steps 6 --train.probe-every 2")
    rows = [r for r in probes(tmp_path) if "variance" in r]
    assert [r["step"] for r in rows] == [2, 4, 6]
    assert all(len(r["variance"]) == 3 and len(r["stream_gradient"]) == 3 for r in rows)
    assert len(rows[0]["update_over_weight"]["mlp_up"]) == 2
    warned = [w for r in rows for w in r["warnings"]]
    assert any(w.startswith("update over weight of attn_q in layer ") for w in warned)
    said = capsys.readouterr().out
    assert all(w in " ".join(said.split()) for w in warned)


def test_a_probed_run_is_the_same_run(tmp_path, text):
    flags = "--scheme.name rezero --optimizer.lr 1e-2 --train.steps 10 --train.log-every 1"
    plain = run(tmp_path / "plain", text, flags)
    probed = run(tmp_path / "probed", text, f"{flags} --train.probe-every 2")
    assert [r["loss"] for r in plain] == [r["loss"] for r in probed]
    gates = [r["gates"]["layers/residual_gate"] for r in probes(tmp_path / "probed") if "variance" in r]
    assert np.abs(gates[-1]).min() > np.abs(gates[0]).max()


def test_a_stack_that_collapses_says_so_without_a_spike(tmp_path, text, capsys):
    flags = "--scheme.name post_ln --model.num-layers 32 --model.mlp relu --model.norm layernorm --optimizer.lr 3e-3"
    run(tmp_path, text, f"{flags} --train.steps 260 --train.probe-every 60")
    said = " ".join(capsys.readouterr().out.split())
    assert "tokens have collapsed: from layer" in said
    assert "the unigram entropy of the text" in said
    assert "loss spike" not in said
