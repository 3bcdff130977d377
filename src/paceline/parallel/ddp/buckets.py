"""Gradients in flat buckets, each sent off as soon as backward has filled it.

After Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020),
section 3.2. Unlike torch's own reducer the layout is fixed from the first step on, by the order of
the parameters alone: where an element lies in its bucket decides in which order an all-reduce adds
it up, so a layout that changed would make a resumed run round otherwise.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from paceline.distributed import torch_compat
from paceline.distributed.communicator import Communicator, wide_dtype
from paceline.parallel.ddp.layout import BucketLayout, lay_out

_NORM_CHUNK = 65536


@dataclass
class _Bucket:
    flat: torch.Tensor
    parameters: list[nn.Parameter] = field(default_factory=list)
    offsets: tuple[int, ...] = ()
    waiting: int = 0
    work: Any = None


class BucketReducer(Protocol):
    """What sums buckets instead of the backend's all-reduce."""

    @property
    def late(self) -> bool:
        """Gradients are summed after backward, by whoever clips them."""

    def start(self, number: int, flat: torch.Tensor) -> Any:
        """Start to sum bucket ``number``; returns what to wait for."""

    def end_step(self) -> None:
        """All buckets of a step are summed."""


class GradientBuckets:
    """Owns the gradient of every parameter given: ``parameter.grad`` is a view into a bucket and
    stays so.

    Args:
        parameters: those that get a gradient, in the model's order. Buckets run in reverse, the
            order in which backward comes to them.
        cap_bytes: size of a bucket; a larger parameter gets one of its own.
        world: issues the all-reduces, always in the order of the buckets, so every rank issues the
            same ones.
        reducer: sums the buckets in its stead.
    """

    #: Equal parts that a bucket must be cut into.
    shards = 1

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        cap_bytes: int,
        world: Communicator,
        reducer: BucketReducer | None = None,
    ) -> None:
        self.world = world
        self.reducer = reducer
        self.buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._next = 0
        self._reducing = False
        self._backward_began = 0.0
        self._sums: list[torch.Tensor] = []  # of each bucket, before others' were added to it
        #: Seconds in the backwards during which buckets are filled and sent, added up; on an
        #: accelerator those of the host.
        self.backward_s = 0.0
        given = list(parameters)
        dtypes = [self._dtype_of(one) for one in given]
        tensors = [
            (one.numel(), dtype.itemsize, (dtype, one.device))
            for one, dtype in zip(given, dtypes, strict=True)
        ]
        for layout in lay_out(tensors, cap_bytes, self.shards):
            self._add_bucket(
                [given[number] for number in layout.members], layout, dtypes[layout.members[0]]
            )
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """dtype in which the gradient of ``parameter`` is kept."""
        return parameter.dtype

    def _add_bucket(
        self, group: list[nn.Parameter], layout: BucketLayout, dtype: torch.dtype
    ) -> None:
        bucket = _Bucket(
            torch.zeros(layout.size, dtype=dtype, device=group[0].device), group, layout.offsets
        )
        for parameter, offset in zip(group, layout.offsets, strict=True):
            parameter.grad = bucket.flat[offset : offset + parameter.numel()].view(parameter.shape)
            self._bucket_of[parameter] = bucket
        self.buckets.append(bucket)

    @property
    def flats(self) -> list[torch.Tensor]:
        return [bucket.flat for bucket in self.buckets]

    @property
    def bucket_bytes(self) -> list[int]:
        return [flat.nbytes for flat in self.flats]

    def zero(self) -> None:
        torch_compat.foreach_zero_(self.flats)

    def start_reducing(self) -> None:
        """From here on (the last micro-batch of a step) each bucket is sent off when its last
        gradient has come."""
        self._reducing = self.world.size > 1 and not (
            self.reducer is not None and self.reducer.late
        )
        self._next = 0
        self._sums = []
        for bucket in self.buckets:
            bucket.waiting = len(bucket.parameters)
            bucket.work = None
        self._backward_began = time.perf_counter()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if not self._reducing:
            return
        self._bucket_of[parameter].waiting -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].waiting == 0:
            self._launch()

    def _launch(self) -> None:
        bucket = self.buckets[self._next]
        self._sums.append(_sum_of(bucket.flat))
        bucket.work = self._send(bucket)
        self._next += 1

    def _send(self, bucket: _Bucket) -> Any:
        if self.reducer is not None:
            return self.reducer.start(self._next, bucket.flat)
        return self.world.all_reduce(bucket.flat)

    def finish(self) -> None:
        """Send what no gradient has completed (unused parameters count as zero), then wait for
        all."""
        self.backward_s += time.perf_counter() - self._backward_began
        if not self._reducing:
            # they are summed later
            self._sums = [_sum_of(flat) for flat in self.flats] if self.world.size > 1 else []
            return
        while self._next < len(self.buckets):
            self._launch()
        for bucket in self.buckets:
            self.world.wait(bucket.work)
        self._reducing = False
        if self.reducer is not None:
            self.reducer.end_step()

    def norm(self) -> torch.Tensor:
        """2-norm over all gradients, a float32 scalar on the device."""
        return norm_of(self.flats, self.world.device)

    def local_sum(self) -> torch.Tensor:
        """A float32 scalar that is not finite where a gradient of this rank was not, before it met
        those of others."""
        sums = self._sums or [_sum_of(flat) for flat in self.flats]
        return torch.stack(sums).sum() if sums else torch.zeros((), device=self.world.device)

    def scale(self, factor: torch.Tensor) -> None:
        for flat in self.flats:
            flat.mul_(factor.to(flat.dtype))


def _sum_of(flat: torch.Tensor) -> torch.Tensor:
    # Reads at the speed of memory; what is not finite stays so in a sum.
    return flat.sum(dtype=torch.float32)


def norm_of(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """2-norm over all elements of the tensors, a float32 scalar on ``device``."""
    return squared_norm_of(tensors, device).sqrt().float()


def squared_norm_of(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Its square, in the widest floating type of ``device``: nearly the same to the last bit
    however the elements are dealt to ranks and tensors (see
    :func:`~paceline.parallel.gradients.clip_factor`)."""
    wide = wide_dtype(device)
    if not tensors:
        return torch.zeros((), device=device, dtype=wide)
    # where a norm in float64 costs sixty times one in float32: many short ones, added up in float64
    if device.type == "cpu":
        chunks = [chunk for one in tensors for chunk in one.reshape(-1).split(_NORM_CHUNK)]
        return torch.stack(torch_compat.foreach_norm(chunks, torch.float32)).to(wide).square().sum()
    norms = torch_compat.foreach_norm(tensors, wide)
    return torch.stack([one.to(device) for one in norms]).square().sum()
