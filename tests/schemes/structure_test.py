"""What every scheme promises beyond its weights, on a real decoder: one forward and one backward pass each."""

import pytest

import deepinit
from benchmarks import trees as made
from deepinit import roles, structure
from deepinit.nn import Decoder
from deepinit.schemes.registry import scheme_names
from deepinit.sharded_init import abstract_params
from tests.schemes.laws_test import ARGS

G = deepinit.Geometry(2, 64, 4, 160, 100, num_kv_heads=2, max_seq_len=16)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in scheme_names() if n != "external"])  # those laws are the caller's
def test_a_healthy_model_keeps_its_promises(name):
    recipe = deepinit.recipe(name, G, **ARGS.get(name, {}))
    model = Decoder.from_recipe(recipe)
    params = made.healthy(roles.unboxed(abstract_params(model)), recipe, seed=1)
    rows = structure.check(model, recipe, params)
    assert not [(r.test, r.path, r.reason) for r in rows if not r.ok]
    assert {"gradient"} | set(recipe.invariants) & {"update_bound", "identity"} <= {r.test for r in rows}
