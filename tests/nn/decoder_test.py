"""The whole model against a NumPy decoder written from the formulas; vocabulary, precision, masks, first losses."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from hypothesis import given
from hypothesis import strategies as st

import deepinit
from deepinit import laws
from deepinit.geometry import Geometry, Role
from deepinit.nn import Decoder
from deepinit.recipe import Gate, Residual
from tests.models import (
    SMALL,
    assert_same,
    born,
    flat,
    forward,
    loss_of,
    noise,
    own_recipe,
    recipe_of,
    refused,
    stats_of,
    tokens,
)
from tests.nn.reference import Reference

L = SMALL.num_layers
PER_LAYER, PER_ADDITION = (0.5, 1.5, 2.0), tuple(0.5 + 0.25 * i for i in range(2 * L))


def rule(norm="pre", **parts):
    return Residual(norm, **parts)


# name: residual rule, changes of the geometry, options, multipliers
CASES = {
    **{norm: (rule(norm), {}, {}, {}) for norm in ("pre", "post", "none", "sandwich", "sub", "reordered")},
    "layernorm, biases": (rule(), {}, {"norm": "layernorm", "bias": True, "positions": "learned"}, {}),
    "post layernorm": (rule("post", skip=2.2), {}, {"norm": "layernorm", "bias": True}, {}),
    "sub layernorm, geglu": (rule("sub"), {"mlp": "geglu"}, {"norm": "layernorm"}, {}),
    "norm offset, qk norm": (rule("sandwich"), {}, {"norm_offset": True, "qk_norm": True}, {}),
    "multi-query, wide heads": (rule(), {"num_kv_heads": 1, "head_dim": 12}, {"positions": "none"}, {}),
    "multi-head, gelu": (rule(), {"num_kv_heads": 8, "mlp": "gelu"}, {"bias": True}, {}),
    "tied": (rule(), {"tied_embeddings": True}, {}, {"logits": 0.125}),
    "parallel": (rule("sandwich", branch=PER_LAYER), {"parallel": True}, {}, {}),
    "a skip a layer": (rule("post", skip=PER_LAYER), {}, {}, {}),
    "numbers by addition": (rule(skip=PER_ADDITION, branch=PER_ADDITION[::-1], scale_in=PER_ADDITION), {}, {}, {}),
    "channel gate": (rule("pre", gate=Gate(0.5, "channel")), {}, {}, {}),
    "a gate a layer": (rule("none", gate=Gate(0.5, share="layer")), {}, {}, {}),
    "shifts": (rule("none", gate=Gate(1.0, role=Role.BRANCH_SCALE), shift=True), {}, {}, {}),
    "shifts, relu": (rule("none", shift=True), {"mlp": "relu"}, {}, {}),
    "multipliers": (
        rule(),
        {},
        {"bias": True},
        {"embed": 8.0, "logits": 0.3, "attention": 0.2, "attn_q": 0.9, "attn_v": 1.2, "attn_out": 0.7, "mlp_gate": 1.1,
         "mlp_up": 0.8, "mlp_down": 1.3},
    ),
}  # fmt: skip


def made(case, **more):
    """(model, params in which no leaf is without effect, reference) of a case."""
    residual, sizes, options, multipliers = CASES[case]
    geometry = SMALL.replace(**{"head_dim": 0, **sizes})
    recipe = own_recipe(geometry=geometry, residual=residual, multipliers=multipliers)
    recipe = recipe.with_norm_offset() if options.get("norm_offset") else recipe
    model = Decoder.from_recipe(recipe, **options, **more)
    return model, noise(model), Reference(geometry, residual, recipe.multipliers, **options)


@pytest.mark.parametrize("case", CASES)
def test_against_numpy(case):
    model, params, reference = made(case)
    expected = reference.forward(params, tokens(time=12))
    got = forward(model)(params, tokens(time=12))
    assert got.dtype == jnp.float32
    assert np.allclose(got, expected, rtol=2e-4, atol=2e-5 * np.abs(expected).max())
    if case in ("pre", "a gate a layer", "parallel"):
        stats = stats_of(model)(params, tokens(time=12))
        stream = np.reshape([(x**2).mean() for x in reference.stream], (L, -1))
        assert np.allclose(stats["layers"]["stream_ms"], stream, rtol=1e-4)
        assert np.allclose(stats["embed_ms"], (reference.embedded**2).mean(), rtol=1e-4)


# No leaf is without effect: each has a gradient, in every layer.
@pytest.mark.parametrize("case", ["norm offset, qk norm", "shifts"])
def test_every_leaf_takes_part(case):
    model, params, _ = made(case)
    gradient = flat(loss_of(model)(params, tokens(4, 16))[1])
    for path, g in gradient.items():
        assert np.isfinite(g).all(), path
        assert (np.abs(g.reshape(L if path.startswith("layers/") else 1, -1)).max(1) > 0).all(), path


# --- masks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["pre", "layernorm, biases"])
def test_the_future_does_not_change_the_past(case):
    model, params, _ = made(case)
    a = tokens(time=12)
    b = a.at[:, 7:].set((a[:, 7:] + 1) % SMALL.vocab_size)
    before, after = (forward(model)(params, x) for x in (a, b))
    assert (before[:, :7] == after[:, :7]).all()
    assert (np.abs(before[:, 7:] - after[:, 7:]).max((0, 2)) > 0).all()


def test_masked_tokens_are_not_seen():
    model, params, reference = made("pre")
    mask = np.ones((2, 12), bool)
    mask[0, :4] = mask[1, 9:] = False
    a = tokens(time=12)
    logits = forward(model)(params, a, jnp.asarray(mask))
    expected = reference.forward(params, a, mask)
    assert np.allclose(logits[mask], expected[mask], rtol=2e-4, atol=1e-4)
    other = jnp.where(mask, a, (a + 1) % SMALL.vocab_size)
    assert (forward(model)(params, other, jnp.asarray(mask))[mask] == logits[mask]).all()


# case B41: a fully masked row, and norms of large activations, stay finite in half precision, gradient too
@pytest.mark.parametrize(
    ("case", "dtype"),
    [("pre", "bfloat16"), ("pre", "float16"), ("post layernorm", "float32"), ("post layernorm", "float16")],
)
def test_a_fully_masked_row_is_finite(case, dtype):
    model, params, _ = made(case, dtype=dtype)
    params["token_embed"] = params["token_embed"] * 2000.0  # whose squares are beyond float16
    mask = jnp.asarray([[True] * 12, [False] * 12])

    def loss(params):
        logits = model.apply({"params": params}, tokens(time=12), mask)
        return jnp.square(jax.nn.log_softmax(logits)).mean(), logits

    with jax.numpy_dtype_promotion("standard"):  # the transpose of jax's own attention mixes dtypes
        (value, logits), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
    assert np.isfinite(value)
    assert np.isfinite(logits).all()


# --- precision ---------------------------------------------------------------------------------------------------


def primitives(jaxpr, name):
    """Dtypes of the operands of every primitive of this name, inner programs included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            yield tuple(v.aval.dtype.name for v in eqn.invars)
        for parameter in eqn.params.values():
            for inner in parameter if isinstance(parameter, tuple | list) else (parameter,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from primitives(inner, name)


# case B40: bfloat16 activations, float32 parameters; bfloat16 parameters only where asked for
# case B41: norms and softmax in float32
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_dtypes(stored):
    model, _, params = born("modern", dtype="bfloat16", param_dtype=stored)
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {stored}
    program = jax.make_jaxpr(model.apply)({"params": params}, tokens())
    assert {d for pair in primitives(program.jaxpr, "dot_general") for d in pair} == {"bfloat16"}
    assert {*primitives(program.jaxpr, "exp"), *primitives(program.jaxpr, "rsqrt")} == {("float32",)}
    wide_model, _, wide = born("modern")
    assert_same(jax.tree.map(lambda x: x.astype(stored), wide), params)
    logits, reference = model.apply({"params": params}, tokens()), forward(wide_model)(wide, tokens())
    assert logits.dtype == jnp.float32
    assert 0 < np.abs(logits - reference).max() < 0.05 * np.abs(reference).max()


# --- vocabulary --------------------------------------------------------------------------------------------------


# case B34: pads are masked, get no gradient, and change nothing of what is real
@pytest.mark.parametrize(("tied", "multiple"), [(False, 64), (True, 96)])
def test_padded_vocabulary(tied, multiple):
    recipe = recipe_of("megatron", SMALL.replace(tied_embeddings=tied))
    model, _, params = born(recipe)
    padded_model, _, padded = born(recipe, vocab_multiple=multiple)
    v, rows = SMALL.vocab_size, -(-SMALL.vocab_size // multiple) * multiple
    tables = ["token_embed"] + ["lm_head"] * (not tied)
    assert {padded[t].shape for t in tables} == {(rows, SMALL.d_model)}
    assert deepinit.digest(padded) == deepinit.digest(params)
    for t in tables:
        assert (padded[t][:v] == params[t]).all()
        assert not padded[t][v:].any()
    x = tokens(4, 16)
    logits = forward(padded_model)(padded, x)
    assert logits.shape[-1] == rows
    assert (logits[..., v:] == np.finfo(np.float32).min).all()
    assert np.allclose(logits[..., :v], forward(model)(params, x), rtol=1e-5, atol=1e-6)
    loss, gradient = loss_of(model)(params, x)
    padded_loss, padded_gradient = loss_of(padded_model)(padded, x)
    assert np.isclose(padded_loss, loss, rtol=1e-6)
    for t in tables:
        assert not padded_gradient[t][v:].any()
        assert np.allclose(padded_gradient[t][:v], gradient[t], rtol=1e-4, atol=1e-7)


# case B34: a zero head gives ln V, not ln of the padded V
def test_zero_head_with_padding():
    g = Geometry(num_layers=1, d_model=16, num_heads=2, d_ff=32, vocab_size=50257)
    model, _, params = born(own_recipe(g, lm_head=laws.Constant(0.0)), vocab_multiple=128)
    assert params["lm_head"].shape == (50304, 16)
    loss, gradient = loss_of(model)(params, tokens(2, 8, 50257))
    assert loss == pytest.approx(10.82491, abs=1e-5)
    assert np.isfinite(gradient["lm_head"]).all()


# case B55: one leaf, whose gradient is the sum of both uses
def test_tied_head():
    tied = recipe_of("megatron", SMALL.replace(tied_embeddings=True))
    model, _, params = born(tied)
    assert "lm_head" not in params
    untied_model, _, untied = born(recipe_of("megatron"))
    count = sum(x.size for x in jax.tree.leaves(params))
    assert count == sum(x.size for x in jax.tree.leaves(untied)) - SMALL.vocab_size * SMALL.d_model
    both = params | {"lm_head": params["token_embed"]}
    loss, gradient = loss_of(model)(params, tokens())
    untied_loss, parts = loss_of(untied_model)(both, tokens())
    assert loss == untied_loss
    assert np.allclose(gradient["token_embed"], parts["token_embed"] + parts["lm_head"], rtol=1e-5, atol=1e-8)
    assert np.abs(parts["token_embed"]).max() > 0
    assert np.abs(parts["lm_head"]).max() > 0


# --- what a model has at step 0 ----------------------------------------------------------------------------------


# case B29: the embedding's std and its multiplier belong together
@pytest.mark.parametrize(("scheme", "rms"), [("post_ln", 1.0), ("megatron", 0.02)])
def test_embedding_rms(scheme, rms):
    model, recipe, params = born(scheme, positions="none")
    ms = float(stats_of(model)(params, jnp.arange(SMALL.vocab_size)[None, :32])["embed_ms"])
    n = 32 * SMALL.d_model
    assert abs(ms / rms**2 - 1) < 5.5 * math.sqrt(2 / n)
    assert recipe.weights["token_embed"].std * recipe.multipliers["embed"] == pytest.approx(rms)


WIDE = Geometry(
    num_layers=2, d_model=768, num_heads=2, num_kv_heads=2, d_ff=64, vocab_size=4096, max_seq_len=64, mlp="gelu"
)


# case B30 and B32: with logits of std s, the first loss is ln V + s^2 / 2, a mean over tokens
@pytest.mark.parametrize(
    ("head_std", "variance"),
    [(WIDE.d_model**-0.5, 1.0), (0.02, WIDE.d_model * 0.02**2), (0.0001, 0.0)],
)
def test_first_loss(head_std, variance):
    recipe = own_recipe(WIDE, lm_head=laws.Normal(head_std))
    model, _, params = born(recipe)
    loss = float(loss_of(model)(params, tokens(8, 64, WIDE.vocab_size))[0])
    # 504 tokens' own logits have std s: their mean has s / sqrt(504), the sum over the vocabulary moves far less
    assert (
        abs(loss - math.log(WIDE.vocab_size) - variance / 2) < 5.5 * math.sqrt(variance / 504) + 0.02 * variance + 1e-3
    )


# case B30: a head of unit std under a normed stream starts above 100
def test_first_loss_of_a_unit_head():
    recipe = own_recipe(WIDE, lm_head=laws.Normal(1.0))
    model, _, params = born(recipe)
    # E max of V normals of std s is about s sqrt(2 ln V) = 113
    assert 85 < float(loss_of(model)(params, tokens(8, 64, WIDE.vocab_size))[0]) < 120


def test_first_loss_of_tied_gpt2():
    recipe = recipe_of("gpt2", WIDE.replace(tied_embeddings=True))
    model, _, params = born(recipe, positions="learned", norm="layernorm")
    loss = float(loss_of(model)(params, tokens(8, 64, WIDE.vocab_size))[0])
    assert loss == pytest.approx(math.log(WIDE.vocab_size) + 0.154, abs=0.15)


# case B13: unscaled, the stream's variance grows with depth; over sqrt(2L), end over start is O(1)
def test_variance_of_the_stream():
    g = Geometry(num_layers=40, d_model=64, num_heads=4, d_ff=256, vocab_size=64, max_seq_len=32, mlp="relu")
    roles = ("attn_q", "attn_k", "attn_v", "attn_out", "mlp_up", "mlp_down")
    unit = {r: laws.Normal(g.fan_in(r) ** -0.5) for r in roles} | {"token_embed": laws.Normal(1.0)}
    scaled = {r: unit[r].scaled(g.num_residuals**-0.5) for r in ("attn_out", "mlp_down")}
    growth = {}
    for name, more in (("plain", {}), ("scaled", scaled)):
        model, _, params = born(own_recipe(g, **unit | more), positions="none")
        stats = stats_of(model)(params, tokens(4, 32, 64))
        ms = np.concatenate([[stats["embed_ms"]], np.ravel(stats["layers"]["stream_ms"])])
        growth[name] = (ms[-1] - ms[0], ms)
    # each branch adds a variance of its own, about the same in every layer: the course is a line
    plain = growth["plain"][1][::2]
    slopes = np.diff(plain)
    assert slopes[20:].mean() == pytest.approx(slopes[5:20].mean(), rel=0.25)
    assert np.corrcoef(np.arange(41), plain)[0, 1] > 0.99
    # at least N times as much: as the stream is drowned, tokens grow alike and attention averages less away
    assert growth["plain"][0] > 0.9 * g.num_residuals * growth["scaled"][0]
    assert growth["scaled"][1][-1] / growth["scaled"][1][0] < 2


# --- structure ---------------------------------------------------------------------------------------------------


def test_the_tree():
    _, _, params = born("layerscale", norm="layernorm", bias=True, qk_norm=True, positions="learned")
    g = SMALL
    expected = {
        "token_embed": (100, 64), "pos_embed": (32, 64), "lm_head": (100, 64),
        "final_norm/norm_scale": (64,), "final_norm/norm_bias": (64,),
        "layers/attention/attn_q": (3, 64, 8, 8), "layers/attention/attn_k": (3, 64, 4, 8),
        "layers/attention/attn_v": (3, 64, 4, 8), "layers/attention/attn_out": (3, 8, 8, 64),
        "layers/mlp/mlp_gate": (3, 64, 160), "layers/mlp/mlp_up": (3, 64, 160), "layers/mlp/mlp_down": (3, 160, 64),
    }  # fmt: skip
    shapes = {path: x.shape for path, x in flat(params).items()}
    assert expected.items() <= shapes.items()
    for path in shapes.keys() - expected.keys():
        assert deepinit.roles.role_of(path) in ("bias", "norm_scale", "residual_gate")
    assert sum(x.size for x in jax.tree.leaves({k: v for k, v in flat(params).items() if k in expected})) == (
        g.num_parameters + g.max_seq_len * g.d_model + 2 * g.d_model
    )


def test_logical_axes():
    boxed = deepinit.sharded_init.abstract_params(Decoder.from_recipe(recipe_of("megatron"), bias=True))
    names = {p: x.names for p, x in _boxes(boxed).items()}
    assert names["token_embed"] == names["lm_head"] == ("vocab", "embed")
    assert names["layers/attention/attn_q"] == ("layers", "embed", "heads", "head_dim")
    assert names["layers/attention/attn_k"] == ("layers", "embed", "kv_heads", "head_dim")
    assert names["layers/attention/attn_out"] == ("layers", "heads", "head_dim", "embed")
    assert names["layers/mlp/mlp_down"] == ("layers", "mlp", "embed")
    shapes = flat_shapes(boxed)
    assert all(len(names[p]) == len(shapes[p]) for p in names)


def _boxes(tree):
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, linen.Partitioned))
    return {"/".join(k.key for k in path): x for path, x in leaves}


def flat_shapes(tree):
    return {p: x.value.shape for p, x in _boxes(tree).items()}


def test_too_long_a_sequence():
    model, _, params = born()
    assert "sequence length 33 is above model.max_seq_len 32" in refused(model.apply, {"params": params}, tokens(1, 33))


@given(st.integers(1, 10**6), st.integers(1, 512))
def test_padding_is_the_next_multiple(vocab, multiple):
    model = Decoder(SMALL.replace(vocab_size=vocab), initializer=None, vocab_multiple=multiple)
    assert model.vocab_padded % multiple == 0
    assert 0 <= model.vocab_padded - vocab < multiple


def test_a_direct_call_is_from_recipe():
    recipe = recipe_of("deepnorm")
    direct = Decoder(SMALL, initializer=recipe.initializer, residual=recipe.residual, multipliers=recipe.multipliers)
    model, _, params = born("deepnorm")
    assert_same(deepinit.init_sharded(direct, recipe), params)
    assert (forward(direct)(params, tokens()) == forward(model)(params, tokens())).all()
