"""Which parameters decay, the factors by role, schedules, and float32 throughout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import NamedSharding, PartitionSpec

from deepinit import Role, roles
from deepinit.errors import ConfigError
from deepinit.recipe import FrozenMap, Update
from deepinit.sharded_init import abstract_params
from deepinit.sharding import make_mesh
from deepinit.signal import probe
from deepinit.train import optimizer
from deepinit.train.config import Config, load

VECTORS = {"norm_scale", "bias", "residual_gate", "branch_scale", "branch_shift"}


def model_of(*flags):
    from deepinit.nn import Decoder

    config = load([], ["--model.num-layers", "2", "--model.d-model", "16", "--model.d-ff", "32", *flags])
    recipe = config.check()
    return config, recipe, Decoder.from_recipe(recipe, **config.model_options())


def by_path(tree):
    return {"/".join(roles.names(path)): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


# case B24, case B65
@pytest.mark.parametrize("scheme", ["gpt2", "deepnorm", "rezero", "fixup"])
@pytest.mark.parametrize("scan", ["true", "false"])
def test_matrices_decay_and_vectors_never(scheme, scan):
    bias = [] if scheme == "fixup" else ["--model.bias", "true", "--model.norm", "layernorm"]
    config, recipe, model = model_of("--scheme.name", scheme, "--model.scan", scan, *bias)
    boxed = abstract_params(model)
    mask = by_path(optimizer.decay_mask(boxed, recipe, config.optimizer))
    assert mask == by_path(optimizer.decay_mask(roles.unboxed(boxed), recipe, config.optimizer))
    vectors = [path for path, decayed in mask.items() if not decayed]
    assert vectors
    for path, decayed in mask.items():
        assert decayed == (not any(path.endswith(v) for v in VECTORS)), path


# case B65: another block's names, its roles given; boxes make no difference
def test_foreign_names():
    config, recipe, _ = model_of()
    tree = {
        "attn": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)},
        "layer_norm": {"weight": jnp.ones(4)},
        "ln_f": {"scale": jnp.ones(4)},
    }
    known = {"kernel": Role.ATTN_Q, "bias": Role.BIAS, "weight": Role.NORM_SCALE, "scale": Role.NORM_SCALE}

    def role_of(path):
        return known[roles.names(path)[-1]]

    boxed = jax.tree.map(lambda x: linen.LogicallyPartitioned(x, (None,) * x.ndim), tree)
    for params in (tree, boxed):
        mask = by_path(optimizer.decay_mask(params, recipe, config.optimizer, role_of))
        assert {path for path, decayed in mask.items() if decayed} == {"attn/kernel"}


# case B65
def test_all_or_nothing_is_an_error():
    config, recipe, _ = model_of()
    matrices, vectors = {"attn_q": jnp.ones((4, 4))}, {"attn_norm_scale": jnp.ones(4)}
    with pytest.raises(ConfigError, match="no parameter would decay"):
        optimizer.make(config, recipe, vectors)
    with pytest.raises(ConfigError, match="every parameter would decay"):
        optimizer.make(config, recipe, matrices)
    optimizer.make(config.replace(optimizer__weight_decay=0), recipe, vectors)
    without_norms = dataclasses.replace(recipe, residual=dataclasses.replace(recipe.residual, norm="none"))
    optimizer.make(config, without_norms, matrices)


def test_a_parameter_without_a_role_is_refused():
    config, recipe, _ = model_of()
    with pytest.raises(ConfigError, match="adapter/kernel has no role"):
        optimizer.make(config, recipe, {"adapter": {"kernel": jnp.ones((4, 4))}})


def test_embeddings_by_option():
    config, recipe, model = model_of("--model.positions", "learned", "--optimizer.decay-embeddings", "false")
    mask = by_path(optimizer.decay_mask(abstract_params(model), recipe, config.optimizer))
    assert not mask["token_embed"]
    assert not mask["pos_embed"]
    assert mask["lm_head"]


# case B24: 1000 steps of lr 1e-3 and decay 0.1 leave a gate without gradient exactly where it was
def test_a_gate_does_not_decay():
    config = load([], ["--optimizer.schedule", "constant", "--optimizer.warmup-steps", "0"])
    recipe = config.check()
    params = {"attn_residual_gate": jnp.float32(0.5), "attn_q": jnp.full((2, 2), 0.5)}
    tx = optimizer.make(config, recipe, params)

    @jax.jit
    def run(params):
        def one(carry, _):
            params, state = carry
            updates, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
            return (optimizer.apply_updates(params, updates), state), None

        return jax.lax.scan(one, (params, tx.init(params)), length=1000)[0][0]

    after = run(params)
    assert float(after["attn_residual_gate"]) == 0.5
    np.testing.assert_allclose(after["attn_q"], 0.5 * (1 - 1e-4) ** 1000, rtol=1e-4)  # 0.4524


def test_it_is_adamw():
    """With factors of 1, the same numbers as optax.adamw with a mask."""
    config = load([], ["--optimizer.warmup-steps", "3", "--optimizer.clip-norm", "0.5"])
    recipe = config.check()
    params = {"attn_q": jnp.linspace(-1, 1, 16).reshape(4, 4), "attn_norm_scale": jnp.ones(4)}
    tx = optimizer.make(config, recipe, params)
    o = config.optimizer
    with jax.numpy_dtype_promotion("standard"):
        reference = optax.chain(
            optax.clip_by_global_norm(0.5),
            optax.adamw(
                optimizer.schedule(config), *o.betas, eps=o.eps, weight_decay=o.weight_decay,
                mask={"attn_q": True, "attn_norm_scale": False},
            ),
        )  # fmt: skip
        a, b, sa, sb = params, params, tx.init(params), reference.init(params)
        for i in range(5):
            grads = jax.tree.map(lambda x, i=i: jnp.sin(x * (i + 1)), params)
            ua, sa = tx.update(grads, sa, a)
            ub, sb = reference.update(grads, sb, b)
            a, b = optimizer.apply_updates(a, ua), optax.apply_updates(b, ub)
    for name in params:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-6)


def test_factors_by_role():
    """lr, decay and eps of a role are multiplied by the recipe's factors."""
    config = load(
        [], ["--optimizer.schedule", "constant", "--optimizer.warmup-steps", "0", "--optimizer.clip-norm", "0"]
    )
    base = config.check()
    factors = Update(lr=0.5, weight_decay=3.0, eps=1e8)
    recipe = dataclasses.replace(base, updates=FrozenMap({**base.updates, "mlp_up": factors}))
    params = {"mlp_up": jnp.full((2, 2), 2.0), "attn_q": jnp.full((2, 2), 2.0), "attn_norm_scale": jnp.ones(2)}
    tx = optimizer.make(config, recipe, params)
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["attn_q"], -1e-3 * (1 + 0.1 * 2), rtol=1e-5)
    np.testing.assert_allclose(updates["mlp_up"], -1e-3 * 0.5 * (1 / (1 + 1.0) + 0.3 * 2), rtol=1e-5)
    np.testing.assert_allclose(updates["attn_norm_scale"], -1e-3, rtol=1e-5)


