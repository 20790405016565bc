"""Admin's factors, measured on data for the very stack that is trained."""

import json
import math

import jax
import numpy as np
import pytest

import deepinit
from deepinit import calibration
from deepinit.calibration import Calibration
from deepinit.nn import Decoder
from deepinit.recipe import Recipe
from tests.models import SMALL, born, flat, mesh_of, recipe_of, refused, stats_of, tokens

MEASURED = recipe_of("admin", growth="measured")


@pytest.fixture(scope="module")
def measured():
    model, _, params = born(MEASURED)
    return calibration.measure(model, MEASURED, params, tokens(8, 32))


# case B28: w_1 = 1, w_(i+1)^2 = Var(w_i x) + Var(F_i), with the stream that these very factors make
def test_the_chain(measured):
    recipe = measured.applied(MEASURED)
    model = Decoder.from_recipe(recipe)
    params = deepinit.init_sharded(model, recipe)
    deepinit.verify(params, recipe)
    stats = stats_of(model)(params, tokens(8, 32))
    omega = 1.0
    for (kept, branch), value in zip(calibration.variances(jax.device_get(stats), recipe), measured.skip):
        assert value == pytest.approx(omega, rel=1e-3)
        omega = math.sqrt(value**2 * kept + branch)
    assert measured.skip[0] == 1.0
    assert list(measured.skip) == sorted(measured.skip)
    assert measured.tokens == 256


# The factors stand on the skip, one for each feature of each addition.
def test_the_leaves(measured):
    recipe = measured.applied(MEASURED)
    leaves = flat(deepinit.init_sharded(Decoder.from_recipe(recipe), recipe))
    for i, kind in enumerate(("attn", "mlp")):
        leaf = leaves[f"layers/{kind}_residual/skip_residual_gate"]
        assert leaf.shape == (SMALL.num_layers, SMALL.d_model)
        assert (leaf == np.float32(measured.skip[i::2])[:, None]).all()
    assert recipe.calibrate == ""
    assert recipe.changes == ("skip measured on 256 tokens",)
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


# case B28: the same on 1 and on 8 devices, scanned and unrolled
@pytest.mark.parametrize(("mesh", "options"), [((8, 1, 1), {}), ((2, 2, 2), {}), (None, {"scan": False})], ids=str)
def test_the_same_everywhere(measured, mesh, options):
    model, _, params = born(MEASURED, mesh=mesh, **options)
    if mesh:
        with jax.set_mesh(mesh_of(mesh)):
            assert calibration.measure(model, MEASURED, params, tokens(8, 32)) == measured
    else:
        assert calibration.measure(model, MEASURED, params, tokens(8, 32)) == measured


# case B28: measured for another depth or width, it is refused
@pytest.mark.parametrize("change", [{"num_layers": 4}, {"d_model": 128}, {"d_ff": 96}])
def test_another_stack_is_refused(measured, tmp_path, change):
    path = tmp_path / calibration.FILE
    measured.write(path)
    assert calibration.read(path) == measured
    other = recipe_of("admin", SMALL.replace(head_dim=0, **change), growth="measured")
    message = refused(calibration.read(path).applied, other, str(path))
    assert next(iter(change)) in message
    assert "measure it anew" in message


def test_what_measures_nothing_is_refused(measured):
    assert "measures nothing" in refused(measured.applied, recipe_of("admin"))
    other = Calibration("else", SMALL, measured.skip, 1)
    assert "measured for scheme else" in refused(other.applied, MEASURED)


def test_no_calibration_in_a_file(tmp_path):
    path = tmp_path / "x.json"
    assert "x.json" in refused(calibration.read, path)
    path.write_text("{}")
    assert "x.json" in refused(calibration.read, path)


def test_measured_factors_are_learnable():
    assert "learnable" in refused(recipe_of, "admin", growth="measured", learnable=False)
