"""The examples of the page on checking one's own model run as they stand, and so do the README's lines on it."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

import deepinit

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "check_your_model.md"


def examples(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


EXAMPLES = examples(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("number", range(3), ids=["Linen", "NNX", "safetensors"])
@pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated")  # the reader may have it still
def test_an_example_runs(number, tmp_path, monkeypatch):
    pytest.importorskip("safetensors", reason="of the extra hf")
    monkeypatch.chdir(tmp_path)
    assert len(EXAMPLES) == 3
    names = {}
    with jax.numpy_dtype_promotion("standard"):  # as a reader has it
        exec(compile(EXAMPLES[number], str(PAGE), "exec"), names)
    if number == 0:
        assert {r.role for r in names["wrong"] if not r.ok} >= {"attn_q", "attn_out", "mlp_up"}
    if number == 2:
        assert "fixed_normal" in [f.recipe.name for f in names["found"].best]


def test_the_readme_s_lines_run():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = examples(readme.partition("## Check the init of your own model")[2].partition("\n## ")[0])
    d, f, heads = 256, 1024, (4, 64)
    shapes = {"embed": (8192, d), "norm/scale": (d,)}
    for i in range(4):
        layer = {f"attention/{n}/kernel": (d, *heads) for n in ("query", "key", "value")}
        layer |= {"attention/out/kernel": (*heads, d), "mlp/up/kernel": (d, f), "mlp/down/kernel": (f, d)}
        layer |= {"norm_1/scale": (d,), "norm_2/scale": (d,)}
        shapes |= {f"layers_{i}/{name}": shape for name, shape in layer.items()}
    rng = np.random.default_rng(0)

    def drawn(name, shape):
        std = 0.02 / (8**0.5 if "out/" in name or "down/" in name else 1)
        return np.ones(shape, np.float32) if len(shape) == 1 else rng.normal(0, std, shape).astype(np.float32)

    names = {"deepinit": deepinit, "params": {name: drawn(name, shape) for name, shape in shapes.items()}}
    *before, last = code.strip().splitlines()
    exec(compile("\n".join([*before, f"found = {last}"]), "README.md", "exec"), names)
    assert names["found"] == "gpt2"
