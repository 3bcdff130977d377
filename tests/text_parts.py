"""Tiny vision-language models with random weights whose language model transformers also has as a
class of its own."""

from pathlib import Path
from typing import Any

import torch

from paceline.models.builtin import resolve_model
from paceline.models.language import copy_tokenizer

_TEXT = {
    "vocab_size": 8192,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_QWEN: dict[str, Any] = {
    "text_config": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "vision_config": {
        "depth": 1,
        "num_heads": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
    },
}
_PARTS: dict[str, dict[str, Any]] = {
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "llama4": {
        "text_config": {
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 1,
        },
        "vision_config": {
            "vision_output_dim": 24,
            "projector_input_dim": 24,
            "projector_output_dim": 24,
        },
    },
    "mllama": {
        "text_config": {"cross_attention_layers": [1]},
        "vision_config": {
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "attention_heads": 2,
            "vision_output_dim": 48,
            "intermediate_layers_indices": [0],
        },
    },
}


def make_text_part(folder: Path, kind: str) -> Path:
    """Write a vision-language model of this ``model_type`` in bfloat16, with a tokenizer and the
    settings of a processor, to ``folder``; return the folder."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    parts = _PARTS[kind]
    config = CONFIG_MAPPING[kind](
        text_config={**_TEXT, **parts["text_config"]},
        vision_config={**_VISION, **parts["vision_config"]},
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():  # experts and gates may be initialized to zero
        if not torch.isfinite(parameter).all() or not parameter.any():
            torch.nn.init.normal_(parameter.data, std=0.02)
    model.bfloat16().save_pretrained(folder)
    copy_tokenizer(resolve_model("builtin:qwen2-micro"), folder)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "None"}')
    return folder
