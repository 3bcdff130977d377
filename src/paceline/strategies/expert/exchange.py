"""Compute the experts of a layer that several ranks divide: each rank sends the hidden states of
its tokens to the ranks of the tokens' experts, and gets the results back.

After Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic
Sharding" (2020), section 3.2, without a capacity: the sizes of the messages are uneven, and no
token is dropped. The host reads the sizes in each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.autograd.function import FunctionCtx

from paceline.distributed.communicator import Communicator

#: Computes experts: hidden states [rows, features], experts and weights [rows, experts of a row].
ExpertsForward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class ExchangedRows:
    """Numbers of hidden states that a rank has sent to and received from other ranks, in a number
    of forward passes of layers."""

    sent: int = 0
    received: int = 0
    passes: int = 0

    def add(self, rank: int, sent_sizes: list[int], received_sizes: list[int]) -> None:
        self.sent += sum(sent_sizes) - sent_sizes[rank]
        self.received += sum(received_sizes) - received_sizes[rank]
        self.passes += 1

    def take(self) -> tuple[float, float]:
        """Return the means per pass since the last call."""
        passes = max(1, self.passes)
        means = self.sent / passes, self.received / passes
        self.sent = self.received = self.passes = 0
        return means


def compute_divided_experts(
    forward: ExpertsForward,
    group: Communicator,
    num_local: int,
    counts: ExchangedRows,
    hidden: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, [tokens, features]. A collective of the
    group, also for a rank without tokens.

    Args:
        forward: function that computes this rank's experts, which it numbers from 0.
        group: the ranks that divide the experts, in the order of the experts.
        num_local: number of experts of each rank.
        counts: where the exchange is counted.
        hidden: hidden states of this rank's tokens, [tokens, features].
        indices: experts of each token, [tokens, experts of a token].
        weights: weight of each of them, of the same shape.
    """
    flat = indices.reshape(-1)
    order = flat.argsort(stable=True)
    rows = hidden[order // indices.shape[-1]]
    sent = torch.zeros(num_local * group.size, dtype=torch.int64, device=hidden.device)
    sent = sent.scatter_add_(0, flat, torch.ones_like(flat)).view(group.size, num_local)
    received = torch.empty_like(sent)
    group.wait(group.all_to_all(received, sent))
    if group.has_peers:
        sent_sizes, received_sizes = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    else:  # a simulation, whose tensors have no values: each expert gets the same number
        sent_sizes = received_sizes = _equal_sizes(flat.numel(), group.size)
    counts.add(group.rank, sent_sizes, received_sizes)
    rows = _exchange(rows, group, sent_sizes, received_sizes)
    experts = torch.arange(num_local, device=hidden.device).repeat(group.size)
    experts = experts.repeat_interleave(received.reshape(-1), output_size=sum(received_sizes))
    results = _compute(forward, rows, experts.unsqueeze(-1))
    results = _exchange(results, group, received_sizes, sent_sizes)
    in_order = cast(torch.Tensor, _TokenOrder.apply(results, order))  # type: ignore[no-untyped-call]
    parts = in_order.view(*indices.shape, results.shape[-1]) * weights.unsqueeze(-1)
    return parts.sum(1).to(hidden.dtype)


def _equal_sizes(total: int, count: int) -> list[int]:
    return [total // count + (number < total % count) for number in range(count)]


def _compute(forward: ExpertsForward, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Compute rows with weight 1. Without rows, the result still depends on them and on the
    parameters, so that backward runs on this rank as on the others."""
    is_empty = rows.shape[0] == 0
    if is_empty:
        rows, experts = rows.sum(0, keepdim=True), experts.new_zeros((1, 1))
    result = forward(rows, experts, torch.ones_like(experts, dtype=rows.dtype))
    return result[:0] if is_empty else result


def _exchange(
    rows: torch.Tensor, group: Communicator, sent_sizes: list[int], received_sizes: list[int]
) -> torch.Tensor:
    """Send consecutive rows to the ranks of the group, and return the rows that they send."""
    apply: Any = _TokenExchange.apply
    result: Any = apply(rows, group, sent_sizes, received_sizes)
    return cast(torch.Tensor, result)


class _TokenOrder(torch.autograd.Function):
    """Rows in the order of the tokens. Unlike ``index_copy``, keeps only their positions for
    backward, and not the rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(positions)
        return torch.empty_like(rows).index_copy_(0, positions, rows)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Any) -> Any:
        context: Any = ctx
        (positions,) = context.saved_tensors
        return gradients[0].index_select(0, positions), None


class _TokenExchange(torch.autograd.Function):
    """Rows in forward, and their gradients in the other direction in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        group: Communicator,
        sent_sizes: list[int],
        received_sizes: list[int],
    ) -> torch.Tensor:
        ctx.group, ctx.sizes = group, (received_sizes, sent_sizes)
        return _all_to_all(rows, group, sent_sizes, received_sizes)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Any) -> Any:
        context: Any = ctx
        return _all_to_all(gradients[0], context.group, *context.sizes), None, None, None


def _all_to_all(
    rows: torch.Tensor, group: Communicator, sent_sizes: list[int], received_sizes: list[int]
) -> torch.Tensor:
    result = rows.new_empty((sum(received_sizes), *rows.shape[1:]))
    group.wait(group.all_to_all(result, rows.contiguous(), received_sizes, sent_sizes))
    return result
