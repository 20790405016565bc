"""What a mesh refuses, in one line that names the number, the axis and the nearest valid values."""

import subprocess
import sys

import pytest

from deepinit import layout
from deepinit.errors import ConfigError
from deepinit.geometry import Geometry

G = Geometry(num_layers=2, d_model=48, num_heads=6, d_ff=96, vocab_size=50257, head_dim=8)


def refused(mesh, **more):
    with pytest.raises(ConfigError) as e:
        layout.check_divisible(G, mesh, **more)
    text = str(e.value)
    assert "\n" not in text
    return text


# case B78
@pytest.mark.parametrize("mesh", [{"data": 4}, {"fsdp": 4}, {"data": 2, "fsdp": 2}])
def test_batch(mesh):
    text = refused(mesh, batch=19)
    assert "train.batch_size: 19" in text
    assert "16 or 20" in text
    assert all(f"mesh.{axis} {size}" in text for axis, size in mesh.items())


# case B78
def test_heads():
    text = refused({"tensor": 4}, batch=16)
    assert "model.num_heads: 6" in text
    assert "mesh.tensor 4" in text
    assert "4 or 8" in text
    assert "mesh.tensor 3" in text


# case B78
def test_vocabulary():
    g = G.replace(num_heads=8, num_kv_heads=8)
    with pytest.raises(
        ConfigError, match=r"model.vocab_size: 50257 .*mesh.tensor 8.*vocab_multiple 8 pads it to 50264"
    ):
        layout.check_divisible(g, {"tensor": 8}, 16)
    layout.check_divisible(g, {"tensor": 8}, 16, layout.padded(50257, 8))


@pytest.mark.parametrize(
    ("change", "mesh", "name"),
    [
        ({"num_heads": 8, "num_kv_heads": 2}, {"tensor": 4}, "model.num_kv_heads: 2"),
        ({"num_heads": 8, "d_ff": 97}, {"tensor": 2}, "model.d_ff: 97"),
        ({"d_model": 49}, {"fsdp": 2}, "model.d_model: 49"),
    ],
)
def test_other_sizes(change, mesh, name):
    with pytest.raises(ConfigError, match=name):
        layout.check_divisible(
            G.replace(num_kv_heads=0, **change) if "num_kv_heads" not in change else G.replace(**change), mesh
        )


def test_accumulation_counts():
    assert "train.accumulate 3 x mesh.data 2 = 6" in refused({"data": 2}, batch=16, accumulate=3)
    layout.check_divisible(G, {"data": 2}, 18, 50257, accumulate=3)


def test_the_rest_is_not_known_yet():
    layout.check_divisible(G, {"data": 1, "fsdp": 1, "tensor": -1}, 16)
    with pytest.raises(ConfigError, match=r"mesh.tensor: -1 .* twice"):
        layout.check_axes({"data": -1, "fsdp": 1, "tensor": -1})
    with pytest.raises(ConfigError, match=r"mesh.fsdp: 0"):
        layout.check_axes({"fsdp": 0})


@pytest.mark.parametrize(("value", "of", "shown"), [(19, 4, "16 or 20"), (3, 4, "4"), (8, 8, "8 or 16")])
def test_multiples(value, of, shown):
    assert layout.multiples(value, of) == shown


def test_no_jax():
    code = "import sys, deepinit.layout, deepinit.train.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
