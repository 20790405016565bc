"""A decoder-only language model: embedding, stack, final norm, head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from deepinit.errors import ConfigError
from deepinit.geometry import Role
from deepinit.nn.block import mean_square
from deepinit.nn.norm import Norm
from deepinit.nn.part import Part
from deepinit.nn.stack import run_layers
from deepinit.sharding import constrain


class Decoder(Part):
    """Tokens to logits. The head has the embedding's layout, one row a token; tied, it is the embedding itself."""

    @linen.compact
    def __call__(
        self, tokens_BT: jax.Array, mask_BT: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """int32 (B, T) -> float32 logits (B, T, V padded); those of padded rows are the smallest float32.

        `mask` is True at real tokens. With `deterministic=False`, dropout takes the rng `dropout`.
        """
        g = self.geometry
        if tokens_BT.shape[1] > g.max_seq_len:
            raise ConfigError(f"sequence length {tokens_BT.shape[1]} is above model.max_seq_len {g.max_seq_len}")
        shared = self.shared() | {"deterministic": deterministic}
        table_VD = self.weight(Role.TOKEN_EMBED, (self.vocab_padded, g.d_model), ("vocab", "embed"))
        x_BTD = self.scaled(jnp.take(table_VD, tokens_BT, axis=0), "embed")
        if self.positions == "learned":
            at_TD = self.weight(Role.POS_EMBED, (g.max_seq_len, g.d_model), ("seq", "embed"))
            x_BTD = x_BTD + at_TD[: tokens_BT.shape[1]]
        x_BTD = linen.Dropout(self.dropout, deterministic=deterministic)(x_BTD)
        x_BTD = constrain(x_BTD, "batch", "seq", "features")
        self.sow("stats", "embed_ms", mean_square(x_BTD), reduce_fn=lambda _, new: new, init_fn=lambda: None)
        x_BTD = run_layers(self, x_BTD, mask_BT, deterministic=deterministic)
        if self.residual.norm not in ("post", "none"):
            x_BTD = Norm(**shared, name="final_norm")(x_BTD)
        if not g.tied_embeddings:
            table_VD = self.weight(Role.LM_HEAD, (self.vocab_padded, g.d_model), ("vocab", "embed"))
        logits = jnp.einsum("BTD,VD->BTV", x_BTD, table_VD, preferred_element_type=jnp.float32)
        logits = constrain(self.scaled(logits, "logits"), "batch", "seq", "vocab")
        if self.vocab_padded > g.vocab_size:
            real = jnp.arange(self.vocab_padded) < g.vocab_size
            logits = jnp.where(real, logits, np.finfo(np.float32).min)
        return logits
