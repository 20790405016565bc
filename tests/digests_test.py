"""One digest a tree, whatever its layout; another one for any change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from hypothesis import given
from hypothesis import strategies as st

import deepinit
from deepinit import digests
from tests.models import born, flat, mesh_of, stacked

words = st.integers(0, 2**32 - 1)
SHAPES = {
    "layers": {"mlp_up": (3, 8, 40), "mlp_up_bias": (3,)},
    "token_embed": (10, 33),
    "final_gate": (),
    "head": (64,),
}


def tree(seed=0):
    """A tree with every kind of shape, stacked and not."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: rng.standard_normal(s).astype(np.float32), SHAPES, is_leaf=lambda s: isinstance(s, tuple)
    )


def leaf_of(t, path):
    """(dict, key) of the leaf at this path."""
    *above, name = path.split("/")
    for key in above:
        t = t[key]
    return t, name


paths = st.sampled_from(list(flat(tree())))
ORIGINAL = deepinit.digest(tree())


def test_form():
    assert len(ORIGINAL) == 32
    assert int(ORIGINAL, 16) >= 0
    assert deepinit.digest(tree()) == ORIGINAL


# Certain, not likely: a changed word times an odd number changes the sum modulo 2^32, and mixing is a bijection.
@given(paths, st.integers(0, 10**6), words)
def test_any_changed_value(path, position, word):
    t = tree()
    holder, name = leaf_of(t, path)
    bits = np.atleast_1d(holder[name]).view(np.uint32)
    at = position % bits.size
    if bits.flat[at] == word:
        return
    bits.flat[at] = word
    holder[name] = bits.view(np.float32).reshape(holder[name].shape)
    assert deepinit.digest(t) != ORIGINAL


@given(st.sampled_from(["layers/mlp_up", "token_embed", "head"]), st.integers(0, 10**6), st.integers(0, 10**6))
def test_any_two_swapped_values(path, i, j):
    t = tree()
    holder, name = leaf_of(t, path)
    x = holder[name].ravel()
    i, j = i % x.size, j % x.size
    if x[i] == x[j]:
        return
    x[i], x[j] = x[j], x[i]
    assert deepinit.digest(t) != ORIGINAL


def test_swapped_layers_leaves_and_names():
    t = tree()
    t["layers"]["mlp_up"] = t["layers"]["mlp_up"][[1, 0, 2]]
    assert deepinit.digest(t) != ORIGINAL
    t = tree()
    t["headless"] = t.pop("head")
    assert deepinit.digest(t) != ORIGINAL
    t = tree()
    t["layers"]["mlp_gate"], t["layers"]["mlp_up"] = t["layers"]["mlp_up"], t["layers"]["mlp_up"][::-1]
    u = tree()
    u["layers"]["mlp_up"], u["layers"]["mlp_gate"] = u["layers"]["mlp_up"], u["layers"]["mlp_up"][::-1]
    assert deepinit.digest(t) != deepinit.digest(u)


@pytest.mark.parametrize("transform", [np.transpose, np.flip, lambda x: np.roll(x, 1, 0), lambda x: np.roll(x, 32, 1)])
def test_moved_values(transform):
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    assert deepinit.digest({"mlp_up": transform(x)}) != deepinit.digest({"mlp_up": x})


def test_dtype_counts():
    values = [1.0, 2.0, -0.5]  # exact in every dtype
    digests = {d: deepinit.digest({"x": jnp.asarray(values, d)}) for d in (np.float32, jnp.bfloat16, np.float16)}
    assert len(set(digests.values())) == 3
    small = {d: deepinit.digest({"x": jnp.asarray(values, d)}) for d in (jnp.float8_e4m3fn, jnp.float8_e5m2)}
    assert len(set(small.values())) == 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, jnp.float8_e4m3fn, np.int32, np.int8, np.bool_])
def test_every_dtype_shows_a_change(dtype):
    x = np.asarray([[0, 1, 0, 1], [1, 1, 0, 0]])
    y = x.copy()
    y[1, 2] = 1
    assert deepinit.digest({"x": jnp.asarray(x, dtype)}) != deepinit.digest({"x": jnp.asarray(y, dtype)})
    if jnp.issubdtype(dtype, jnp.floating):
        assert deepinit.digest({"x": jnp.asarray(x * 0.25, dtype)}) != deepinit.digest(
            {"x": jnp.asarray(y * 0.25, dtype)}
        )


def test_the_sign_of_zero_and_nan_count():
    zero, minus, nan = ({"x": np.asarray([v, 1.0], np.float32)} for v in (0.0, -0.0, np.nan))
    assert len({deepinit.digest(t) for t in (zero, minus, nan)}) == 3


def test_boxes_and_hosts_do_not_count():
    t = tree()
    boxed = jax.tree.map(lambda x: linen.LogicallyPartitioned(jnp.asarray(x), (None,) * x.ndim), t)
    assert deepinit.digest(boxed) == ORIGINAL
    assert deepinit.digest(jax.tree.map(jnp.asarray, t)) == ORIGINAL


def test_scanned_and_unrolled_are_one():
    scanned, unrolled = born()[2], born(scan=False)[2]
    assert deepinit.digest(unrolled) == deepinit.digest(scanned)
    assert deepinit.digest(stacked(unrolled)) == deepinit.digest(scanned)
    swapped = dict(unrolled, layers_0=unrolled["layers_1"], layers_1=unrolled["layers_0"])
    assert deepinit.digest(swapped) != deepinit.digest(scanned)


def test_rows_of_zeros_do_not_count():
    x = np.random.default_rng(0).standard_normal((100, 64)).astype(np.float32)
    padded = np.concatenate([x, np.zeros((28, 64), np.float32)])
    assert deepinit.digest({"token_embed": padded}) == deepinit.digest({"token_embed": x})
    assert deepinit.digest({"token_embed": padded[::-1]}) != deepinit.digest({"token_embed": x})


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 2, 4), (2, 2, 2)])
def test_layouts_do_not_count(sizes):
    spec = jax.sharding.PartitionSpec
    mesh = mesh_of(sizes)
    x = np.random.default_rng(0).standard_normal((24, 40, 48)).astype(np.float32)
    expected = deepinit.digest({"layers": {"mlp_up": x}})
    for axes in (spec(), spec(None, "fsdp", "tensor"), spec("data", ("fsdp", "tensor")), spec(None, None, "tensor")):
        placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, axes))
        assert deepinit.digest({"layers": {"mlp_up": placed}}) == expected


# One CPU with the whole leaf sums four lanes in one pass; a mesh, lane by lane.
SIZES = [
    (shape, stacked) for shape in ((3, 8, 40), (2, 5, 64, 96), (70, 33), (64,), (0, 4)) for stacked in (True, False)
]


@pytest.mark.parametrize(("shape", "stacked"), [*SIZES, ((), False)], ids=str)
def test_lanes_are_the_same_near_and_far(shape, stacked):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    near, far = (jax.device_get(digests.all_lanes([x], (stacked,), near)[0]) for near in (True, False))
    assert near.shape == (shape[0] if stacked else 1, 4)
    np.testing.assert_array_equal(near, far)


def test_a_mesh_is_not_one_cpu():
    x = jnp.zeros((8, 8))
    assert digests.on_one_cpu([x])
    spread = jax.device_put(x, jax.sharding.NamedSharding(mesh_of((8, 1, 1)), jax.sharding.PartitionSpec("data")))
    assert not digests.on_one_cpu([x, spread])
