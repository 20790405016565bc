"""A birth certificate: a page of JSON from which anyone can check an initial state, or a shard of it, with NumPy alone.

It holds the recipe, the seed, and of every leaf its law, the slot that its random key is made from, and a digest. A
weight is checked by drawing it again from its index; nothing here imports jax.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from deepinit import laws, replays
from deepinit.errors import ConfigError
from deepinit.recipe import Recipe
from deepinit.roles import Leaf, locate

VERSION = 1
BLOCK = 32  # as deepinit.digests
Certificate = Mapping[str, Any]


def make(
    leaves: Sequence[tuple[Leaf, Any]],
    lanes: Sequence[np.ndarray],
    recipe: Recipe,
    seed: int,
    digest: str,
    **facts: Any,
) -> dict[str, Any]:
    """The certificate of a tree of ours: `leaves` with shapes and dtypes, `lanes` the sums of their digests."""
    rows = {}
    for (leaf, x), sums in zip(leaves, lanes):
        law = recipe.law_at(leaf.canonical, leaf.role) if leaf.role and leaf.role in recipe.weights else None
        rows[leaf.path] = {
            "role": leaf.role,
            "shape": list(x.shape),
            "dtype": str(x.dtype),
            "slot": leaf.slot,
            "law": law.to_json() if law else None,
            "digest": leaf_digest(leaf, str(x.dtype), sums),
        }
    return {
        "certificate": VERSION,
        "scheme": f"{recipe.name}@{recipe.version}",
        "seed": seed,
        "draws": "threefry2x32-13 at flat row-major indices; key folded from (seed, crc32(slot), layer)",
        "digest": digest,
        **facts,
        "recipe": recipe.to_json(),
        "leaves": rows,
    }


def leaf_digest(leaf: Leaf, dtype: str, lanes: np.ndarray) -> str:
    """16 hexadecimal digits of one leaf."""
    return hashlib.sha256("\n".join(digest_rows(leaf, dtype, lanes)).encode()).hexdigest()[:16]


def digest_rows(leaf: Leaf, dtype: str, lanes: np.ndarray) -> Iterator[str]:
    """What the digest of a tree hashes of one leaf, a line a layer."""
    for i, row in enumerate(np.asarray(lanes)):
        layer = -1 if (at := leaf.at(i)) is None else at
        yield f"{leaf.canonical} {layer} {dtype} {' '.join(f'{v:08x}' for v in row)}"


def lanes_of(x: np.ndarray, stacked: bool) -> np.ndarray:
    """(layers, 4) sums of a leaf: what `deepinit.digests.lanes` computes on the devices, in NumPy."""
    u = np.uint32
    kind = {1: np.uint8, 2: np.uint16}.get(x.dtype.itemsize, np.uint32)
    word = np.ascontiguousarray(x).view(kind).astype(np.uint32)
    word = word.reshape(*x.shape[:-1], -1) if x.ndim else word.reshape(1)
    word = word if stacked else word[None]
    word = word[:, None] if word.ndim == 1 else word
    width = math.gcd(word.shape[-1], BLOCK)
    with np.errstate(over="ignore"):
        inner = mixed(np.arange(1, width + 1, dtype=np.uint32)) | u(1)
        blocks = word.reshape(word.shape[0], -1, width)
        sums = mixed((mixed(blocks) * inner).sum(-1, dtype=np.uint32))
        index = np.arange(sums.shape[1], dtype=np.uint64)
        high, low = (index >> np.uint64(32)).astype(np.uint32), (index & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        a = (low * u(0x9E3779B1) + high * u(0x632BE5AB)) | u(1)
        b = mixed(low ^ mixed(high + u(0x27D4EB2F))) | u(1)
        factors = (a, b, a * b, (a ^ (b << u(7))) | u(1))
        return np.stack([(sums * f).sum(1, dtype=np.uint32) for f in factors], -1)


def mixed(x: np.ndarray) -> np.ndarray:
    """`deepinit.digests.mix`."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


# --- checking ----------------------------------------------------------------------------------------------------


