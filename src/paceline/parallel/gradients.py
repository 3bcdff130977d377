"""Backward over micro-batches and gradient clipping, shared by most strategies."""

from collections.abc import Callable

import torch
from torch import nn

from paceline.models.blocks import BATCH_NORMS
from paceline.parallel.base import MicroStep
from paceline.parallel.ddp.buckets import GradientBuckets


def accumulate(
    micro_step: MicroStep, model: nn.Module, num_micro_batches: int, before_last: Callable[[], None]
) -> None:
    """Run forward and backward of each micro-batch. ``before_last`` is called before the backward
    of the last one."""
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
    """Run forward and backward of each micro-batch; the buckets are sent during the last backward.
    ``on_computed`` is called before waiting for other ranks."""
    buckets.zero()
    accumulate(micro_step, model, num_micro_batches, buckets.start_reducing)
    if on_computed is not None:
        on_computed()
    buckets.finish()


def clip_to(
    max_norm: float, norm: torch.Tensor, scale: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """Multiply gradients of ``norm`` (float32), with ``scale``, so that their norm is at most
    ``max_norm``, if that is > 0. Returns ``norm``."""
    if max_norm > 0:
        scale(clip_factor(norm, max_norm))
    return norm


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor for gradients of ``norm`` (float32). Like torch.nn.utils.clip_grad_norm_ it
    never scales up. It does not branch on the value, so it does not wait for the device.

    The factor is rounded to 18 bits (a relative 2e-6). The norm's last bits depend on the order in
    which elements are added up, and so on the strategy. Without rounding, each scaled gradient
    would differ in its last bits, which Adam amplifies if a gradient is near zero. With it, all
    strategies clip by the same factor.
    """
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # With NaN the update is skipped; unchanged gradients show which rank's was not finite.
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
