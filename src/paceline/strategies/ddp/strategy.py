"""`ddp`, which keeps a full replica of the model on each rank, and `single` for one rank."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from paceline.distributed.collective_bytes import all_reduce_bytes
from paceline.distributed.communicator import Communicator
from paceline.parallel.buckets.strategy import BucketedStrategy
from paceline.parallel.comm_profile import CommProfile, CommTimes
from paceline.parallel.gradients import changing_buffers, clip_to
from paceline.parallel.initial_weights import sync_weights
from paceline.parallel.optimizer_state import optimizer_tensors
from paceline.parallel.save_load import trained_state
from paceline.parallel.state import (
    TensorShard,
    all_buffers,
    frozen_parts,
    full_shards,
    trained_parameters,
)
from paceline.parallel.strategy import MicroStep, OptimizerFactory
from paceline.strategies.reducers.buckets import make_buckets


class DDPStrategy(BucketedStrategy):
    """Data parallelism. Gradients are all-reduced in buckets during the last backward of a step.

    Rank 0's weights are broadcast at the start, and every rank makes the same update.
    """

    name = "ddp"

    def setup(self, model: nn.Module) -> nn.Module:
        self.model = model
        self.trained = trained_parameters(model)
        sync_weights(model, self.world)
        self.changing_buffers = changing_buffers(model) if self.world.size > 1 else []
        self.buckets, self.reducer = make_buckets(self, self.trained, self.world)
        return model

    def setup_optimizer(self, build: OptimizerFactory) -> torch.optim.Optimizer:
        built = build(list(self.trained.items()))
        self.optimizer = built if self.reducer is None else self.reducer.optimizer(built)
        return self.optimizer

    def forward_backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        self.accumulate(micro_step, self.model, num_micro_batches)

    def begin_accumulation(self) -> None:
        super().begin_accumulation()
        self.buckets.zero()

    def last_backward(self, loss: torch.Tensor) -> None:
        self.buckets.start_reducing()
        loss.backward()

    def end_accumulation(self) -> None:
        self.note_computed()
        self.buckets.finish()
        self.world.broadcast(self.changing_buffers)

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        if self.reducer is not None and self.reducer.late:
            return self.reducer.clip_and_sum(max_norm)
        return clip_to(max_norm, self.buckets.norm(), self.buckets.scale)

    def local_grad_finite(self) -> torch.Tensor | None:
        return self.buckets.local_sum()

    @property
    def replica_group(self) -> Communicator:
        return self.world

    def replicated_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from trained_state(self)
        yield from frozen_parts(self.model)

    def tensor_shards(self) -> Iterable[TensorShard]:
        return full_shards(self.trained, self.model, owned=self.world.is_rank_zero)

    def memory_tensors(self) -> list[torch.Tensor]:
        residuals = [] if self.reducer is None else self.reducer.memory_tensors()
        state = [*self.buckets.flats, *optimizer_tensors(self.optimizer), *residuals]
        return [*self.model.parameters(), *all_buffers(self.model), *state]

    @property
    def comm_profile(self) -> CommProfile | None:
        if self.world.size == 1:
            return None
        if self.reducer is not None and self.reducer.comm_profile is not None:
            return self.reducer.comm_profile
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
    """Trains on one rank, without collectives."""

    name = "single"
