"""The invariants of every birth hold for our init, and are broken by the usual mistakes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import deepinit
from deepinit import births, forecasts, initializers
from deepinit.collectives import moved
from deepinit.nn import Decoder
from tests.models import SMALL, born, mesh_of, recipe_of, refused

EVEN = dataclasses.replace(SMALL, num_layers=4)


@pytest.mark.parametrize("scheme", ["megatron", "lingua_current_depth"])
def test_every_invariant_holds(scheme):  # case B47
    recipe = recipe_of(scheme, EVEN)
    model = Decoder.from_recipe(recipe)
    facts = deepinit.assert_birth_invariants([mesh_of((2, 4, 1)), mesh_of((1, 4, 2))], model=model, recipe=recipe)
    names = {f.name for f in facts}
    assert {"scan", "remat", "padded vocabulary", "depth prefix", "mesh data 2 x fsdp 4"} <= names
    assert {"collectives on fsdp 4 x tensor 2", "temporaries on fsdp 4 x tensor 2"} <= names
    assert next(f for f in facts if f.name == "depth prefix").said == "2 layers are the first of 4"


def test_shards_drawn_from_one_seed_each_are_seen():  # case B47
    mesh = mesh_of((2, 4, 1))
    recipe = recipe_of("megatron")
    block = np.random.default_rng(0).normal(size=(16, 8, 8)).astype(np.float32)
    repeated = jax.device_put(np.tile(block, (4, 1, 1)), NamedSharding(mesh, P("fsdp")))
    assert not births.shards("shards", {"attn_q": repeated}, recipe).ok
    differing = [
        jax.device_put(np.full((4,), float(i), np.float32), d) for i, d in enumerate(mesh.devices.flat)
    ]  # fmt: skip
    broken = jax.make_array_from_single_device_arrays((4,), NamedSharding(mesh, P()), differing)
    assert not births.replicas("replicas", {"bias": broken}).ok


def test_a_broken_init_is_named(monkeypatch):
    recipe = recipe_of("megatron", EVEN)
    model = Decoder.from_recipe(recipe)
    real = births.init_sharded

    def depends_on_the_mesh(model, recipe, mesh=None, seed=0):
        return real(model, recipe, mesh, seed + (mesh is not None))

    monkeypatch.setattr(births, "init_sharded", depends_on_the_mesh)
    with pytest.raises(AssertionError, match=r"^mesh fsdp 4 x tensor 2: digest \w+, on one device \w+$"):
        deepinit.assert_birth_invariants(mesh_of((1, 4, 2)), model=model, recipe=recipe)


def test_fast_keys_draw_the_same_alone_and_vmapped():  # case B45
    closure = recipe_of("megatron").initializer("attn_q", layer=0)
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 4)
    together = jax.vmap(lambda k: closure(k, (64, 8, 8), jnp.float32))(keys)
    alone = jnp.stack([closure(k, (64, 8, 8), jnp.float32) for k in keys])
    assert (together == alone).all()
    assert not (
        jax.vmap(lambda k: jax.random.normal(k, (4,)))(keys) == jnp.stack([jax.random.normal(k, (4,)) for k in keys])
    ).all()


def test_fans_are_global_inside_shard_map():  # case B46
    mesh = mesh_of((1, 1, 4))
    law = deepinit.laws.Normal((2 / (4096 + 32)) ** 0.5)

    def local(key):  # each shard draws its own rows with the fans said, not those of its shape
        return initializers.of_law(law)(jax.random.fold_in(key[0], jax.lax.axis_index("tensor")), (1024, 32))

    drawn = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P("tensor"))(jax.random.key(0)[None])
    whole = initializers.glorot_normal()(jax.random.key(0), (4096, 32))
    assert float(drawn.std()) == pytest.approx(0.02201, rel=0.01)
    assert float(whole.std()) == pytest.approx(0.02201, rel=0.01)
    assert float(initializers.glorot_normal()(jax.random.key(0), (1024, 32)).std()) == pytest.approx(0.0435, rel=0.02)
    g = dataclasses.replace(SMALL, d_ff=4096, d_model=32, num_heads=4, num_kv_heads=4, head_dim=8)
    message = refused(
        deepinit.recipe("glorot_normal", g).initializer("mlp_down", layer=0), jax.random.key(0), (1024, 32)
    )
    assert "cannot hold its 4096 x 32 matrix" in message


def test_a_huge_kernel_is_forecast_and_compiled_without_it():  # case B48
    g = deepinit.Geometry(1, 8192, 64, 32768, 64)
    model = Decoder.from_recipe(deepinit.recipe("megatron", g))
    made = deepinit.forecast(model, mesh_of((1, 4, 2)))
    assert made.largest.endswith(("mlp_up", "mlp_gate", "mlp_down"))
    assert made.largest_bytes == 32768 * 8192 * 4 // 8
    assert made.whole > 3 * 2**30
    program = jax.jit(
        lambda key: initializers.of_law(deepinit.laws.Normal(0.02))(key, (32768, 8192)),
        out_shardings=NamedSharding(mesh_of((1, 4, 2)), P("fsdp", "tensor")),
    ).lower(jax.random.key(0)).compile()  # fmt: skip
    memory = program.memory_analysis()
    assert memory.output_size_in_bytes == 32768 * 8192 * 4 // 8
    assert memory.temp_size_in_bytes < 0.01 * memory.output_size_in_bytes
    assert not moved(program.as_text())


def test_the_program_of_an_init_does_not_grow_with_depth():  # case B49
    sizes = {}
    for layers in (8, 64):
        recipe = deepinit.recipe("megatron", dataclasses.replace(SMALL, num_layers=layers))
        model = Decoder.from_recipe(recipe)
        shapes = deepinit.roles.unboxed(deepinit.sharded_init.abstract_params(model))
        draw, keys = deepinit.sharded_init.plan(model, shapes, 0)
        sizes[layers] = len(jax.jit(draw).lower(keys).as_text().splitlines())
    assert sizes[64] <= 1.05 * sizes[8]


def test_a_forecast_is_what_is_allocated():
    model, _, params = born("megatron", mesh=(1, 4, 2))
    made = forecasts.forecast(model, mesh_of((1, 4, 2)))
    device = jax.devices()[0]
    held = sum(s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards if s.device == device)
    assert made.params == held
    assert made.whole == sum(x.nbytes for x in jax.tree.leaves(params))
    assert made.parameters == sum(x.size for x in jax.tree.leaves(params))
    assert made.total == made.params + made.gradients + made.moments
    assert forecasts.forecast(model, forecasts.abstract_mesh({"fsdp": 4, "tensor": 2})).params == held
    assert f"{made.parameters:,} parameters over 8 devices" in made.lines()[0]
    assert "nearest that it divides" in refused(forecasts.forecast, model, forecasts.abstract_mesh({"fsdp": 5}))
