"""Audits name the right scheme, what does not fit, what is unsafe, and what is no initial state."""

import dataclasses
import math

import jax
import numpy as np
import pytest

import deepinit
from benchmarks import trees as made
from deepinit import audits
from deepinit.geometry import Geometry
from deepinit.schemes import registry
from tests.models import born, loss_of, refused, tokens

G = Geometry(8, 256, 4, 512, 256)


def tree_of(scheme, geometry=G, seed=1, **args):
    recipe = deepinit.recipe(scheme, geometry, **args)
    return recipe, made.healthy(made.own(recipe), recipe, seed)


@pytest.mark.parametrize(
    ("scheme", "others"),
    [
        ("lecun_normal", ()),
        ("megatron", ("gpt2", "nanogpt", "sandwich_ln")),
        ("deepnorm", ("deepnorm_per_stack",)),
        ("ds_init", ()),
        ("olmo_mitchell", ()),
        ("gemma", ()),
        ("rezero", ()),
        ("modern", ()),
        ("fixup", ()),
    ],
)
def test_the_scheme_is_named_and_its_twins_with_it(scheme, others):
    recipe, params = tree_of(scheme)
    found = audits.audit(params)
    names = [f.recipe.name for f in found.best]
    assert scheme in names
    assert set(others) <= set(names)
    assert others or names == [scheme]
    assert found.ok, (found.moved, found.unsafe, [r.reason for r in found.misfits])
    assert found.runner_up.recipe.name not in names
    assert found.best[0].score - found.runner_up.score > 5
    assert found.difference
    assert found.geometry == dataclasses.replace(recipe.geometry, max_seq_len=1024)


@pytest.mark.slow
def test_every_scheme_is_named_with_those_that_draw_the_same_and_no_other():
    missed, told = [], {}
    for scheme in registry.schemes():
        if scheme.name == "external":  # there is nothing to draw from
            continue
        for seed in range(3):
            recipe, params = tree_of(scheme.name, seed=seed)
            found = audits.audit(params)
            if scheme.name not in {f.recipe.name for f in found.best}:
                missed.append((scheme.name, seed, found.best[0].name))
            else:
                told[scheme.name] = recipe, found.best
    assert not missed
    for recipe, best in told.values():
        for view in deepinit.interop.trees.viewed(made.own(recipe), recipe.geometry).views:
            law, *others = (r.law_at(view.leaf.canonical, view.leaf.role) for r in (recipe, *(f.recipe for f in best)))
            for other in others:
                for fact in ("mean", "std", "bound"):
                    assert np.allclose(getattr(other, fact), getattr(law, fact), rtol=1e-6, equal_nan=True), (
                        recipe.name,
                        view.leaf,
                    )


def test_a_std_of_the_user_s_own_is_found():
    _, params = tree_of("megatron", std=0.0137)
    found = audits.audit(params)
    assert "megatron(std=0.0137)" in [f.name for f in found.best]
    assert found.ok


def test_one_faulty_leaf_does_not_hide_the_scheme():
    _, params = tree_of("deepnorm")
    params["layers/block/attn_out"][3] *= 1.2
    found = audits.audit(params)
    assert "deepnorm" in [f.recipe.name for f in found.best]
    (row,) = found.misfits
    assert (row.role, row.test) == ("attn_out", "std")
    assert "layer 3" in row.reason
    assert not found.ok


def test_mistakes_are_named_by_their_ratio():
    recipe, params = tree_of("modern_small")
    root = math.sqrt(recipe.geometry.num_residuals)
    for path, factor, said in (
        ("layers/block/mlp_down", root, f"as if without 1/sqrt({recipe.geometry.num_residuals})"),
        ("layers/block/attn_out", 1 / root, "residual additions, twice"),
        ("layers/block/mlp_up", 8**-0.5, "as if the axis of the layers were among the inputs"),
    ):
        broken = {**params, path: params[path] * np.float32(factor)}
        reasons = [r.reason for r in audits.audit(broken, recipe=recipe, schemes=["modern_small"]).misfits]
        assert any(said in r for r in reasons), reasons


def test_dangers_are_listed():
    _, params = tree_of("fixed_normal", dataclasses.replace(G, num_layers=24, d_model=64, d_ff=128))
    assert any("no residual scaling" in said for said in audits.audit(params).unsafe)
    recipe, params = tree_of("lecun_normal")
    params["lm_head"] = params["lm_head"] * np.float32(16)
    params["layers/block/attn_q"][4] = params["layers/block/attn_q"][2]
    params["layers/block/attn_k"][1] = 0
    params["layers/block/mlp_up"][0, 0, 0] = np.nan
    said = "\n".join(audits.audit(params, recipe=recipe).unsafe)
    for danger in ("layers 2 and 4 hold the same values", "all zero", "not finite", "first loss about"):
        assert danger in said, said


def test_a_trained_tree_is_no_initial_state():
    model, _, params = born("megatron")
    assert audits.audit(params).initial
    for step in range(3):
        _, grads = loss_of(model)(params, tokens(seed=step))
        params = jax.tree.map(lambda p, g: p - np.float32(0.1) * np.sign(g) * np.abs(p).mean(), params, grads)
    found = audits.audit(params)
    assert not found.initial
    assert "norm gains are not constant" in found.moved[0]
    assert not found.ok
    plain = {k: v for k, v in deepinit.interop.trees.flat(params) if "norm" not in k}
    rows = np.asarray(plain["token_embed"]).copy()
    rows[:50] *= 1.5
    plain["token_embed"] = rows
    assert audits.audit(plain).best


def test_the_record_is_json():
    import json

    _, params = tree_of("megatron")
    record = json.loads(json.dumps(audits.audit(params).to_json(), allow_nan=False))
    assert {
        "ok",
        "scheme",
        "runner_up",
        "misfits",
        "unsafe",
        "initial",
        "indistinguishable_by_weights",
    } <= record.keys()
    assert record["rows"][0].keys() >= {"path", "role", "expected_std", "measured_std", "z", "ok", "test"}


def test_sizes_that_are_not_there_must_be_given():
    assert "model.num_layers" in refused(audits.audit, {"token_embed": np.ones((8, 4), np.float32)})
