"""The loss from parts of the logits is that of all of them, with its gradient, at a part of the memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from deepinit.nn.losses import Head, chunked, cross_entropy
from deepinit.sharding import make_mesh

B, T, D, V = 2, 12, 16, 40


def inputs(gain=False, vocab=V, dtype="float32"):
    keys = jax.random.split(jax.random.key(0), 5)
    table = jax.random.normal(keys[0], (vocab, D), dtype)
    x = jax.random.normal(keys[1], (B, T, D), dtype)
    targets = jax.random.randint(keys[2], (B, T), 0, V - 3)
    share = jnp.where(jax.random.uniform(keys[4], (B, T)) > 0.3, jax.random.uniform(keys[3], (B, T)), 0)
    return (table, jnp.linspace(0.5, 2, vocab, dtype=dtype) if gain else None), x, targets, share


def whole(head, weights, x, targets, share):
    return jnp.sum(cross_entropy(head(weights, x), targets) * share)


@pytest.mark.parametrize("head", [Head(V), Head(V - 3, 0.25, 5.0)], ids=["plain", "padded, scaled, capped"])
@pytest.mark.parametrize("gain", [False, True])
def test_value_and_gradient_are_those_of_the_whole(head, gain):
    weights, x, targets, share = inputs(gain)
    wanted = jax.value_and_grad(lambda w, x: 3 * whole(head, w, x, targets, share), argnums=(0, 1))(weights, x)
    for parts in (1, 3, 12):
        found = jax.jit(
            jax.value_and_grad(lambda w, x, n=parts: 3 * chunked(head, n, w, x, targets, share), argnums=(0, 1))
        )(weights, x)
        assert chunked(head, parts, weights, x, targets, share) == pytest.approx(float(wanted[0]) / 3, rel=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, wanted)


def test_gradients_keep_the_dtypes():
    weights, x, targets, share = inputs(dtype="bfloat16")
    dw, dx = jax.grad(lambda w, x: chunked(Head(V), 3, w, x, targets, share), argnums=(0, 1))(weights, x)
    assert dw[0].dtype == dx.dtype == jnp.bfloat16


def test_a_quarter_of_the_sequence_takes_a_third_of_the_memory_at_most():
    shapes = [
        jax.ShapeDtypeStruct(s, d)
        for s, d in (((4096, 32), "f4"), ((4, 64, 32), "f4"), ((4, 64), "i4"), ((4, 64), "f4"))
    ]

    def peak(loss):
        step = jax.value_and_grad(lambda t, x, y, w: loss((t, None), x, y, w), argnums=(0, 1))
        return jax.jit(step).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    head = Head(4096)
    assert peak(lambda *a: chunked(head, 8, *a)) < peak(lambda *a: whole(head, *a)) / 3


def test_parts_of_a_sharded_sequence_stay_where_they_are():
    mesh = make_mesh({"data": 2, "sequence": 4})
    weights, x, targets, share = inputs()
    put = lambda a, *axes: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*axes)))  # noqa: E731
    with jax.set_mesh(mesh):
        args = (
            (put(weights[0]), None),
            put(x, "data", "sequence"),
            *(put(a, "data", "sequence") for a in (targets, share)),
        )
        run = jax.jit(lambda *a: chunked(Head(V), 3, *a)).lower(*args).compile()
        text = run.as_text()
        assert "all-gather" not in text
        assert "all-to-all" not in text
        assert float(run(*args)) == pytest.approx(float(whole(Head(V), weights, x, targets, share)), rel=1e-5)
