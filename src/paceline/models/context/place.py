"""The place of a rank among the ranks that divide each row of tokens, and sums over them."""

from typing import Any

import torch

from paceline.distributed.communicator import Communicator


class ContextPlace:
    """A rank of a context group.

    Args:
        group: the ranks that divide each row. A copy in a loader process has none.

    Attributes:
        gathered_head_sizes: sizes of the heads of layers that had no kernel for blocks in the ring
            and exchanged all keys and values instead.
    """

    gathered_head_sizes: set[int]

    def __init__(self, group: Communicator) -> None:
        self._group: Communicator | None = group
        self.rank, self.size = group.rank, group.size
        self.gathered_head_sizes = set()

    @property
    def group(self) -> Communicator:
        assert self._group is not None, "a loader process is in no group"
        return self._group

    def __getstate__(self) -> tuple[int, int]:
        return self.rank, self.size

    def __setstate__(self, state: tuple[int, int]) -> None:
        self._group = None
        self.rank, self.size = state
        self.gathered_head_sizes = set()


class _SumOverParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, place: ContextPlace) -> torch.Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        place.group.wait(place.group.all_reduce(total))
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def sum_over_parts(values: torch.Tensor, place: ContextPlace) -> torch.Tensor:
    """Sum the values that the ranks of a group have computed from their parts of a row.

    Every rank computes the same loss from the sum, and in backward the gradient of its own part;
    the gradients of the ranks are added later.
    """
    result: torch.Tensor = _SumOverParts.apply(values, place)  # type: ignore[no-untyped-call]
    return result
