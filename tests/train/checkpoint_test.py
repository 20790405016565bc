"""Saving while the run goes on, and strict restores: containers, types, shapes, layouts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec

from deepinit import roles
from deepinit.errors import ConfigError
from deepinit.nn import Decoder
from deepinit.sharded_init import abstract_params, init_sharded
from deepinit.sharding import make_mesh
from deepinit.train import checkpoint, optimizer, step, transplant
from deepinit.train.checkpoint import CheckpointError, Checkpoints
from deepinit.train.config import load

ROOT = Path(__file__).parents[2]
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


# ---------------------------------------------------------------------------------------------- meshes and structures


def sized(scan=True, layers=3, seed=0, **model):
    """Config, recipe and model of a tiny decoder."""
    sizes = {"model__num_layers": layers, "model__d_model": 16, "model__num_heads": 4, "model__d_ff": 32}
    config = load().replace(**{**sizes, **model}, model__scan=scan, train__seed=seed)
    recipe = config.check()
    return config, recipe, Decoder.from_recipe(recipe, **config.model_options())


def shapes(**options):
    """The state of such a model, of which nothing is allocated."""
    config, recipe, model = sized(**options)
    params = roles.unboxed(abstract_params(model))
    moments = jax.eval_shape(optimizer.make(config, recipe, params).init, params)
    return step.TrainState(params, moments, *[jax.ShapeDtypeStruct((), np.int32)] * 3)


def trained(mesh_sizes, steps=1, seed=0, **options):
    """The state of such a model after some updates with gradients of ones, on a mesh."""
    config, recipe, model = sized(seed=seed, **options)
    mesh = make_mesh(mesh_sizes)
    params = init_sharded(model, recipe, mesh, seed)
    tx = optimizer.make(config, recipe, params)
    state, shardings = step.create(params, tx, mesh)
    for _ in range(steps):
        state = advance(shardings, tx)(state)
    return state


def by_path(state):
    return {path: np.asarray(x) for path, x in transplant.flat(state)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A scanned state on (fsdp 4, tensor 2), and its checkpoint."""
    state = trained({"fsdp": 4, "tensor": 2})
    c = Checkpoints(tmp_path_factory.mktemp("saved") / "checkpoints")
    c.save(7, state, {"tokens": 1})
    c.close()
    return by_path(state), c.folder


# case B71
@pytest.mark.parametrize("sizes", [{}, {"data": 2}, {"fsdp": 1, "tensor": 4}, {"data": 2, "tensor": 2}, {"fsdp": 8}])
def test_any_mesh(saved, sizes):
    values, folder = saved
    fresh = trained(sizes, steps=0, seed=1)
    got, _, origins = checkpoint.read(folder / "7", fresh)
    jax.tree.map(np.testing.assert_array_equal, by_path(got), values)
    assert [x.sharding for x in jax.tree.leaves(got)] == [x.sharding for x in jax.tree.leaves(fresh)]
    assert {path: str(o) for path, o in origins.items()} == {path: path for path in values}


# cases B72 and B76
def test_scanned_to_unrolled_and_back_is_exact(saved, tmp_path):
    values, folder = saved
    fresh = trained({"fsdp": 2}, scan=False, steps=0, seed=1)
    got, _, origins = checkpoint.read(folder / "7", fresh)
    unrolled = by_path(got)
    moved = [path for path in unrolled if "layers_" in path]
    assert len(moved) == 3 * 3 * 9  # parameters and two moments of three layers with nine leaves
    for path in moved:
        leaf = roles.locate(path)
        stack, layer = leaf.canonical, leaf.layer
        np.testing.assert_array_equal(unrolled[path], values[stack][layer])
        assert str(origins[path]) == f"{stack}[{layer}]"
    assert [x.sharding for x in jax.tree.leaves(got)] == [x.sharding for x in jax.tree.leaves(fresh)]

    c = Checkpoints(tmp_path / "checkpoints")
    c.save(8, got, {})
    c.close()
    back, _, origins = checkpoint.read(c.folder / "8", trained({"tensor": 2}, steps=0, seed=1))
    jax.tree.map(np.testing.assert_array_equal, by_path(back), values)
    stack = "params/layers/attention/attn_q"
    assert str(origins[stack]) == "params/layers_0/attention/attn_q ... params/layers_2/attention/attn_q"


