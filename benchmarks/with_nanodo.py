"""The rival that google-deepmind/nanodo is, where its folder stands in PYTHONPATH: its model as it is, under a plain
jitted AdamW step with clipping.

`start SIZES` prints the costs of a first step; `train SIZES` serves steps.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.harness import serve


def made(layers: int, d: int, heads: int, seq: int, batch: int, vocab: int = 256) -> tuple[Any, ...]:
    """(init, its key, step, tx, batch), nothing compiled."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from nanodo import model  # type: ignore[import-not-found]

    sizes = model.DoConfig(D=d, H=heads, L=seq, N=layers, V=vocab, F=4 * d, fsdp_enabled=False)
    decoder = model.TransformerDo(sizes)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, 0.9, 0.95, weight_decay=0.1))
    tokens = np.random.default_rng(0).integers(0, vocab, (batch, seq + 1)).astype(np.int32)

    def init(key: Any) -> Any:
        return decoder.init(key, jnp.zeros((1, seq), jnp.int32))["params"]

    def loss(params: Any, tokens: Any) -> Any:
        logits = decoder.apply({"params": params}, tokens[:, :-1])
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(state: Any, tokens: Any) -> Any:
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return jax.jit(init), jax.random.key(0), jax.jit(step, donate_argnums=0), tx, jnp.asarray(tokens)


def start(**sizes: int) -> dict[str, float]:
    """As `benchmarks.start` measures it."""
    import jax

    from benchmarks.start import Laps

    init, key, step, tx, batch = made(**sizes)
    return Laps().through(init, key, lambda params: ((params, jax.jit(tx.init)(params)), batch), lambda: step)


def train(**sizes: int) -> None:
    """Serve steps."""
    import jax

    init, key, step, tx, batch = made(**sizes)
    params = init(key)
    state = params, jax.jit(tx.init)(params)

    def one() -> None:
        nonlocal state
        state, loss = step(state, batch)
        jax.block_until_ready((state, loss))

    serve({"nanodo": one})


if __name__ == "__main__":
    verb, given = sys.argv[1], json.loads(sys.argv[2])
    if verb == "start":
        print("\n" + json.dumps(start(**given)))
    else:
        train(**given)
