"""How mixtures of experts are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from paceline.inference.exports.gguf.metadata import add_experts, add_rope, add_sizes, refuse
from paceline.inference.exports.gguf.model_config import ModelConfig
from paceline.inference.exports.gguf.weights import Weight

if TYPE_CHECKING:
    import gguf


def add_mixtral(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Add the metadata of Mixtral."""
    add_sizes(writer, config)
    add_rope(writer, config)
    add_experts(writer, config)


def add_qwen3_moe(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Add the metadata of Qwen3-MoE."""
    add_mixtral(writer, config)
    writer.add_expert_feed_forward_length(config.whole("moe_intermediate_size"))


def add_qwen2_moe(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Add the metadata of Qwen2-MoE."""
    add_qwen3_moe(writer, config)
    writer.add_expert_shared_feed_forward_length(config.whole("shared_expert_intermediate_size"))


def add_gpt_oss(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Add the metadata of gpt-oss."""
    add_mixtral(writer, config)
    writer.add_expert_feed_forward_length(config.whole("intermediate_size"))
    writer.add_sliding_window(config.whole("sliding_window"))


def convert_mixtral(
    convert_attention: Callable[[ModelConfig, Weight], Iterable[Weight]],
) -> Callable[[ModelConfig, Weight], Iterable[Weight]]:
    """Return what converts weights of Mixtral.

    Args:
        convert_attention: converts weights of Llama.
    """

    def convert(config: ModelConfig, weight: Weight) -> Iterable[Weight]:
        yield from convert_attention(config, weight)

    return convert


def convert_experts(config: ModelConfig, weight: Weight) -> Iterable[Weight]:
    """Convert a weight of a model whose experts may be stored as one stack with gate and up."""
    if weight.name.endswith(".experts.gate_up_proj"):
        yield from _halves(weight)
    elif weight.name.endswith(".experts.down_proj"):
        yield weight.renamed(f"{weight.name}.weight")
    else:
        yield weight


def _halves(weight: Weight) -> Iterable[Weight]:
    prefix = weight.name.removesuffix("gate_up_proj")
    half = weight.shape[1] // 2
    yield weight.map(lambda stack: stack[:, :half], f"{prefix}gate_proj.weight")
    yield weight.map(lambda stack: stack[:, half:], f"{prefix}up_proj.weight")


def convert_gpt_oss(config: ModelConfig, weight: Weight) -> Iterable[Weight]:
    """Convert a weight of gpt-oss: gate and up alternate in the last dimension, and weights are
    stored as [in, out]."""
    name = weight.name
    prefix, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        yield weight.map(lambda stack: stack[..., ::2].mT, f"{prefix}.gate_proj.weight")
        yield weight.map(lambda stack: stack[..., 1::2].mT, f"{prefix}.up_proj.weight")
    elif last == "gate_up_proj_bias":
        yield weight.map(lambda stack: stack[..., ::2], f"{prefix}.gate_proj.bias")
        yield weight.map(lambda stack: stack[..., 1::2], f"{prefix}.up_proj.bias")
    elif last == "down_proj":
        yield weight.map(lambda stack: stack.mT, f"{name}.weight")
    elif last == "down_proj_bias":
        yield weight.renamed(f"{prefix}.down_proj.bias")
    elif last == "sinks":
        yield weight.renamed(f"{name}.weight")
    else:
        yield weight


def check_qwen3_moe(config: ModelConfig) -> None:
    """Refuse settings that llama.cpp does not have."""
    if config.wholes("mlp_only_layers") or config.whole("decoder_sparse_step", 1) != 1:
        raise refuse(config, "has experts in some layers only")
    if not config.flag("norm_topk_prob"):
        raise refuse(config, "does not normalize the weights of its experts (`norm_topk_prob`)")
    if config.flag("use_sliding_window"):
        raise refuse(config, "attends to a window of tokens")


def check_qwen2_moe(config: ModelConfig) -> None:
    """Refuse settings that llama.cpp does not have."""
    if config.wholes("mlp_only_layers") or config.whole("decoder_sparse_step", 1) != 1:
        raise refuse(config, "has experts in some layers only")
    if config.flag("norm_topk_prob"):
        raise refuse(config, "normalizes the weights of its experts (`norm_topk_prob`)")
    if config.flag("use_sliding_window"):
        raise refuse(config, "attends to a window of tokens")


def check_gpt_oss(config: ModelConfig) -> None:
    """Refuse settings that llama.cpp does not have."""
    kinds = config.texts("layer_types")
    if kinds and kinds != [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(len(kinds))
    ]:
        raise refuse(config, "attends to all tokens in other layers than each second one")
    if config.number("swiglu_limit", 7.0) != 7.0 or config.number("swiglu_alpha", 1.702) != 1.702:
        raise refuse(config, "has another limit or slope of its activation")
