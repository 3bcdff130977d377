"""How models of the Gemma family are written."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from paceline.inference.exports.gguf.metadata import add_rope, add_sizes, refuse
from paceline.inference.exports.gguf.model_config import ModelConfig
from paceline.inference.exports.gguf.weights import Weight

if TYPE_CHECKING:
    import gguf

#: Numbers of layers of the largest models of Gemma 2 and 3, by which llama.cpp recognizes them and
#: divides queries by another root (``load_arch_hparams`` of gemma2 and gemma3).
_LARGEST = {"gemma2": 46, "gemma3_text": 62}
#: Every sixth layer of Gemma 3 attends to all tokens, every second one of Gemma 2.
_PERIODS = {"gemma2": 2, "gemma3_text": 6}


def add_gemma(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Add the metadata of Gemma."""
    add_sizes(writer, config)
    add_rope(writer, config)


def add_gemma2(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Add the metadata of Gemma 2."""
    add_gemma(writer, config)
    writer.add_attn_logit_softcapping(config.number("attn_logit_softcapping"))
    writer.add_final_logit_softcapping(config.number("final_logit_softcapping"))
    writer.add_sliding_window(config.whole("sliding_window"))


def add_gemma3(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Add the metadata of Gemma 3, whose two kinds of layers have rotary embeddings of their
    own."""
    add_sizes(writer, config)
    add_rope(writer, _global_rope(config))
    writer.add_rope_freq_base_swa(config.rope.section("sliding_attention").number("rope_theta"))
    writer.add_sliding_window(config.whole("sliding_window"))
    if "final_logit_softcapping" in config:
        writer.add_final_logit_softcapping(config.number("final_logit_softcapping"))


def _global_rope(config: ModelConfig) -> ModelConfig:
    rope = config.rope.section("full_attention").values
    return ModelConfig({**config.values, "rope_parameters": rope})


def convert_gemma(config: ModelConfig, weight: Weight) -> Iterable[Weight]:
    """Convert a weight: norms multiply by one more than their weight, and queries are scaled so
    that llama.cpp's fixed divisor gives the model's."""
    scale = _query_scale(config)
    if weight.name.endswith(".q_norm.weight"):
        yield weight.map(lambda tensor: (tensor.float() + 1) * scale)
    elif weight.name.endswith("norm.weight"):
        yield weight.map(lambda tensor: tensor.float() + 1)
    elif ".q_proj." in weight.name and config.model_type == "gemma2" and scale != 1:
        yield weight.map(lambda tensor: tensor.float() * scale)
    else:
        yield weight


def _query_scale(config: ModelConfig) -> float:
    if config.model_type == "gemma":
        return 1.0
    divisor: float = config.head_dim
    if config.num_layers == _LARGEST[config.model_type]:
        divisor = config.whole("hidden_size") / config.num_heads
    return math.sqrt(divisor / config.number("query_pre_attn_scalar", config.head_dim))


def check_gemma(config: ModelConfig) -> None:
    """Refuse settings that llama.cpp does not have."""
    if config.flag("use_bidirectional_attention"):
        raise refuse(config, "attends to later tokens")
    if config.model_type == "gemma3_text":
        if "attn_logit_softcapping" in config:
            raise refuse(config, "caps the scores of its attention")
        if config.rope.section("sliding_attention").text("rope_type", "default") != "default":
            raise refuse(config, "scales the rotary embedding of its window")
    period = _PERIODS.get(config.model_type)
    kinds = config.texts("layer_types")
    if period and kinds and kinds != _layer_types(len(kinds), period):
        raise refuse(config, f"attends to all tokens in other layers than each of {period}")
    activation = config.text("hidden_activation") or config.text("hidden_act")
    if activation not in ("", "gelu", "gelu_pytorch_tanh"):
        raise refuse(config, f"has the activation function `{activation}`")


def _layer_types(num_layers: int, period: int) -> list[str]:
    return [
        "full_attention" if (layer + 1) % period == 0 else "sliding_attention"
        for layer in range(num_layers)
    ]
