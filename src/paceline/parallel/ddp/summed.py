"""What strategies share whose replicas sum their gradients in buckets."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from paceline.distributed.communicator import Communicator
from paceline.parallel.base import Strategy
from paceline.parallel.ddp.buckets import GradientBuckets
from paceline.parallel.ddp.reducer import GradientReducer, make_reducer
from paceline.parallel.loss_scale import LossScaler


class SummedInBuckets(Strategy):
    """``trained`` and ``buckets`` are there from :meth:`reduce_in_buckets` on, which a strategy's
    ``setup`` calls."""

    reduces_in_buckets = True
    trained: dict[str, nn.Parameter]
    buckets: GradientBuckets | None = None
    #: Sums the buckets where the backend's all-reduce is not to.
    reducer: GradientReducer | None = None

    def reduce_in_buckets(self, line: Communicator) -> GradientBuckets:
        """Gradients of ``trained`` lie in buckets, summed over ``line``. A collective."""
        self.reducer = make_reducer(self.config, self.world)
        cap_bytes = int(self.settings.bucket_cap_mb * 2**20)
        buckets = self.buckets = GradientBuckets(
            self.trained.values(), cap_bytes, line, self.reducer
        )
        if self.reducer is not None:
            self.reducer.bind(buckets, self.trained)
            self.notices += self.reducer.notices
        return buckets

    def optimizer_step(self, apply: Callable[[torch.optim.Optimizer], bool]) -> bool:
        made = super().optimizer_step(apply)
        if self.reducer is not None:
            self.reducer.finish_step(made)
        return made

    def use_scaler(self, scaler: LossScaler | None) -> None:
        super().use_scaler(scaler)
        if self.reducer is not None:
            self.reducer.scaler = scaler

    def unscale(self) -> None:
        if self.reducer is None or not self.reducer.unscales:
            super().unscale()

    @property
    def needs_rollback_on_skip(self) -> bool:
        return self.reducer is not None and self.reducer.needs_rollback_on_skip

    def local_grad_finite(self) -> torch.Tensor | None:
        return None if self.buckets is None else self.buckets.own()
