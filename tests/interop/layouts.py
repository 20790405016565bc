"""Models in the layouts of public code, small: flax's gemma (NNX) and lm1b (Linen), nanodo, MaxText, Hugging Face.

Names, shapes and the order of the axes are theirs; what the modules compute is a plain forward pass.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from deepinit import Geometry

PLAIN = Geometry(num_layers=3, d_model=64, num_heads=4, d_ff=160, vocab_size=100, max_seq_len=32, mlp="gelu")
GATED = Geometry(3, 64, 8, 160, 100, num_kv_heads=4, max_seq_len=32, mlp="geglu")
MOE = Geometry(3, 64, 8, 96, 100, num_kv_heads=4, num_experts=4, mlp="swiglu")


# --- flax's gemma -------------------------------------------------------------------------------------------------


class Einsum(nnx.Module):
    """A kernel and the way it is applied."""

    def __init__(self, spec: str, shape: tuple[int, ...], rngs: nnx.Rngs):
        self.spec = spec
        self.w = nnx.Param(jax.nn.initializers.normal()(rngs.params(), shape))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum(self.spec, x, self.w[...])


class RMSNorm(nnx.Module):
    """A norm that multiplies by 1 + w."""

    def __init__(self, dim: int, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.zeros((dim,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * (1 + self.scale[...])


class Attention(nnx.Module):
    """Grouped-query attention with fused keys and values, all fused where the heads are as many."""

    def __init__(self, g: Geometry, rngs: nnx.Rngs):
        self.g = g
        n, k, d, h = g.num_heads, g.num_kv_heads, g.d_model, g.head_dim
        self.attn_vec_einsum = Einsum("BTNH,NHD->BTD", (n, h, d), rngs)
        if n == k:
            self.qkv_einsum = Einsum("BTD,SNDH->SBTNH", (3, n, d, h), rngs)
        else:
            self.q_einsum = Einsum("BTD,NDH->BTNH", (n, d, h), rngs)
            self.kv_einsum = Einsum("BSD,CKDH->CBSKH", (2, k, d, h), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.g.num_heads == self.g.num_kv_heads:
            q, k, v = self.qkv_einsum(x)
        else:
            q, (k, v) = self.q_einsum(x), self.kv_einsum(x)
        return self.attn_vec_einsum(jax.nn.dot_product_attention(q, k, v, is_causal=True))


class FeedForward(nnx.Module):
    """A gated MLP, its kernels zero until values are loaded."""

    def __init__(self, g: Geometry, rngs: nnx.Rngs):
        zeros = {"use_bias": False, "rngs": rngs, "kernel_init": nnx.initializers.zeros_init()}
        self.gate_proj = nnx.Linear(g.d_model, g.d_ff, **zeros)
        self.up_proj = nnx.Linear(g.d_model, g.d_ff, **zeros)
        self.down_proj = nnx.Linear(g.d_ff, g.d_model, **zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.gelu(self.gate_proj(x)) * self.up_proj(x))


class GemmaBlock(nnx.Module):
    """A pre-norm block."""

    def __init__(self, g: Geometry, rngs: nnx.Rngs):
        self.pre_attention_norm = RMSNorm(g.d_model, rngs)
        self.attn = Attention(g, rngs)
        self.pre_ffw_norm = RMSNorm(g.d_model, rngs)
        self.mlp = FeedForward(g, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.pre_attention_norm(x))
        return x + self.mlp(self.pre_ffw_norm(x))


class Embedder(nnx.Module):
    """One table for both ends."""

    def __init__(self, g: Geometry, rngs: nnx.Rngs):
        self.input_embedding = nnx.Param(jax.nn.initializers.normal()(rngs.params(), (g.vocab_size, g.d_model)))


class Gemma(nnx.Module):
    """Tokens to logits."""

    def __init__(self, g: Geometry, rngs: nnx.Rngs):
        self.g = g
        self.embedder = Embedder(g, rngs)
        self.layers = nnx.List([GemmaBlock(g, rngs) for _ in range(g.num_layers)])
        self.final_norm = RMSNorm(g.d_model, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = self.embedder.input_embedding[...]
        x = table[tokens] * np.float32(self.g.d_model**0.5)
        for layer in self.layers:
            x = layer(x)
        return self.final_norm(x) @ table.T


# --- flax's lm1b and nanodo ---------------------------------------------------------------------------------------


class MlpBlock(linen.Module):
    """Two dense layers."""

    g: Geometry

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        boxed = linen.with_logical_partitioning(linen.initializers.xavier_uniform(), ("embed", "mlp"))
        x = linen.relu(linen.Dense(self.g.d_ff, kernel_init=boxed)(x))
        return linen.Dense(self.g.d_model)(x)


class EncoderDecoder1DBlock(linen.Module):
    """A pre-norm block of stock layers."""

    g: Geometry

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        boxed = linen.with_logical_partitioning(linen.initializers.xavier_uniform(), ("embed", "kv"))
        y = linen.LayerNorm()(x)
        # as flax's deprecated SelfAttention names it
        attention = linen.MultiHeadDotProductAttention(
            num_heads=self.g.num_heads, use_bias=False, kernel_init=boxed, name="SelfAttention_0"
        )
        y = attention(y)
        x = x + y
        return x + MlpBlock(self.g)(linen.LayerNorm()(x))


class Lm1bDecoder(linen.Module):
    """Unrolled blocks named encoderdecoderblock_N, a head with a bias."""

    g: Geometry

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = linen.Embed(self.g.vocab_size, self.g.d_model)(tokens)
        for layer in range(self.g.num_layers):
            x = EncoderDecoder1DBlock(self.g, name=f"encoderdecoderblock_{layer}")(x)
        return linen.Dense(self.g.vocab_size, name="logitdense")(linen.LayerNorm(name="encoderdecoder_norm")(x))


class Lm1b(linen.Module):
    """The decoder under its name."""

    g: Geometry

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return Lm1bDecoder(self.g, name="decoder")(tokens)


class CausalAttn(linen.Module):
    """Attention of DenseGeneral layers."""

    g: Geometry

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        heads = (self.g.num_heads, self.g.head_dim)
        q, k, v = (linen.DenseGeneral(heads, use_bias=False, name=n)(x) for n in ("query", "key", "value"))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return linen.DenseGeneral(self.g.d_model, axis=(-2, -1), use_bias=False, name="attn_out_proj")(y)


class Mlp(linen.Module):
    """Two dense layers without biases."""

    g: Geometry

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.gelu(linen.Dense(self.g.d_ff, use_bias=False)(x))
        return linen.Dense(self.g.d_model, use_bias=False)(x)


class TBlock(linen.Module):
    """A pre-norm block."""

    g: Geometry

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + CausalAttn(self.g)(linen.LayerNorm(use_bias=False)(x))
        return x + Mlp(self.g)(linen.LayerNorm(use_bias=False)(x))


class Nanodo(linen.Module):
    """One table for both ends, learned positions."""

    g: Geometry

    def setup(self) -> None:
        g = self.g
        self.embed = linen.Embed(g.vocab_size, g.d_model)
        self.pos_embed = linen.Embed(g.max_seq_len, g.d_model)
        self.blocks = [TBlock(g) for _ in range(g.num_layers)]
        self.out_ln = linen.LayerNorm(use_bias=False)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.pos_embed(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.out_ln(x))


def linen_params(model: linen.Module, boxed: bool = False) -> Any:
    """Parameters of a Linen model by its own initializers."""
    params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    return params if boxed else linen.unbox(params)


# --- shapes of files ----------------------------------------------------------------------------------------------


def shapes(sizes: dict[str, tuple[int, ...]], dtype: Any = jnp.float32) -> dict[str, jax.ShapeDtypeStruct]:
    """Name -> abstract array."""
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in sizes.items()}


def hf_gpt2(g: Geometry = PLAIN, tied: bool = False, dtype: Any = jnp.float32) -> dict[str, Any]:
    """GPT2LMHeadModel."""
    d, f = g.d_model, g.d_ff
    found = {"transformer.wte.weight": (g.vocab_size, d), "transformer.wpe.weight": (g.max_seq_len, d)}
    for i in range(g.num_layers):
        at = f"transformer.h.{i}."
        found |= {at + f"ln_{k}.{x}": (d,) for k in (1, 2) for x in ("weight", "bias")}
        kernels = {"attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d), "mlp.c_fc": (d, f), "mlp.c_proj": (f, d)}
        for name, shape in kernels.items():
            found |= {f"{at}{name}.weight": shape, f"{at}{name}.bias": shape[1:]}
    found |= {"transformer.ln_f.weight": (d,), "transformer.ln_f.bias": (d,)}
    return shapes(found if tied else found | {"lm_head.weight": (g.vocab_size, d)}, dtype)


def hf_llama(g: Geometry = GATED, dtype: Any = jnp.float32) -> dict[str, Any]:
    """LlamaForCausalLM, or a mixture of experts in its style."""
    d, f, q, kv = g.d_model, g.d_ff, g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
    found = {"model.embed_tokens.weight": (g.vocab_size, d), "lm_head.weight": (g.vocab_size, d)}
    for i in range(g.num_layers):
        at = f"model.layers.{i}."
        found |= {at + f"{n}_layernorm.weight": (d,) for n in ("input", "post_attention")}
        found |= {at + f"self_attn.{n}_proj.weight": s for n, s in
                  {"q": (q, d), "k": (kv, d), "v": (kv, d), "o": (d, q)}.items()}  # fmt: skip
        if g.routed(i):
            found[at + "block_sparse_moe.gate.weight"] = (g.num_experts, d)
            for e in range(g.num_experts):
                expert = f"{at}block_sparse_moe.experts.{e}."
                found |= {expert + "w1.weight": (f, d), expert + "w3.weight": (f, d), expert + "w2.weight": (d, f)}
        else:
            found |= {at + f"mlp.{n}_proj.weight": s for n, s in
                      {"gate": (f, d), "up": (f, d), "down": (d, f)}.items()}  # fmt: skip
    return shapes(found | {"model.norm.weight": (d,)}, dtype)


def maxtext(g: Geometry = GATED) -> dict[str, Any]:
    """A scanned decoder: the axis of the layers is the second of every leaf."""
    d, n, k, h, f, L, e = g.d_model, g.num_heads, g.num_kv_heads, g.head_dim, g.d_ff, g.num_layers, g.num_experts

    def s(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def kernel(*shape: int) -> Any:
        return {"kernel": s(*shape)}

    norm = {"scale": s(d, L)}
    attention = {"query": kernel(d, L, n, h), "key": kernel(d, L, k, h), "value": kernel(d, L, k, h)}
    layers: dict[str, Any] = {
        "self_attention": attention | {"out": kernel(n, L, h, d)},
        "pre_self_attention_layer_norm": norm,
        "post_self_attention_layer_norm": norm,
    }
    if e:
        layers["MoeBlock_0"] = {"gate": kernel(d, L, e), "wi_0": s(e, L, d, f), "wi_1": s(e, L, d, f),
                                "wo": s(e, L, f, d)}  # fmt: skip
    else:
        layers["mlp"] = {"wi_0": kernel(d, L, f), "wi_1": kernel(d, L, f), "wo": kernel(f, L, d)}
    decoder = {"layers": layers, "decoder_norm": {"scale": s(d)}, "logits_dense": kernel(d, g.vocab_size)}
    return {"params": {"decoder": decoder, "token_embedder": {"embedding": s(g.vocab_size, d)}}}
