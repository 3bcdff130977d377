"""Attention for packed rows: each sample attends only to itself, and nothing is computed between
samples.

With position_ids alone, transformers masks the full row, so the cost grows with the square of the
row's length. Here it grows with the square of each sample's length, and no mask is built.
"""

from typing import Any

import torch

NAME = "paceline_packed"


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segment_lengths: tuple[int, ...] | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each segment of a row, as an attention function of
    transformers.

    Args:
        query: queries [1, heads, tokens, head_size]; key, value: [1, key_value_heads, tokens,
            head_size].
        attention_mask: must be None.
        segment_lengths: number of tokens of each sample, in order; their sum is ``tokens``.
        sliding_window: number of tokens that a token attends to, including itself.

    Returns:
        ([1, tokens, heads, head_size], None).

    Raises:
        NotImplementedError: the model requires an unsupported feature (a mask, soft-capped logits,
            sinks); the caller then uses the model's own attention.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    features = ("softcap", "s_aux", "position_bias")
    used = [name for name in features if kwargs.get(name) is not None]
    if segment_lengths is None or attention_mask is not None or used or query.shape[0] != 1:
        raise NotImplementedError(
            "packed attention requires segment lengths, and supports neither a mask nor"
            f" {', '.join(features)}"
        )
    outputs = []
    parts = zip(
        *(tensor.split(segment_lengths, dim=2) for tensor in (query, key, value)), strict=True
    )
    for length, (queries, keys, values) in zip(segment_lengths, parts, strict=True):
        window = _window_mask(length, sliding_window, query.device)
        output, _ = sdpa_attention_forward(
            module,
            queries,
            keys,
            values,
            window,
            dropout=dropout,
            scaling=scaling,
            is_causal=window is None,
        )
        outputs.append(output)
    return torch.cat(outputs, dim=1), None


def _window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return a boolean mask [1, 1, length, length] that is True where a token attends, or None if
    plain causal attention is equivalent."""
    if window is None or length <= window:
        return None
    distance = torch.arange(length, device=device).unsqueeze(1) - torch.arange(
        length, device=device
    )
    return ((distance >= 0) & (distance < window)).view(1, 1, length, length)


def attention_of(model: Any) -> str | None:
    """Return the name of the attention implementation of a transformers model, or None for other
    models."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None)


def install(model: Any) -> str | None:
    """Switch a transformers model that uses torch's scaled_dot_product_attention to
    :func:`packed_attention`.

    Returns:
        The name of the attention it used before, or None if nothing was changed.
    """
    from transformers import AttentionInterface

    before = attention_of(model)
    if before != "sdpa" or not hasattr(model, "set_attn_implementation"):
        return None
    AttentionInterface.register(NAME, packed_attention)
    model.set_attn_implementation(NAME)
    return str(before)
