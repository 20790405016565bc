"""Products with weights, as XLA runs them best."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from deepinit.sharding import RULES


def product(x: jax.Array, w: jax.Array, inner: int = 1, dtype: Any = None) -> jax.Array:
    """x (..., I) times w (I, O): I are the last `inner` axes of x and the first of w, O may be several; in `dtype`.

    As a product of two matrices, batch and time in one axis: the gradient of w then sums over one axis. Over two, XLA's
    CPU backend first copies both operands transposed, which takes longer than the product. Not where a mesh splits
    the sequence: one axis cannot say how.
    """
    lead, inside, out = x.shape[:-inner], x.shape[-inner:], w.shape[inner:]
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.shape.get(RULES["seq"], 1) > 1:
        last = tuple(range(len(lead), x.ndim))
        return jax.lax.dot_general(x, w, ((last, tuple(range(inner))), ((), ())), preferred_element_type=dtype)
    flat_x, flat_w = x.reshape(math.prod(lead), math.prod(inside)), w.reshape(math.prod(inside), math.prod(out))
    return jnp.matmul(flat_x, flat_w, preferred_element_type=dtype).reshape(*lead, *out)
