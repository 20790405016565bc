"""What a mesh asks of a model's sizes: checked before any compile, and before jax is imported.

Axes: `data`, `fsdp` and `expert` split the batch, `fsdp` also d_model of every matrix, `expert` the experts, `sequence`
the tokens of a sequence, `tensor` heads, d_ff and vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from deepinit.errors import ConfigError
from deepinit.geometry import Geometry, nearest_divisor

AXES = ("data", "fsdp", "tensor", "sequence", "expert")


def padded(vocab_size: int, multiple: int) -> int:
    """Rows of an embedding whose vocabulary is padded to a multiple."""
    return -(-vocab_size // multiple) * multiple


def check_axes(mesh_sizes: Mapping[str, int]) -> None:
    """Refuse sizes that no number of devices could serve: below 1, save one -1 for "the rest"."""
    for axis, size in mesh_sizes.items():
        if size < 1 and size != -1:
            raise ConfigError(f"mesh.{axis}: {size} is not a number of devices; a positive one, or -1 for the rest")
    if len(rest := [axis for axis, size in mesh_sizes.items() if size == -1]) > 1:
        raise ConfigError(f"mesh.{rest[1]}: -1 (the rest) is given twice, mesh.{rest[0]} has it already; give a number")


def check_divisible(
    geometry: Geometry,
    mesh_sizes: Mapping[str, int],
    batch: int | None = None,
    vocab_padded: int | None = None,
    accumulate: int = 1,
    seq_len: int | None = None,
) -> None:
    """Refuse the first size that its mesh axis does not divide, naming the nearest that it does.

    `batch` is the number of sequences of one optimizer step, taken in `accumulate` equal parts. An axis of size -1 (the
    rest of the devices) is not known yet and is passed over.
    """
    g = geometry
    check_axes(mesh_sizes)
    size = {axis: max(mesh_sizes.get(axis, 1), 1) for axis in AXES}
    if batch is not None:
        parts = {"train.accumulate": accumulate} | {f"mesh.{axis}": size[axis] for axis in ("data", "fsdp", "expert")}
        whole = math.prod(parts.values())
        if batch % whole:
            names = " x ".join(f"{name} {n}" for name, n in parts.items() if n > 1)
            raise ConfigError(
                f"train.batch_size: {batch} is not a multiple of {names}{f' = {whole}' if ' x ' in names else ''}; "
                f"nearest: {multiples(batch, whole)}"
            )
    if size["expert"] > 1 and not g.num_experts:
        raise ConfigError(f"mesh.expert: {size['expert']} needs model.num_experts; nearest: mesh.expert 1")
    if seq_len is not None and seq_len % size["sequence"]:
        raise ConfigError(
            f"data.seq_len: {seq_len} is not a multiple of mesh.sequence {size['sequence']}; "
            f"nearest: {multiples(seq_len, size['sequence'])}"
        )
    rows = g.vocab_size if vocab_padded is None else vocab_padded
    for name, value, axis in (
        ("num_heads", g.num_heads, "tensor"),
        ("num_kv_heads", g.num_kv_heads, "tensor"),
        ("d_ff", g.d_ff, "tensor"),
        ("d_model", g.d_model, "fsdp"),
        ("num_experts", g.num_experts, "expert"),
    ):
        if value % size[axis]:
            raise ConfigError(
                f"model.{name}: {value} is not a multiple of mesh.{axis} {size[axis]}; "
                f"nearest: {multiples(value, size[axis])} (or mesh.{axis} {nearest_divisor(size[axis], value)})"
            )
    if rows % size["tensor"]:
        shown = f"{g.vocab_size}" if rows == g.vocab_size else f"{g.vocab_size} (padded to {rows})"
        raise ConfigError(
            f"model.vocab_size: {shown} is not a multiple of mesh.tensor {size['tensor']}; "
            f"nearest: model.vocab_multiple {size['tensor']} pads it to {padded(g.vocab_size, size['tensor'])}"
        )


def multiples(value: int, of: int) -> str:
    """The two multiples of `of` around `value`, as text; only the upper one where the lower is 0."""
    low = value // of * of
    return f"{low} or {low + of}" if low else f"{low + of}"
