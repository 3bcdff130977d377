"""Attention of blocks of queries and keys, with what is needed to merge the results."""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch

from paceline.distributed import torch_compat
from paceline.distributed.host_copies import tensor_of
from paceline.models.attention import has_varlen
from paceline.models.context.blocks import CAUSAL, FULL, AttentionBlock, TokenRange, Window
from paceline.models.kernels.attention_choice import VARLEN
from paceline.models.kernels.fused_attention import States, usable_kernel


class BlockOutput(NamedTuple):
    """The attention of the queries of some blocks to their keys.

    Args:
        queries: ranges of the queries.
        output: [queries, heads, head_size].
        lse: logarithm of the sum of the exponentials of the scores [queries, heads].
    """

    queries: Sequence[TokenRange]
    output: torch.Tensor
    lse: torch.Tensor


class BlockGrads(NamedTuple):
    """Gradients of the queries, keys and values of some blocks.

    Args:
        queries: ranges of the queries.
        keys: ranges of the keys.
        query_grad: [queries, heads, head_size].
        key_grad, value_grad: [keys, key_heads, head_size].
    """

    queries: Sequence[TokenRange]
    keys: Sequence[TokenRange]
    query_grad: torch.Tensor
    key_grad: torch.Tensor
    value_grad: torch.Tensor


class MergedOutput(NamedTuple):
    """The attention of queries to all of their keys, and its gradient.

    Args:
        output: [queries, heads, head_size].
        lse: [queries, heads].
        grad: gradient of the output.
    """

    output: torch.Tensor
    lse: torch.Tensor
    grad: torch.Tensor


class BlockKernel(Protocol):
    """Computes blocks of [tokens, heads, head_size].

    Args:
        head_multiple: head sizes must be multiples of this number.
    """

    head_multiple: int

    def forward(
        self, states: States, blocks: Sequence[AttentionBlock], scale: float
    ) -> Iterator[BlockOutput]: ...

    def backward(
        self, states: States, blocks: Sequence[AttentionBlock], scale: float, merged: MergedOutput
    ) -> Iterator[BlockGrads]: ...


def find_block_kernel(query: torch.Tensor, value: torch.Tensor) -> BlockKernel | None:
    """Return the kernel for such queries and values, or None if there is none."""
    if usable_kernel(VARLEN, query, value) is not None and has_varlen():
        return VarlenBlocks()
    return CpuBlocks() if query.device.type == "cpu" else None


class CpuBlocks:
    """Computes each block by a call of torch's flash attention for CPUs."""

    head_multiple = 1

    def forward(
        self, states: States, blocks: Sequence[AttentionBlock], scale: float
    ) -> Iterator[BlockOutput]:
        for block in blocks:
            output, lse = torch_compat.flash_for_cpu(
                *_as_rows(states, block), scale, block.window == CAUSAL, _mask(block, states[0])
            )
            yield BlockOutput([block.queries], _as_tokens(output), lse.squeeze(0).transpose(0, 1))

    def backward(
        self, states: States, blocks: Sequence[AttentionBlock], scale: float, merged: MergedOutput
    ) -> Iterator[BlockGrads]:
        for block in blocks:
            part = slice(*block.queries)
            grads = torch_compat.flash_for_cpu_backward(
                _as_row(merged.grad[part]),
                _as_rows(states, block),
                _as_row(merged.output[part]),
                merged.lse[part].transpose(0, 1).unsqueeze(0),
                scale,
                block.window == CAUSAL,
                _mask(block, states[0]),
            )
            yield BlockGrads([block.queries], [block.keys], *map(_as_tokens, grads))


def _as_row(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, 1).unsqueeze(0)


