"""From a config to a verdict: drawn models agree with their prediction, and broken ones do not."""

import dataclasses
import json

import pytest

from deepinit import cli
from deepinit.signal import study
from deepinit.train.config import load

pytestmark = pytest.mark.slow

TINY = [
    "--model.num-layers", "4", "--model.d-model", "64", "--model.num-heads", "4", "--model.d-ff", "168",
    "--model.max-seq-len", "64", "--data.seq-len", "48", "--train.batch-size", "4",
]  # fmt: skip


def examined(*flags, tokens="text", effects=False):
    config = load((), [*TINY, *flags])
    config.check()
    return study.examine(config.scheme.name, config, tokens, effects)


CASES = {
    "text": (
        "--scheme.name lecun_normal --model.num-kv-heads 2",
        "--scheme.name peri_ln --model.qk-norm true --model.positions learned",
        "--scheme.name subln --model.num-experts 4",
    ),
    "random": (
        "--scheme.name small_init --model.mlp relu --model.norm layernorm --model.tied-embeddings true",
        "--scheme.name megatron --model.parallel true --mesh.fsdp 2 --mesh.tensor 2",
        "--scheme.name tfixup_decoder --model.mlp gelu",
    ),
}


@pytest.mark.parametrize(("tokens", "flags"), [(kind, flags) for kind, cases in CASES.items() for flags in cases])
def test_drawn_models_agree(tokens, flags):
    case = examined(*flags.split(), tokens=tokens)
    assert case.ok, [c for c in case.checks if c.ok is False]
    assert any(c.z is not None for c in case.checks)


def test_a_model_that_is_not_the_predicted_one_fails(monkeypatch):
    """The outputs' 1/sqrt(2L) is left off where the weights are drawn."""
    honest = study.born

    def broken(config):
        made = honest(config)
        layers = made.params["layers"]
        louder = {**layers["mlp"], "mlp_down": layers["mlp"]["mlp_down"] * 8**0.5}
        return dataclasses.replace(made, params={**made.params, "layers": {**layers, "mlp": louder}})

    assert examined("--scheme.name", "small_init_scaled", "--model.mlp", "relu").ok
    monkeypatch.setattr(study, "born", broken)
    case = examined("--scheme.name", "small_init_scaled", "--model.mlp", "relu")
    assert not case.ok
    assert any(c.ok is False and c.name.startswith("Var(x)") for c in case.checks)


def test_the_command_probes_and_reports(tmp_path, capsys):
    flags = [*TINY, "--scheme.name", "deepnorm", "--report", str(tmp_path)]
    assert cli.main(["probe", *flags]) == 0
    said = capsys.readouterr().out
    assert "probe ok" in said
    assert "gradient, first over last layer" in said
    assert "attn_out" in said
    data = json.loads((tmp_path / "report.json").read_text())["schemes"][0]
    assert data["scheme"] == "deepnorm"
    assert 0.8 < data["measured"]["gradient_ratio"] < 1.25
    page = (tmp_path / "report.html").read_text()
    assert len(page) < 500_000
    assert "<svg" in page


def test_a_collapsed_post_norm_stack_does_not_pass(capsys):
    flags = [*TINY, "--scheme.name", "post_ln", "--model.num-layers", "48", "--json", "--quick"]
    assert cli.main(["probe", *flags]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    bad = [c["name"] for c in found["checks"] if c["ok"] is False]
    assert "token correlation, top" in bad


def test_the_command_compares(capsys, tmp_path):
    assert cli.main(["compare", "--schemes", "megatron,rezero", *TINY, "--quick", "--report", str(tmp_path)]) == 0
    assert "worst |z|" in capsys.readouterr().out
    rows = json.loads((tmp_path / "report.json").read_text())["schemes"]
    assert [r["scheme"] for r in rows] == ["megatron", "rezero"]
    assert not any(c["ok"] is False for r in rows for c in r["checks"])


def test_wrong_input_is_one_line(capsys, tmp_path):
    taken = tmp_path / "file"
    taken.write_text("")
    for args in (
        ["compare", *TINY],
        ["probe", *TINY, "--scheme.name", "mimetic"],
        ["probe", *TINY, "--scheme.name", "megatron", "--report", str(taken / "x")],
        ["predict", "--schemes", "megatrn"],
        ["predict", "--seq-len", "9000"],
        ["coord", "--widths", "32,sixty", *TINY],
        ["coord", "--widths", "40,80", *TINY],
        ["coord", "--schemes", "mup", "--seeds", "1", *TINY],
        ["probe", "--tokens", "bytes", *TINY],
    ):
        assert cli.main(args) == 2, args
        assert len(capsys.readouterr().err.strip().splitlines()) == 1, args
