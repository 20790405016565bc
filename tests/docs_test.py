"""The examples of the page on checking one's own model run as they stand."""

import re
from pathlib import Path

import jax
import pytest

PAGE = Path(__file__).parents[1] / "docs" / "check_your_model.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("number", range(3), ids=["Linen", "NNX", "safetensors"])
@pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated")
def test_an_example_runs(number, tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    assert len(EXAMPLES) == 3
    names = {}
    with jax.numpy_dtype_promotion("standard"):  # as a reader has it
        exec(compile(EXAMPLES[number], str(PAGE), "exec"), names)
    if number == 0:
        assert {r.role for r in names["wrong"] if not r.ok} >= {"attn_q", "attn_out", "mlp_up"}
    if number == 2:
        assert "fixed_normal" in [f.recipe.name for f in names["found"].best]
