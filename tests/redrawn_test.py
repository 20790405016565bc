"""Whole trees drawn again: one bit is seen, nothing healthy is."""

import jax
import numpy as np
import pytest

import deepinit
from deepinit.errors import ConfigError
from deepinit.invariants import inspect
from tests.models import born, refused


@pytest.mark.parametrize("scheme", ["megatron", "ds_init", "rezero", "fixup"])
@pytest.mark.parametrize("options", [{}, {"scan": False}, {"param_dtype": "bfloat16"}], ids=str)
def test_every_weight_of_a_healthy_tree_is_drawn_again(scheme, options):
    _, recipe, params = born(scheme, **options)
    whole = inspect(params, recipe, seed=0, replay="full")
    assert whole.ok, whole.table()
    assert whole.replayed == sum(x.size for x in jax.tree.leaves(params))
    some = inspect(params, recipe, seed=0)
    assert some.ok, some.table()
    assert 500 < some.replayed < whole.replayed
    assert f"{some.replayed} weights drawn again" in some.summary()


def test_padding_and_shards_are_drawn_again():
    _, recipe, params = born("megatron", mesh=(1, 4, 2), vocab_multiple=64)
    for replay in ("sample", "full"):
        assert inspect(params, recipe, seed=0, replay=replay).ok


def test_one_bit_is_seen_and_its_place_is_named():
    _, recipe, params = born("megatron")
    x = np.array(params["layers"]["mlp"]["mlp_up"])
    x.view(np.uint32)[2, 5, 7] ^= 1
    params = jax.tree.map(lambda y: y, params)
    params["layers"]["mlp"]["mlp_up"] = jax.numpy.asarray(x)
    assert inspect(params, recipe).ok
    verdict = inspect(params, recipe, seed=0, replay="full")
    (row,) = verdict.bad
    assert (row.role, row.test) == ("mlp_up", "replay")
    assert f"1 of {x.size} weights are not those drawn with seed 0: index {5 * 160 + 7} of layer 2" in row.reason


def test_another_seed_is_seen_although_its_statistics_are_right():
    _, recipe, params = born("megatron", seed=1)
    assert inspect(params, recipe).ok
    verdict = inspect(params, recipe, seed=0)
    assert {r.role for r in verdict.bad} == {r.role for r in verdict.rows if r.expected_std}
    assert {r.test for r in verdict.bad} == {"replay"}
    with pytest.raises(AssertionError, match="not those drawn with seed 0"):
        deepinit.verify(params, recipe, seed=0)


def test_stock_draws_are_not_ours():
    _, recipe, params = born("megatron", sampler="jax")
    assert inspect(params, recipe).ok
    assert not inspect(params, recipe, seed=0).ok


def test_what_has_no_single_draws_is_left_to_statistics():
    _, recipe, params = born("scion_spectral")
    verdict = inspect(params, recipe, seed=0, replay="full")
    assert verdict.ok, verdict.table()
    assert 0 < verdict.replayed < sum(x.size for x in jax.tree.leaves(params))
    with pytest.raises(ConfigError, match="Orthogonal"):
        deepinit.replay(recipe, "attn_q", [0], layer=0)


def test_refusals():
    _, recipe, params = born("megatron")
    assert "did you mean 'sample'" in refused(inspect, params, recipe, seed=0, replay="smaple")
