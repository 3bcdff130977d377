"""Exchanges between the ranks of a context group."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from paceline.data.context.rows import RowDivision
from paceline.distributed.communicator import Communicator, Waitable


@dataclass
class PeerMessages:
    """Messages in progress from and to one other rank each.

    Args:
        received: buffer of the message to this rank, or None if there is none.
    """

    group: Communicator
    works: Sequence[Waitable] = ()
    received: torch.Tensor | None = None
    #: Keeps the tensor until it has been sent.
    sent: torch.Tensor | None = field(default=None, repr=False)

    def wait(self) -> torch.Tensor | None:
        """Wait for the messages, and return the received one."""
        for work in self.works:
            self.group.wait(work)
        self.works, self.sent = (), None
        return self.received


def send_and_receive(
    group: Communicator,
    sent: torch.Tensor | None,
    target: int,
    received: torch.Tensor | None,
    source: int,
) -> PeerMessages:
    """Start to send a tensor to one rank of the group and to receive one from another, or the
    same, rank."""
    operations = []
    if sent is not None:
        operations.append(dist.P2POp(dist.isend, sent, group.ranks[target], group.group))
    if received is not None:
        operations.append(dist.P2POp(dist.irecv, received, group.ranks[source], group.group))
    works = dist.batch_isend_irecv(operations) if operations else ()
    return PeerMessages(group, works, received, sent)


def exchange(
    group: Communicator, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int]
) -> torch.Tensor:
    """Send the rows of a tensor to all ranks of the group, and return those that they send to this
    rank, in order of ranks. Differentiable: backward sends the gradients back.

    Args:
        tensor: [rows, width].
        sent: number of rows for each rank.
        received: number of rows from each rank.
    """
    result: torch.Tensor = _ExchangeRows.apply(tensor, group, list(sent), list(received))  # type: ignore[no-untyped-call]
    return result


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: Communicator, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _all_to_all(group, tensor, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _all_to_all(ctx.group, grad, ctx.received, ctx.sent), None, None, None


def _all_to_all(
    group: Communicator, tensor: torch.Tensor, sent: list[int], received: list[int]
) -> torch.Tensor:
    if group.size == 1:
        return tensor.clone()
    output = tensor.new_empty(sum(received), tensor.shape[1])
    work = dist.all_to_all_single(
        output, tensor.contiguous(), received, sent, group=group.group, async_op=True
    )
    group.wait(work)
    return output


def gather_rows(
    group: Communicator, tensor: torch.Tensor, division: RowDivision
) -> list[torch.Tensor]:
    """Return the tokens of every rank on every rank. Differentiable: the gradients of a rank's
    tokens are summed on that rank, in float32 if they have 16 bits.

    Args:
        tensor: [tokens of this rank, width].
    """
    counts = tuple(division.num_local(rank) for rank in range(group.size))
    gathered = _GatherRows.apply(tensor, group, max(counts))  # type: ignore[no-untyped-call]
    return [part[:count] for part, count in zip(gathered, counts, strict=True)]


class _GatherRows(torch.autograd.Function):
    """Parts are padded to the same number of rows, because they differ by a few at most."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Communicator, num_rows: int) -> torch.Tensor:
        ctx.group, ctx.num_local = group, tensor.shape[0]
        padded = tensor.new_zeros(num_rows, tensor.shape[1])
        padded[: tensor.shape[0]] = tensor
        output = tensor.new_empty(group.size, *padded.shape)
        group.wait(group.all_gather(output.view(-1), padded.view(-1)))
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        wide = grad.float() if grad.element_size() < 4 else grad
        own = wide.new_empty(wide.shape[1:])
        group = ctx.group
        group.wait(group.reduce_scatter(own.view(-1), wide.contiguous().view(-1)))
        return own[: ctx.num_local].to(grad.dtype), None, None


def in_row_order(parts: Sequence[torch.Tensor], division: RowDivision) -> torch.Tensor:
    """Return the tokens of all ranks in the order of the row.

    Args:
        parts: tokens of each rank [tokens of the rank, ...].
    """
    chunks = []
    for rank, part in enumerate(parts):
        offset = 0
        for start, stop in division.ranges(rank):
            chunks.append((start, part[offset : offset + stop - start]))
            offset += stop - start
    return torch.cat([chunk for _, chunk in sorted(chunks, key=lambda each: each[0])])


def in_rank_order(row: torch.Tensor, division: RowDivision) -> torch.Tensor:
    """Return the tokens of a row in order of ranks. The inverse of :func:`in_row_order`.

    Args:
        row: [tokens, ...].
    """
    ranges = [each for rank in range(division.size) for each in division.ranges(rank)]
    return torch.cat([row[start:stop] for start, stop in ranges])


def split_widths(tensor: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
    """Return views of the columns of a tensor.

    Args:
        widths: number of columns of each view.
    """
    ends = list(accumulate(widths))
    return [tensor[..., end - width : end] for end, width in zip(ends, widths, strict=True)]
