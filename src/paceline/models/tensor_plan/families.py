"""Tensor-parallel plans for model families for which transformers has no plan, or a plan for only
some of the layers.

The keys are the values of ``model_type`` in a model's config. A pattern names modules below the
base model; ``*`` matches one part of a name. The plans of transformers apply as well, except to
modules that are listed here.
"""

from collections.abc import Mapping
from typing import Any

_C, _R, _REPLICATED = "colwise", "rowwise", "replicated_with_grad_allreduce"
_QKVO = {"q_proj": _C, "k_proj": _C, "v_proj": _C}
_GATED = {"gate_proj": _C, "up_proj": _C, "down_proj": _R}


def _under(prefix: str, styles: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}.{name}": style for name, style in styles.items()}


_CONV1D_BLOCK = {
    "h.*.attn.c_attn": "packed_colwise:3",  # [query | key | value]
    "h.*.attn.c_proj": _R,
    "h.*.mlp.c_fc": _C,
    "h.*.mlp.c_proj": _R,
}
# The rows of the fused layer are [head 0: query, key, value | head 1: …]: a range of heads is a
# range of rows.
_INTERLEAVED = {"dense": _R, "query_key_value": _C}
_TALL = {"dense_h_to_4h": _C, "dense_4h_to_h": _R}
_LLAMA_ATTENTION = _under("layers.*.self_attn", {**_QKVO, "o_proj": _R})
_FAIRSEQ = {
    **_under("layers.*.self_attn", {**_QKVO, "out_proj": _R}),
    "layers.*.fc1": _C,
    "layers.*.fc2": _R,
}
# The same parts as transformers' colwise_gather_output, with one all-reduce instead of two
# all-gathers.
_DELTA_NET = {"layers.*.linear_attn.out_proj": "rowwise_split_input"}

PLANS: dict[str, dict[str, str]] = {
    "gpt2": _CONV1D_BLOCK,
    "openai-gpt": _CONV1D_BLOCK,
    "gpt_bigcode": {**_CONV1D_BLOCK, "h.*.attn.c_attn": _C},
    "gpt_neo": {
        **_under("h.*.attn.attention", {**_QKVO, "out_proj": _R}),
        **_under("h.*.mlp", {"c_fc": _C, "c_proj": _R}),
    },
    "gptj": {
        **_under("h.*.attn", {**_QKVO, "out_proj": _R}),
        **_under("h.*.mlp", {"fc_in": _C, "fc_out": _R}),
    },
    "opt": _under("decoder", _FAIRSEQ),
    "biogpt": _FAIRSEQ,
    "xglm": _FAIRSEQ,
    "bloom": {**_under("h.*.self_attention", _INTERLEAVED), **_under("h.*.mlp", _TALL)},
    "falcon": {**_under("h.*.self_attention", _INTERLEAVED), **_under("h.*.mlp", _TALL)},
    "mpt": {
        **_under("blocks.*.attn", {"Wqkv": "packed_colwise:3", "out_proj": _R}),
        **_under("blocks.*.ffn", {"up_proj": _C, "down_proj": _R}),
    },
    "persimmon": {
        **_under(
            "layers.*.self_attn",
            {**_INTERLEAVED, "q_layernorm": _REPLICATED, "k_layernorm": _REPLICATED},
        ),
        **_under("layers.*.mlp", _TALL),
    },
    "stablelm": {**_LLAMA_ATTENTION, **_under("layers.*.mlp", _GATED)},
    "hunyuan_v1_dense": {
        **_LLAMA_ATTENTION,
        **_under(
            "layers.*.self_attn", {"query_layernorm": _REPLICATED, "key_layernorm": _REPLICATED}
        ),
        **_under("layers.*.mlp", _GATED),
    },
    "lfm2": {
        **_under(
            "layers.*.self_attn",
            {**_QKVO, "out_proj": _R, "q_layernorm": _REPLICATED, "k_layernorm": _REPLICATED},
        ),
        **_under("layers.*.feed_forward", {"w1": _C, "w3": _C, "w2": _R}),
    },
    # transformers has a plan only for their experts.
    "deepseek_v3": _under(
        "layers.*.self_attn",
        {
            "q_proj": _C,
            "q_b_proj": _C,
            "kv_a_proj_with_mqa": "mla_kv_a_proj",
            "kv_b_proj": _C,
            "o_proj": _R,
        },
    ),
    "granitemoe": _LLAMA_ATTENTION,
    "qwen3_next": _DELTA_NET,
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": _DELTA_NET,
    "phimoe": _LLAMA_ATTENTION,
    "jamba": {**_LLAMA_ATTENTION, **_under("layers.*.feed_forward", _GATED)},
}

#: Attributes with which modules of these families compute and which are divided by the number of
#: ranks. Modules of other families use the shapes of their weights.
HEAD_NUMBERS = (
    "num_heads",
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "split_size",
    "embed_dim",
)
#: Arguments of an attention module that have one row per head (ALiBi). Each rank uses the rows of
#: its heads.
HEAD_ARGUMENTS = ("alibi", "position_bias", "attention_mask")


def family_plan(config: Any) -> dict[str, str]:
    """Return {pattern: style} for the config of a transformers model; empty if its family is not in
    :data:`PLANS`."""
    kind = getattr(config, "model_type", None)
    plan = dict(PLANS.get(kind or "", {}))
    heads = getattr(config, "num_attention_heads", None)
    if kind == "falcon" and config.multi_query and not config.new_decoder_architecture:
        plan["h.*.self_attention.query_key_value"] = f"multi_query_colwise:{heads}"
    if kind == "gpt_bigcode" and config.multi_query:
        plan["h.*.attn.c_attn"] = f"multi_query_colwise:{heads}"
    return plan


def unsupported(config: Any) -> str | None:
    """Return why tensor parallelism does not support a model with this config although its family
    has a plan, or None if it does."""
    kind = getattr(config, "model_type", None)
    if (
        kind == "bloom"
        and getattr(config, "slow_but_exact", False)
        and getattr(config, "pretraining_tp", 1) > 1
    ):
        return "`slow_but_exact` with `pretraining_tp` computes with slices of full weights"
    if kind in ("llama4", "llama4_text"):
        return "its experts process every token once per expert"
    if kind == "stablelm" and getattr(config, "qk_layernorm", False):
        return "`qk_layernorm` has a norm with separate weights per head"
    return None