# Mixed stacks: from one run's stacks to another's layers and back, every leaf with both moments.
def test_mixed_stacks_to_layers_and_back_is_exact(tmp_path):
    mixed = {"layers": 5, "model__num_experts": 2, "model__moe_every": 2}
    values = by_path(state := trained({"fsdp": 2}, **mixed))
    c = Checkpoints(tmp_path / "checkpoints")
    c.save(1, state, {})
    c.wait()
    got, _, origins = checkpoint.read(c.folder / "1", trained({}, steps=0, seed=1, scan=False, **mixed))
    apart = by_path(got)
    for path in (path for path in apart if "layers_" in path):
        layer = roles.locate(path).layer
        name, row = ("layers_4_1", 0) if layer == 4 else (f"layers_{layer % 2}_2", layer // 2)
        stack = path.replace(f"layers_{layer}", name)
        np.testing.assert_array_equal(apart[path], values[stack][row])
        assert str(origins[path]) == f"{stack}[{row}]"
    c.save(2, got, {})
    c.close()
    back, _, origins = checkpoint.read(c.folder / "2", trained({"tensor": 2}, steps=0, seed=1, **mixed))
    jax.tree.map(np.testing.assert_array_equal, by_path(back), values)
    assert str(origins["params/layers_1_2/mlp/router"]) == "params/layers_1/mlp/router ... params/layers_3/mlp/router"
    with pytest.raises(ConfigError, match="has no params/layers_0_4/mlp/mlp_up, here"):
        checkpoint.read(c.folder / "1", shapes(**mixed | {"model__moe_every": 4}))


def bytes_read():
    """By this process so far, through orbax's store."""
    (metric,) = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return metric["values"][0]["value"]


# case B72
def test_parameters_alone(saved):
    values, folder = saved
    fresh = trained({"fsdp": 2}, steps=0, seed=1)
    before = by_path(fresh)
    got, _, origins = checkpoint.read(folder / "7", fresh, "params")
    for path, value in by_path(got).items():
        mine = path.startswith("params/")
        np.testing.assert_array_equal(value, values[path] if mine else before[path])
        assert str(origins[path]) == (path if mine else "initial")


# case B72
def test_of_the_optimizer_no_byte_is_read(checkpoints):
    """Values that cannot be compressed, in leaves too large to be fetched along with their neighbours."""
    rng = np.random.default_rng(0)
    state, _, _ = made(width=256)
    state = jax.tree.map(lambda x: jax.device_put(rng.random(x.shape).astype(x.dtype), x.sharding), state)
    checkpoints.save(1, state, {})
    checkpoints.wait()
    start = bytes_read()
    checkpoint.read(checkpoints.folder / "1", state, "params")
    alone = bytes_read() - start
    checkpoint.read(checkpoints.folder / "1", state)
    whole = bytes_read() - start - alone
    moment = 256 * 256 * 4 * 0.8  # a float's exponent says little
    assert whole - alone > 2 * moment
    assert alone < 2 * moment


def test_what_is_asked_for_is_what_is_read(saved, monkeypatch):
    values, folder = saved
    asked = []
    real = checkpoint.fetch
    monkeypatch.setattr(checkpoint, "fetch", lambda f, tree, needed: asked.append(needed) or real(f, tree, needed))
    fresh = trained({}, steps=0, seed=1)
    got, _, _ = checkpoint.read(folder / "7", fresh, "list", ["params/layers/attention/*", "*/lm_head"])
    assert {path.split("/")[0] for path in asked[0]} == {"params", "opt_state"}
    new, before = by_path(got), by_path(fresh)
    for path, value in new.items():
        hit = path.startswith("params/layers/attention/") or path.endswith("/lm_head")
        assert (path in asked[0]) == hit
        np.testing.assert_array_equal(value, (values if hit else before)[path])
    with pytest.raises(ConfigError, match=r"train.load_paths: 'params/layer/\*' takes no leaf"):
        checkpoint.read(folder / "7", fresh, "list", ["params/layer/*"])


# case B15: another depth is never built from what is there
@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (
            {"layers": 4},
            r"params/layers/attention/attn_q is \[3, 16, 4, 4\] float32 there, \[4, 16, 4, 4\] float32 here",
        ),
        ({"layers": 4, "scan": False}, r"has no params/layers_3/attention/attn_q, here \[16, 4, 4\] float32"),
        (
            {"layers": 2},
            r"params/layers/attention/attn_q is \[3, 16, 4, 4\] float32 there, \[2, 16, 4, 4\] float32 here",
        ),
        ({"layers": 2, "scan": False}, "params/layers/attention/attn_q has 3 layers there, 2 here"),
        ({"model__d_ff": 64}, r"params/layers/mlp/mlp_up is \[3, 16, 32\] float32 there, \[3, 16, 64\] float32 here"),
        ({"model__qk_norm": True}, r"has no params/layers/attention/q_norm/\S+, here"),
        ({"model__tied_embeddings": True}, r"has params/lm_head, \[256, 16\] float32, which this run lacks"),
    ],
)
def test_another_model_is_refused_with_every_path(saved, change, shown):
    _, folder = saved
    with pytest.raises(ConfigError, match=shown) as e:
        checkpoint.read(folder / "7", shapes(**change))
    assert "\n" not in str(e.value)
    assert str(e.value).count(";") >= 3  # the moments too


