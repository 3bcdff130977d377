"""Gradients in flat buckets, each all-reduced as soon as backward has filled it.

After Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020), section 3.2. Unlike
torch's own reducer the layout is fixed from the first step on, by the order of the parameters alone: where an element lies in
its bucket decides in which order an all-reduce adds it up, so a layout that changed would make a resumed run round otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from paceline.world.group import World

_ALIGN_BYTES = 64


@dataclass
class _Bucket:
    flat: torch.Tensor
    size: int
    waiting: int = 0
    work: object = None
    parameters: list[nn.Parameter] = field(default_factory=list)


class GradientBuckets:
    """Owns the gradient of every parameter given: ``parameter.grad`` is a view into a bucket and stays so.

    Args:
        parameters: those that get a gradient, in the model's order. Buckets run in reverse, the order in which backward
            comes to them.
        cap_bytes: size of a bucket; a larger parameter gets one of its own.
        world: issues the all-reduces, always in the order of the buckets, so every rank issues the same ones.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], cap_bytes: int, world: World) -> None:
        self.world = world
        self.buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._next = 0
        self._reducing = False
        for group in _group(list(parameters)[::-1], cap_bytes):
            self._add_bucket(group)
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _add_bucket(self, group: list[nn.Parameter]) -> None:
        first = group[0]
        offsets, size = [], 0
        for parameter in group:
            offsets.append(size)
            size += _aligned(parameter)
        flat = torch.zeros(size, dtype=first.dtype, device=first.device)
        bucket = _Bucket(flat, size, parameters=group)
        for parameter, offset in zip(group, offsets, strict=True):
            parameter.grad = flat[offset : offset + parameter.numel()].view(parameter.shape)
            self._bucket_of[parameter] = bucket
        self.buckets.append(bucket)

    @property
    def flats(self) -> list[torch.Tensor]:
        return [bucket.flat for bucket in self.buckets]

    def zero(self) -> None:
        torch._foreach_zero_(self.flats)

    def start_reducing(self) -> None:
        """From here on (the last micro-batch of a step) each bucket is sent off when its last gradient has come."""
        self._reducing = self.world.size > 1
        self._next = 0
        for bucket in self.buckets:
            bucket.waiting = len(bucket.parameters)
            bucket.work = None

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if not self._reducing:
            return
        self._bucket_of[parameter].waiting -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].waiting == 0:
            self._launch()

    def _launch(self) -> None:
        bucket = self.buckets[self._next]
        bucket.work = self.world.all_reduce(bucket.flat)
        self._next += 1

    def finish(self) -> None:
        """Send what no gradient has completed (unused parameters count as zero), then wait for all."""
        if not self._reducing:
            return
        while self._next < len(self.buckets):
            self._launch()
        for bucket in self.buckets:
            self.world.wait(bucket.work)  # type: ignore[arg-type]
        self._reducing = False

    def norm(self) -> torch.Tensor:
        """2-norm over all gradients, a float32 scalar on the device."""
        if not self.buckets:
            return torch.zeros((), device=self.world.device)
        norms = torch._foreach_norm(self.flats, 2, dtype=torch.float32)
        return torch.linalg.vector_norm(torch.stack([one.to(self.world.device) for one in norms]))

    def scale(self, factor: torch.Tensor) -> None:
        for flat in self.flats:
            flat.mul_(factor.to(flat.dtype))


def _aligned(parameter: nn.Parameter) -> int:
    step = max(1, _ALIGN_BYTES // parameter.element_size())
    return math.ceil(parameter.numel() / step) * step


def _group(parameters: list[nn.Parameter], cap_bytes: int) -> list[list[nn.Parameter]]:
    """Consecutive parameters of one dtype and device, up to ``cap_bytes`` a group."""
    groups: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        bytes_here = parameter.numel() * parameter.element_size()
        same = bool(groups) and (groups[-1][0].dtype, groups[-1][0].device) == (parameter.dtype, parameter.device)
        if not same or size + bytes_here > cap_bytes:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += bytes_here
    return groups
