"""Eight virtual CPU devices, strict dtype promotion, and models that many tests share."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")  # the user's folder is not ours to fill
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")

import jax
import pytest
from hypothesis import settings

from deepinit import Geometry

jax.config.update("jax_numpy_dtype_promotion", "strict")
settings.register_profile("deepinit", deadline=None, derandomize=True)  # a first example may compile
settings.load_profile("deepinit")


@pytest.fixture(scope="session")
def geometry() -> Geometry:
    """Small, with grouped-query heads, and no two sizes equal."""
    return Geometry(num_layers=3, d_model=64, num_heads=8, num_kv_heads=4, d_ff=160, vocab_size=100, max_seq_len=32)
