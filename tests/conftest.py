"""Eight virtual CPU devices, strict dtype promotion, and models that many tests share."""

import gc
import os
from collections.abc import Iterator

from tests.xla import FLAGS

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")  # the user's folder is not ours to fill
os.environ["XLA_FLAGS"] = FLAGS

import jax
import pytest
from hypothesis import settings

from deepinit import Geometry

jax.config.update("jax_numpy_dtype_promotion", "strict")
settings.register_profile("deepinit", deadline=None, derandomize=True)  # a first example may compile
settings.load_profile("deepinit")


@pytest.fixture(scope="module", autouse=True)
def compiled_for_one_file() -> Iterator[None]:
    """Programs are shared within a file; kept over all of them they take gigabytes."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def geometry() -> Geometry:
    """Small, with grouped-query heads, and no two sizes equal."""
    return Geometry(num_layers=3, d_model=64, num_heads=8, num_kv_heads=4, d_ff=160, vocab_size=100, max_seq_len=32)
