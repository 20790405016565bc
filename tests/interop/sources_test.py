"""Trees from disk: orbax, safetensors in one file and in shards, npz, runs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import deepinit
from deepinit.interop import hf, sources
from deepinit.interop.sizes import geometry_of
from deepinit.invariants import inspect
from deepinit.reinits import reinit
from tests.interop import layouts
from tests.interop.layouts import PLAIN
from tests.models import assert_same, born, refused

pytest.importorskip("safetensors", reason="of the extra hf")


@pytest.fixture(scope="module")
def gpt2():
    """A fresh GPT-2 in the names of its files."""
    recipe = deepinit.recipe("gpt2", PLAIN)
    return recipe, reinit(layouts.hf_gpt2(), recipe, seed=1)


def test_one_safetensors_file(gpt2, tmp_path):
    recipe, params = gpt2
    hf.write(tmp_path / "model.safetensors", params, {"format": "pt"})
    source = sources.load(tmp_path / "model.safetensors")
    assert source.kind == "safetensors"
    assert_same(source.params, params)
    assert inspect(source.params, recipe, seed=1).ok


@pytest.mark.parametrize(
    ("config", "stated"),
    [
        ({"num_experts": 8, "decoder_sparse_step": 2}, {"num_experts": 8, "moe_every": 2}),
        ({"num_experts": 8, "mlp_only_layers": [1, 0]}, {"num_experts": 8, "first_dense": 2}),
        ({"num_local_experts": 8, "interleave_moe_layer_step": 2}, {"num_experts": 8, "moe_every": 2}),
        ({"n_routed_experts": 8, "first_k_dense_replace": 3}, {"num_experts": 8, "first_dense": 3}),
        ({"decoder_sparse_step": 2, "first_k_dense_replace": 3}, {}),  # no experts: a dense model
    ],
)
def test_routed_layers_of_a_config(config, stated):
    assert hf.sizes(config) == stated


def test_routed_layers_that_no_rule_says_are_refused():
    assert "mlp_only_layers: [0, 2]" in refused(hf.sizes, {"num_experts": 8, "mlp_only_layers": [0, 2]})
    assert "moe_layer_freq: 2" in refused(hf.sizes, {"n_routed_experts": 8, "moe_layer_freq": 2})


def test_a_folder_of_shards_with_its_config(gpt2, tmp_path):
    _, params = gpt2
    names = sorted(params)
    parts = {f"model-0000{i}-of-00002.safetensors": names[i - 1 :: 2] for i in (1, 2)}
    for file, own in parts.items():
        hf.write(tmp_path / file, {n: params[n] for n in own}, {})
    weight_map = {n: file for file, own in parts.items() for n in own}
    (tmp_path / hf.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    config = {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 100, "n_positions": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = sources.load(tmp_path)
    assert_same(source.params, params)
    assert geometry_of(source.params, given=source.sizes) == (PLAIN.replace(mlp="gelu"), [])
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    assert "model-00001-of-00002.safetensors" in refused(sources.load, tmp_path)


def test_half_precision_survives(tmp_path):
    recipe = deepinit.recipe("gpt2", PLAIN)
    params = reinit(layouts.hf_gpt2(dtype=jnp.bfloat16), recipe, seed=1)
    hf.write(tmp_path / "half.safetensors", params, {})
    loaded = sources.load(tmp_path / "half.safetensors").params
    assert {str(x.dtype) for x in loaded.values()} == {"bfloat16"}
    assert inspect(loaded, recipe, seed=1, replay="full").ok


def test_npz(gpt2, tmp_path):
    recipe, params = gpt2
    np.savez(tmp_path / "tree.npz", **{k: np.asarray(x) for k, x in params.items()})
    assert inspect(sources.load(tmp_path / "tree.npz").params, recipe, seed=1).ok


def test_orbax_reads_the_parameters_and_nothing_else(tmp_path):
    _, recipe, params = born("megatron")
    state = {"params": params, "opt_state": [jnp.ones(3)], "step": jnp.asarray(4)}
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "bare", params)
        saver.save(tmp_path / "state", state)
    for name in ("bare", "state"):
        source = sources.load(tmp_path / name)
        assert source.kind == "orbax"
        assert_same(source.params, params)
        assert inspect(source.params, recipe, seed=0).ok


def test_a_run_is_read_at_its_newest_checkpoint(tmp_path):
    _, recipe, params = born("megatron")
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.to_json()))
    with ocp.CheckpointManager(tmp_path / "checkpoints", item_names=("state", "meta")) as manager:
        for step in (0, 12):
            save = ocp.args.StandardSave({"params": jax.tree.map(lambda x, s=step: x + np.float32(s), params)})
            manager.save(step, args=ocp.args.Composite(state=save, meta=ocp.args.JsonSave({"step": step})))
    whole = sources.load(tmp_path)
    assert (whole.step, whole.recipe) == (12, recipe)
    first = sources.load(tmp_path / "checkpoints" / "0")
    assert (first.step, first.recipe) == (0, recipe)
    assert_same(first.params, params)
    assert geometry_of(first.params)[0] == recipe.geometry.replace(max_seq_len=1024)


def test_what_is_no_tree(tmp_path):
    assert "does not exist" in refused(sources.load, tmp_path / "nowhere")
    assert "neither a checkpoint" in refused(sources.load, tmp_path)
    (tmp_path / "x.txt").write_text("no")
    assert "not a folder" in refused(sources.load, tmp_path / "x.txt")
    (tmp_path / "x.safetensors").write_text("this is none")
    assert "no safetensors file" in refused(sources.load, tmp_path / "x.safetensors")
