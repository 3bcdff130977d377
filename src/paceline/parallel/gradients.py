"""Backward over micro-batches and clipping, as most strategies do them."""

from collections.abc import Callable

import torch
from torch import nn

from paceline.models.blocks import BATCH_NORMS
from paceline.parallel.base import (
    MicroStep,
)
from paceline.parallel.ddp.buckets import GradientBuckets


def accumulate(
    micro_step: MicroStep, model: nn.Module, num_micro_batches: int, before_last: Callable[[], None]
) -> None:
    """Forward and backward of each micro-batch; ``before_last`` is called when the last one's
    backward is to begin."""
    for number in range(num_micro_batches):
        loss = micro_step(number, model)
        if number == num_micro_batches - 1:
            before_last()
        loss.backward()


def reduce_in_backward(
    buckets: GradientBuckets,
    micro_step: MicroStep,
    model: nn.Module,
    num_micro_batches: int,
    on_computed: Callable[[], None] | None = None,
) -> None:
    """Forward and backward of each micro-batch, while the last one's backward sends the buckets.
    ``on_computed`` is called before waiting for other ranks."""
    buckets.zero()
    accumulate(micro_step, model, num_micro_batches, buckets.start_reducing)
    if on_computed is not None:
        on_computed()
    buckets.finish()


def clip_to(
    max_norm: float, norm: torch.Tensor, scale: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """Have ``scale`` multiply gradients of ``norm`` (float32) so that it is at most ``max_norm``,
    where that is > 0.

    Returns:
        The norm as it was.
    """
    if max_norm > 0:
        scale(clip_factor(norm, max_norm))
    return norm


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients of ``norm`` (float32) are multiplied by. As torch.nn.utils.clip_grad_norm_:
    never scales up. No branch on the value, so no wait for the device.

    The factor is rounded to 18 bits (a relative 2e-6). The norm's last bits depend on the order in
    which elements are added up, and so on the strategy; with them each scaled gradient would round
    otherwise, and Adam makes much of that where a gradient is near zero. Rounded, all strategies
    clip by the same factor.
    """
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # the update is skipped then; gradients are left as they are, to see whose it was
    factor = factor.nan_to_num(nan=1.0)
    return ((factor.view(torch.int32) + 16) & ~31).view(torch.float32)


def changing_buffers(model: nn.Module) -> list[torch.Tensor]:
    """The running statistics of normalisation layers, which each rank would gather from its own
    share."""
    return [
        one
        for module in model.modules()
        if isinstance(module, BATCH_NORMS)
        for one in module.buffers()
    ]


def batch_norm_parameters(model: nn.Module) -> frozenset[nn.Parameter]:
    """Parameters of batch and instance normalisations: beside float32 running statistics they must
    be float32 too."""
    return frozenset(
        one
        for module in model.modules()
        if isinstance(module, BATCH_NORMS)
        for one in module.parameters(recurse=False)
    )
