"""A probe against independent computations, on one device and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import deepinit
from deepinit.nn import stats
from deepinit.sharding import batch_sharding
from deepinit.signal.probe import measure, probe
from tests.models import SMALL, born, flat, mesh_of, recipe_of, tokens

LR = 1e-2


def sgd(grads, params):
    return jax.tree.map(lambda g: -LR * g, grads)


def adam(grads, params):
    tx = optax.adam(LR, eps=1e-30)
    with jax.numpy_dtype_promotion("standard"):
        return tx.update(grads, tx.init(params), params)[0]


def rates(params):
    return jax.tree.map(lambda _: LR, params)


def probed(scheme="megatron", update=adam, effects=1, batch=None, **options):
    model, recipe, params = born(scheme, **options)
    batch = tokens(batch=2, time=17) if batch is None else batch
    return probe(model, recipe, params, batch, update, rates(params), effects=effects), model, params, batch


@pytest.fixture(scope="module")
def base():
    """(measured, model, params, batch) of one model under Adam, read by many tests."""
    return probed()


def loss(model, params, batch):
    logits = model.apply({"params": params}, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def test_gradients_by_role_and_layer_are_those_of_the_loss(base):
    m, model, params, batch = base
    assert m.loss == pytest.approx(float(loss(model, params, batch)), rel=1e-6)
    grads = flat(jax.jit(jax.grad(lambda p: loss(model, p, batch)))(params))
    for path, g in grads.items():
        role = path.split("/")[-1]
        if role in ("attn_q", "mlp_down"):
            np.testing.assert_allclose(m.roles[role].gradient, np.sqrt((g**2).sum((1, *range(2, g.ndim)))), rtol=1e-4)
    both = [g for path, g in grads.items() if path.startswith("layers/") and path.endswith("norm_scale")]
    np.testing.assert_allclose(m.roles["norm_scale"].gradient, np.sqrt(sum((g**2).sum(1) for g in both)), rtol=1e-4)
    assert m.roles["final_norm/norm_scale"].gradient.shape == (1,)


def test_the_tap_reads_the_gradient_of_the_stream():
    """Where every token stands once, the table's gradient is that of the stack's input."""
    batch = jnp.asarray(np.random.default_rng(0).permutation(SMALL.vocab_size)[:34].reshape(2, 17), jnp.int32)
    m, model, params, batch = probed(batch=batch, effects=0)
    table = jax.jit(jax.grad(lambda p: loss(model, p, batch)))(params)["token_embed"]
    assert m.gradient[0] == pytest.approx(float(jnp.linalg.norm(table)), rel=1e-5)
    assert m.gradient.shape == (SMALL.num_layers + 1,)
    assert all(np.isnan(s.effect) for s in m.roles.values())  # effects were left out


def test_the_last_tap_by_finite_difference():
    model, _, params = born("megatron")
    batch = tokens(batch=2, time=17)
    taps = {"gradient": jnp.zeros(()), "layers": {"gradient": jnp.zeros(SMALL.num_layers)}}

    def through(t):
        logits = model.apply({"params": params, stats.TAPS: t}, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    squares = jax.grad(through)(taps)
    _, kept = model.apply({"params": params}, batch[:, :-1], mutable=[stats.STREAM])
    last = kept[stats.STREAM]["layers"]["x"][-1]

    def head(x):
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        logits = jnp.einsum("BTD,VD->BTV", x, params["lm_head"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    assert float(squares["layers"]["gradient"][-1]) == pytest.approx(
        float(jnp.sum(jax.grad(head)(last) ** 2)), rel=1e-4
    )


@pytest.mark.parametrize("options", [{"scan": False}, {"remat": "full"}, {"fused_qkv": True}])
def test_layouts_of_the_model_measure_the_same(options, base):
    one, *_ = base
    other, *_ = probed(**options)
    for name in ("variance", "branch", "correlation", "entropy", "scores", "gradient"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=2e-4, atol=1e-7, err_msg=name)
    for role, signal in one.roles.items():
        np.testing.assert_allclose(signal.gradient, other.roles[role].gradient, rtol=2e-3, err_msg=role)
        assert signal.effect == pytest.approx(other.roles[role].effect, rel=2e-2)


def test_a_mixed_stack_gives_one_row_a_layer():
    g = SMALL.replace(num_layers=4, d_model=32, d_ff=48, num_experts=4, moe_every=2)
    recipe = recipe_of("megatron", g)
    one, model, params, batch = probed(recipe)
    other, *_ = probed(recipe, scan=False)
    assert one.variance.shape == one.correlation.shape == (9,)
    assert one.gradient.shape == (5,)
    assert one.entropy.shape == one.scores.shape == (4,)
    for name in ("variance", "branch", "correlation", "entropy", "scores", "gradient"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=2e-4, atol=1e-7, err_msg=name)
    held = {"attn_q": (0, 1, 2, 3), "norm_scale": (0, 1, 2, 3), "mlp_up": (0, 2), "expert_up": (1, 3)}
    grads = flat(jax.jit(jax.grad(lambda p: loss(model, p, batch)))(params))
    for role, layers in held.items():
        assert one.roles[role].layers == other.roles[role].layers == layers
        np.testing.assert_allclose(one.roles[role].gradient, other.roles[role].gradient, rtol=2e-3)
        assert one.roles[role].effect == pytest.approx(other.roles[role].effect, rel=2e-2)
    experts = np.square(grads["layers_1_2/mlp/expert_up"]).sum((1, 2, 3))
    np.testing.assert_allclose(one.roles["expert_up"].gradient, np.sqrt(experts), rtol=1e-4)
    np.testing.assert_allclose(one.roles["mlp_up"].weight_rms, other.roles["mlp_up"].weight_rms, rtol=1e-6)
    assert one.roles["expert_up"].weight_rms == pytest.approx(0.02, rel=0.05)
    assert one.roles["expert_up"].where(1) == " in layer 4"


def test_a_mesh_measures_what_one_device_does():
    batch = np.asarray(tokens(batch=4, time=17))
    one, *_ = probed(batch=batch, effects=4)
    mesh = mesh_of((2, 2, 2))
    model, recipe, params = born("megatron", mesh=(2, 2, 2))
    with jax.set_mesh(mesh):
        there = jax.device_put(batch, batch_sharding(mesh))
        many = probe(model, recipe, params, there, adam, rates(params), effects=4)
    np.testing.assert_allclose(one.variance, many.variance, rtol=1e-5)
    np.testing.assert_allclose(one.gradient, many.gradient, rtol=1e-3)
    assert many.loss == pytest.approx(one.loss, rel=1e-5)
    assert many.roles["mlp_up"].effect == pytest.approx(one.roles["mlp_up"].effect, rel=1e-2)


def test_first_steps_and_what_they_do_to_the_logits(base):
    m, model, params, batch = probed(update=sgd)
    for role, s in m.roles.items():
        np.testing.assert_allclose(s.update, s.sgd_update, rtol=1e-5, err_msg=role)
        assert s.effect == pytest.approx(s.sgd_effect, rel=1e-4)
    grads = jax.jit(jax.grad(lambda p: loss(model, p, batch)))(params)
    step = dict(params, lm_head=params["lm_head"] - LR * grads["lm_head"])
    before, after = (model.apply({"params": p}, batch[:1, :16]) for p in (params, step))
    moved = float(jnp.sqrt(jnp.mean((after - before) ** 2)))
    assert m.roles["lm_head"].effect == pytest.approx(moved, rel=1e-3)  # the head is linear: first order is all
    up = base[0].roles["mlp_up"]
    np.testing.assert_allclose(up.update, LR / up.weight_rms, rtol=1e-3)  # every entry moves by the rate


def test_rezero_moves_by_its_gates_alone():
    m, *_ = probed("rezero", effects=0)
    assert (m.branch == 0).all()
    assert (m.variance == m.variance[0]).all()
    np.testing.assert_allclose(m.gradient, m.gradient[0], rtol=1e-6)
    for role in ("attn_q", "attn_v", "attn_out", "mlp_gate", "mlp_up", "mlp_down"):
        assert (m.roles[role].zero_gradient == 1).all(), role
    assert (m.roles["residual_gate"].zero_gradient == 0).all()
    assert (m.gates["layers/residual_gate"] == 0).all()


def test_attention_statistics_in_closed_form():
    q = jnp.zeros((2, 8, 4, 16))
    spread, entropy = stats.attention(q, jnp.ones((2, 8, 2, 16)), 1.0)
    assert float(spread) == 0
    assert float(entropy) == pytest.approx(1, rel=1e-6)
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 200, 8, 16)), jnp.float32) for _ in range(2))
    spread, entropy = stats.attention(q, k, 0.25)
    assert float(spread) == pytest.approx(1.0, rel=0.05)  # 16 products of variance 1, over 16
    assert 0.7 < float(entropy) < 0.95
    _, sharp = stats.attention(20 * q, k, 0.25)
    assert float(sharp) < 0.1


def test_token_correlation():
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 12, 32)), jnp.float32)
    u = np.asarray(x / jnp.linalg.norm(x, axis=-1, keepdims=True))
    cosines = np.einsum("BID,BJD->BIJ", u, u)
    expected = (cosines.sum((1, 2)) - 12) / (12 * 11)
    assert float(stats.token_correlation(x)) == pytest.approx(expected.mean(), abs=1e-6)
    assert float(stats.token_correlation(jnp.ones((1, 5, 8)))) == pytest.approx(1, rel=1e-6)


def test_an_ordinary_step_keeps_nothing():
    model, _, params = born("megatron")
    _, kept = jax.eval_shape(lambda p: model.apply({"params": p}, tokens(), mutable=["losses"]), params)
    assert not jax.tree.leaves(kept)
    assert set(jax.eval_shape(model.init, jax.random.key(0), tokens())) <= {"params", "losses"}


def test_a_probe_holds_no_activation_of_the_whole_stack():
    """Statistics leave the scan as scalars: nothing of size layers x tokens x width comes out."""
    model, _, params = born("megatron")
    out = jax.eval_shape(lambda p: measure(model, p, tokens(), adam, rates(params), 1), params)
    assert max(x.size for x in jax.tree.leaves(out)) <= SMALL.num_layers * 2


@pytest.mark.parametrize("scheme", ["ngpt", "nanochat", "keel", "normformer"])
def test_structures_of_the_catalogue_are_measured(scheme):
    recipe = recipe_of(scheme)
    model = deepinit.nn.Decoder.from_recipe(recipe)
    params = deepinit.init_sharded(model, recipe)
    m = probe(model, recipe, params, tokens(batch=1, time=9), sgd, rates(params), effects=0)
    assert m.finite
    assert len(m.variance) == recipe.geometry.num_residuals + 1
