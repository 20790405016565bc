"""Tables for the names of public code: which role a leaf has there, and where its fans lie.

Names and axes as in flax's own examples (gemma, lm1b), nanodo, MaxText, and Hugging Face's GPT-2 and Llama.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinit.errors import unknown
from deepinit.interop.trees import Table

POST_NORM = "norm_scale @ post_norm/norm_scale"


def table(name: str, rules: Mapping[str, str | None], **options: Any) -> Table:
    """A preset; which of its rules apply depends on the model's options, so none must."""
    return Table.of(rules, name=name, complete=False, **options)


OWN = table(
    "deepinit",
    {
        "token_embed": "token_embed | i o",
        "pos_embed": "pos_embed | i o",
        **{f"{kind}_{name}": f"{kind}_{name} | i o o" for kind in ("attn", "cross") for name in "qkv"},
        "attn_out|cross_out": "attn_out | i i o",
        "mlp_gate": "mlp_gate | i o",
        "mlp_up": "mlp_up | i o",
        "mlp_down": "mlp_down | i o",
        "router": "router | i o",
        "expert_gate": "expert_gate | E i o",
        "expert_up": "expert_up | E i o",
        "expert_down": "expert_down | E i o",
        "lm_head": "lm_head | o i",
        "(?:\\w+_)?norm_scale": "norm_scale",
        "(?:\\w+_)?residual_gate": "residual_gate",
        "(?:\\w+_)?branch_scale": "branch_scale",
        "(?:\\w+_)?branch_shift": "branch_shift",
        "(?:\\w+_)?bias": "bias",
    },
)
"""Our own modules' names with their axes, for the sizes that are read off the shapes."""
GEMMA = table(
    "flax_gemma",
    {
        "embedder/input_embedding": "token_embed | i o",
        "attn/qkv_einsum/w": "attn_q attn_k attn_v | S o i o",
        "attn/q_einsum/w": "attn_q | o i o",
        "attn/kv_einsum/w": "attn_k attn_v | S o i o",
        "attn/attn_vec_einsum/w": "attn_out | i i o",
        "mlp/gate_proj/kernel": "mlp_gate | i o",
        "mlp/up_proj/kernel": "mlp_up | i o",
        "mlp/down_proj/kernel|mlp/linear": "mlp_down | i o",
        "mlp/gating_einsum": "mlp_gate mlp_up | S i o",
        "post_(?:attn|attention|ffw)_norm/scale": POST_NORM,
        "(?:pre_attention_norm|pre_ffw_norm|final_norm|_query_norm|_key_norm)/scale": "norm_scale",
    },
)
LM1B = table(
    "flax_lm1b",
    {
        "Embed_0/embedding|shared_embedding/embedding": "token_embed | i o",
        "posembed_\\w+/pos_embedding": "pos_embed | 1 i o",
        "query/kernel": "attn_q | i o o",
        "key/kernel": "attn_k | i o o",
        "value/kernel": "attn_v | i o o",
        "out/kernel": "attn_out | i i o",
        "MlpBlock_0/Dense_0/kernel": "mlp_up | i o",
        "MlpBlock_0/Dense_1/kernel": "mlp_down | i o",
        "logitdense/kernel": "lm_head | i o",
        "(?:LayerNorm_\\d|\\w+_norm)/scale": "norm_scale",
        "(?:query|key|value|out|Dense_\\d|logitdense|LayerNorm_\\d|\\w+_norm)/bias": "bias",
    },
)
NANODO = table(
    "nanodo",
    {
        "pos_embed/embedding": "pos_embed | i o",
        "embed/embedding": "token_embed | i o",
        "query/kernel": "attn_q | i o o",
        "key/kernel": "attn_k | i o o",
        "value/kernel": "attn_v | i o o",
        "attn_out_proj/kernel": "attn_out | i i o",
        "Mlp_0/Dense_0/kernel": "mlp_up | i o",
        "Mlp_0/Dense_1/kernel": "mlp_down | i o",
        "(?:LayerNorm_\\d|out_ln)/scale": "norm_scale",
    },
)
MAXTEXT = table(
    "maxtext",
    {
        "token_embedder/embedding": "token_embed | i o",
        "position_embedder/embedding": "pos_embed | i o",
        "self_attention/query/kernel": "attn_q | i o o",
        "self_attention/key/kernel": "attn_k | i o o",
        "self_attention/value/kernel": "attn_v | i o o",
        "self_attention/qkv_proj/kernel": "attn_q attn_k attn_v | i S o o",
        "self_attention/out/kernel": "attn_out | i i o",
        "MoeBlock_\\d/gate/kernel": "router | i o",
        "MoeBlock_\\d/wi_0": "expert_gate | E i o",
        "MoeBlock_\\d/wi_1": "expert_up | E i o",
        "MoeBlock_\\d/wo": "expert_down | E i o",
        "mlp/wi_0/kernel": "mlp_gate | i o",
        "mlp/wi_1/kernel|mlp/wi/kernel": "mlp_up | i o",
        "mlp/wo/kernel": "mlp_down | i o",
        "decoder/logits_dense/kernel": "lm_head | i o",
        "post_(?:self_attention|ffw)_norm/scale": POST_NORM,
        "\\w*norm\\w*/scale": "norm_scale",
        "\\w+/bias": "bias",
    },
    layer_axis=1,
)
HF_GPT2 = table(
    "hf_gpt2",
    {
        "wte/weight": "token_embed | i o",
        "wpe/weight": "pos_embed | i o",
        "attn/c_attn/weight": "attn_q attn_k attn_v | i o",  # Conv1D keeps inputs first
        "attn/c_proj/weight": "attn_out | i o",
        "mlp/c_fc/weight": "mlp_up | i o",
        "mlp/c_proj/weight": "mlp_down | i o",
        "lm_head/weight": "lm_head | o i",
        "(?:ln_\\d|ln_f)/weight": "norm_scale",
        "attn/(?:bias|masked_bias)": None,
        "(?:c_attn|c_proj|c_fc|ln_\\d|ln_f)/bias": "bias",
    },
    outputs_first=True,
)
HF_LLAMA = table(
    "hf_llama",
    {
        "embed_tokens/weight": "token_embed | i o",
        "self_attn/q_proj/weight": "attn_q | o i",
        "self_attn/k_proj/weight": "attn_k | o i",
        "self_attn/v_proj/weight": "attn_v | o i",
        "self_attn/o_proj/weight": "attn_out | o i",
        "mlp/gate_proj/weight": "mlp_gate | o i",
        "mlp/up_proj/weight": "mlp_up | o i",
        "mlp/down_proj/weight": "mlp_down | o i",
        "block_sparse_moe/gate/weight|mlp/gate/weight": "router | o i",
        "experts/\\d+/(?:w1|gate_proj)/weight": "expert_gate | o i",
        "experts/\\d+/(?:w3|up_proj)/weight": "expert_up | o i",
        "experts/\\d+/(?:w2|down_proj)/weight": "expert_down | o i",
        "lm_head/weight": "lm_head | o i",
        "post_feedforward_layernorm/weight": POST_NORM,
        "(?:\\w*layernorm|q_norm|k_norm|norm)/weight": "norm_scale",
        "rotary_emb/inv_freq": None,
        "\\w+_proj/bias": "bias",
    },
    outputs_first=True,
)
TABLES = {t.name: t for t in (GEMMA, LM1B, NANODO, MAXTEXT, HF_GPT2, HF_LLAMA)}
"""The presets by name."""


def preset(name: str) -> Table:
    """The preset of this name.

    Raises:
      ConfigError: there is none.
    """
    if name not in TABLES:
        raise unknown("roles: table", name, TABLES)
    return TABLES[name]
