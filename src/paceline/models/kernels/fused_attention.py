"""Attention over the samples of a row in one call of a fused kernel on a GPU."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from paceline.models.kernels.attention_choice import (
    MAX_HEAD_SIZE,
    VARLEN,
    FusedKernel,
    fused_kernel,
)

#: torch's fused kernel requires head sizes that are multiples of this number.
_HEAD_MULTIPLE = 8
#: Where fused kernels run.
_FUSED_DEVICE, _FUSED_DTYPES = "cuda", (torch.bfloat16, torch.float16)

#: Queries, keys and values.
States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class SampleEnds(NamedTuple):
    """Where samples end among the tokens of a row.

    Args:
        cu_seqlens: cumulative sum of their numbers of tokens, int32 [samples + 1].
        max_seqlen: the longest of them.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int


def usable_kernel(
    kernel: str, query: torch.Tensor, value: torch.Tensor, dropout: float = 0.0
) -> FusedKernel | None:
    """Return the fused kernel of that name if it computes such queries and values, else None."""
    if query.device.type != _FUSED_DEVICE or compute_dtype(query) not in _FUSED_DTYPES:
        return None
    fused = fused_kernel(kernel)
    if fused is not None and dropout > 0 and not fused.has_dropout:
        return None
    # Some layers of a model may have larger heads than its config says.
    return None if max(query.shape[-1], value.shape[-1]) > MAX_HEAD_SIZE else fused


def fused_attention(
    kernel: str,
    states: States,
    queries: SampleEnds,
    keys: SampleEnds,
    scaling: float | None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute causal attention within each sample by a fused kernel. If a sample has more keys than
    queries, its queries are its last tokens.

    Args:
        kernel: name of a kernel that :func:`usable_kernel` returns for these states.
        states: [1, heads, tokens, head_size] each.

    Returns:
        [1, queries, heads, head_size].
    """
    query, key, value = states
    dtype = compute_dtype(query)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    compute: _Compute
    if kernel == VARLEN:
        compute = partial(
            _varlen,
            cu_seqlens=queries.cu_seqlens,
            max_seqlen=queries.max_seqlen,
            scale=scale,
            window=sliding_window,
            keys=keys,
        )
    else:
        compute = partial(
            _flash_attn,
            kernel=kernel,
            dropout=dropout,
            softmax_scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            cu_seq_lens_q=queries.cu_seqlens,
            cu_seq_lens_k=keys.cu_seqlens,
            max_length_q=queries.max_seqlen,
            max_length_k=keys.max_seqlen,
        )
    return _with_equal_heads(compute, query.to(dtype), key.to(dtype), value.to(dtype))


def compute_dtype(query: torch.Tensor) -> torch.dtype:
    """Return the data type in which autocast computes matrix products; outside of autocast, the
    data type of the queries. Rotary embeddings return float32 under autocast."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def _with_equal_heads(
    compute: _Compute, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Call a fused kernel with [tokens, heads, head_size]. Queries, keys and values are padded with
    zeros to the same head size, a multiple of 8; in multi-head latent attention, values are
    narrower than keys. Padding changes no score and no result."""
    width = value.shape[-1]
    size = max(query.shape[-1], width)
    size += -size % _HEAD_MULTIPLE
    query, key, value = (
        functional.pad(tensor, [0, size - tensor.shape[-1]]) if tensor.shape[-1] != size else tensor
        for tensor in (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    )
    return compute(query, key, value)[..., :width].unsqueeze(0)


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    window: int | None,
    keys: SampleEnds | None = None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu_keys, max_keys = (cu_seqlens, max_seqlen) if keys is None else keys
    # The window of the kernel does not count the token itself; -1: unlimited.
    left = -1 if window is None or window >= max_keys else window - 1
    result: torch.Tensor = varlen_attn(  # type: ignore[assignment]  # a tuple with return_aux
        query,
        key,
        value,
        cu_seqlens,
        cu_keys,
        max_seqlen,
        max_keys,
        scale=scale,
        window_size=(left, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return result


def _flash_attn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, kernel: str, **options: Any
) -> torch.Tensor:
    from transformers import modeling_flash_attention_utils

    result: torch.Tensor = modeling_flash_attention_utils._flash_attention_forward(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        None,
        query_length=query.shape[0],
        is_causal=True,
        attn_implementation=kernel,
        **options,
    )
    return result.squeeze(0)
