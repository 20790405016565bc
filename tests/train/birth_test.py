"""From flags to initial values, which nothing touches afterwards."""

import jax
import numpy as np
import pytest

import deepinit
from deepinit.errors import ConfigError
from deepinit.train import checkpoint, optimizer, step
from deepinit.train.checkpoint import Checkpoints
from deepinit.train.config import load
from tests.models import born, mesh_of

# case B16: another base scheme by flag changes what reads the stream and what writes to it


@pytest.mark.parametrize(
    ("flags", "inputs", "outputs"),
    [
        ("gpt2", 0.02, 0.02 / 24**0.5),
        ("gpt2 --scheme.args.std 0.01", 0.01, 0.01 / 24**0.5),
        ("small_init_scaled", (2 / (5 * 768)) ** 0.5, (2 / (5 * 768 * 24)) ** 0.5),
        ("small_init_scaled --scheme.args.divisor none", (2 / (5 * 768)) ** 0.5, (2 / (5 * 768)) ** 0.5),
        ("fixed_normal --scheme.args.std 0.006", 0.006, 0.006),
    ],
)
def test_a_flag_reaches_inputs_and_outputs_alike(flags, inputs, outputs):
    recipe = load(["configs/gpt2_124m.yaml"], f"--scheme.name {flags}".split()).recipe()
    for roles, std in (("attn_q attn_k attn_v mlp_up", inputs), ("attn_out mlp_down", outputs)):
        for role in roles.split():
            assert recipe.weights[role].std == pytest.approx(std, rel=1e-12), role
    drawn = recipe.initializer("mlp_down", layer=0)(jax.random.key(0), (3072, 768))
    assert np.std(drawn) == pytest.approx(outputs, rel=0.01)


def test_nothing_is_left_of_the_scheme_before(tmp_path):
    (tmp_path / "x.yaml").write_text("scheme: {name: megatron, args: {std: 0.006}}")
    recipe = load([tmp_path / "x.yaml"], ["--scheme.name", "glorot_normal"]).recipe()
    assert recipe == deepinit.recipe("glorot_normal", recipe.geometry)
    with pytest.raises(ConfigError, match="scheme glorot_normal: option 'std' is unknown"):
        load([tmp_path / "x.yaml"], ["--scheme.name", "glorot_normal", "--scheme.args.std", "0.006"]).recipe()


# case B54: initial values are made once, and are what a restored state holds
def test_no_later_stage_changes_a_value(tmp_path):
    mesh = mesh_of((1, 4, 2))
    _, recipe, params = born("megatron", mesh=(1, 4, 2))
    digest = deepinit.digest(params)
    with jax.set_mesh(mesh):
        tx = optimizer.make(load(), recipe, params)
        state, _ = step.create(params, tx, mesh)
        assert deepinit.digest(state.params) == digest
        saver = Checkpoints(tmp_path / "checkpoints")
        saver.save(0, state, {})
        saver.close()
        _, _, others = born("megatron", mesh=(1, 4, 2), seed=1)
        assert deepinit.digest(others) != digest
        fresh, _ = step.create(others, tx, mesh)
        back, _, _ = checkpoint.read(saver.folder / "0", fresh)
    assert deepinit.digest(back.params) == digest
    deepinit.verify(back.params, recipe, seed=0, replay="full")
    with pytest.raises(AssertionError, match="not those drawn with seed 1"):
        deepinit.verify(back.params, recipe, seed=1)