# case B40
def test_moments_are_float32_whatever_the_parameters():
    config, recipe, _ = model_of()
    params = {"attn_q": jnp.ones((4, 4), jnp.bfloat16), "attn_norm_scale": jnp.ones(4, jnp.bfloat16)}
    tx = optimizer.make(config, recipe, params)
    state = tx.init(params)
    updates, state = tx.update(params, state, params)
    kinds = {x.dtype for x in jax.tree.leaves(state)}
    assert kinds == {jnp.dtype("float32"), jnp.dtype("int32")}
    assert updates["attn_q"].dtype == jnp.float32
    assert optimizer.apply_updates(params, updates)["attn_q"].dtype == jnp.bfloat16


# case B40: in float32 an update of 3e-4 is not lost on a norm's scale of 1
def test_small_updates_are_kept():
    params = {"attn_norm_scale": jnp.ones(2)}
    after = optimizer.apply_updates(params, {"attn_norm_scale": jnp.full(2, 3e-4)})
    np.testing.assert_allclose(after["attn_norm_scale"] - 1, 3e-4, rtol=1e-3)


def test_state_lies_as_the_parameters_do():
    config, recipe, _ = model_of()
    mesh = make_mesh({"fsdp": 2, "tensor": 2})
    params = {"attn_q": jnp.ones((4, 4)), "attn_norm_scale": jnp.ones(4)}
    split, whole = NamedSharding(mesh, PartitionSpec("fsdp", "tensor")), NamedSharding(mesh, PartitionSpec())
    tx = optimizer.make(config, recipe, params)
    shapes, placed = optimizer.state_shardings(tx, params, {"attn_q": split, "attn_norm_scale": whole}, whole)
    assert jax.tree.structure(shapes) == jax.tree.structure(placed)
    for path, sharding in by_path(placed).items():
        assert sharding == (split if path.endswith("attn_q") else whole)


