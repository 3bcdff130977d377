"""Attention over packed rows whose tokens are divided among the ranks of a context group.

Three methods compute the same numbers as :func:`paceline.models.attention.packed_attention` over
the whole row: ``ring``, ``ulysses`` and ``gather``.
"""

import logging
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.data.collate import segment_inputs
from paceline.data.context.rows import RowDivision, divide_row
from paceline.models import attention
from paceline.models.context.blocks import ring_steps
from paceline.models.context.gather import LayerAttention, gather_attention, grouped_heads
from paceline.models.context.kernels import find_block_kernel
from paceline.models.context.methods import GATHER, RING, ULYSSES
from paceline.models.context.place import ContextPlace
from paceline.models.context.ring import Ring, ring_attention
from paceline.models.context.ulysses import ulysses_attention
from paceline.models.kernels.fused_attention import States, compute_dtype
from paceline.models.transforms.compile import outside_graphs

logger = logging.getLogger(__name__)


def context_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segment_lengths: tuple[int, ...] | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    *,
    place: ContextPlace,
    method: str,
    kernel: str,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each sample of a divided row, as an attention function of
    transformers. All ranks of the context group call it together.

    A rank that has no token of the row passes one filler token. Its output is zero, no other token
    attends to it, and its gradients are zero.

    Args:
        query: queries of this rank's tokens [1, heads, tokens, head_size]; key, value: [1,
            key_value_heads, tokens, head_size].
        attention_mask: must be None.
        segment_lengths: number of tokens of each sample of the whole row, the same on all ranks.
        cu_seqlens, max_seqlen: as in a row that is not divided.
        sliding_window: number of tokens that a token attends to, including itself.
        softcap: bound of the scores; with ``gather`` only.
        s_aux: scores without a key (attention sinks); with ``gather`` only.
        method: "ring", "ulysses" or "gather". A layer that has no kernel for blocks is computed by
            ``gather`` instead of ``ring``.
        kernel: name of the fused kernel. It is not used for tensors that it does not support.

    Returns:
        ([1, tokens, heads, head_size], None).

    Raises:
        NotImplementedError: the model requires a feature that the method does not support.
    """
    names = ["a mask", "position_bias"]
    used = [attention_mask is not None, position_bias is not None]
    if method != GATHER:
        names += ["softcap", "s_aux", "dropout"]
        used += [softcap is not None, s_aux is not None, dropout > 0]
    if segment_lengths is None or any(used) or query.shape[0] != 1:
        raise NotImplementedError(
            f"context parallelism by `{method}` requires one row per call and the lengths of its"
            f" samples, and does not support {', '.join(names)}"
        )
    division = divide_row(tuple(segment_lengths), place.group.size)
    num_local = division.num_local(place.group.rank)
    if query.shape[2] != max(num_local, 1):
        raise ValueError(
            f"rank {place.group.rank} of the context group has {num_local} tokens of the row, but"
            f" its attention was called with {query.shape[2]}"
        )
    dtype = compute_dtype(query)
    states: Any = tuple(
        each.to(dtype)[0, :, :num_local].transpose(0, 1) for each in (query, key, value)
    )
    layer = LayerAttention(module, kernel, dropout, scaling, sliding_window, softcap, s_aux)
    if method == RING:
        output = _ring(states, division, place, layer)
    elif method == ULYSSES:
        output = _ulysses(states, division, place, layer, cu_seqlens, max_seqlen)
    else:
        output = gather_attention(states, division, place.group, layer)
    if num_local == 0:
        output = torch.nn.functional.pad(output, [0, 0, 0, 0, 0, 1])
    return output.unsqueeze(0), None


def _ring(
    states: States, division: RowDivision, place: ContextPlace, layer: LayerAttention
) -> torch.Tensor:
    query, _, value = states
    kernel = find_block_kernel(query, value)
    group = place.group
    if kernel is None:
        _report_gather(place, max(query.shape[-1], value.shape[-1]))
        return gather_attention(states, division, group, layer)
    steps = ring_steps(division.lengths, division.size, group.rank, layer.window)
    scale = query.shape[-1] ** -0.5 if layer.scaling is None else layer.scaling
    return ring_attention(states, Ring(group, steps, scale, kernel))


def _report_gather(place: ContextPlace, head_size: int) -> None:
    """Say once for each head size that its layers are computed by another method."""
    if head_size not in place.gathered_head_sizes:
        place.gathered_head_sizes.add(head_size)
        text = UserText(
            "context: layers with heads of size {head_size} exchange keys and values by `gather`,"
            " not by `ring`, because there is no kernel for blocks with heads of this size",
            code="context-layers-gathered",
            head_size=head_size,
        )
        logger.warning(text)


def _ulysses(
    states: States,
    division: RowDivision,
    place: ContextPlace,
    layer: LayerAttention,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
) -> torch.Tensor:
    heads, size = states[0].shape[1], place.group.size
    if heads % size:
        raise NotImplementedError(
            f"context parallelism by `{ULYSSES}` divides the query heads of a layer among the"
            f" ranks, but {heads} heads cannot be divided among {size}"
        )
    if cu_seqlens is None or max_seqlen is None:
        segments = segment_inputs(division.lengths, states[0].device)
        cu_seqlens, max_seqlen = segments["cu_seqlens"], segments["max_seqlen"]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output, _ = attention.packed_attention(
            grouped_heads(query.shape[1], key.shape[1]),
            query,
            key,
            value,
            None,
            scaling=layer.scaling,
            segment_lengths=division.lengths,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            sliding_window=layer.window,
            kernel=layer.kernel,
        )
        return output

    return ulysses_attention(states, division, place.group, attend)


def install_context(model: Any, place: ContextPlace, method: str, kernel: str) -> None:
    """Switch a transformers model to :func:`context_attention`. In a vision-language model, only
    the language model is switched.

    Args:
        method: "ring", "ulysses" or "gather".
        kernel: name of the fused kernel, for tensors that it supports.

    Raises:
        ConfigError: the attention of the model cannot be replaced.
    """
    from transformers import AttentionInterface

    compute = outside_graphs(model, context_attention)
    AttentionInterface.register(
        attention.CONTEXT_NAME, partial(compute, place=place, method=method, kernel=kernel)
    )
    if not attention.replace_attention(model, attention.CONTEXT_NAME):
        raise _fixed_attention(model)
    _join_group(place)


def _join_group(place: ContextPlace) -> None:
    """Let all ranks of a group use it together. NCCL requires this of the first use, and in the
    ring, some ranks may have nothing to send."""
    group = place.group
    if group.size > 1 and group.has_peers and dist.get_backend(group.group) != "gloo":
        group.barrier()


def _fixed_attention(model: Any) -> ConfigError:
    return ConfigError(
        "context parallelism is not supported with {kind}: its attention cannot be replaced",
        code="context-attention-fixed",
        fix="leave `parallel.context` out, or train another model",
        kind=type(model).__name__,
    )
