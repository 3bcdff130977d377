"""What strategies share whose replicas sum their gradients in buckets."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from paceline.distributed.communicator import Communicator
from paceline.parallel.base import Strategy
from paceline.parallel.ddp.buckets import GradientBuckets
from paceline.parallel.ddp.reducer import Reduction, make_reduction
from paceline.parallel.loss_scale import LossScaler


class SummedInBuckets(Strategy):
    """``trained`` and ``buckets`` are there from :meth:`sum_in_buckets` on, which a strategy's
    ``place`` calls."""

    sums_buckets = True
    trained: dict[str, nn.Parameter]
    buckets: GradientBuckets | None = None
    #: Sums the buckets where the backend's all-reduce is not to.
    reduction: Reduction | None = None

    def sum_in_buckets(self, line: Communicator) -> GradientBuckets:
        """Gradients of ``trained`` lie in buckets, summed over ``line``. A collective."""
        self.reduction = make_reduction(self.config, self.world)
        cap_bytes = int(self.settings.bucket_cap_mb * 2**20)
        buckets = self.buckets = GradientBuckets(
            self.trained.values(), cap_bytes, line, self.reduction
        )
        if self.reduction is not None:
            self.reduction.bind(buckets, self.trained)
            self.notices += self.reduction.notices
        return buckets

    def update(self, apply: Callable[[torch.optim.Optimizer], bool]) -> bool:
        made = super().update(apply)
        if self.reduction is not None:
            self.reduction.settle(made)
        return made

    def use_scaler(self, scaler: LossScaler | None) -> None:
        super().use_scaler(scaler)
        if self.reduction is not None:
            self.reduction.scaler = scaler

    def unscale(self) -> None:
        if self.reduction is None or not self.reduction.unscales:
            super().unscale()

    @property
    def undoes(self) -> bool:
        return self.reduction is not None and self.reduction.undoes

    def own_gradient(self) -> torch.Tensor | None:
        return None if self.buckets is None else self.buckets.own()
