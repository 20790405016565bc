"""The step of a run, compiled in a thread of its own while data are read and parameters drawn, proved and restored."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from deepinit import roles, sharding
from deepinit.projection import project
from deepinit.sharded_init import check_divisible
from deepinit.train import optimizer, step
from deepinit.train.birth import Plan
from deepinit.train.config import Config


class Program:
    """Traced where it is made; XLA, which needs no Python, goes on beside what comes next."""

    def __init__(self, config: Config, plan: Plan):
        """Under any mesh; `plan` gives shapes and layouts, so that nothing need be allocated yet.

        Raises:
          ConfigError: the mesh does not divide a leaf, or the optimizer cannot place one.
        """
        began = time.perf_counter()
        recipe, shapes = plan.recipe, roles.unboxed(plan.boxed)
        placed = sharding.param_shardings(plan.boxed, plan.mesh)
        check_divisible(shapes, placed)
        self.tx = optimizer.make(config, recipe, shapes)
        state, self.shardings = step.layout(shapes, placed, self.tx, plan.mesh)
        lr, dropout = optimizer.schedule(config), config.model.dropout > 0
        pure = step.train_step(plan.model, self.tx, lr, config.train.seed, dropout, lambda p: project(p, recipe))
        with jax.set_mesh(plan.mesh):
            traced = step.jitted(pure, self.shardings, plan.mesh).trace(state, batch_shapes(config))
            with jax.numpy_dtype_promotion("standard"):  # jax's lowering of its attention mixes bfloat16 with float32
                lowered = traced.lower()

        def compiled() -> tuple[Any, float]:
            return lowered.compile(), time.perf_counter() - began

        thread = ThreadPoolExecutor(1, "compile")
        self.compiling = thread.submit(compiled)
        thread.shutdown(wait=False)

    def ready(self) -> tuple[Any, float, float]:
        """(the compiled step, the seconds that took with its tracing, those for which this call has waited)."""
        asked = time.perf_counter()
        compiled, seconds = self.compiling.result()
        return compiled, seconds, time.perf_counter() - asked


def batch_shapes(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """What a batch of A parts holds, as `step.place` has it."""
    t, width = config.train, config.data.seq_len
    lead = t.accumulate, t.batch_size // t.accumulate
    shapes = {
        "tokens": jax.ShapeDtypeStruct((*lead, width + 1), np.int32),
        "weights": jax.ShapeDtypeStruct((*lead, width), np.float32),
    }
    if config.data.document_mask:
        shapes["segments"] = shapes["tokens"]
    return shapes
