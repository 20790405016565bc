"""A birth certificate, and what it shows with NumPy alone; initial states on disk; the verbs."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

import deepinit
from deepinit import artefact, certificate, cli
from deepinit.interop import sources, trees
from deepinit.invariants import inspect
from tests.models import born, refused

SIZES = {"num-layers": 2, "d-model": 32, "num-heads": 2, "d-ff": 64}
SMALL_RUN = ["--config", "configs/tiny.yaml", *(x for k, n in SIZES.items() for x in (f"--model.{k}", str(n)))]


def certified(scheme="ds_init", **options):
    _, recipe, params = born(scheme, **options)
    verdict = inspect(params, recipe, seed=0)
    page = artefact.certify(params, recipe, 0, verdict, {"numpy": np.__version__})
    arrays = {path: np.asarray(x) for path, x in trees.flat(params)}
    return json.loads(json.dumps(page)), arrays, params


@pytest.mark.parametrize("options", [{}, {"scan": False}, {"vocab_multiple": 64}, {"param_dtype": "bfloat16"}], ids=str)
def test_a_healthy_state_is_as_its_certificate_says(options):
    page, arrays, params = certified(**options)
    assert certificate.check(page, arrays) == []
    assert page["digest"] == deepinit.digest(params)
    assert set(page["leaves"]) == set(arrays)


def test_one_bit_a_missing_leaf_and_another_seed_are_seen():
    page, arrays, _ = certified()
    broken = {**arrays, "layers/mlp/mlp_up": arrays["layers/mlp/mlp_up"].copy()}
    broken["layers/mlp/mlp_up"].view(np.uint32)[1, 3, 5] ^= 1
    (said,) = certificate.check(page, broken)
    assert said.startswith(f"layers/mlp/mlp_up: index {3 * 160 + 5} of layer 1 holds")
    del broken["layers/mlp/mlp_up"]
    assert certificate.check(page, broken) == ["layers/mlp/mlp_up: missing"]
    assert certificate.check(page, broken, whole=False) == []
    assert len(certificate.check({**page, "seed": 1}, arrays)) > 8
    gain = {"final_norm/norm_scale": arrays["final_norm/norm_scale"] * 2} if "final_norm/norm_scale" in arrays else {}
    assert all("holds 2, seed 0 draws 1" in s for s in certificate.check(page, gain, whole=False))
    assert "the certificate has no such leaf" in certificate.check(page, {"x": np.ones(3)}, whole=False)[0]
    assert "version 2 is unknown" in refused(certificate.check, {**page, "certificate": 2}, arrays)


def test_one_shard_is_checked_where_it_lies():
    page, _, params = certified(mesh=(1, 4, 2))
    leaf = params["layers"]["mlp"]["mlp_down"]
    for shard in leaf.addressable_shards:
        start = [s.indices(n)[0] for s, n in zip(shard.index, leaf.shape)]
        data = np.array(shard.data)
        assert certificate.check_shard(page, "layers/mlp/mlp_down", data, start) == []
        data[2, 4, 1] += 1e-3
        (said,) = certificate.check_shard(page, "layers/mlp/mlp_down", data, start)
        row = (start[1] + 4) * leaf.shape[2] + start[2] + 1
        assert f"index {row} of layer 2" in said
    (said,) = certificate.check_shard(page, "layers/mlp/mlp_down", data, [0, 0, 60])
    assert "is not inside" in said


def test_checking_needs_no_jax(tmp_path):
    page, arrays, _ = certified()
    (tmp_path / "page.json").write_text(json.dumps(page))
    np.savez(tmp_path / "arrays.npz", **arrays)
    code = (
        "import json, sys, numpy as np; from deepinit import certificate;"
        f"page = json.load(open({str(tmp_path / 'page.json')!r}));"
        f"arrays = dict(np.load({str(tmp_path / 'arrays.npz')!r}));"
        "assert certificate.check(page, arrays) == []; assert 'jax' not in sys.modules; print('as drawn')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "as drawn\n"


@pytest.mark.parametrize("form", ["orbax", "safetensors"])
def test_an_artefact_is_written_audited_and_compared(tmp_path, capsys, form):
    if form == "safetensors":
        pytest.importorskip("safetensors", reason="of the extra hf")
    out = tmp_path / "born"
    assert cli.main(["init", *SMALL_RUN, "--out", str(out), "--format", form]) == 0
    said = capsys.readouterr().out
    assert f"init: {out}" in said
    source = sources.load(out)
    page = json.loads((out / "certificate.json").read_text())
    assert source.recipe.name == "megatron"
    assert certificate.check(page, {p: np.asarray(x) for p, x in trees.flat(source.params)}) == []
    assert f"digest {page['digest']}" in said
    assert cli.main(["audit", str(out)]) == 0
    said = capsys.readouterr().out
    assert "scheme: megatron" in said
    assert "every leaf as drawn from its seed" in said
    assert cli.main(["audit", str(out), "--against", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same"]
    assert cli.main(["init", *SMALL_RUN, "--out", str(out)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_trees_of_two_layouts_are_compared_leaf_by_leaf():
    from deepinit import comparison

    _, recipe, scanned = born("megatron")
    other = born("megatron", scan=False)[2]
    source = lambda params: sources.Source(None, params, "tree", recipe)  # noqa: E731
    rows, facts = comparison.compared(source(scanned), source(other))
    assert all(r["same"] for r in rows)
    assert facts == ["one recipe: megatron@1"]
    changed = jax.tree.map(lambda x: x, scanned)
    changed["lm_head"] = changed["lm_head"] * np.float32(1.1)
    rows, _ = comparison.compared(source(changed), source(other))
    (row,) = [r for r in rows if not r["same"]]
    assert row["path"] == "lm_head"
    assert row["difference"].endswith("std 0.909091 times")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["audit"], "give the path"),
        (["audit", "/nowhere"], "does not exist"),
        (["audit", "/nowhere", "--model.num-head", "4"], "num_head"),
        (["init", *SMALL_RUN], "give the folder to write as --out DIR"),
        (["init", *SMALL_RUN, "--out", "/tmp/x", "--format", "orbx"], "did you mean 'orbax'?"),
        (["init", "somewhere"], "is no flag"),
        (["check", *SMALL_RUN, "--replay", "ful"], "did you mean 'full'?"),
    ],
)
def test_wrong_input_is_one_line(capsys, args, said):
    assert cli.main(args) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_a_forecast_allocates_nothing(capsys):
    args = ["init", "--config", "configs/llama_1b.yaml", "--forecast", "--json", "--mesh.fsdp", "64"]
    assert cli.main(args) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["devices"] == 64
    assert made["params"] * 64 == pytest.approx(made["whole"], rel=0.01)
