"""Store weights and gradients in flat buckets with one shard per rank (ZeRO stage 1)."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from paceline.distributed.communicator import Communicator
from paceline.parallel.buckets.gradients import GradientBucket, GradientBuckets, squared_norm_of
from paceline.parallel.buckets.layout import BucketLayout


@dataclass
class FlatPiece:
    """The range of a parameter in this rank's shard, which the optimizer updates.

    Args:
        name: name of the parameter.
        values: 1-D view into the weights or the float32 master weights, with its ``grad``.
        start: index of the range's first element in the flattened parameter.
        shape: shape of the full parameter.
    """

    name: str
    values: nn.Parameter
    start: int
    shape: tuple[int, ...]


@dataclass
class _Shard:
    """This rank's part of a bucket."""

    weights: torch.Tensor  # the full bucket, [size]; the parameters are views into it
    local: torch.Tensor  # this rank's part of ``weights``, [size / N]
    values: torch.Tensor  # what the optimizer updates, [size / N]
    gradient: torch.Tensor  # what the optimizer reads, [size / N]


class ShardedBuckets(GradientBuckets):
    """Gradient buckets that are reduce-scattered, and weight buckets of the same layout that are
    all-gathered.

    Nothing is stored twice: in float32 a rank's shard is a range of the bucket itself. In low
    precision the shard has float32 master weights. Backward computes a gradient in low precision,
    which is added to a float32 bucket as soon as it is complete, so a rank holds 6 + 12/N bytes per
    parameter with Adam. With gradients in low precision, it holds 4 + 12/N (Rajbhandari et al.,
    "ZeRO", 2020, section 5.1): the gradient of the shard is widened to float32 within the memory of
    the bucket, which is unused between backward and the next step.

    Args:
        trained: parameters by name, in the model's order, with rank 0's values on every rank.
        keep: parameters whose dtype is unchanged in mixed precision.
        low_dtype: dtype of the weights in mixed precision, or None for the dtype of the parameters.
        reduces_in_float32: whether the gradients of weights in ``low_dtype`` are accumulated and
            reduced in float32 instead of ``low_dtype``.
    """

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        cap_bytes: int,
        world: Communicator,
        low_dtype: torch.dtype | None = None,
        keep: frozenset[nn.Parameter] = frozenset(),
        reduces_in_float32: bool = True,
    ) -> None:
        self.shards = world.size
        # With one rank a low-precision copy would only take more memory.
        self._low_dtype = low_dtype if world.size > 1 else None
        self._keep = keep
        self._reduces_in_float32 = reduces_in_float32
        # Parameter → its part of a bucket, if that has another dtype than the parameter.
        self._wide_gradients: dict[nn.Parameter, torch.Tensor] = {}
        self._names = {parameter: name for name, parameter in trained.items()}
        self.shard_parts: list[_Shard] = []
        self.pieces: list[FlatPiece] = []
        super().__init__(trained.values(), cap_bytes, world)
        # The shard of this rank contains only padding, but an optimizer needs a parameter.
        if not self.pieces and trained:
            name, first = next(iter(trained.items()))
            self._add_piece(
                name, first, 0, self.shard_parts[0].values[:0], self.shard_parts[0].gradient[:0]
            )
        order = {name: number for number, name in enumerate(trained)}
        self.pieces.sort(key=lambda piece: order[piece.name])

    def _weight_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        if self._low_dtype is None or parameter.dtype != torch.float32 or parameter in self._keep:
            return parameter.dtype
        return self._low_dtype

    def _dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        dtype = self._weight_dtype(parameter)
        return torch.float32 if self._reduces_in_float32 and dtype == self._low_dtype else dtype

    def _kind_of(self, parameter: nn.Parameter) -> Hashable:
        return self._weight_dtype(parameter), parameter.device

    @torch.no_grad()
    def _add_bucket(
        self, group: list[nn.Parameter], layout: BucketLayout, dtype: torch.dtype
    ) -> None:
        size = layout.size // self.shards
        begin = size * self.world.rank
        weight_dtype = self._weight_dtype(group[0])
        weights = torch.zeros(layout.size, dtype=weight_dtype, device=group[0].device)
        local = weights[begin : begin + size]
        has_master = weight_dtype == self._low_dtype
        values = local
        if has_master:
            values = torch.zeros(size, dtype=torch.float32, device=weights.device)
        ranges = []
        for parameter, offset in zip(group, layout.offsets, strict=True):
            flat = parameter.detach().reshape(-1)
            weights[offset : offset + flat.numel()].copy_(flat)
            start, stop = max(0, begin - offset), min(flat.numel(), begin + size - offset)
            if start < stop:
                region = slice(offset + start - begin, offset + stop - begin)
                values[region].copy_(flat[start:stop])
                ranges.append((parameter, start, region))
            # The parameter becomes a view into the bucket: gathering the bucket updates it.
            parameter.data = weights[offset : offset + flat.numel()].view(parameter.shape)
        super()._add_bucket(group, layout, dtype)
        gradients = self.buckets[-1].flat
        gradient = (
            gradients.view(torch.float32)[:size]
            if has_master and dtype != torch.float32
            else gradients[begin : begin + size]
        )
        self.shard_parts.append(_Shard(weights, local, values, gradient))
        for parameter, start, region in ranges:
            self._add_piece(
                self._names[parameter], parameter, start, values[region], gradient[region]
            )

    def _place_gradient(self, parameter: nn.Parameter, part: torch.Tensor) -> None:
        if parameter.dtype == part.dtype:
            super()._place_gradient(parameter, part)
        else:
            self._wide_gradients[parameter] = part

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        wide = self._wide_gradients.get(parameter)
        if wide is not None and parameter.grad is not None:
            wide.add_(parameter.grad)
            parameter.grad = None
        super()._on_gradient(parameter)

    def _add_piece(
        self,
        name: str,
        parameter: nn.Parameter,
        start: int,
        values: torch.Tensor,
        gradient: torch.Tensor,
    ) -> None:
        piece = nn.Parameter(values)
        piece.grad = gradient
        self.pieces.append(FlatPiece(name, piece, start, tuple(parameter.shape)))

    def _send(self, bucket: GradientBucket) -> dist.Work | None:
        return self.world.reduce_scatter(
            bucket.flat.chunk(self.shards)[self.world.rank], bucket.flat
        )

    def finish(self) -> None:
        super().finish()
        for bucket, shard in zip(self.buckets, self.shard_parts, strict=True):
            if shard.gradient.dtype != bucket.flat.dtype:
                # Both lie in the bucket's memory, so the values are copied first.
                shard.gradient.copy_(bucket.flat.chunk(self.shards)[self.world.rank].clone())

    def gather(self) -> None:
        """All-gather the updated shards into the weights of every rank."""
        works = []
        for shard in reversed(self.shard_parts):  # in the order in which forward reads them
            if shard.values is not shard.local:
                shard.local.copy_(shard.values)
            works.append(self.world.all_gather(shard.weights, shard.local))
        for work in works:
            self.world.wait(work)

    def norm(self) -> torch.Tensor:
        squared = squared_norm_of([shard.gradient for shard in self.shard_parts], self.world.device)
        self.world.wait(self.world.all_reduce(squared))
        return squared.sqrt().float()

    def scale(self, factor: torch.Tensor) -> None:
        for shard in self.shard_parts:
            shard.gradient.mul_(factor.to(shard.gradient.dtype))

    @property
    def weights(self) -> list[torch.Tensor]:
        """Every weight bucket and every shard of master weights."""
        return [tensor for shard in self.shard_parts for tensor in (shard.weights, shard.values)]
