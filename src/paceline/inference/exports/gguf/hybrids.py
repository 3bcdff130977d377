"""How models with recurrent or convolution layers are written: Qwen3.5 and LFM2."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from paceline.inference.exports.gguf.metadata import add_experts, add_rope, add_sizes, refuse
from paceline.inference.exports.gguf.mixtures import convert_experts
from paceline.inference.exports.gguf.model_config import ModelConfig
from paceline.inference.exports.gguf.weights import Weight

if TYPE_CHECKING:
    import gguf
    import torch


def add_qwen35(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Add the metadata of Qwen3.5."""
    add_sizes(writer, config)
    _add_qwen35_layers(writer, config)


def add_qwen35_moe(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Add the metadata of Qwen3.5 with experts."""
    inner = config.whole("moe_intermediate_size")
    add_sizes(writer, ModelConfig({**config.values, "intermediate_size": inner}))
    add_experts(writer, config)
    writer.add_expert_feed_forward_length(inner)
    writer.add_expert_shared_feed_forward_length(config.whole("shared_expert_intermediate_size"))
    _add_qwen35_layers(writer, config)


def _add_qwen35_layers(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    rotated = int(config.head_dim * config.rope.number("partial_rotary_factor", 0.25))
    add_rope(writer, config, rotated)
    writer.add_rope_dimension_sections(_text_sections(rotated // 2))
    num_values = config.whole("linear_num_value_heads")
    writer.add_ssm_conv_kernel(config.whole("linear_conv_kernel_dim"))
    writer.add_ssm_state_size(config.whole("linear_key_head_dim"))
    writer.add_ssm_group_count(config.whole("linear_num_key_heads"))
    writer.add_ssm_time_step_rank(num_values)
    writer.add_ssm_inner_size(config.whole("linear_value_head_dim") * num_values)
    writer.add_full_attention_interval(_interval(config))


def _text_sections(pairs: int) -> list[int]:
    """Return how many pairs rotate by the position in time, by height and by width. The three are
    equal in texts, and llama.cpp rotates pairs in no section by position 0, so each pair is in
    one: every third in each section. For real models, this is transformers' [11, 11, 10]."""
    return [(pairs + 2 - section) // 3 for section in range(3)] + [0]


def _interval(config: ModelConfig) -> int:
    """Return every how many layers attention is not linear."""
    kinds = config.texts("layer_types")
    return kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1


def check_qwen35(config: ModelConfig) -> None:
    """Refuse settings that llama.cpp does not have."""
    if config.whole("linear_key_head_dim") != config.whole("linear_value_head_dim"):
        raise refuse(config, "has keys and values of different sizes in its linear attention")
    if config.whole("linear_num_value_heads") % config.whole("linear_num_key_heads"):
        raise refuse(config, "has a number of values that is not a multiple of the number of keys")
    kinds, interval = config.texts("layer_types"), _interval(config)
    if kinds != [
        "linear_attention" if (layer + 1) % interval else "full_attention"
        for layer in range(len(kinds))
    ]:
        raise refuse(config, "has attention that is not linear in irregular layers")


def convert_qwen35(config: ModelConfig, weight: Weight) -> Iterable[Weight]:
    """Convert a weight of Qwen3.5. Its norms multiply by one more than their weight, except those
    inside linear attention."""
    name = weight.name
    if ".linear_attn." in name:
        yield from _convert_linear(config, weight)
    elif name.endswith("norm.weight"):
        yield weight.map(lambda tensor: tensor.float() + 1)
    elif name.endswith(".shared_expert_gate.weight"):
        yield weight.map(lambda tensor: tensor.squeeze(0))
    else:
        yield from convert_experts(config, weight)


def _convert_linear(config: ModelConfig, weight: Weight) -> Iterable[Weight]:
    """Convert a weight of linear attention: llama.cpp repeats keys in another order, so the values
    are ordered by their number within a key first."""
    name, last = weight.name, weight.name.rpartition(".linear_attn.")[2]
    keys = 2 * config.whole("linear_num_key_heads") * config.whole("linear_key_head_dim")
    by_value, by_head = (
        _value_order(config, config.whole("linear_value_head_dim")),
        _value_order(config, 1),
    )
    if last == "A_log":
        yield weight.map(lambda tensor: -by_head(tensor.float()).exp())
    elif last == "dt_bias":
        yield weight.map(by_head, name.replace("dt_bias", "dt_proj.bias"))
    elif last in ("in_proj_a.weight", "in_proj_b.weight"):
        yield weight.map(by_head)
    elif last == "in_proj_z.weight":
        yield weight.map(by_value)
    elif last == "in_proj_qkv.weight":
        yield weight.map(_after(keys, by_value))
    elif last == "conv1d.weight":
        yield weight.map(lambda tensor: _after(keys, by_value)(tensor.squeeze(1)))
    elif last == "out_proj.weight":
        yield weight.map(lambda tensor: by_value(tensor.T).T)
    else:
        yield weight


def _value_order(config: ModelConfig, size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that orders rows by the number of the value within its key, then by key.

    Args:
        size: number of rows of a value.
    """
    keys = config.whole("linear_num_key_heads")
    values = config.whole("linear_num_value_heads") // keys

    def order(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.reshape(keys, values, size, *tensor.shape[1:])
        return rows.transpose(0, 1).reshape(tensor.shape)

    return order


def _after(
    start: int, order: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that orders the rows from ``start``."""

    def ordered(tensor: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.cat([tensor[:start], order(tensor[start:])])

    return ordered


def add_lfm2(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Add the metadata of LFM2. Layers with a convolution have no keys."""
    inner = _lfm2_inner_size(config)
    _add_lfm2_layers(writer, ModelConfig({**config.values, "intermediate_size": inner}))


def add_lfm2_moe(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Add the metadata of LFM2 with experts."""
    from gguf import ExpertGatingFuncType

    _add_lfm2_layers(writer, config)
    add_experts(writer, config)
    writer.add_expert_feed_forward_length(config.whole("moe_intermediate_size"))
    writer.add_leading_dense_block_count(config.whole("num_dense_layers"))
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def _add_lfm2_layers(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    add_sizes(writer, config, lfm2_kv_heads(config))
    add_rope(writer, config)
    writer.add_shortconv_l_cache(config.whole("conv_L_cache"))


def lfm2_kv_heads(config: ModelConfig) -> list[int]:
    """Return the number of keys of each layer."""
    return [
        config.num_kv_heads if kind == "full_attention" else 0
        for kind in config.texts("layer_types")
    ]


def _lfm2_inner_size(config: ModelConfig) -> int:
    """Return the size of the feed-forward layers, as ``Lfm2MLP`` in transformers computes it."""
    inner = config.whole("intermediate_size")
    if config.flag("block_auto_adjust_ff_dim"):
        multiple = config.whole("block_multiple_of", 256)
        inner = int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
        inner = multiple * -(-inner // multiple)
    return inner


def convert_lfm2(config: ModelConfig, weight: Weight) -> Iterable[Weight]:
    """Convert a weight of LFM2."""
    if weight.name.endswith(".conv.conv.weight"):
        yield weight.map(lambda tensor: tensor.squeeze(1))
    elif weight.name.endswith(".expert_bias"):
        yield weight.renamed(f"{weight.name}.bias")
    elif ".experts.w" in weight.name:
        yield weight.renamed(weight.name.removeprefix("model."))  # as the package gguf has them
    else:
        yield from convert_experts(config, weight)


def check_lfm2(config: ModelConfig) -> None:
    """Refuse settings that llama.cpp does not have."""
    if config.flag("conv_bias"):
        raise refuse(config, "has biases in its convolutions")
    if config.model_type == "lfm2_moe":
        if not config.flag("norm_topk_prob", True) or not config.flag("use_expert_bias", True):
            raise refuse(config, "selects its experts in another way")
        if config.number("routed_scaling_factor", 1.0) != 1.0:
            raise refuse(config, "scales the output of its experts")
