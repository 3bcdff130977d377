"""Tiny models with random weights, for the model families whose modules differ from Llama's."""

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 8192  # of the built-in tokenizer

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 256,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_MOE: dict[str, Any] = {
    "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "n_routed_experts": 4,
    "num_local_experts": 4, "shared_expert_intermediate_size": 24, "n_shared_experts": 1,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "head_dim": 8,
}  # fmt: skip
_STATE: dict[str, Any] = {"state_size": 8, "conv_kernel": 4, "expand": 2, "time_step_rank": 4}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_chunk_size": 16,
}  # fmt: skip

#: model_type → configuration in addition to the common one.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "mixtral": _MOE,
    "qwen2_moe": {**_MOE, "decoder_sparse_step": 1},
    "qwen3_moe": {**_MOE, "decoder_sparse_step": 1, "head_dim": 8},
    "deepseek_v2": {**_MOE, **_LATENT, "topk_method": "greedy"},
    "deepseek_v3": {**_MOE, **_LATENT},
    "olmoe": _MOE,
    "gpt_oss": {**_MOE, "head_dim": 8},
    "granitemoe": _MOE,
    "mamba": _STATE,
    "mamba2": {**_STATE, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    "falcon_mamba": _STATE,
    "jamba": {
        **_MOE,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64, "head_dim": 8},
    "granitemoehybrid": {
        **_MOE,
        **_MAMBA2,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 24,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"],
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "zamba2": {
        **_MAMBA2,
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "num_mem_blocks": 1,
        "hybrid_layer_ids": [1],
        "adapter_rank": 4,
        "use_shared_attention_adapter": False,
        "n_mamba_heads": 8,
        "attention_head_dim": 16,
    },
    "qwen3_next": {
        **_MOE,
        "decoder_sparse_step": 1,
        "head_dim": 8,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "doge": {"head_dim": 8},
    "phimoe": _MOE,
    "llama4_text": {
        **_MOE,
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 16,
    },
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "intermediate_size": [48] * 5,
        "activation_sparsity_pattern": [0.0] * 5,
        "head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 0,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
    },
    "rwkv": {"attention_hidden_size": 32, "context_length": 256},
    "recurrent_gemma": {
        "lru_width": 32,
        "head_dim": 8,
        "attention_window_size": 64,
        "block_types": ("recurrent", "attention"),
    },
}


def family_config(kind: str, **overrides: Any) -> Any:
    """Return the transformers configuration of a tiny model of this ``model_type``."""
    from transformers import AutoConfig

    settings = {**_COMMON, **FAMILIES.get(kind, {}), **overrides}
    if kind == "gpt2":
        for key in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        ):
            settings.pop(key)
    return AutoConfig.for_model(kind, **settings)


def write_config(kind: str, folder: Path, **overrides: Any) -> Path:
    """Write only the configuration, which is enough to build the model on the meta device."""
    family_config(kind, **overrides).save_pretrained(str(folder))
    return folder


def make_family(kind: str, folder: Path, **overrides: Any) -> Path:
    """Write a tiny model of this ``model_type`` to ``folder``; return the folder."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(kind, **overrides))
    for parameter in model.parameters():  # some families initialize experts and biases to zero
        if not torch.isfinite(parameter).all() or not parameter.any():
            torch.nn.init.normal_(parameter.data, std=0.02)
    model.save_pretrained(str(folder))
    return folder
