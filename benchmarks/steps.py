"""A training step as `deepinit train` makes it, taken apart so that each part can be timed. The same block everywhere:
pre-norm LayerNorm, learned positions, GELU MLP of 4 d, tied head, no biases, as nanodo and GPT-2 have it.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from deepinit import roles, sharded_init, sharding
from deepinit.nn import Decoder
from deepinit.train import optimizer, step
from deepinit.train.config import Config, load

BLOCK = {
    "model.mlp": "gelu", "model.norm": "layernorm", "model.positions": "learned", "model.tied-embeddings": "true",
    "scheme.name": "gpt2", "train.compilation-cache": "",
}  # fmt: skip


def config(layers: int, d: int, heads: int, seq: int, batch: int, **more: Any) -> Config:
    """Settings of a small run; more as `section__field=value`."""
    flags = BLOCK | {
        "model.num-layers": layers, "model.d-model": d, "model.num-heads": heads, "model.d-ff": 4 * d,
        "model.max-seq-len": seq, "data.seq-len": seq, "train.batch-size": batch,
    }  # fmt: skip
    flags |= {k.replace("__", ".").replace("_", "-"): v for k, v in more.items()}
    return load([], [text for name, value in flags.items() for text in (f"--{name}", str(value))])


class Parts:
    """What a run is made of; nothing is drawn or compiled before it is asked for."""

    def __init__(self, config: Config):
        self.config, self.recipe = config, config.check()
        self.model = Decoder.from_recipe(self.recipe, **config.model_options())
        self.mesh = sharding.make_mesh({axis: getattr(config.mesh, axis) for axis in sharding.MESH_AXES})
        self.boxed = sharded_init.abstract_params(self.model)
        self.layout = sharding.param_shardings(self.boxed, self.mesh)

    def init(self) -> tuple[Any, Any]:
        """The jitted init, and the keys it takes."""
        draw, keys = sharded_init.plan(self.model, roles.unboxed(self.boxed), 0)
        return sharded_init.jitted(draw, self.layout), keys

    def state(self, params: Any) -> step.TrainState:
        """The state at step 0."""
        self.tx = optimizer.make(self.config, self.recipe, params)
        state, self.shardings = step.create(params, self.tx, self.mesh)
        return state

    def step(self) -> Any:
        """The jitted step, once there is a state."""
        pure = step.train_step(self.model, self.tx, optimizer.schedule(self.config), 0, False)
        return step.jitted(pure, self.shardings, self.mesh)

    def batch(self) -> dict[str, jax.Array]:
        """Random tokens."""
        t, vocab = self.config.train, self.recipe.geometry.vocab_size
        shape = t.batch_size, self.config.data.seq_len
        tokens = np.random.default_rng(0).integers(0, vocab, (shape[0], shape[1] + 1)).astype(np.int32)
        return step.put({"tokens": tokens, "weights": np.ones(shape, np.float32)}, t.accumulate, self.mesh)


class Running:
    """A run after its start: each call takes a step and waits for it."""

    def __init__(self, config: Config):
        self.parts = parts = Parts(config)
        with jax.set_mesh(parts.mesh):
            init, keys = parts.init()
            self.state = parts.state(init(keys))
            self.batch = parts.batch()
            self.compiled = parts.step().lower(self.state, self.batch).compile()

    def __call__(self) -> None:
        self.state, metrics = self.compiled(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