# ---------------------------------------------------------------------------------------------- schedules


def rates(config, counts):
    return [float(optimizer.schedule(config)(i)) for i in counts]


# case B67
def test_warmup_starts_at_one_step_of_it():
    config = Config().replace(optimizer__lr=1.0, optimizer__warmup_steps=4, optimizer__schedule="constant")
    assert rates(config, range(6)) == [0.25, 0.5, 0.75, 1, 1, 1]
    config = config.replace(optimizer__warmup_steps=0)
    assert rates(config, range(2)) == [1, 1]


def test_cosine():
    config = Config().replace(
        optimizer__lr=2.0, optimizer__warmup_steps=10, optimizer__min_lr_ratio=0.1, train__steps=110
    )
    got = rates(config, (9, 10, 60, 109, 110))
    np.testing.assert_allclose(got, [2, 2, 2 * 0.55, 2 * (0.1 + 0.45 * (1 + np.cos(np.pi * 0.99))), 0.2], rtol=1e-5)


def test_warmup_stable_decay():
    config = Config().replace(
        optimizer__lr=1.0, optimizer__warmup_steps=10, optimizer__min_lr_ratio=0.0, optimizer__schedule="wsd",
        optimizer__decay_steps=20, train__steps=100,
    )  # fmt: skip
    np.testing.assert_allclose(rates(config, (4, 10, 79, 80, 89, 99)), [0.5, 1, 1, 0.95, 0.5, 0], atol=1e-6)
    assert Config().replace(train__steps=300).decay_steps == 30


# case B69: the horizon is that of `steps`, wherever a run stops
def test_stop_at_does_not_move_the_horizon():
    whole = Config().replace(train__steps=100)
    part = whole.replace(train__stop_at=50)
    assert rates(whole, range(50)) == rates(part, range(50))


# In memory there is no tree of squares, of which the global norm and sums by role would both be taken.
def test_norms_by_role_need_no_memory_beside_the_global_one():
    rng = np.random.default_rng(0)
    q, up, head = (jnp.asarray(rng.standard_normal(x), np.float32) for x in ((8, 64, 4, 16), (8, 64, 256), (64, 100)))
    grads = {"layers": {"attention": {"attn_q": q}, "mlp": {"mlp_up": up}}, "lm_head": head}

    def both(g):
        return optimizer.norm(g), probe.by_role(g, probe.square)

    compiled = jax.jit(both).lower(grads).compile()
    norm, squares = compiled(grads)
    assert float(norm) == pytest.approx(float(optax.tree.norm(grads)), rel=1e-6)
    assert float(norm) ** 2 == pytest.approx(sum(float(x.sum()) for x in squares.values()), rel=1e-6)
    assert compiled.memory_analysis().temp_size_in_bytes < 0.05 * sum(x.nbytes for x in jax.tree.leaves(grads))
