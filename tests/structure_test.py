"""What every scheme promises beyond its weights, on real models; and each promise broken once."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinit
from deepinit import structure
from deepinit.audits import expected_loss
from deepinit.errors import ConfigError
from deepinit.laws import Normal
from deepinit.nn import Decoder
from deepinit.recipe import FrozenMap, Laws
from deepinit.schemes.mixing import overridden
from tests.models import SMALL, loss_of, mesh_of, tokens

TIED = dataclasses.replace(SMALL, tied_embeddings=True)


def made(scheme, geometry=SMALL, seed=0, **options):
    recipe = scheme if isinstance(scheme, deepinit.Recipe) else deepinit.recipe(scheme, geometry)
    model = Decoder.from_recipe(recipe, **options)
    return model, recipe, deepinit.init_sharded(model, recipe, seed=seed)


def rows_of(scheme, geometry=SMALL):
    return {r.test: r for r in structure.check(*made(scheme, geometry))}


def changed(params, path, f):
    """The tree with one leaf changed."""

    def at(where, x):
        return f(x) if deepinit.roles.joined(deepinit.roles.names(where)) == path else x

    return jax.tree.map_with_path(at, params)


@pytest.mark.parametrize("scan", [True, False])
def test_no_device_holds_the_whole_gradient(scan):
    g = SMALL.replace(num_layers=8, d_model=128, d_ff=1024)
    recipe, mesh = deepinit.recipe("megatron", g), mesh_of((1, 8, 1))
    model = Decoder.from_recipe(recipe, scan=scan)
    with jax.set_mesh(mesh):
        params = structure.nested(deepinit.init_sharded(model, recipe, mesh))
        batch = jax.ShapeDtypeStruct((8, 16), jnp.int32)

        def temporaries(layout):
            run = structure.compiled(model.clone(scan=True), layout)
            return run.lower(params, batch, batch).compile().memory_analysis().temp_size_in_bytes

        layers = [x for path, x in structure.layout(params, g) if path.startswith("layers/")]
        assert layers
        assert all(x.spec[0] is None for x in layers)  # the axis of the layers is not split
        assert temporaries(structure.layout(params, g)) < 0.6 * temporaries(())


@pytest.mark.parametrize(
    ("scheme", "moving"),
    [
        ("megatron", "21 of 21"),
        ("rezero", "3 of 24"),
        ("zero_out", "6 of 21"),
        ("fixup", "0 of 27"),
        ("deepnorm", "21 of 21"),
    ],
)
def test_healthy_schemes_keep_their_promises(scheme, moving):  # case B25
    model, recipe, params = made(scheme)
    rows = structure.check(model, recipe, params)
    assert all(r.ok for r in rows), [r.reason for r in rows if not r.ok]
    by = {r.test: r.reason for r in rows}
    assert moving in by["gradient"]
    assert ("identity" in by) == (scheme in ("rezero", "zero_out", "fixup"))
    assert ("norm" in by) == (scheme in ("megatron", "zero_out", "deepnorm"))
    assert "embedding" in by
    assert "loss" in by
    if scheme == "deepnorm":
        alpha = (2 * SMALL.num_layers) ** 0.25
        assert f"alpha {alpha:.6g} on the skip" in by["update_bound"]
    if scheme == "megatron":
        assert "at any depth" in by["growth"]
    if scheme == "fixup":
        assert f"loss {math.log(100):.4g}" in by["loss"]


def test_an_unrolled_stack_in_bfloat16_with_pads_and_positions():
    rows = structure.check(*made("gpt2", scan=False, positions="learned", vocab_multiple=64, dtype="bfloat16"))
    assert all(r.ok for r in rows), [r.reason for r in rows if not r.ok]


def test_two_zeros_in_one_branch_are_dead_and_one_is_not():
    model, recipe, params = made("zero_out")
    dead = changed(params, "layers/mlp/mlp_up", lambda x: x.at[1].set(0.0))
    bad = [r for r in structure.check(model, recipe, dead) if not r.ok]
    assert {(r.role, r.layer) for r in bad} == {("mlp_up", 1), ("mlp_down", 1)}
    assert all("neither will ever have a gradient" in r.reason for r in bad)
    assert "mlp_up and mlp_down" in " ".join(r.reason for r in bad)


def test_a_branch_that_should_be_zero_breaks_the_identity():
    model, recipe, params = made("rezero")
    gate = "layers/resweight" if "resweight" in params["layers"] else "layers/residual_gate"
    alive = changed(params, gate, lambda x: x.at[2].set(1e-3))
    bad = {r.test: r for r in structure.check(model, recipe, alive) if not r.ok}
    assert bad["identity"].layer == 2
    assert "should start as the identity" in bad["identity"].reason


def test_another_rule_than_the_recipe_s_is_named():
    model, recipe, params = made("deepnorm")
    plain = model.clone(residual=recipe.residual.replace(skip=1.0))
    (row,) = structure.check(plain, recipe, params)
    assert not row.ok
    assert "the recipe says x <- N(1.565 x + F(x))" in row.reason
    louder = model.clone(multipliers=FrozenMap({**recipe.multipliers, "logits": 8.0}))
    (row,) = structure.check(louder, recipe, params)
    assert row.reason == "multiplier logits is 8, should be 1"


def test_norms_that_start_at_the_wrong_gain_are_seen_in_both_conventions():
    model, recipe, params = made("gemma")
    silent = model.clone(norm_offset=False)  # a gain of 0 for one of 1 + 0
    bad = [r for r in structure.check(silent, recipe, params) if not r.ok]
    assert any(r.test == "gradient" for r in bad)
    louder = changed(params, "final_norm/norm_scale", jnp.ones_like)
    bad = [r for r in structure.check(model, recipe, louder) if not r.ok]
    assert [r.path for r in bad if r.test == "norm"] == ["final_norm"]
    assert "RMS 2" in next(r.reason for r in bad if r.test == "norm")


def test_an_embedding_without_its_multiplier_is_seen():  # case B29
    model, recipe, params = made("post_ln")
    quiet = changed(params, "token_embed", lambda x: x / 8)
    bad = {r.test: r for r in structure.check(model, recipe, quiet) if not r.ok}
    assert "has RMS 0.11" in bad["embedding"].reason or "has RMS 0.12" in bad["embedding"].reason


def test_an_untied_head_of_std_1_is_unsafe_with_the_number():  # case B30
    base = deepinit.recipe("t5x", SMALL)
    recipe = overridden(base, {"lm_head": {"std": 1.0}})
    row = rows_of(recipe)["loss"]
    assert row.unsafe
    assert "a head of std 1 on a stream of RMS 1" in row.reason
    number = float(row.reason.split("expected loss ")[1].split(",")[0])
    assert number == pytest.approx(expected_loss(100, 64.0), rel=0.15)
    assert not rows_of(base)["loss"].unsafe
    strict = structure.check(*made(recipe), strict=True)
    assert not all(r.ok for r in strict)


def test_a_tied_head_on_an_identity_stack_is_unsafe_with_the_number():
    row = rows_of("rezero", TIED)["loss"]
    assert row.unsafe
    assert "each token's own logit 7" in row.reason
    assert not rows_of("rezero")["loss"].unsafe


def test_a_head_that_is_not_its_law_is_wrong():
    model, recipe, params = made("megatron")
    bad = [r for r in structure.check(model, recipe, changed(params, "lm_head", lambda x: x * 10)) if not r.ok]
    assert [r.test for r in bad] == ["loss"]
    assert "a head of std 0.02 gives 0.0256" in bad[0].reason


def test_the_expected_loss():
    for variance in (0.0, 0.1, 0.5):
        assert expected_loss(5000, variance, draws=64) == pytest.approx(math.log(5000) + variance / 2, abs=0.01)
    own = expected_loss(5000, 0.2, own=12.0)
    assert own == pytest.approx(math.log(4999 * math.exp(0.1) + math.exp(12)) - 12 / 5000, abs=0.01)
    assert expected_loss(32128, 768.0) == pytest.approx(114, abs=6)  # case B30


def test_pads_that_are_not_masked_are_seen():  # case B34
    model, recipe, params = made("megatron", vocab_multiple=64)
    other = dataclasses.replace(model, geometry=dataclasses.replace(SMALL, vocab_size=128))
    seen = structure.run(other, recipe, params)
    assert seen.rows["pads have no gradient"]  # none are taken for pads there
    seen = structure.run(model, recipe, params)
    assert seen.rows["pads are masked"]
    assert seen.rows["pads have no gradient"]


def test_the_gradient_of_a_tied_table_is_the_sum_of_both_uses():  # case B55
    model, recipe, params = made("megatron", TIED)
    assert "lm_head" not in params
    assert all(r.ok for r in structure.check(model, recipe, params))
    apart = model.clone(geometry=SMALL)
    _, tied = loss_of(model)(params, tokens())
    _, both = loss_of(apart)({**params, "lm_head": params["token_embed"]}, tokens())
    total = both["token_embed"] + both["lm_head"]
    assert np.allclose(tied["token_embed"], total, rtol=1e-4, atol=1e-7)
    assert np.abs(both["lm_head"]).max() > 0
    assert np.abs(both["token_embed"]).max() > 0


def test_deepnorm_s_bound_is_declared_where_the_paper_has_it():
    g = dataclasses.replace(SMALL, parallel=True)
    assert deepinit.recipe("deepnorm", SMALL).invariants == ("update_bound",)
    assert deepinit.recipe("deepnorm", g).invariants == ()
    changed_ = overridden(deepinit.recipe("deepnorm", SMALL), {"attn_v": {"std": 0.5}})
    row = {r.test: r for r in structure.check(*made(changed_))}["update_bound"]
    assert row.unsafe
    broken = dataclasses.replace(
        deepinit.recipe("deepnorm", SMALL),
        weights=Laws({**deepinit.recipe("deepnorm", SMALL).weights, "attn_v": Normal(0.5)}),
    )
    assert not {r.test: r for r in structure.check(*made(broken))}["update_bound"].ok


def test_an_unknown_invariant_is_refused():
    recipe = dataclasses.replace(deepinit.recipe("megatron", SMALL), invariants=("bounded_growt",))
    with pytest.raises(ConfigError, match="did you mean 'bounded_growth'"):
        structure.check(*made(recipe))
    assert deepinit.Recipe.from_json(recipe.to_json()).invariants == ("bounded_growt",)


def test_verify_takes_the_model():
    model, recipe, params = made("rezero")
    rows = deepinit.verify(params, recipe, seed=0, model=model)
    assert {r.test for r in rows} >= {"identity", "gradient", "loss", "embedding"}
    with pytest.raises(AssertionError, match="as a whole are broken"):
        deepinit.verify(params, recipe, model=model.clone(multipliers=FrozenMap({**recipe.multipliers, "embed": 2.0})))
