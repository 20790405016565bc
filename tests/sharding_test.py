"""Meshes and the strict table from logical axes to mesh axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from deepinit import sharding
from deepinit.sharding import RULES, batch_sharding, constrain, make_mesh, param_shardings, spec
from tests.models import MESHES, mesh_of, refused

BATCH = ("data", "fsdp", "expert")


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, (1, 1, 1)),
        (None, (1, 1, 1)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 2)),
        ({"fsdp": 4}, (1, 4, 1)),
        ({"data": -1}, (8, 1, 1)),
        ({"data": -1, "tensor": 4}, (2, 1, 4)),
        ({"tensor": -1, "fsdp": 8}, (1, 8, 1)),
        ({"sequence": 2, "expert": -1}, (1, 1, 1, 2, 4)),
    ],
)
def test_make_mesh(sizes, shape):
    mesh = make_mesh(sizes)
    assert mesh.axis_names == ("data", "fsdp", "tensor", "sequence", "expert")
    assert mesh.devices.shape == (*shape, *(1,) * (5 - len(shape)))
    # explicit axes, jax's default, are those on which Linen's logical boxes fail
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert sorted(d.id for d in mesh.devices.ravel()) == list(range(np.prod(shape)))  # the first devices


def test_make_mesh_of_given_devices():
    mesh = make_mesh({"data": -1}, jax.devices()[4:6])
    assert {d.id for d in mesh.devices.ravel()} == {4, 5}


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"fdsp": 2}, "mesh axis 'fdsp' is unknown; did you mean 'fsdp'?"),
        ({"data": 0}, "mesh: data 0: sizes must be positive, at most one of them -1"),
        ({"data": -1, "fsdp": -1}, "mesh: data -1 x fsdp -1: sizes must be positive, at most one of them -1"),
        ({"data": -2}, "mesh: data -2: sizes must be positive, at most one of them -1"),
        ({"data": -1, "tensor": 3}, "mesh: 3 does not divide the 8 devices here"),
        ({"data": 4, "tensor": 4}, "mesh: data 4 x tensor 4 needs 16 devices, there are 8"),
    ],
)
def test_refusals(sizes, says):
    assert refused(make_mesh, sizes) == says


def test_spec():
    assert spec(("batch", "seq", "features")) == PartitionSpec(BATCH, "sequence", None)
    assert spec(("layers", "embed", "heads", "head_dim")) == PartitionSpec(None, "fsdp", "tensor", None)
    assert spec(("vocab", None)) == PartitionSpec("tensor", None)
    # a mesh that lacks an axis
    assert spec(("batch", "embed"), ("data",)) == PartitionSpec(("data",), None)
    assert spec(("batch", "embed"), ()) == PartitionSpec(None, None)


# flax's own constraint ignores a misspelt axis
@given(st.text(max_size=8).filter(lambda name: name not in RULES))
def test_a_misspelt_axis_is_an_error(name):
    assert refused(spec, (name,)).startswith(f"logical axis {name!r} is unknown")


def test_a_misspelt_axis_is_an_error_without_a_mesh_too():
    assert refused(constrain, jnp.ones((2, 2)), "batch", "fetures").endswith("did you mean 'features'?")
    assert "2 axes named for an array of shape (2,)" in refused(constrain, jnp.ones(2), "batch", "seq")


def test_constrain_without_a_mesh_does_nothing():
    x = jnp.ones((4, 2))
    assert constrain(x, "batch", "seq") is x


@pytest.mark.parametrize("sizes", MESHES)
def test_constrain(sizes):
    mesh = mesh_of(sizes)
    x = jnp.arange(64.0).reshape(8, 8)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: constrain(x * 1.0, "batch", "mlp"))(x)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(BATCH, "tensor")), 2)
    assert (y == x).all()


def test_batch_sharding():
    mesh = mesh_of((2, 2, 2))
    assert batch_sharding(mesh).spec == PartitionSpec(BATCH, None)
    assert batch_sharding(mesh, 3, axis=1).spec == PartitionSpec(None, BATCH, None)
    x = jax.device_put(jnp.zeros((8, 3)), batch_sharding(mesh))
    assert {s.data.shape for s in x.addressable_shards} == {(2, 3)}


def test_param_shardings():
    boxed = {
        "token_embed": linen.LogicallyPartitioned(jnp.zeros((8, 4)), ("vocab", "embed")),
        "plain": jnp.zeros((8, 4)),
    }
    mesh = mesh_of((2, 2, 2))
    layout = param_shardings(boxed, mesh)
    assert layout == {
        "token_embed": NamedSharding(mesh, PartitionSpec("tensor", "fsdp")),
        "plain": NamedSharding(mesh, PartitionSpec()),
    }
    wrong = {"w": linen.LogicallyPartitioned(jnp.zeros((8, 4)), ("vocb", "embed"))}
    assert "did you mean 'vocab'" in refused(param_shardings, wrong, mesh)


def test_rules_name_mesh_axes():
    named = {axis for rule in RULES.values() for axis in ((rule,) if isinstance(rule, str) else rule or ())}
    assert named <= set(sharding.MESH_AXES)
