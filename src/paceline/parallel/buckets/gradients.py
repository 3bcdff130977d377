"""Store gradients in flat buckets and reduce each bucket as soon as backward has filled it.

Based on Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
(2020), section 3.2. Unlike in torch's reducer, the layout is fixed from the first step on and
depends only on the order of the parameters. The position of an element in its bucket determines the
order in which an all-reduce adds it up, so a resumed run with another layout would round
differently.
"""

import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from paceline.distributed import torch_compat
from paceline.distributed.communicator import Communicator, wide_dtype
from paceline.parallel.buckets.layout import BucketLayout, lay_out

_NORM_CHUNK = 65536


@dataclass
class GradientBucket:
    flat: torch.Tensor
    parameters: list[nn.Parameter] = field(default_factory=list)
    offsets: tuple[int, ...] = ()
    waiting: int = 0
    work: Any = None


class BucketReducer(Protocol):
    """Sums buckets over the ranks in place of the backend's all-reduce."""

    @property
    def late(self) -> bool:
        """Whether gradients are summed after backward, when they are clipped, instead of during
        backward."""

    def start(self, number: int, flat: torch.Tensor) -> Any:
        """Start to sum bucket ``number``. Return an object with ``wait()``."""

    def end_step(self) -> None:
        """Called after all buckets of a step have been summed."""


class GradientBuckets:
    """Owns the gradients of parameters: each ``parameter.grad`` stays a view into a bucket.

    Args:
        parameters: trained parameters in the model's order. Buckets are in the reverse order, in
            which backward reaches the parameters.
        cap_bytes: maximum size of a bucket in bytes. A larger parameter gets its own bucket.
        world: communicator that issues the all-reduces, always in the order of the buckets, so that
            every rank issues the same sequence.
        reducer: sums the buckets instead of ``world``, unless it is None.
    """

    #: Number of equal parts into which each bucket can be split.
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
        self.buckets: list[GradientBucket] = []
        self._bucket_of: dict[nn.Parameter, GradientBucket] = {}
        self._next = 0
        self._reducing = False
        self._backward_began = 0.0
        # The sum of each bucket's elements before it was reduced over the ranks.
        self._sums: list[torch.Tensor] = []
        #: Total seconds of the backward passes during which buckets are filled and reduced,
        #: measured on the host.
        self.backward_s = 0.0
        ordered = list(parameters)
        dtypes = [self._dtype_of(parameter) for parameter in ordered]
        tensors = [
            (parameter.numel(), dtype.itemsize, (dtype, self._kind_of(parameter)))
            for parameter, dtype in zip(ordered, dtypes, strict=True)
        ]
        for layout in lay_out(tensors, cap_bytes, self.shards):
            members = [ordered[index] for index in layout.members]
            self._add_bucket(members, layout, dtypes[layout.members[0]])
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype in which the gradient of ``parameter`` is stored."""
        return parameter.dtype

    def _kind_of(self, parameter: nn.Parameter) -> Hashable:
        """Return what the parameters of a bucket have in common besides that dtype."""
        return parameter.device

    def _add_bucket(
        self, group: list[nn.Parameter], layout: BucketLayout, dtype: torch.dtype
    ) -> None:
        bucket = GradientBucket(
            torch.zeros(layout.size, dtype=dtype, device=group[0].device), group, layout.offsets
        )
        for parameter, offset in zip(group, layout.offsets, strict=True):
            part = bucket.flat[offset : offset + parameter.numel()].view(parameter.shape)
            self._place_gradient(parameter, part)
            self._bucket_of[parameter] = bucket
        self.buckets.append(bucket)

    def _place_gradient(self, parameter: nn.Parameter, part: torch.Tensor) -> None:
        """Let backward add the gradient of ``parameter`` to its part of a bucket."""
        parameter.grad = part

    @property
    def flats(self) -> list[torch.Tensor]:
        return [bucket.flat for bucket in self.buckets]

    @property
    def bucket_bytes(self) -> list[int]:
        return [flat.nbytes for flat in self.flats]

    def zero(self) -> None:
        """Set all gradients to zero."""
        if self.buckets:  # without parameters there are none
            torch_compat.foreach_zero_(self.flats)

    def start_reducing(self) -> None:
        """From now on, reduce each bucket as soon as its last gradient has been computed.

        Called before the backward of the last micro-batch of a step.
        """
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

    def _send(self, bucket: GradientBucket) -> Any:
        if self.reducer is not None:
            return self.reducer.start(self._next, bucket.flat)
        return self.world.all_reduce(bucket.flat)

    def finish(self) -> None:
        """Reduce the buckets that backward did not complete, then wait for all of them.

        Parameters that the forward pass did not use have a gradient of zero.
        """
        self.backward_s += time.perf_counter() - self._backward_began
        if not self._reducing:  # a late reducer sums the buckets when gradients are clipped
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
        """Return the 2-norm of all gradients, a float32 scalar on the device."""
        return squared_norm_of(self.flats, self.world.device).sqrt().float()

    def local_sum(self) -> torch.Tensor:
        """Return a float32 scalar that is finite only if the gradients of this rank were finite
        before they were reduced."""
        sums = self._sums or [_sum_of(flat) for flat in self.flats]
        return torch.stack(sums).sum() if sums else torch.zeros((), device=self.world.device)

    def scale(self, factor: torch.Tensor) -> None:
        for flat in self.flats:
            flat.mul_(factor.to(flat.dtype))


def _sum_of(flat: torch.Tensor) -> torch.Tensor:
    # A sum runs at memory bandwidth, and it is non-finite if any element is.
    return flat.sum(dtype=torch.float32)


def squared_norm_of(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the squared 2-norm of all elements of the tensors, a scalar on ``device``.

    It has the widest floating-point dtype of the device, so that it hardly depends on how the
    elements are split over ranks and tensors (see
    :func:`~paceline.parallel.gradients.clip_factor`). Tensors on other devices, such as offloaded
    gradients in host memory, are added up there, and each of these devices copies one scalar.
    """
    wide = wide_dtype(device)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    sums = [_squared_norm(group, wide).to(device) for group in by_device.values()]
    if len(sums) == 1:
        return sums[0]
    return torch.stack(sums).sum() if sums else torch.zeros((), device=device, dtype=wide)


def _squared_norm(tensors: list[torch.Tensor], wide: torch.dtype) -> torch.Tensor:
    """Return the squared 2-norm of tensors of one device, a scalar of dtype ``wide`` on it."""
    # On a CPU a norm in float64 takes sixty times as long as one in float32, so the norms of short
    # chunks are computed in float32 and added up in float64.
    if tensors[0].device.type == "cpu":
        chunks = [chunk for tensor in tensors for chunk in tensor.reshape(-1).split(_NORM_CHUNK)]
        return torch.stack(torch_compat.foreach_norm(chunks, torch.float32)).to(wide).square().sum()
    return torch.stack(torch_compat.foreach_norm(tensors, wide)).square().sum()
