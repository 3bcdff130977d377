"""The base of strategies whose replicas sum gradients in buckets, compressed or by our own
all-reduce where the config asks for it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.distributed.communicator import Communicator
from paceline.parallel.base import Strategy
from paceline.parallel.comm_profile import CommProfile
from paceline.parallel.compression.reducer import CompressedReducer
from paceline.parallel.ddp.buckets import GradientBuckets
from paceline.parallel.ddp.reducer import GradientReducer
from paceline.parallel.loss_scale import LossScaler
from paceline.parallel.state import StateReader, TensorShard


class BucketedStrategy(Strategy):
    """``trained`` and ``buckets`` are there from :meth:`reduce_in_buckets` on, which a strategy's
    ``setup`` calls."""

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

    def reducer_tensors(self) -> list[torch.Tensor]:
        """What the reducer keeps from step to step."""
        return [] if self.reducer is None else self.reducer.memory_tensors()

    def extra_state(self) -> list[TensorShard]:
        return [] if self.reducer is None else self.reducer.extra_state()

    def load_extra_state(self, source: StateReader) -> None:
        if self.reducer is None:
            super().load_extra_state(source)
        else:
            self.notices += self.reducer.load_extra_state(source, self.optimizer)

    @property
    def comm_profile(self) -> CommProfile | None:
        return None if self.reducer is None else self.reducer.comm_profile

    def report_metrics(self, sent_bytes: float | None) -> dict[str, Any]:
        return {} if self.reducer is None else self.reducer.report_metrics(sent_bytes)


def make_reducer(config: Config, world: Communicator) -> GradientReducer | None:
    """What sums gradients over the axis data of ``world`` as the config says; None: the backend's
    own all-reduce. A collective."""
    if world.axes.data == 1:
        return None
    if config.compression.chain:
        return CompressedReducer(config, world)
    return GradientReducer(config, world) if config.parallel.all_reduce != "native" else None