# case B15
@pytest.mark.parametrize("layers", [16, 6])
@pytest.mark.parametrize("scan", [True, False])
def test_twelve_layers_are_not_taken_for_others(layers, scan):
    """Every leaf of the stack is named, with both shapes or as missing: parameters and moments."""
    twelve = dict(transplant.flat(shapes(layers=12)))
    wanted = dict(transplant.flat(shapes(layers=layers, scan=scan)))
    with pytest.raises(ConfigError) as e:
        transplant.plan(twelve, wanted, "there")
    message = str(e.value)
    stack = [path for path in twelve if "/layers/" in path]
    assert len(stack) == 3 * 9
    if scan:
        named = [f"{path} is {list(twelve[path].shape)} float32 there, {list(wanted[path].shape)}" for path in stack]
    elif layers > 12:
        named = [f"has no {path}, here" for path in wanted if roles.locate(path).layer in range(12, layers)]
    else:
        named = [f"{path} has 12 layers there, 6 here" for path in stack]
    assert all(text in message for text in named)
    assert message.count(";") == len(named)


# ---------------------------------------------------------------------------------------------- damage


def cut(folder):
    """Halve the largest file."""
    largest = max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    return largest


def two_steps(folder):
    first, shardings, tx = made()
    c = Checkpoints(folder)
    c.save(1, first, {})
    values = host(first)
    state = advance(shardings, tx)(first)
    c.save(2, state, {})
    c.close()
    return values


@pytest.mark.parametrize("known", [True, False])
def test_a_truncated_newest_falls_back_to_the_one_before(tmp_path, known):
    values = two_steps(tmp_path / "c")
    cut(tmp_path / "c" / "2")
    if not known:  # killed before the sizes were written down: the values tell, or orbax itself
        (tmp_path / "c" / "2.files.json").unlink()
    again = Checkpoints(tmp_path / "c")
    got = again.resume(step.released(made(fill=3.0)[0]))
    assert got.step == 1
    jax.tree.map(np.testing.assert_array_equal, host(got.state), values)
    (said,) = got.said
    assert "c/2 is damaged: " in said
    assert ("bytes, written were" in said) == known
    assert again.latest == 1
    assert (tmp_path / "c" / "damaged-2").exists()
    again.save(2, got.state, {})
    again.close()
    assert Checkpoints(tmp_path / "c").latest == 2


def test_a_list_of_sizes_that_was_cut_off_is_damage(tmp_path):
    two_steps(tmp_path / "c")
    (tmp_path / "c" / "2.files.json").write_text("")
    got = Checkpoints(tmp_path / "c").resume(made()[0])
    assert got.step == 1
    assert got.said == [f"{tmp_path / 'c' / '2'} is damaged: 2.files.json was cut off"]


def test_no_whole_checkpoint_is_an_error(tmp_path):
    two_steps(tmp_path / "c")
    for name in "12":
        cut(tmp_path / "c" / name)
    with pytest.raises(CheckpointError, match=r"c/2 is damaged: .*; .*c/1 is damaged: "):
        Checkpoints(tmp_path / "c").resume(made()[0])


def test_other_values_than_those_saved_are_damage(tmp_path):
    two_steps(tmp_path / "c")
    meta = tmp_path / "c" / "2" / "meta" / "metadata"
    record = json.loads(meta.read_text())
    record["sums"]["params/attn_q"]["0"][0] ^= 1
    meta.write_text(json.dumps(record))
    (tmp_path / "c" / "2.files.json").unlink()
    got = Checkpoints(tmp_path / "c").resume(made()[0])
    assert got.step == 1
    assert "the values of params/attn_q are not those that were saved" in got.said[0]


@pytest.mark.parametrize("what", [np.nan, np.inf])
def test_a_state_that_is_not_finite_is_never_saved(checkpoints, what):
    state, _, _ = made()
    checkpoints.save(1, state, {})
    bad = state.params["attn_q"].at[3, 4].set(what)
    with pytest.raises(CheckpointError, match="after step 2 is not finite and was not saved: params/attn_q"):
        checkpoints.save(2, state.replace(params={**state.params, "attn_q": bad}), {})
    assert checkpoints.latest == 1


# case B74
def test_a_folder_that_became_read_only_is_heard_of(tmp_path):
    """In a process without root's right to write anywhere."""
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import tests.conftest
from tests.train.checkpoint_test import made
from deepinit.train.checkpoint import CheckpointError, Checkpoints
state, _, _ = made()
c = Checkpoints("checkpoints")
c.save(1, state, {{}})
c.wait()
os.chmod("checkpoints", 0o500)
try:
    c.save(2, state, {{}})
    c.wait()
except CheckpointError as e:
    print(e)
print(c.latest)
os.chmod("checkpoints", 0o700)
"""
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    got = subprocess.run([*drop, sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert got.returncode == 0, got.stderr[-2000:]
    *_, why, latest = got.stdout.splitlines()
    assert "could not be written: PermissionError" in why
    assert latest == "1"


def test_a_run_is_found_by_its_folder(saved):
    _, folder = saved
    assert checkpoint.locate(folder) == folder / "7"
    assert checkpoint.locate(folder.parent) == folder / "7"
    assert checkpoint.locate(folder / "7") == folder / "7"
    with pytest.raises(ConfigError, match="there is no checkpoint in"):
        checkpoint.locate(folder / "nowhere")
