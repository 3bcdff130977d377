"""A whole replica of the model on each rank: `ddp`, and `single`, which is the same with one
rank."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.distributed.collectives.schedules import all_reduce_bytes
from paceline.distributed.communicator import Communicator
from paceline.parallel.base import (
    MicroStep,
    OptimizerFactory,
    optimizer_tensors,
    persistent_buffers,
)
from paceline.parallel.comm_profile import CommProfile, CommTimes
from paceline.parallel.ddp.bucketed import BucketedStrategy
from paceline.parallel.ddp.buckets import GradientBuckets
from paceline.parallel.gradients import changing_buffers, clip_to, reduce_in_backward
from paceline.parallel.state import TensorShard, frozen_parts


class DDPStrategy(BucketedStrategy):
    """Rank 0's weights are broadcast; gradients are summed over the ranks in buckets while backward
    goes on, once a step, not within an accumulation; every rank then makes the same update."""

    name = "ddp"
    buckets: GradientBuckets

    def __init__(self, config: Config, world: Communicator) -> None:
        super().__init__(config, world)
        self.model: nn.Module

    def setup(self, model: nn.Module) -> nn.Module:
        self.model = model
        self.trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self.world.broadcast([*model.parameters(), *model.buffers()])
        self.changing_buffers = changing_buffers(model) if self.world.size > 1 else []
        self.reduce_in_buckets(self.world)
        return model

    def setup_optimizer(self, build: OptimizerFactory) -> torch.optim.Optimizer:
        built = build(list(self.trained.items()))
        self.optimizer = built if self.reducer is None else self.reducer.optimizer(built)
        return self.optimizer

    def forward_backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        reduce_in_backward(
            self.buckets, micro_step, self.model, num_micro_batches, self.on_computed
        )
        self.world.broadcast(self.changing_buffers)

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        if self.reducer is not None and self.reducer.late:
            return self.reducer.clip_and_sum(max_norm)
        return clip_to(max_norm, self.buckets.norm(), self.buckets.scale)

    @property
    def replica_group(self) -> Communicator | None:
        return self.world

    def replicated_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        yield from super().replicated_tensors()
        yield from frozen_parts(self.model)

    def tensor_shards(self) -> Iterable[TensorShard]:
        for name, one in self.trained.items():
            yield TensorShard.whole(name, one, key=one, owned=self.world.is_rank_zero)
        for name, buffer in persistent_buffers(self.model).items():
            yield TensorShard.whole(name, buffer, owned=self.world.is_rank_zero)

    def memory_tensors(self) -> list[Any]:
        state = [*self.buckets.flats, *optimizer_tensors(self.optimizer), *self.reducer_tensors()]
        return [*self.model.parameters(), *self.model.buffers(), *state]

    @property
    def comm_profile(self) -> CommProfile | None:
        if self.world.size == 1:
            return None
        reducer_profile = super().comm_profile
        if reducer_profile is not None:
            return reducer_profile
        sent = all_reduce_bytes(sum(self.buckets.bucket_bytes), self.world.size)
        messages = 2 * (self.world.size - 1) * len(self.buckets.flats)
        return CommProfile(
            None,
            "",
            self.buckets.bucket_bytes,
            self.world,
            self.world,
            sent,
            messages,
            lambda: CommTimes(self.buckets.backward_s),
        )


class SingleDeviceStrategy(DDPStrategy):
    """One rank: no collective is issued."""

    name = "single"