def _as_tokens(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.squeeze(0).transpose(0, 1)


def _as_rows(states: States, block: AttentionBlock) -> States:
    query, key, value = states
    queries, keys = slice(*block.queries), slice(*block.keys)
    return _as_row(query[queries]), _as_row(key[keys]), _as_row(value[keys])


def _mask(block: AttentionBlock, query: torch.Tensor) -> torch.Tensor | None:
    """Return what is added to the scores of a block [queries, keys], or None if the kernel needs no
    mask."""
    if block.window in (FULL, CAUSAL):
        return None
    visible = visible_keys(block.num_queries, block.num_keys, block.window, query)
    return query.new_zeros(visible.shape).masked_fill_(~visible, -torch.inf)


def visible_keys(
    num_queries: int, num_keys: int, window: Window, like: torch.Tensor
) -> torch.Tensor:
    """Return a mask [queries, keys] that is True where a query attends to a key.

    Args:
        like: a tensor on the device of the mask.
    """
    # Created from a tensor, because backward may compute it again in a thread that does not know
    # that its tensors have no values.
    visible = like.new_ones(num_queries, num_keys, dtype=torch.bool)
    diagonal = num_keys - num_queries
    if window.left >= 0:
        visible = visible.triu(diagonal - window.left)
    if window.right >= 0:
        visible = visible.tril(diagonal + window.right)
    return visible


class VarlenBlocks:
    """Computes all blocks with the same window in one call of torch's varlen_attn, in 16 bits on a
    GPU."""

    head_multiple = 8

    def forward(
        self, states: States, blocks: Sequence[AttentionBlock], scale: float
    ) -> Iterator[BlockOutput]:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        query, key, value = states
        for call in _calls(blocks, query):
            output, lse = varlen_attn(
                take(query, call.queries),
                take(key, call.keys),
                take(value, call.keys),
                *call.cu_seqlens,
                *call.max_seqlens,
                return_aux=AuxRequest(lse=True),
                scale=scale,
                window_size=call.window,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            yield BlockOutput(call.queries, output, lse.transpose(0, 1))

    def backward(
        self, states: States, blocks: Sequence[AttentionBlock], scale: float, merged: MergedOutput
    ) -> Iterator[BlockGrads]:
        query, key, value = states
        for call in _calls(blocks, query):
            grads = torch_compat.varlen_backward(
                take(merged.grad, call.queries),
                (take(query, call.queries), take(key, call.keys), take(value, call.keys)),
                take(merged.output, call.queries),
                take(merged.lse, call.queries).transpose(0, 1).contiguous(),
                call.cu_seqlens,
                call.max_seqlens,
                scale,
                call.window,
            )
            yield BlockGrads(call.queries, call.keys, *grads)


class _VarlenCall(NamedTuple):
    """Blocks with the same window, as arguments of varlen_attn."""

    queries: list[TokenRange]
    keys: list[TokenRange]
    cu_seqlens: tuple[torch.Tensor, torch.Tensor]
    max_seqlens: tuple[int, int]
    window: Window


def _calls(blocks: Sequence[AttentionBlock], like: torch.Tensor) -> Iterator[_VarlenCall]:
    groups: dict[Window, list[AttentionBlock]] = {}
    for block in blocks:
        groups.setdefault(block.window, []).append(block)
    for window, group in groups.items():
        queries = tuple(block.num_queries for block in group)
        keys = tuple(block.num_keys for block in group)
        if window == FULL and max(queries) == 1:
            # For single queries without a window, flash attention exchanges heads and tokens, and
            # leaves the log-sum-exp in that order.
            window = Window(max(keys), -1)
        yield _VarlenCall(
            [block.queries for block in group],
            [block.keys for block in group],
            (cumulative(queries, like), cumulative(keys, like)),
            (max(queries), max(keys)),
            window,
        )


def cumulative(lengths: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return the cumulative sum of lengths, int32 [lengths + 1], on the device of a tensor."""
    if not torch_compat.has_values(like):
        return like.new_empty(len(lengths) + 1, dtype=torch.int32)
    return _cumulative(lengths, like.device)


@lru_cache(maxsize=256)  # all layers need the same few tensors, so the host copies each once
def _cumulative(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return tensor_of([0, *accumulate(lengths)], torch.int32, device)


def take(tensor: torch.Tensor, ranges: Sequence[TokenRange]) -> torch.Tensor:
    """Return the tokens of some ranges, in this order; without a copy if they are adjacent."""
    parts = [tensor[start:stop] for start, stop in runs(ranges)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def runs(ranges: Iterable[TokenRange]) -> list[TokenRange]:
    """Join ranges that follow on each other."""
    joined: list[TokenRange] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def split_runs(
    ranges: Sequence[TokenRange], *tensors: torch.Tensor
) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """Yield each run of ranges with the part of the tensors that belongs to it. The inverse of
    :func:`take`."""
    before = 0
    for start, stop in runs(ranges):
        part = slice(before, before + stop - start)
        yield slice(start, stop), [tensor[part] for tensor in tensors]
        before = part.stop
