"""Attention with all tokens of some heads on each rank (Jacobs et al., "DeepSpeed Ulysses", 2023):
an exchange gives each rank all tokens of its share of the heads, and another one gives it back all
heads of its tokens."""

from collections.abc import Callable
from math import gcd

import torch

from paceline.data.context.rows import RowDivision
from paceline.distributed.communicator import Communicator
from paceline.models.context.exchange import (
    exchange,
    in_rank_order,
    in_row_order,
    split_widths,
)
from paceline.models.kernels.fused_attention import States

#: Returns the attention [1, tokens, heads, head_size] of a row's queries, keys and values
#: [1, heads, tokens, head_size].
RowAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ulysses_attention(
    states: States, division: RowDivision, group: Communicator, attend: RowAttention
) -> torch.Tensor:
    """Compute the attention of this rank's queries.

    Args:
        states: queries, keys and values [tokens of this rank, heads, head_size]; the number of
            query heads must be a multiple of the number of ranks.
        attend: attention over the row for a share of the heads.

    Returns:
        [tokens of this rank, heads, head_size of the values].
    """
    size = group.size
    query, key, value = states
    repeats = key_repeats(key.shape[1], size)
    if repeats > 1:
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    shares = [_by_rank(each, size) for each in (query, key, value)]
    own = query.shape[0]
    counts = [division.num_local(rank) for rank in range(size)]
    sent = torch.cat(shares, dim=-1).flatten(0, 1)
    received = exchange(group, sent, [own] * size, counts)
    row = in_row_order(received.split(counts), division)
    parts = split_widths(row, [share.shape[-1] for share in shares])
    heads = [each.shape[1] // size for each in (query, key, value)]
    whole = [
        part.unflatten(-1, (count, -1)).transpose(0, 1).unsqueeze(0)
        for part, count in zip(parts, heads, strict=True)
    ]
    output = attend(*whole).squeeze(0).flatten(1)
    returned = exchange(group, in_rank_order(output, division), counts, [own] * size)
    width = value.shape[-1]
    return returned.view(size, own, heads[0], width).transpose(0, 1).flatten(1, 2)


def _by_rank(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Divide [tokens, heads, head_size] into [ranks, tokens, share of the heads × head_size]."""
    tokens, heads, width = tensor.shape
    return tensor.reshape(tokens, size, heads // size * width).transpose(0, 1)


def key_repeats(key_heads: int, size: int) -> int:
    """Return how often each key head is repeated, so that each rank has the key heads of its query
    heads."""
    return size // gcd(key_heads, size)
