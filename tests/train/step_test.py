"""The jitted step: accumulation, non-finite steps, dropout keys, sharding, evaluation."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import deepinit
from deepinit.train import optimizer, step
from deepinit.train.birth import born
from deepinit.train.config import load

TINY = (
    "--model.num-layers 2 --model.d-model 16 --model.num-heads 2 --model.d-ff 32 --data.seq-len 8 "
    "--scheme.name megatron --scheme.args.std 0.2 --train.batch-size 8"
)


@functools.cache
def parts(flags):
    """What trainers of the same flags share: all but the state, so that nothing is compiled twice."""
    config = load([], f"{TINY} {flags}".split())
    config.check()
    birth = born(config)
    tx = optimizer.make(config, birth.recipe, birth.params)
    lr = optimizer.schedule(config)
    pure = step.train_step(birth.model, tx, lr, config.train.seed, config.model.dropout > 0)
    with jax.set_mesh(birth.mesh):
        _, shardings = step.create(birth.params, tx, birth.mesh)
        return config, birth, tx, shardings, step.jitted(pure, shardings, birth.mesh)


MESH = "--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2"
DROPOUT = "--model.dropout 0.5 --train.accumulate 2 --optimizer.lr 0"


class Trainer:
    """A tiny model at step 0, ready to step."""

    def __init__(self, flags=""):
        self.config, self.birth, tx, self.shardings, self.step_fn = parts(flags)
        self.mesh, self.model = self.birth.mesh, self.birth.model
        with jax.set_mesh(self.mesh):
            self.state, _ = step.create(jax.tree.map(jnp.copy, self.birth.params), tx, self.mesh)

    def __call__(self, batch):
        with jax.set_mesh(self.mesh):
            on_mesh = step.put(batch, self.config.train.accumulate, self.mesh)
            self.state, metrics = self.step_fn(self.state, on_mesh)
            return jax.device_get(metrics)


def batch_of(seed=0, size=8, length=8, weights=None):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 256, (size, length + 1)).astype(np.int32)
    return {"tokens": tokens, "weights": np.ones((size, length), np.float32) if weights is None else weights}


def rows_of(batch):
    return lambda rows: {name: values[list(rows)] for name, values in batch.items()}


def host(tree):
    return jax.tree.map(lambda x: np.array(x, copy=True), tree)


def close(a, b, rtol):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * 1e-2), a, b)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_the_loss_is_that_of_the_definition():
    trainer = Trainer()
    batch = batch_of()
    logits = jax.jit(trainer.model.apply)({"params": trainer.birth.params}, batch["tokens"][:, :-1])
    wanted = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()
    assert trainer(batch)["loss"] == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize("flags", ["", "--model.num-experts 4 --model.balance-loss 0.01 --train.accumulate 2"])
def test_the_loss_in_parts_of_a_sequence_trains_alike(flags):
    batch = batch_of(weights=np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8))
    whole, parts = Trainer(flags), Trainer(f"{flags} --model.loss-chunks 4")
    a, b = whole(batch), parts(batch)
    assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
    close(host(whole.state.params), host(parts.state.params), rtol=1e-3)


def test_accumulation_is_one_big_batch():
    """Parts with different numbers of real tokens: every token counts the same (case B67: it is still one step)."""
    weights = np.ones((8, 8), np.float32)
    weights[:3] = 0
    weights[5, 2:] = 0
    batch = batch_of(weights=weights)
    whole, parts = Trainer(), Trainer("--train.accumulate 4")
    for _ in range(2):
        a, b = whole(batch), parts(batch)
    assert a["tokens"] == b["tokens"] == weights.sum()
    assert int(parts.state.step) == 2
    assert a["lr"] == b["lr"] == np.float32(1e-3) * np.float32(2 / 20)
    for name in ("loss", "grad_norm"):
        assert a[name] == pytest.approx(b[name], rel=1e-5)
    close(host(whole.state.params), host(parts.state.params), rtol=1e-3)


def test_padding_does_not_count():
    weights = np.ones((8, 8), np.float32)
    weights[4:] = 0
    batch = batch_of(weights=weights)
    other = {"tokens": batch["tokens"].copy(), "weights": weights}
    other["tokens"][4:] = 7
    a, b = Trainer(), Trainer()
    assert a(batch)["loss"] == b(other)["loss"]


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_bad_step_changes_nothing_and_is_counted(poison):
    trainer = Trainer()
    trainer(batch_of(0))
    before = host((trainer.state.params, trainer.state.opt_state))
    for i in (1, 2):
        bad = batch_of(i)
        bad["weights"][0, 0] = poison
        metrics = trainer(bad)
        assert not np.isfinite(metrics["loss"])
        assert (metrics["bad_steps"], metrics["bad_in_row"]) == (i, i)
    equal(before, host((trainer.state.params, trainer.state.opt_state)))
    assert int(trainer.state.step) == 3

    good = trainer(batch_of(3))
    assert np.isfinite(good["loss"])
    assert (good["bad_steps"], good["bad_in_row"]) == (2, 0)
    # The rate is that of the second update, since the bad steps were none.
    assert good["lr"] == np.float32(1e-3) * np.float32(2 / 20)


def test_an_infinite_gradient_of_a_finite_loss_changes_nothing():
    class Root:
        """Logits sqrt(w): finite at w = 0, where the derivative is not."""

        def apply(self, variables, tokens, mask, deterministic, rngs):
            return jnp.zeros((*tokens.shape, 256)) + jnp.sqrt(variables["params"]["lm_head"])

    config, birth, *_ = parts("")
    tx = optimizer.make(config.replace(optimizer__weight_decay=0), birth.recipe, {"lm_head": jnp.zeros(256)})
    with jax.set_mesh(birth.mesh):
        params = jax.device_put({"lm_head": jnp.zeros(256)}, NamedSharding(birth.mesh, PartitionSpec()))
        state, shardings = step.create(params, tx, birth.mesh)
        run = step.jitted(step.train_step(Root(), tx, optimizer.schedule(config), 0, False), shardings, birth.mesh)
        state, metrics = run(state, step.put(batch_of(), 1, birth.mesh))
    assert np.isfinite(metrics["loss"])
    assert not np.isfinite(metrics["grad_norm"])
    assert int(state.bad_steps) == 1
    equal(host(state.params), {"lm_head": np.zeros(256)})
    assert all(np.all(x == 0) for x in jax.tree.leaves(host(state.opt_state)))


# case B52
def test_dropout_differs_by_step_and_part_and_follows_from_the_seed():
    trainer, batch = Trainer(DROPOUT), batch_of()
    losses = [float(trainer(batch)["loss"]) for _ in range(3)]
    assert len(set(losses)) == 3  # lr is 0: only the masks change
    again = Trainer(DROPOUT)
    assert [float(again(batch)["loss"]) for _ in range(3)] == losses

    with jax.set_mesh(trainer.mesh):
        sums = jax.jit(lambda params, part, key: step.loss_sums(trainer.model, params, part, key)[0])
        key = jax.random.fold_in(step.dropout_key(0), 0)
        halves = [{k: v[i : i + 4] for k, v in batch.items()} for i in (0, 4)]
        own = [float(sums(trainer.state.params, half, jax.random.fold_in(key, i))) for i, half in enumerate(halves)]
        swapped = float(sums(trainer.state.params, halves[0], jax.random.fold_in(key, 1)))
    assert sum(own) / 64 == pytest.approx(losses[0], rel=1e-5)
    assert swapped != own[0]


# case B52: at step 2, the masks are those of an uninterrupted run
def test_dropout_after_a_jump_is_that_of_the_step():
    straight, batch = Trainer(DROPOUT), batch_of()
    losses = [float(straight(batch)["loss"]) for _ in range(3)]
    jumped = Trainer(DROPOUT)
    jumped.state = jumped.state.replace(step=jax.device_put(np.int32(2), jumped.shardings.step))
    assert float(jumped(batch)["loss"]) == losses[2]


def test_large_seeds_differ():
    keys = [jax.random.key_data(step.dropout_key(seed)).tolist() for seed in (0, 1, 2**32, 2**63 - 1)]
    assert len({tuple(k) for k in keys}) == 4


def test_a_mesh_computes_the_same():
    one, many = Trainer(), Trainer(MESH)
    for i in range(3):
        a, b = one(batch_of(i)), many(batch_of(i))
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


# Experts on devices of their own are born with the same bits, and learn the same; each holds one of four.
def test_an_expert_axis_computes_the_same():
    experts = "--scheme.name olmo_core_llama --model.num-experts 4 --model.balance-loss 0.01"
    one, spread = Trainer(experts), Trainer(f"{experts} --mesh.expert 4 --mesh.fsdp 2")
    assert deepinit.digest(one.birth.params) == deepinit.digest(spread.birth.params)
    up = spread.birth.params["layers"]["mlp"]["expert_up"]
    assert up.shape == (2, 4, 16, 32)
    assert up.sharding.shard_shape(up.shape) == (2, 1, 8, 32)
    for i in range(2):
        a, b = one(batch_of(i)), spread(batch_of(i))
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    close(host(one.state.params), host(spread.state.params), rtol=1e-3)


# Dense and routed layers: rematerialized, in parts, over fsdp, tensor and expert, and unrolled, the same steps.
@pytest.mark.slow
def test_a_mixed_stack_computes_the_same_on_a_mesh():
    mixed = "--model.num-layers 3 --model.num-experts 2 --model.moe-every 2 --model.balance-loss 0.01"
    mesh = "--mesh.fsdp 2 --mesh.tensor 2 --mesh.expert 2 --model.remat full"
    one, spread, unrolled = Trainer(mixed), Trainer(f"{mixed} {mesh}"), Trainer(f"{mixed} --model.scan false")
    assert len({deepinit.digest(t.birth.params) for t in (one, spread, unrolled)}) == 1
    up = spread.birth.params["layers_1_2"]["mlp"]["expert_up"]
    assert up.sharding.shard_shape(up.shape) == (1, 1, 8, 16)
    for i in range(2):
        wanted, *others = (t(batch_of(i)) for t in (one, spread, unrolled))
        for found in others:
            assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
            assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
    close(host(one.state.params), host(spread.state.params), rtol=1e-3)
    params = one.state.params
    stream = step.stream_variance(one.model, params, batch_of()["tokens"][:, :-1])
    alone = step.stream_variance(unrolled.model, unrolled.state.params, batch_of()["tokens"][:, :-1])
    assert len(stream) == 4
    assert stream == pytest.approx(alone, rel=1e-4)


def test_the_state_keeps_its_layout_and_compiles_once():
    trainer = Trainer(MESH)
    for i in range(3):
        trainer(batch_of(i))
        assert jax.tree.map(lambda x: x.sharding, trainer.state) == trainer.shardings
    assert trainer.step_fn._cache_size() == 1
    specs = {str(x.sharding.spec) for x in jax.tree.leaves(trainer.state.opt_state)}
    assert any("fsdp" in s and "tensor" in s for s in specs)


def test_the_state_is_donated():
    trainer = Trainer()
    old = trainer.state
    trainer(batch_of())
    assert all(x.is_deleted() for x in jax.tree.leaves(old))


def types_after_a_step(trainer):
    """(of the parameters, of the optimizer's state, of the loss); nothing is compiled."""
    with jax.set_mesh(trainer.mesh):
        batch = step.put(batch_of(), 1, trainer.mesh)
        state, metrics = jax.eval_shape(trainer.step_fn, trainer.state, batch)
    kinds = ({str(x.dtype) for x in jax.tree.leaves(tree)} for tree in (state.params, state.opt_state))
    return *kinds, str(metrics["loss"].dtype)


# case B40
def test_no_moment_is_copied_before_its_update():
    t = Trainer()
    with jax.set_mesh(t.mesh):
        batch = step.put(batch_of(), 1, t.mesh)
        lines = t.step_fn.lower(t.state, batch).compile().as_text().splitlines()
    moments = [x for x in jax.tree.leaves(t.state.opt_state) if x.ndim > 1]
    assert len(moments) == 2 * len([x for x in jax.tree.leaves(t.state.params) if x.ndim > 1])
    assert not [line for line in lines if re.search(r"= f32\[\d+,.* copy\(%state_opt_state", line)]


def test_bfloat16_compute_keeps_float32_parameters_and_moments():
    assert types_after_a_step(Trainer("--model.dtype bfloat16")) == ({"float32"}, {"float32", "int32"}, "float32")


# case B40
def test_bfloat16_parameters_by_explicit_choice():
    trainer = Trainer("--model.dtype bfloat16 --model.param-dtype bfloat16")
    assert types_after_a_step(trainer) == ({"bfloat16"}, {"float32", "int32"}, "float32")


def test_evaluation_is_the_mean_over_tokens():
    trainer = Trainer()
    few = np.zeros((8, 8), np.float32)
    few[0, :2] = 1
    batches = [batch_of(0), batch_of(1, weights=few)]
    with jax.set_mesh(trainer.mesh):
        got = step.evaluator(trainer.model, trainer.mesh)(trainer.state.params, [(8, rows_of(b)) for b in batches])
        sums = [jax.jit(lambda b: step.loss_sums(trainer.model, trainer.state.params, b))(b) for b in batches]
    loss, tokens = (sum(float(s[i]) for s in sums) for i in (0, 1))
    assert tokens == 66
    assert got == pytest.approx(loss / tokens, rel=1e-6)


@pytest.mark.parametrize("scan", ["true", "false"])
def test_variance_of_the_stream(scan):
    trainer = Trainer(f"--model.scan {scan} --model.num-layers 3")
    with jax.set_mesh(trainer.mesh):
        variance = step.stream_variance(trainer.model, trainer.birth.params, batch_of()["tokens"][:, :-1])
    assert len(variance) == 4
    rows = trainer.birth.params["token_embed"][batch_of()["tokens"][:, :-1]]
    assert variance[0] == pytest.approx(float(jnp.mean(rows**2)), rel=1e-5)
    assert variance[0] < variance[-1]


def test_packed_documents_do_not_see_each_other():
    trainer = Trainer()
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 256, (1, n)).astype(np.int32) for n in (5, 7))
    packed, segments = np.concatenate([a, b, 0 * a], 1), np.repeat([[1, 2, 0]], [5, 7, 5], axis=1)
    apply = jax.jit(trainer.model.apply)
    variables = {"params": trainer.birth.params}
    together = apply(variables, packed, jnp.asarray(segments))
    assert np.isfinite(together).all()
    for piece, x in ((together[:, :5], a), (together[:, 5:12], b)):
        np.testing.assert_allclose(piece, apply(variables, x), rtol=1e-4, atol=1e-5)
    assert not np.allclose(together[:, 5:12], apply(variables, packed)[:, 5:12], atol=1e-3)
