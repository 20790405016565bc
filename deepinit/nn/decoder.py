"""A decoder-only language model: embedding, stack, final norm, head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from deepinit.errors import ConfigError
from deepinit.geometry import Role
from deepinit.nn.losses import Head, chunked
from deepinit.nn.norm import Norm
from deepinit.nn.part import Part
from deepinit.nn.stack import run_layers
from deepinit.nn.stats import collecting, keep, mean_square, tapped, token_correlation
from deepinit.sharding import constrain, gathered


class Decoder(Part):
    """Tokens to logits. The head has the embedding's layout, one row a token; tied, it is the embedding itself."""

    @linen.compact
    def __call__(
        self,
        tokens_BT: jax.Array,
        mask_BT: jax.Array | None = None,
        loss_of: tuple[jax.Array, jax.Array] | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """int32 (B, T) -> float32 logits (B, T, V padded); those of padded rows are the smallest float32.

        `mask` is True at real tokens. With `deterministic=False`, dropout takes the rng `dropout`. `loss_of` targets
        and weights, (B, T) each: the weighted sum of the losses instead, in nats, from `loss_chunks` parts in turn.
        """
        g = self.geometry
        if tokens_BT.shape[1] > g.max_seq_len:
            raise ConfigError(f"sequence length {tokens_BT.shape[1]} is above model.max_seq_len {g.max_seq_len}")
        shared = self.shared() | {"deterministic": deterministic}
        table_VD = self.weight(Role.TOKEN_EMBED, (self.vocab_padded, g.d_model), ("vocab", "embed"))
        x_BTD = self.scaled(jnp.take(gathered(table_VD, ("vocab", "embed")), tokens_BT, axis=0), "embed")
        if self.positions == "learned":
            at_TD = self.weight(Role.POS_EMBED, (g.max_seq_len, g.d_model), ("positions", "embed"))
            x_BTD = x_BTD + at_TD[: tokens_BT.shape[1]]
        if self.embed_norm:
            x_BTD = Norm(**shared, name="embed_norm")(x_BTD)
        x_BTD = linen.Dropout(self.dropout, deterministic=deterministic)(x_BTD)
        smear = self.gain("smear")
        if smear is not None:
            x_BTD = x_BTD + smear * jnp.pad(x_BTD, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        x_BTD = constrain(x_BTD, "batch", "seq", "features")
        if collecting(self):
            keep(self, "embed_ms", mean_square(x_BTD))
            keep(self, "embed_corr", token_correlation(x_BTD))
        x_BTD = tapped(self, x_BTD)
        values_LBTF = self.values(tokens_BT) if self.value_embed else None
        x_BTD = run_layers(self, x_BTD, mask_BT, values_LBTF, deterministic=deterministic)
        if self.residual.final_norm(g.num_layers):
            x_BTD = Norm(**shared, name="final_norm")(x_BTD)
        if not g.tied_embeddings:
            table_VD = self.weight(Role.LM_HEAD, (self.vocab_padded, g.d_model), ("vocab", "embed"))
        head = Head(g.vocab_size, self.factor("logits"), self.logit_softcap)
        weights = table_VD, self.gain("s_z")
        if loss_of is None:
            return head(weights, x_BTD)
        return chunked(head, self.loss_chunks, weights, x_BTD, *loss_of)

    def values(self, tokens_BT: jax.Array) -> jax.Array:
        """(L, B, T, K H) of each token's rows in the table of values: for every other layer, the last among them."""
        g = self.geometry
        layers, width = np.arange(g.num_layers), g.num_kv_heads * g.head_dim
        shape = (self.vocab_padded, (g.num_layers + 1) // 2, width)
        table_VNF = self.weight("value_token_embed", shape, ("vocab", None, "embed"))
        rows_NBTF = jnp.moveaxis(jnp.take(table_VNF, tokens_BT, axis=0), 2, 0)
        there_L = jnp.asarray(layers % 2 == (g.num_layers - 1) % 2)
        return jnp.where(there_L[:, None, None, None], rows_NBTF[layers // 2], jnp.zeros((), rows_NBTF.dtype))
