"""Fresh models of transformers, written by it as safetensors and audited; skipped where torch is not installed."""

import json

import numpy as np
import pytest

from deepinit import audits, cli
from deepinit.interop import sources, trees

torch = pytest.importorskip("torch", reason="never a requirement")
transformers = pytest.importorskip("transformers", reason="never a requirement")
pytest.importorskip("safetensors", reason="of the extra hf")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch and transformers warn of themselves

LAYERS, D, VOCAB = 6, 128, 512
ROOT = (2 * LAYERS) ** 0.5
BASE = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}


def gpt2(**args):
    config = transformers.GPT2Config(n_layer=LAYERS, n_embd=D, n_head=4, n_positions=64, **BASE, **args)
    return transformers.GPT2LMHeadModel(config)


def llama(**args):
    config = transformers.LlamaConfig(
        hidden_size=D, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, intermediate_size=384,
        **BASE, **args,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def audited(model, folder, seed=0, **how):
    """(audit, role -> std by layer) of a model written to disk."""
    torch.manual_seed(seed)
    model().save_pretrained(folder, **how)
    source = sources.load(folder)
    found = audits.audit(source.params, sizes=source.sizes)
    stds = {}
    for view in trees.viewed(source.params, found.geometry).views:
        stds.setdefault(str(view.leaf.role), []).append(float(np.std(view.take(source.params[view.leaf.path]))))
    return found, stds


def test_gpt2_has_its_residual_scaling(tmp_path):
    found, stds = audited(gpt2, tmp_path)
    assert (found.table, found.assumed) == ("hf_gpt2", ())
    for role in ("attn_out", "mlp_down"):  # both are named c_proj
        assert len(stds[role]) == LAYERS
        assert stds[role] == pytest.approx([0.02 / ROOT] * LAYERS, rel=0.03), role
    for role in ("attn_q", "attn_k", "attn_v", "mlp_up"):
        assert stds[role] == pytest.approx([0.02] * LAYERS, rel=0.03), role
    names = {f.recipe.name for f in found.best}
    assert "nanogpt" in names  # transformers draws positions with 0.02, where the original has 0.01
    assert "gpt2" not in names
    assert found.ok, (found.unsafe, found.moved, [r.reason for r in found.misfits])


def test_llama_has_none(tmp_path):
    found, stds = audited(llama, tmp_path, max_shard_size="400KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert (found.table, found.assumed) == ("hf_llama", ())
    assert (found.geometry.num_kv_heads, found.geometry.head_dim) == (2, 32)
    for role in ("attn_q", "attn_k", "attn_v", "attn_out", "mlp_gate", "mlp_up", "mlp_down"):
        assert len(stds[role]) == LAYERS
        assert stds[role] == pytest.approx([0.02] * LAYERS, rel=0.03), role
    assert "fixed_normal" in {f.recipe.name for f in found.best}
    assert found.ok, (found.unsafe, found.moved, [r.reason for r in found.misfits])


def test_the_command_sees_a_changed_range(tmp_path, capsys):
    torch.manual_seed(1)
    llama(initializer_range=0.0125).save_pretrained(tmp_path)
    assert cli.main(["audit", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["scheme"] == "fixed_normal(std=0.0125)"
    assert said["ok"]
    assert said["initial"]


def test_a_forgotten_scaling_is_named(tmp_path):
    def forgetful():
        model = gpt2()
        for name, p in model.named_parameters():
            if name.endswith("c_proj.weight") and "h.3." in name:
                torch.nn.init.normal_(p, std=0.02)
        return model

    found, _ = audited(forgetful, tmp_path)
    assert "nanogpt" in {f.recipe.name for f in found.best}
    assert {(r.role, r.layer) for r in found.misfits if r.path[0] != "("} == {("attn_out", 3), ("mlp_down", 3)}
    assert all("without 1/sqrt(12)" in r.reason for r in found.misfits if r.test == "std")
