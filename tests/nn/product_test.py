"""Products with weights are those of einsum, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinit import sharding
from deepinit.nn.product import product

CASES = {
    "BTD,DF->BTF": ((2, 8, 16), (16, 24), 1),
    "BTD,DNH->BTNH": ((2, 8, 16), (16, 4, 6), 1),
    "BTNH,NHD->BTD": ((2, 8, 4, 6), (4, 6, 16), 2),
    "BD,DF->BF": ((3, 16), (16, 24), 1),
    "D,DF->F": ((16,), (16, 24), 1),
}


def drawn(spec):
    xs, ws, inner = CASES[spec]
    rng = np.random.default_rng(0)
    return *(jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (xs, ws)), inner


@pytest.mark.parametrize("mesh", [{}, {"data": 2, "sequence": 2, "tensor": 2}], ids=["one device", "split sequence"])
@pytest.mark.parametrize("spec", CASES)
def test_a_product_and_its_gradients_are_those_of_einsum(spec, mesh):
    x, w, inner = drawn(spec)

    def through(f):
        return jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), argnums=(0, 1)))

    with jax.set_mesh(sharding.make_mesh(mesh)):
        ours = through(lambda x, w: product(x, w, inner))(x, w)
        theirs = through(lambda x, w: jnp.einsum(spec, x, w))(x, w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, theirs)


def test_sums_may_be_wider_than_the_operands():
    x, w, _ = drawn("BTD,DF->BTF")
    y = product(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), dtype=jnp.float32)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, jnp.einsum("BTD,DF->BTF", x, w), rtol=0.05, atol=0.1)
