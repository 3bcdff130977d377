"""Backward over micro-batches and gradient clipping, shared by most strategies."""

from collections.abc import Callable

import torch
from torch import nn

from paceline.distributed.communicator import Communicator
from paceline.models.blocks import BATCH_NORMS


def clip_to(
    max_norm: float, norm: torch.Tensor, scale: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """Clip gradients whose norm is ``norm`` (float32) to ``max_norm``, if it is positive, by
    calling ``scale`` with a factor. Return ``norm``."""
    if max_norm > 0:
        scale(clip_factor(norm, max_norm))
    return norm


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor that clips gradients whose norm is ``norm`` (float32) to ``max_norm``. As
    in torch.nn.utils.clip_grad_norm_, the factor is at most 1. The function does not branch on the
    value, so it does not synchronize with the device.

    The factor is rounded to 18 bits (a relative error of 2e-6). The last bits of the norm depend on
    the order in which elements are added up, and so on the strategy. Without rounding, the scaled
    gradients of two strategies would differ in their last bits, which Adam amplifies if a gradient
    is near zero. With rounding, all strategies clip by the same factor.
    """
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # If the norm is NaN, the update is skipped. The gradients remain unchanged, so that they show
    # on which rank they were not finite.
    factor = factor.nan_to_num(nan=1.0)
    return ((factor.view(torch.int32) + 16) & ~31).view(torch.float32)


def changing_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Return the running statistics of normalization layers, which each rank computes from its
    share of the batch."""
    return [
        buffer
        for module in model.modules()
        if isinstance(module, BATCH_NORMS)
        for buffer in module.buffers()
    ]


def batch_norm_parameters(model: nn.Module) -> frozenset[nn.Parameter]:
    """Return the parameters of batch and instance normalization layers, which must be float32 like
    their running statistics."""
    return frozenset(
        parameter
        for module in model.modules()
        if isinstance(module, BATCH_NORMS)
        for parameter in module.parameters(recurse=False)
    )


def sum_over_ranks(values: dict[str, torch.Tensor], group: Communicator) -> dict[str, torch.Tensor]:
    """Sum values that all ranks of a group have under the same names. A collective."""
    if not values:
        return values
    flat = torch.cat([value.flatten().to(group.wide_dtype) for value in values.values()])
    group.wait(group.all_reduce(flat))
    parts = flat.split([value.numel() for value in values.values()])
    return {
        name: part.view(value.shape).to(value.dtype)
        for (name, value), part in zip(values.items(), parts, strict=True)
    }
