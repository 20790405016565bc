"""safetensors files, one or a folder of shards, and the sizes that a Hugging Face config.json states."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deepinit.errors import ConfigError

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
# What a config.json calls the sizes, in the order of preference.
SIZES = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "d_model": ("hidden_size", "n_embd"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "d_ff": ("intermediate_size", "n_inner"),
    "vocab_size": ("vocab_size",),
    "max_seq_len": ("max_position_embeddings", "n_positions"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "moe_every": ("decoder_sparse_step", "interleave_moe_layer_step"),
    "first_dense": ("first_k_dense_replace",),
    "tied_embeddings": ("tie_word_embeddings",),
}

ROUTED = ("moe_every", "first_dense")


def library() -> Any:
    """The safetensors package.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        import safetensors
        import safetensors.numpy
    except ImportError:
        raise ConfigError("safetensors is not installed: pip install 'deepinit[hf]'") from None
    return safetensors


def files(path: Path) -> list[Path]:
    """The safetensors files of a path, complete.

    Raises:
      ConfigError: a shard that the index names is missing.
    """
    if path.is_file():
        return [path]
    if (path / INDEX).is_file():
        shards = sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))
        for shard in shards:
            if not (path / shard).is_file():
                raise ConfigError(f"{path}: shard {shard}, which {INDEX} names, is missing")
        return [path / shard for shard in shards]
    return sorted(path.glob(f"*{SUFFIX}"))


def read(path: Path) -> dict[str, np.ndarray]:
    """Name -> array, over all shards; nothing of torch is needed.

    Raises:
      ConfigError: a name that stands in two shards, or a file that is no safetensors file.
    """
    found: dict[str, np.ndarray] = {}
    for file in files(path):
        try:
            with library().safe_open(str(file), framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                    if name in found:
                        raise ConfigError(f"{file}: {name} stands in another shard too")
                    found[name] = opened.get_tensor(name)
        except library().SafetensorError as e:
            raise ConfigError(f"{file} is no safetensors file: {e}") from None
    return found


def write(path: Path, arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """One safetensors file."""
    plain = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    library().numpy.save_file(plain, str(path), metadata=dict(metadata))


def sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Geometry that a config.json states.

    Raises:
      ConfigError: routed layers that moe_every and first_dense cannot say.
    """
    config = config.get("text_config", config)
    found: dict[str, Any] = {}
    for field, names in SIZES.items():
        for name in names:
            if config.get(name) is not None:
                found[field] = config[name]
                break
    if not found.get("num_experts"):  # of a dense model, they say nothing
        return {k: v for k, v in found.items() if k not in ROUTED}
    if dense := config.get("mlp_only_layers"):
        if sorted(dense) != list(range(len(dense))):
            raise ConfigError(f"mlp_only_layers: {dense} are dense; only the first layers can be: model.first_dense")
        found["first_dense"] = len(dense)
    if (every := config.get("moe_layer_freq", 1)) != 1:  # the first of every so many, not the last
        raise ConfigError(f"moe_layer_freq: {every} is another rule than that of model.moe_every; only 1 is known")
    return found
