"""The collectives of tensor parallelism as differentiable operations.

Each is its own pair: what one does in forward its counterpart does in backward (Shoeybi et al.,
"Megatron-LM", 2019, section 3: f and g; Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models", 2022, section 4.2.2: the same along the tokens). All ranks of the group
issue the same collectives in the same order, as their graphs are the same.
"""

from collections.abc import Callable
from typing import Any

import torch

from paceline.distributed.communicator import Communicator

_Op = Callable[[torch.Tensor], torch.Tensor]


def _all_reduced(tensor: torch.Tensor, group: Communicator) -> torch.Tensor:
    # A copy: autograd may have handed the same gradient to somebody else.
    result = tensor.contiguous().clone() if tensor.is_contiguous() else tensor.contiguous()
    group.wait(group.all_reduce(result))
    return result


def _gathered(tensor: torch.Tensor, dim: int, group: Communicator) -> torch.Tensor:
    """The ranks' tensors of one shape, side by side along ``dim``."""
    tensor = tensor.contiguous()
    stacked = torch.empty((group.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    group.wait(group.all_gather(stacked.view(-1), tensor.view(-1)))
    shape = list(tensor.shape)
    shape[dim] *= group.size
    return stacked.movedim(0, dim).reshape(shape)


def _own_part(tensor: torch.Tensor, dim: int, group: Communicator) -> torch.Tensor:
    return tensor.chunk(group.size, dim)[group.rank].contiguous()


def _pad(tensor: torch.Tensor, group: Communicator) -> torch.Tensor:
    """[rows, tokens, …] with zeros after the tokens, so that they divide by the ranks."""
    missing = -tensor.shape[1] % group.size
    if not missing:
        return tensor
    zeros = tensor.new_zeros((tensor.shape[0], missing, *tensor.shape[2:]))
    return torch.cat([tensor, zeros], dim=1)


def _own_tokens(tensor: torch.Tensor, group: Communicator) -> torch.Tensor:
    return _own_part(_pad(tensor, group), 1, group)


def _gather_tokens(tensor: torch.Tensor, tokens: int, group: Communicator) -> torch.Tensor:
    return _gathered(tensor, 1, group).narrow(1, 0, tokens)


def _scatter_tokens(tensor: torch.Tensor, group: Communicator) -> torch.Tensor:
    """Sum over the ranks of [rows, tokens, width]; each keeps its part of the tokens."""
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
    def forward(ctx: Any, x: torch.Tensor, there: _Op, back: _Op) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grad), None, None


def _paired(x: torch.Tensor, there: _Op, back: _Op) -> torch.Tensor:
    """``there(x)``, whose gradient goes through ``back``."""
    return _Pair.apply(x, there, back)  # type: ignore[no-any-return, no-untyped-call]


def sum_gradient(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    """Megatron's f: x as it is; its gradient is the sum over the ranks."""
    return _paired(x, lambda tensor: tensor.view_as(tensor), lambda grad: _all_reduced(grad, group))


def sum_parts(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    """Megatron's g: the sum over the ranks; the gradient goes back as it is."""
    return _paired(x, lambda tensor: _all_reduced(tensor, group), lambda grad: grad)


def gather_features(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    """Parts of the last dimension put together; what follows is the same on every rank."""
    last = x.dim() - 1
    return _paired(
        x, lambda tensor: _gathered(tensor, last, group), lambda grad: _own_part(grad, last, group)
    )


def split_features(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    """This rank's part of the last dimension."""
    last = x.dim() - 1
    return _paired(
        x, lambda tensor: _own_part(tensor, last, group), lambda grad: _gathered(grad, last, group)
    )


def enter_tokens(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    """This rank's part of the tokens of [rows, tokens, …], padded with zeros so that the parts are
    equal."""
    tokens = x.shape[1]
    return _paired(
        x,
        lambda tensor: _own_tokens(tensor, group),
        lambda grad: _gather_tokens(grad, tokens, group),
    )


def leave_tokens(x: torch.Tensor, tokens: int, group: Communicator) -> torch.Tensor:
    """The parts of the tokens put together; what follows is the same on every rank."""
    return _paired(
        x,
        lambda tensor: _gather_tokens(tensor, tokens, group),
        lambda grad: _own_tokens(grad, group),
    )


def gather_tokens(x: torch.Tensor, tokens: int, group: Communicator) -> torch.Tensor:
    """The parts of the tokens put together for layers that are cut; the gradient is summed over the
    ranks."""
    return _paired(
        x,
        lambda tensor: _gather_tokens(tensor, tokens, group),
        lambda grad: _scatter_tokens(grad, group),
    )


def scatter_tokens(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    """Sum over the ranks, of which each keeps its part of the tokens."""
    tokens = x.shape[1]
    return _paired(
        x,
        lambda tensor: _scatter_tokens(tensor, group),
        lambda grad: _gather_tokens(grad, tokens, group),
    )


def low_precision(x: torch.Tensor) -> torch.Tensor:
    """x in the type in which autocast's linear layers compute: what passes between the ranks is
    then half as much."""
    kind = x.device.type
    if x.is_floating_point() and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x
