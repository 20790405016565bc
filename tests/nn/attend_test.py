"""Ways to compute attention: equal to XLA's own, values and gradients, with and without masks, alone and on a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinit import sharding
from deepinit.nn import attend
from deepinit.train.config import load
from tests.models import MESHES, mesh_of, refused

B, T, H = 2, 128, 16


def inputs(heads, key_heads, length=T, dtype=jnp.float32):
    """(q, k, v, cotangent)."""
    shapes = [(B, length, n, H) for n in (heads, key_heads, key_heads, heads)]
    return [jax.random.normal(jax.random.key(i), s).astype(dtype) for i, s in enumerate(shapes)]


def real(kind, length=T):
    """A mask of this kind, and which queries are real tokens."""
    if kind == "none":
        return None, np.ones((B, length), bool)
    if kind == "padded":
        mask = jnp.arange(length) < jnp.array([[length], [length - 37]])
        return mask, np.asarray(mask)
    cuts = jnp.array([[0, 50, 90], [0, 17, 18]])
    documents = jnp.sum(jnp.arange(length)[None, None] >= cuts[..., None], 1).astype(jnp.int32)
    documents = documents.at[1, -9:].set(0)
    return documents, np.asarray(documents > 0)


def run(way, arrays, mask, scale, counted):
    """(output, gradients), of real queries alone."""
    q, k, v, ct = arrays
    keep = jnp.asarray(counted)[:, :, None, None]

    @jax.jit
    def both(q, k, v, ct):
        def f(q, k, v):
            out = attend.attend(q, k, v, mask, scale, way)
            return out * keep.astype(out.dtype)

        out, back = jax.vjp(f, q, k, v)
        return out, *back(ct)

    with jax.numpy_dtype_promotion("standard"):
        return jax.device_get(both(q, k, v, ct))


@pytest.mark.parametrize("kind", ["none", "padded", "documents"])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("way", ["blocks", "splash"])
def test_every_way_is_the_plain_one(way, heads, key_heads, kind):
    arrays = inputs(heads, key_heads)
    mask, counted = real(kind)
    found, plain = (run(w, arrays, mask, 0.3, counted) for w in (way, "plain"))
    for a, b in zip(found, plain):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_half_precision_is_as_exact():
    arrays = inputs(4, 2, dtype=jnp.bfloat16)
    exact = run("plain", [x.astype(jnp.float32) for x in arrays], None, 0.25, np.ones((B, T), bool))
    for way in ("plain", "blocks"):
        found = run(way, arrays, None, 0.25, np.ones((B, T), bool))
        for a, b in zip(found, exact):
            assert a.dtype == jnp.bfloat16
            assert np.sqrt(np.mean((a.astype(np.float32) - b) ** 2) / np.mean(b**2)) < 2**-7


@pytest.mark.parametrize(("length", "parts"), [(64, 1), (100, 1), (128, 2), (192, 2), (256, 4), (1024, 8), (1000, 8)])
def test_blocks_are_not_small(length, parts):
    assert attend.parts(length) == parts


@pytest.mark.parametrize("way", ["blocks", "splash"])
@pytest.mark.parametrize("mesh", MESHES[1:], ids=str)
def test_a_mesh_changes_nothing(way, mesh):
    arrays = [jnp.concatenate([x] * 4) for x in inputs(4, 4)]
    alone = attend.attend(*arrays[:3], None, 0.25, "plain")
    with jax.set_mesh(mesh_of(mesh)):
        found = jax.jit(functools.partial(attend.attend, mask_BT=None, scale=0.25, way=way))(*arrays[:3])
    np.testing.assert_allclose(found, alone, rtol=2e-5, atol=2e-5)


def test_a_row_of_padding_is_finite():
    q, k, v, _ = inputs(4, 4)
    for way in ("plain", "blocks"):
        assert np.isfinite(attend.attend(q, k, v, jnp.zeros((B, T), bool), 0.25, way)).all()


@pytest.mark.parametrize(
    ("backend", "ways"),
    [("cpu", ["blocks"] * 4), ("gpu", ["plain", "cudnn", "plain", "plain"]), ("tpu", ["splash"] * 4)],
)
def test_auto_takes_what_applies(monkeypatch, backend, ways):
    documents = jnp.ones((2, 256), jnp.int32)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    found = [attend.fastest(256, dtype, m) for m in (None, documents) for dtype in (jnp.float32, jnp.bfloat16)]
    assert found == ways
    assert attend.fastest(100, jnp.float32, None) == "plain"
    with jax.set_mesh(sharding.make_mesh({"sequence": 4})):
        assert attend.fastest(256, jnp.bfloat16, documents) == "plain"


def test_what_does_not_apply_is_refused():
    q, k, v, _ = inputs(4, 4)
    assert "cudnn is for GPUs" in refused(attend.attend, q, k, v, None, 0.25, "cudnn")
    assert "did you mean 'splash'" in refused(load, [], ["--model.attention", "splsh"])
