"""The collectives of tensor parallelism as differentiable operations.

They come in pairs: the forward of one is the backward of the other (Shoeybi et al., "Megatron-LM",
2019, section 3: f and g; Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022, section 4.2.2: the same along the tokens). All ranks of the group issue
the same collectives in the same order, because their graphs are the same.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from paceline.distributed.communicator import Communicator

_Op = Callable[[torch.Tensor], torch.Tensor]


def _all_reduced(tensor: torch.Tensor, group: Communicator) -> torch.Tensor:
    # A copy, since autograd may use the same gradient elsewhere.
    result = tensor.clone(memory_format=torch.contiguous_format)
    group.wait(group.all_reduce(result))
    return result


def _gathered(tensor: torch.Tensor, dim: int, group: Communicator) -> torch.Tensor:
    """Concatenate the ranks' tensors, which have the same shape, along ``dim``."""
    tensor = tensor.contiguous()
    shape = list(tensor.shape)
    shape[dim] *= group.size
    if math.prod(tensor.shape[:dim]) == 1:  # the parts follow each other in memory
        result = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        group.wait(group.all_gather(result.view(-1), tensor.view(-1)))
        return result
    stacked = torch.empty((group.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    group.wait(group.all_gather(stacked.view(-1), tensor.view(-1)))
    return stacked.movedim(0, dim).reshape(shape)


def _local_part(tensor: torch.Tensor, dim: int, group: Communicator) -> torch.Tensor:
    return tensor.chunk(group.size, dim)[group.rank].contiguous()


def _pad(tensor: torch.Tensor, group: Communicator) -> torch.Tensor:
    """Append zeros to the tokens of [rows, tokens, …], so that the ranks divide their number."""
    missing = -tensor.shape[1] % group.size
    if not missing:
        return tensor
    zeros = tensor.new_zeros((tensor.shape[0], missing, *tensor.shape[2:]))
    return torch.cat([tensor, zeros], dim=1)


def _local_tokens(tensor: torch.Tensor, group: Communicator) -> torch.Tensor:
    return _local_part(_pad(tensor, group), 1, group)


def _gather_tokens(tensor: torch.Tensor, tokens: int, group: Communicator) -> torch.Tensor:
    gathered = _gathered(tensor, 1, group)
    if gathered.shape[1] == tokens:
        return gathered
    # Not a view: models view it in another shape, and FSDP's hooks need an output of its own.
    return gathered.narrow(1, 0, tokens).clone(memory_format=torch.contiguous_format)


def _scatter_tokens(tensor: torch.Tensor, group: Communicator) -> torch.Tensor:
    """Sum [rows, tokens, width] over the ranks; each rank gets its part of the tokens."""
    padded = _pad(tensor, group)
    rows, tokens = padded.shape[:2]
    by_rank = (
        padded.reshape(rows, group.size, tokens // group.size, *padded.shape[2:])
        .movedim(1, 0)
        .contiguous()
    )
    result = torch.empty(by_rank.shape[1:], dtype=tensor.dtype, device=tensor.device)
    group.wait(group.reduce_scatter(result.view(-1), by_rank.view(-1)))
    return result


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: _Op, backward: _Op) -> torch.Tensor:
        ctx.run_backward = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.run_backward(grad), None, None


def _apply(x: torch.Tensor, forward: _Op, backward: _Op) -> torch.Tensor:
    """Return ``forward(x)``; the gradient is computed by ``backward``."""
    return _Pair.apply(x, forward, backward)  # type: ignore[no-any-return, no-untyped-call]


def sum_gradient(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    """Return ``x``, whose gradient is summed over the ranks: Megatron's f."""
    return _apply(x, lambda tensor: tensor.view_as(tensor), lambda grad: _all_reduced(grad, group))


def sum_parts(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    """Sum ``x`` over the ranks; the gradient is unchanged: Megatron's g."""
    return _apply(x, lambda tensor: _all_reduced(tensor, group), lambda grad: grad)


def gather_features(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    """Gather the parts of the last dimension, for computations that are the same on all ranks."""
    last = x.dim() - 1
    return _apply(
        x,
        lambda tensor: _gathered(tensor, last, group),
        lambda grad: _local_part(grad, last, group),
    )


def gather_rows(x: torch.Tensor, size: int, group: Communicator) -> torch.Tensor:
    """Gather the parts of the last dimension, for computations that are the same on all ranks. The
    parts of the first ranks may have one element more.

    Args:
        size: number of elements of all parts.
    """
    share, rest = divmod(size, group.size)
    if not rest:
        return gather_features(x, group)
    gathered = gather_features(functional.pad(x, (0, share + 1 - x.shape[-1])), group)
    longer, padded = gathered.unflatten(-1, (group.size, share + 1)).split(
        [rest, group.size - rest], dim=-2
    )
    return torch.cat([longer.flatten(-2), padded[..., :share].flatten(-2)], dim=-1)


def split_features(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    """Return this rank's part of the last dimension."""
    last = x.dim() - 1
    return _apply(
        x,
        lambda tensor: _local_part(tensor, last, group),
        lambda grad: _gathered(grad, last, group),
    )


def enter_tokens(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    """Return this rank's part of the tokens of [rows, tokens, …], padded to equal parts."""
    tokens = x.shape[1]
    return _apply(
        x,
        lambda tensor: _local_tokens(tensor, group),
        lambda grad: _gather_tokens(grad, tokens, group),
    )


def leave_tokens(x: torch.Tensor, tokens: int, group: Communicator) -> torch.Tensor:
    """Gather the parts of the tokens, for computations that are the same on all ranks."""
    return _apply(
        x,
        lambda tensor: _gather_tokens(tensor, tokens, group),
        lambda grad: _local_tokens(grad, group),
    )


def gather_tokens(x: torch.Tensor, tokens: int, group: Communicator) -> torch.Tensor:
    """Gather the parts of the tokens for tensor-parallel layers; the gradient is summed over the
    ranks."""
    return _apply(
        x,
        lambda tensor: _gather_tokens(tensor, tokens, group),
        lambda grad: _scatter_tokens(grad, group),
    )


def scatter_tokens(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    """Sum ``x`` over the ranks; each rank gets its part of the tokens."""
    tokens = x.shape[1]
    return _apply(
        x,
        lambda tensor: _scatter_tokens(tensor, group),
        lambda grad: _gather_tokens(grad, tokens, group),
    )


def low_precision(x: torch.Tensor) -> torch.Tensor:
    """Cast ``x`` to the dtype in which autocast's linear layers compute, which halves the
    traffic."""
    kind = x.device.type
    if x.is_floating_point() and kind != "meta" and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x