def check(certificate: Certificate, arrays: Mapping[str, np.ndarray], *, whole: bool = True) -> list[str]:
    """What is wrong with some leaves, by path as in the certificate; nothing if they are what it says.

    Every weight is drawn again where its law allows it, and the digest of every leaf is computed again.

    Args:
      certificate: the parsed JSON.
      arrays: path -> the whole leaf.
      whole: a leaf of the certificate that is not here is wrong too, and the digest of the tree is checked.
    """
    refuse(certificate)
    said: list[str] = []
    rows: list[str] = []
    for path, x in arrays.items():
        if path not in certificate["leaves"]:
            said.append(f"{path}: the certificate has no such leaf")
            continue
        fact, leaf = certificate["leaves"][path], locate(path)
        if list(x.shape) != fact["shape"] or str(x.dtype) != fact["dtype"]:
            said.append(f"{path}: {x.dtype} {x.shape}, the certificate says {fact['dtype']} {tuple(fact['shape'])}")
            continue
        lanes = lanes_of(x, leaf.stacked)
        rows += digest_rows(leaf, str(x.dtype), lanes)
        said += check_shard(certificate, path, x)
        if leaf_digest(leaf, str(x.dtype), lanes) != fact["digest"] and not any(s.startswith(path) for s in said):
            said.append(f"{path}: its digest is another")
    if whole:
        said += [f"{path}: missing" for path in certificate["leaves"] if path not in arrays]
        digest = hashlib.sha256("\n".join(sorted(rows)).encode()).hexdigest()[:32]
        if not said and digest != certificate["digest"]:
            said.append(f"the digest of the tree is {digest}, the certificate says {certificate['digest']}")
    return said


def check_shard(certificate: Certificate, path: str, x: np.ndarray, start: Sequence[int] = ()) -> list[str]:
    """What is wrong with one shard of a leaf that begins at `start` in each axis; nothing if it is as drawn."""
    refuse(certificate)
    if path not in certificate["leaves"]:
        return [f"{path}: the certificate has no such leaf"]
    fact, leaf = certificate["leaves"][path], locate(path)
    law = fact["law"] and laws.from_json(fact["law"])
    if not isinstance(law, replays.DRAWN) or certificate["recipe"]["project"]:
        return []
    shape, begin = fact["shape"], list(start) or [0] * x.ndim
    if any(b + n > whole for b, n, whole in zip(begin, x.shape, shape)) or len(shape) != x.ndim:
        return [f"{path}: a shard of shape {x.shape} at {tuple(begin)} is not inside {tuple(shape)}"]
    inside = shape[1:] if leaf.stacked else shape
    strides = [math.prod(inside[k + 1 :]) for k in range(len(inside))]
    geometry = certificate["recipe"]["geometry"]
    drawn = geometry["vocab_size"] * geometry["d_model"]  # rows beyond the vocabulary are zero
    table = fact["role"] in ("token_embed", "lm_head")
    layers = range(x.shape[0]) if leaf.stacked else [0]
    for i in layers:
        block = x[i] if leaf.stacked else x
        offset = begin[1:] if leaf.stacked else begin
        layer = leaf.at(begin[0] + i if leaf.stacked else 0)
        for rows in pieces(block):
            part = block[rows] if block.ndim else block
            index = np.zeros(part.shape, np.int64)
            for axis, (stride, first) in enumerate(zip(strides, offset)):
                first += rows.start if axis == 0 else 0
                along = (first + np.arange(part.shape[axis], dtype=np.int64)) * stride
                index += along.reshape([-1 if k == axis else 1 for k in range(part.ndim)])
            wanted = replays.redrawn(law, fact["slot"], index, layer=layer, seed=certificate["seed"])
            if table:
                wanted = np.where(index < drawn, wanted, np.float32(0))
            wrong = np.atleast_1d(replays.different(part, wanted.astype(part.dtype))).ravel()
            if wrong.any():
                first = int(np.flatnonzero(wrong)[0])
                where = "" if layer is None else f" of layer {layer}"
                return [
                    f"{path}: index {int(index.reshape(-1)[first])}{where} holds {float(part.reshape(-1)[first]):.9g}, "
                    f"seed {certificate['seed']} draws {float(wanted.reshape(-1)[first]):.9g}"
                ]
    return []


def pieces(block: np.ndarray) -> Iterator[slice]:
    """Slices along the first axis, a few million entries each."""
    if block.ndim == 0:
        yield slice(0, 1)
        return
    rows = max(1, replays.CHUNK // max(1, math.prod(block.shape[1:])))
    for low in itertools.count(0, rows):
        if low >= block.shape[0]:
            return
        yield slice(low, min(low + rows, block.shape[0]))


def refuse(certificate: Certificate) -> None:
    """Refuse a certificate of another kind."""
    if certificate.get("certificate") != VERSION:
        raise ConfigError(f"certificate: version {certificate.get('certificate')!r} is unknown; known: {VERSION}")
