"""The step compiled ahead: the program that a run would compile, ready before there are data or parameters."""

import threading

import jax
import numpy as np
import pytest

from deepinit.errors import ConfigError
from deepinit.train import data, optimizer, program, step
from deepinit.train.birth import born, planned
from deepinit.train.config import load
from deepinit.train.program import Program, batch_shapes

TINY = (
    "--model.num-layers 2 --model.d-model 16 --model.num-heads 2 --model.d-ff 32 --data.seq-len 8 "
    "--scheme.name megatron --train.batch-size 8 --train.accumulate 2"
)


def config_of(flags=""):
    return load([], f"{TINY} {flags}".split())


@pytest.mark.parametrize("mesh", ["", "--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2"])
def test_it_takes_the_state_and_the_batches_of_the_run(mesh):
    config = config_of(mesh)
    config.check()
    plan = planned(config)
    ahead = Program(config, plan)
    run, seconds, waited = ahead.ready()
    assert 0 <= waited <= seconds
    birth = born(config, plan=plan)
    lr = optimizer.schedule(config)
    with jax.set_mesh(birth.mesh):
        state, shardings = step.create(birth.params, optimizer.make(config, birth.recipe, birth.params), birth.mesh)
        assert jax.tree.leaves(shardings) == jax.tree.leaves(ahead.shardings)
        tokens = np.random.default_rng(0).integers(0, 256, (8, 9)).astype(np.int32)
        batch = step.put({"tokens": tokens, "weights": np.ones((8, 8), np.float32)}, 2, birth.mesh)
        pure = step.train_step(birth.model, ahead.tx, lr, config.train.seed, False)
        expected = step.jitted(pure, shardings, birth.mesh)(jax.tree.map(lambda x: x.copy(), state), batch)
        got = run(state, batch)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("flags", ["", "--data.document-mask true"])
def test_shapes_are_those_of_the_data(flags):
    config = config_of(flags)
    real = data.load(config.data, batch_size=8, eval_batch_size=4, eval_batches=1, vocab_size=256).train[0]
    placed = step.put({k: v for k, v in real.items() if k != "id"}, 2, planned(config).mesh)
    assert {k: (v.shape, v.dtype) for k, v in placed.items()} == {
        k: (v.shape, v.dtype) for k, v in batch_shapes(config).items()
    }


def test_compilation_goes_on_beside_its_maker(monkeypatch):
    started, go, real = threading.Event(), threading.Event(), step.jitted

    class Held:
        """A program whose compilation waits for its maker, who could not say `go` if the maker had to wait for it."""

        def __init__(self, inner):
            self.inner = inner

        def trace(self, *args):
            return Held(self.inner.trace(*args))

        def lower(self):
            return Held(self.inner.lower())

        def compile(self):
            started.set()
            assert go.wait(60)
            return self.inner.compile()

    monkeypatch.setattr(program.step, "jitted", lambda *args: Held(real(*args)))
    config = config_of()
    ahead = Program(config, planned(config))
    assert started.wait(60)
    assert not ahead.compiling.done()
    go.set()
    assert ahead.ready()[0].as_text()


def test_a_leaf_that_the_mesh_does_not_divide_is_named_before_anything_compiles():
    config = config_of("--mesh.fsdp 8 --model.d-model 12 --model.num-heads 2")
    with pytest.raises(ConfigError, match="8 does not divide 12"):
        Program(config, planned(config))
