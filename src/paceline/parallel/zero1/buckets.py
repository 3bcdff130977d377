"""Weights and gradients in flat buckets that are cut into one shard a rank (ZeRO stage 1)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from paceline.distributed.communicator import Communicator
from paceline.parallel.ddp.buckets import GradientBuckets, _Bucket, squared_norm_of
from paceline.parallel.ddp.layout import BucketLayout


@dataclass
class FlatPiece:
    """The range of a parameter that falls into this rank's shard: what the optimizer sees.

    Args:
        name: of the parameter.
        values: 1-D, live: a view into the weights, or into the float32 master weights. Its ``grad``
            is set.
        start: where the range begins in the flattened parameter.
        shape: of the parameter.
    """

    name: str
    values: nn.Parameter
    start: int
    shape: tuple[int, ...]


@dataclass
class _Shard:
    """This rank's part of a bucket. ``weights`` is the whole bucket, in which the parameters lie;
    ``values`` what the optimizer updates and ``gradient`` what it reads; both are [size / N]."""

    weights: torch.Tensor
    local: torch.Tensor  # this rank's part of ``weights``
    values: torch.Tensor
    gradient: torch.Tensor


class ShardedBuckets(GradientBuckets):
    """Gradient buckets that are reduce-scattered, beside weight buckets of the same layout that are
    all-gathered.

    Nothing is kept twice: in float32 a rank's shard is a range of the bucket itself. In low
    precision the weights have float32 masters in the shard, and the shard's gradient is widened to
    float32 within the bucket's own memory, which nothing else needs between backward and the next
    step. So a rank holds 4 + 12/N bytes a parameter with Adam (Rajbhandari et al., "ZeRO", 2020,
    section 5.1).

    Args:
        trained: name → parameter, in the model's order; rank 0's values are on every rank.
        keep: parameters that stay in their own type under mixed precision.
        low_dtype: of weights and gradients under mixed precision; None: as they are.
    """

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        cap_bytes: int,
        world: Communicator,
        low_dtype: torch.dtype | None = None,
        keep: frozenset[nn.Parameter] = frozenset(),
    ) -> None:
        self.shards = world.size
        # One rank has no memory to share: a low-precision copy would only cost.
        self._low_dtype = low_dtype if world.size > 1 else None
        self._keep = keep
        self._names = {one: name for name, one in trained.items()}
        self.shard_parts: list[_Shard] = []
        self.pieces: list[FlatPiece] = []
        super().__init__(trained.values(), cap_bytes, world)
        # a rank that got padding alone: an optimizer wants a parameter
        if not self.pieces and trained:
            name, first = next(iter(trained.items()))
            self._add_piece(
                name, first, 0, self.shard_parts[0].values[:0], self.shard_parts[0].gradient[:0]
            )
        order = {name: number for number, name in enumerate(trained)}
        self.pieces.sort(key=lambda piece: order[piece.name])

    def _dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        low = (
            self._low_dtype is not None
            and parameter.dtype == torch.float32
            and parameter not in self._keep
        )
        return self._low_dtype if low and self._low_dtype is not None else parameter.dtype

    @torch.no_grad()
    def _add_bucket(
        self, group: list[nn.Parameter], layout: BucketLayout, dtype: torch.dtype
    ) -> None:
        size = layout.size // self.shards
        begin = size * self.world.rank
        weights = torch.zeros(layout.size, dtype=dtype, device=group[0].device)
        local = weights[begin : begin + size]
        master = dtype == self._low_dtype
        values = torch.zeros(size, dtype=torch.float32, device=weights.device) if master else local
        ranges = []
        for parameter, offset in zip(group, layout.offsets, strict=True):
            flat = parameter.detach().reshape(-1)
            weights[offset : offset + flat.numel()].copy_(flat)
            start, stop = max(0, begin - offset), min(flat.numel(), begin + size - offset)
            if start < stop:
                place = slice(offset + start - begin, offset + stop - begin)
                values[place].copy_(flat[start:stop])
                ranges.append((parameter, start, place))
            # From here on the parameter is a view into the bucket: gathering the bucket updates it.
            parameter.data = weights[offset : offset + flat.numel()].view(parameter.shape)
        super()._add_bucket(group, layout, dtype)
        gradients = self.buckets[-1].flat
        gradient = (
            gradients.view(torch.float32)[:size] if master else gradients[begin : begin + size]
        )
        self.shard_parts.append(_Shard(weights, local, values, gradient))
        for parameter, start, place in ranges:
            self._add_piece(
                self._names[parameter], parameter, start, values[place], gradient[place]
            )

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

    def _send(self, bucket: _Bucket) -> dist.Work | None:
        return self.world.reduce_scatter(
            bucket.flat.chunk(self.shards)[self.world.rank], bucket.flat
        )

    def finish(self) -> None:
        super().finish()
        for bucket, shard in zip(self.buckets, self.shard_parts, strict=True):
            if shard.gradient.dtype != bucket.flat.dtype:
                # Both lie in the bucket's memory, so by way of a copy.
                shard.gradient.copy_(bucket.flat.chunk(self.shards)[self.world.rank].clone())

    def gather(self) -> None:
        """Bring every rank's updated shard into the weights of all."""
        works = []
        for shard in reversed(self.shard_parts):  # in the order in which forward will want them
            if shard.values is not shard.local:
                shard.local.copy_(shard.values)
            works.append(self.world.all_gather(shard.weights, shard.local))
        for work in works:
            self.world.wait(work)

    def norm(self) -> torch.Tensor:
        squared = squared_norm_of([one.gradient for one in self.shard_parts], self.world.device)
        self.world.wait(self.world.all_reduce(squared))
        return squared.sqrt().float()

    def scale(self, factor: torch.Tensor) -> None:
        for shard in self.shard_parts:
            shard.gradient.mul_(factor.to(shard.gradient.dtype))

    @property
    def weights(self) -> list[torch.Tensor]:
        """Every weight bucket and every shard of master weights."""
        return [one for shard in self.shard_parts for one in (shard.weights, shard.values)]
