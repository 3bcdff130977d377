"""The metadata of a GGUF file that architectures share: sizes, rotary embedding, experts.

The keys are in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and in llama.cpp's
converter.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.inference.exports.gguf.model_config import ModelConfig
from paceline.inference.exports.gguf.weights import Weight

if TYPE_CHECKING:
    import gguf
    import torch


def refuse(config: ModelConfig, reason: str) -> ConfigError:
    """Return the error for a setting of a model that llama.cpp does not have."""
    return ConfigError(
        "this {model_type} model {reason}, which llama.cpp does not have: a GGUF file would compute"
        " something else",
        code="gguf-unsupported-setting",
        fix="export another form of the model, such as `--merge` for adapters",
        model_type=config.model_type,
        reason=reason,
    )


def add_sizes(
    writer: gguf.GGUFWriter, config: ModelConfig, kv_heads: list[int] | None = None
) -> None:
    """Add what every decoder has.

    Args:
        kv_heads: number of keys of each layer, if layers differ.
    """
    writer.add_context_length(window_of(config) or config.whole("max_position_embeddings"))
    writer.add_embedding_length(config.whole("hidden_size"))
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.whole("intermediate_size"))
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(kv_heads or config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_vocab_size(config.whole("vocab_size"))
    writer.add_layer_norm_rms_eps(config.number("rms_norm_eps", config.number("norm_eps", 1e-6)))


def window_of(config: ModelConfig) -> int | None:
    """Return the number of tokens that attention of all layers is limited to, if llama.cpp does not
    have this limit and texts can be longer; None otherwise. Up to it, llama.cpp computes what the
    model does."""
    if config.model_type not in ("mistral", "mixtral", "qwen2", "qwen3", "smollm3"):
        return None
    window = config.values.get("sliding_window")
    is_used = config.flag("use_sliding_window", config.model_type in ("mistral", "mixtral"))
    longest = config.whole("max_position_embeddings")
    return window if is_used and isinstance(window, int) and window < longest else None


def add_experts(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Add the numbers of a mixture of experts."""
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.whole("num_experts_per_tok"))


def add_rope(writer: gguf.GGUFWriter, config: ModelConfig, dimensions: int | None = None) -> None:
    """Add the rotary embedding.

    Args:
        dimensions: number of rotated dimensions of a head; by default all.

    Raises:
        ConfigError: llama.cpp does not know the kind of scaling.
    """
    from gguf import RopeScalingType

    rope = config.rope
    writer.add_rope_dimension_count(dimensions or config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    kind = rope_kind(config)
    if kind in ("default", "llama3"):
        return  # llama3 has factors instead, in a weight
    if kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.number("factor"))
    elif kind == "yarn":
        _add_yarn(writer, config, rope)
    else:
        raise refuse(config, f"scales its rotary embedding by `{kind}`")


def rope_kind(config: ModelConfig) -> str:
    """Return how the rotary embedding is scaled, such as ``default`` or ``yarn``."""
    return config.rope.text("rope_type") or config.rope.text("type") or "default"


def _add_yarn(writer: gguf.GGUFWriter, config: ModelConfig, rope: ModelConfig) -> None:
    from gguf import RopeScalingType

    factor = rope.number("factor")
    original = rope.whole(
        "original_max_position_embeddings", config.whole("max_position_embeddings")
    )
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(factor)
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_scaling_yarn_beta_fast(rope.number("beta_fast", 32.0))
    writer.add_rope_scaling_yarn_beta_slow(rope.number("beta_slow", 1.0))
    usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    factor_of_model = rope.number("attention_factor", usual)
    if not math.isclose(factor_of_model, usual, rel_tol=1e-3) or "mscale" in rope:
        raise refuse(config, "scales attention by its own factor of YaRN")


def llama3_factors(config: ModelConfig) -> Weight | None:
    """Return the factors by which Llama 3.1 divides its frequencies; None for other models.

    As ``_compute_llama3_parameters`` in transformers' ``modeling_rope_utils.py``.
    """
    if rope_kind(config) != "llama3":
        return None
    rope, dimensions = config.rope, config.head_dim

    def load() -> torch.Tensor:
        import torch

        powers = torch.arange(0, dimensions, 2, dtype=torch.float64) / dimensions
        lengths = 2 * math.pi * config.rope_theta**powers
        factor = rope.number("factor", 8.0)
        low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
        original = rope.number("original_max_position_embeddings", 8192.0)
        smooth = ((original / lengths - low) / (high - low)).clamp(0, 1)
        return (1 / ((1 - smooth) / factor + smooth)).float()

    return Weight("rope_freqs.weight", (dimensions // 2,), load)
