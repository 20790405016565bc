"""Saving while the run goes on, and strict restores: containers, types, shapes, layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from deepinit.errors import ConfigError
from deepinit.sharding import make_mesh
from deepinit.train import optimizer, step
from deepinit.train.checkpoint import Checkpoints
from deepinit.train.config import load

MESH = {"fsdp": 2, "tensor": 2}


def made(mesh_sizes=MESH, width=8, dtype=jnp.float32, name="attn_q", fill=1.0):
    """A state of a few leaves on a mesh, its shardings, and a step that may be jitted."""
    config = load()
    mesh = make_mesh(mesh_sizes)
    layout = {name: PartitionSpec("fsdp", "tensor"), "attn_norm_scale": PartitionSpec()}
    values = {name: jnp.full((width, width), fill, dtype), "attn_norm_scale": jnp.full(width, fill, dtype)}
    params = {k: jax.device_put(v, NamedSharding(mesh, layout[k])) for k, v in values.items()}
    tx = optimizer.make(config, config.check(), params)
    state, shardings = step.create(params, tx, mesh)
    return state, shardings, tx


def advance(shardings, tx):
    """A jitted update that donates its state."""

    def one(state):
        updates, opt_state = tx.update(jax.tree.map(jnp.ones_like, state.params), state.opt_state, state.params)
        params = optimizer.apply_updates(state.params, updates)
        return state.replace(params=params, opt_state=opt_state, step=state.step + 1)

    return jax.jit(one, donate_argnums=0, in_shardings=(shardings,), out_shardings=shardings)


def host(tree):
    return jax.tree.map(lambda x: np.array(x, copy=True), tree)


@pytest.fixture
def checkpoints(tmp_path):
    c = Checkpoints(tmp_path / "checkpoints", keep=2)
    yield c
    c.manager.close()


# case B73
def test_containers_and_types_are_those_of_the_target(checkpoints):
    state, shardings, tx = made()
    run = advance(shardings, tx)
    state = run(state)
    checkpoints.save(1, state, {"step": 1, "tokens": 7})
    checkpoints.close()

    fresh, _, _ = made(fill=5.0)
    again = Checkpoints(checkpoints.folder)
    got, meta = again.restore(again.latest, step.released(fresh))
    assert all(x.is_deleted() for x in jax.tree.leaves(fresh))  # two states would take twice the memory
    assert meta == {"step": 1, "tokens": 7}
    assert jax.tree.structure(got) == jax.tree.structure(state)
    assert [x.dtype for x in jax.tree.leaves(got)] == [x.dtype for x in jax.tree.leaves(state)]
    assert [x.sharding for x in jax.tree.leaves(got)] == [x.sharding for x in jax.tree.leaves(state)]
    jax.tree.map(np.testing.assert_array_equal, host(got), host(state))
    run(got)
    assert run._cache_size() == 1  # the restored state needs no other program
    again.close()


def test_a_donated_state_is_saved_as_it_was(checkpoints):
    state, shardings, tx = made(width=512)
    run = advance(shardings, tx)
    state = run(state)
    wanted = host(state)
    checkpoints.save(1, state, {})
    for _ in range(10):
        state = run(state)
    jax.block_until_ready(state)
    checkpoints.wait()
    got, _ = checkpoints.restore(1, state)
    jax.tree.map(np.testing.assert_array_equal, host(got), wanted)


def test_another_mesh(checkpoints):
    state, _, _ = made()
    checkpoints.save(1, state, {})
    checkpoints.wait()
    other, _, _ = made({"fsdp": 4}, fill=0.0)
    got, _ = checkpoints.restore(1, other)
    jax.tree.map(np.testing.assert_array_equal, host(got), host(state))
    assert got.params["attn_q"].sharding == other.params["attn_q"].sharding


# case B73: orbax would cast in silence
@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"dtype": jnp.bfloat16}, r"params/attn_q is \[8, 8\] float32 there, \[8, 8\] bfloat16 here"),
        ({"width": 16}, r"mu/attn_norm_scale is \[8\] float32 there, \[16\] float32 here"),
        ({"name": "attn_k"}, "has no params/attn_k"),
    ],
)
def test_another_state_is_refused(checkpoints, change, shown):
    state, _, _ = made()
    checkpoints.save(1, state, {})
    checkpoints.wait()
    with pytest.raises(ConfigError, match=shown) as e:
        checkpoints.restore(1, made(**change)[0])
    assert "\n" not in str(e.value)


def test_only_the_newest_are_kept(checkpoints):
    state, _, _ = made()
    for i in (1, 2, 3):
        checkpoints.save(i, state, {})
    checkpoints.save(3, state, {})  # is there already
    checkpoints.wait()
    assert checkpoints.manager.all_steps() == [2, 3]
    assert checkpoints.latest == 3


def test_a_half_written_step_does_not_count(checkpoints):
    state, _, _ = made()
    checkpoints.save(1, state, {})
    checkpoints.close()
    whole = checkpoints.folder / "1"
    cut = checkpoints.folder / "2.orbax-checkpoint-tmp-1"
    cut.mkdir()
    (cut / "state").mkdir()
    again = Checkpoints(checkpoints.folder)
    assert again.latest == 1
    assert whole.exists()
    again.save(2, state, {})
    again.close()
    assert Checkpoints(checkpoints.folder).latest == 2
