"""A whole replica of the model on each rank: `ddp`, and `single`, which is the same with one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import ParallelDims
from paceline.distributed.traffic_volume import all_reduce_bytes
from paceline.parallel.base import (
    MicroStep,
    OptimizerFactory,
    optimizer_tensors,
    persistent_buffers,
)
from paceline.parallel.comm_profile import CommProfile, CommTimes
from paceline.parallel.compression.cost import communication_cost
from paceline.parallel.cost import Cost, ModelShape, Workload, total_bytes
from paceline.parallel.ddp.buckets import GradientBuckets
from paceline.parallel.ddp.summed import SummedInBuckets
from paceline.parallel.state import StateReader, TensorShard, frozen_parts


class DDPStrategy(SummedInBuckets):
    """Rank 0's weights are broadcast; gradients are summed over the ranks in buckets while backward
    goes on, once a step, not within an accumulation; every rank then makes the same update."""

    name = "ddp"
    allows_unequal_shares = True
    allows_mixed_devices = True
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
        self.buckets.zero()
        accumulate(micro_step, self.model, num_micro_batches, self.buckets.start_reducing)
        if self.on_computed is not None:
            self.on_computed()
        self.buckets.finish()
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
        for name, one in persistent_buffers(self.model).items():
            yield TensorShard.whole(name, one, owned=self.world.is_rank_zero)

    def memory_tensors(self) -> list[Any]:
        kept = [] if self.reducer is None else self.reducer.memory_tensors()
        state = [*self.buckets.flats, *optimizer_tensors(self.optimizer), *kept]
        return [*self.model.parameters(), *self.model.buffers(), *state]

    def extra_state(self) -> list[TensorShard]:
        return [] if self.reducer is None else self.reducer.extra_state()

    def load_extra_state(self, source: StateReader) -> None:
        if self.reducer is None:
            super().load_extra_state(source)
        else:
            self.notices += self.reducer.load_extra_state(source, self.optimizer)

    @property
    def comm_profile(self) -> CommProfile | None:
        if self.world.size == 1 or not self.reduces_in_buckets:
            return None
        other = None if self.reducer is None else self.reducer.comm_profile
        sent = all_reduce_bytes(
            sum(one.numel() * one.element_size() for one in self.buckets.flats), self.world.size
        )
        messages = 2 * (self.world.size - 1) * len(self.buckets.flats)
        plain = CommProfile(
            None,
            "",
            self.buckets,
            self.world,
            self.world,
            sent,
            messages,
            lambda: CommTimes(self.buckets.backward_s),
        )
        return plain if other is None else other

    def report_metrics(self, sent_bytes: float | None) -> dict[str, Any]:
        return {} if self.reducer is None else self.reducer.report_metrics(sent_bytes)

    @classmethod
    def estimate_cost(
        cls, shape: ModelShape, axes: ParallelDims, work: Workload, config: Config
    ) -> Cost:
        """Everything whole on each rank; the gradients' all-reduce: 2(N-1)/N × their bytes
        (Rajbhandari et al., "ZeRO", 2020, section 7.1: 2Ψ)."""
        gradients = total_bytes(shape.trained)
        elements = sum(one.numel for one in shape.trained)
        optimizer = elements * shape.optimizer_bytes_per_element
        traffic: Mapping[str, int] = {"all_reduce": all_reduce_bytes(gradients, axes.data)}
        other = communication_cost(shape.trained, config, axes.data)
        if other is not None:
            optimizer = other.kept + (0 if other.holds_moments else optimizer)
            traffic = other.traffic
        return Cost(
            parameters=shape.parameter_bytes + shape.buffer_bytes,
            gradients=gradients,
            optimizer=optimizer,
            activations=work.activation_bytes,
            traffic=traffic,
        )


class SingleDeviceStrategy(DDPStrategy):
    """One rank: no collective is issued."""

    name = "single"
    reduces_in_buckets = False


def accumulate(
    micro_step: MicroStep, model: nn.Module, num_micro_batches: int, before_last: Callable[[], None]
) -> None:
    """Forward and backward of each micro-batch; ``before_last`` is called when the last one's
    backward is to begin."""
    for number in range(num_micro_batches):
        loss = micro_step(number, model)
        if number == num_micro_batches - 1:
            before_last()
        loss.backward()


def clip_to(
    max_norm: float, norm: torch.Tensor, scale: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """Have ``scale`` multiply gradients of ``norm`` (float32) so that it is at most ``max_norm``,
    where that is > 0.

    Returns:
        The norm as it was.
    """
    if max_norm > 0:
        scale(clip_factor(norm, max_norm))
    return norm


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients of ``norm`` (float32) are multiplied by. As torch.nn.utils.clip_grad_norm_:
    never scales up. No branch on the value, so no wait for the device.

    The factor is rounded to 18 bits (a relative 2e-6). The norm's last bits depend on the order in
    which elements are added up, and so on the strategy; with them each scaled gradient would round
    otherwise, and Adam makes much of that where a gradient is near zero. Rounded, all strategies
    clip by the same factor.
    """
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # the update is skipped then; gradients are left as they are, to see whose it was
    factor = factor.nan_to_num(nan=1.0)
    return ((factor.view(torch.int32) + 16) & ~31).view(torch.float32)


def changing_buffers(model: nn.Module) -> list[torch.Tensor]:
    """The running statistics of normalisation layers, which each rank would gather from its own
    share."""
    norms = (nn.modules.batchnorm._NormBase,)
    return [
        one for module in model.modules() if isinstance(module, norms) for one in module.buffers()
    ]
