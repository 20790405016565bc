"""softmax(scale q k^T) v under causality, by whatever is fastest where it runs; all ways give the same numbers.

B batch, T time, N heads, K key and value heads, G heads per key head, H head width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from deepinit.errors import ConfigError
from deepinit.sharding import spec

WAYS = ("auto", "plain", "blocks", "cudnn", "splash")
BLOCK, MOST = 64, 8
"""Least queries of a block, and most blocks: smaller ones cost more in small products than they skip."""


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask_BT: jax.Array | None, scale: float, way: str) -> jax.Array:
    """(B, T, N, H), (B, T, K, H), (B, T, K, H) -> (B, T, N, H). Every query sees itself and what is before it.

    `mask` is True at real tokens, or the number of each token's document, from 1, beyond which nothing is seen; 0 is no
    token. Ways: `plain`, XLA's own, the reference; `blocks` (CPU), which skips the half that causality hides; `cudnn`
    (GPU, half precision); `splash` (TPU); `auto`, the fastest of them that applies.

    Raises:
      ConfigError: a way that does not apply here.
    """
    way = fastest(q.shape[1], q.dtype, mask_BT) if way == "auto" else way
    if way == "splash":
        return splash(q, k, v, mask_BT, scale, interpret=jax.default_backend() != "tpu")
    if way == "blocks":
        return blocks(q, k, v, mask_BT, scale)
    if way == "cudnn" and (jax.default_backend() != "gpu" or mask_BT is not None):
        raise ConfigError("model.attention: cudnn is for GPUs and for batches without a mask; auto finds what applies")
    return jax.nn.dot_product_attention(
        q, k, v, mask=None if mask_BT is None else seen(mask_BT), is_causal=True, scale=scale,
        implementation="cudnn" if way == "cudnn" else "xla",
    )  # fmt: skip


def fastest(length: int, dtype: Any, mask_BT: jax.Array | None) -> str:
    """The way for these shapes on this backend and mesh."""
    backend, half = jax.default_backend(), dtype in (jnp.bfloat16, jnp.float16)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.shape.get("sequence", 1) > 1:  # a device has a range of the queries, which blocks would tear apart
        return "plain"
    if backend == "gpu":
        return "cudnn" if half and mask_BT is None else "plain"
    if backend == "tpu":
        return "splash" if length % 128 == 0 else "plain"
    return "blocks" if parts(length) > 1 else "plain"


def seen(mask_BT: jax.Array) -> jax.Array:
    """(B, 1, 1 or T, T): the keys that a query may see, causality apart."""
    if mask_BT.dtype == jnp.bool_:
        return mask_BT[:, None, None, :]
    return (mask_BT[:, None, :, None] == mask_BT[:, None, None, :]) & (mask_BT > 0)[:, None, None, :]


def parts(length: int) -> int:
    """How many blocks of queries."""
    return max(n for n in (1, 2, 4, MOST) if n == 1 or (length % n == 0 and length // n >= BLOCK))


def blocks(q: jax.Array, k: jax.Array, v: jax.Array, mask_BT: jax.Array | None, scale: float) -> jax.Array:
    """Each block of queries against the keys up to its own end; one product for all heads of a key head."""
    b, t, n, h = q.shape
    heads, size = k.shape[2], t // parts(t)
    q = (q * jnp.asarray(scale, q.dtype)).reshape(b, t, heads, n // heads, h).transpose(0, 2, 3, 1, 4)  # B K G T H
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    allowed = None if mask_BT is None else seen(mask_BT)
    outs = []
    for start in range(0, t, size):
        end = start + size
        rows = q[:, :, :, start:end].reshape(b, heads, -1, h)
        see = jnp.arange(end) <= jnp.arange(start, end)[:, None]
        if allowed is not None:
            see = see & (allowed if allowed.shape[2] == 1 else allowed[:, :, start:end])[..., :end]
        scores = jnp.einsum("bkrh,bksh->bkrs", rows, k[:, :, :end], preferred_element_type=jnp.float32)
        scores = scores.reshape(b, heads, -1, size, end)
        see = see if see.ndim == 2 else see[:, :, None]
        shares = jax.nn.softmax(jnp.where(see, scores, np.finfo(np.float32).min), -1).astype(v.dtype)
        out = jnp.einsum("bkrs,bksh->bkrh", shares.reshape(b, heads, -1, end), v[:, :, :end])
        outs.append(out.reshape(b, heads, -1, size, h))
    return jnp.concatenate(outs, 3).transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)


def splash(
    q: jax.Array, k: jax.Array, v: jax.Array, mask_BT: jax.Array | None, scale: float, interpret: bool = False
) -> jax.Array:
    """Pallas's kernel for TPUs, on each device's share of batch and heads. Not tried on a real TPU."""
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    def local(q: jax.Array, k: jax.Array, v: jax.Array, documents_BT: jax.Array | None) -> jax.Array:
        t, n = q.shape[1], q.shape[2]
        e = max(s for s in (128, 256, 512) if t % s == 0)
        sizes = kernels.BlockSizes(
            block_q=e, block_kv=e, block_kv_compute=e, block_q_dkv=e, block_kv_dkv=e, block_kv_dkv_compute=e,
            block_q_dq=e, block_kv_dq=e,
        )  # fmt: skip
        mask = kernels.MultiHeadMask([kernels.CausalMask((t, t))] * n)
        run = kernels.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret)
        ids = None if documents_BT is None else kernels.SegmentIds(q=documents_BT, kv=documents_BT)
        swapped = [x.transpose(0, 2, 1, 3) for x in (q * jnp.asarray(scale, q.dtype), k, v)]
        return jax.vmap(run)(*swapped, ids).transpose(0, 2, 1, 3)

    documents = None if mask_BT is None else mask_BT.astype(jnp.int32)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(t == AxisType.Manual for t in mesh.axis_types):
        return local(q, k, v, documents)
    heads = spec(("batch", None, "heads", None), mesh.axis_names)
    keys = spec(("batch", None, "kv_heads", None), mesh.axis_names)
    rows = None if documents is None else spec(("batch", None), mesh.axis_names)
    run = jax.shard_map(local, in_specs=(heads, keys, keys, rows), out_specs=heads, check_vma=False)
    return run(q, k, v, documents)
