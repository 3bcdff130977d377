"""A whole replica of the model on each rank: `ddp`, and `single`, which is the same with one rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.parallel.base import BuildOptimizer, MicroStep, Part, Strategy, optimizer_tensors, persistent_buffers
from paceline.parallel.buckets import GradientBuckets
from paceline.parallel.cost import Cost, ModelShape, Workload, total_bytes
from paceline.world.group import World
from paceline.world.mesh import Axes
from paceline.world.volume import all_reduce_bytes


class DistributedDataParallel(Strategy):
    """Rank 0's weights are broadcast; gradients are summed over the ranks in buckets while backward goes on, once a step,
    not within an accumulation; every rank then makes the same update."""

    name = "ddp"

    def __init__(self, config: Config, world: World) -> None:
        super().__init__(config, world)
        self.model: nn.Module
        self.buckets: GradientBuckets

    def place(self, model: nn.Module) -> nn.Module:
        self.model = model
        self.trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self.world.broadcast([*model.parameters(), *model.buffers()])
        self.changing_buffers = changing_buffers(model) if self.world.size > 1 else []
        self.buckets = GradientBuckets(self.trained.values(), int(self.settings.bucket_cap_mb * 2**20), self.world)
        return model

    def build_optimizer(self, build: BuildOptimizer) -> torch.optim.Optimizer:
        self.optimizer = build(list(self.trained.items()))
        return self.optimizer

    def backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        self.buckets.zero()
        for number in range(num_micro_batches):
            loss = micro_step(number, self.model)
            if number == num_micro_batches - 1:
                self.buckets.start_reducing()
            loss.backward()
        self.buckets.finish()
        self.world.broadcast(self.changing_buffers)

    def clip(self, max_norm: float) -> torch.Tensor:
        norm = self.buckets.norm()
        if max_norm > 0:
            self.buckets.scale(clip_factor(norm, max_norm))
        return norm

    def parts(self) -> Iterable[Part]:
        for name, one in self.trained.items():
            yield Part.whole(name, one, key=one, owned=self.world.is_first)
        for name, one in persistent_buffers(self.model).items():
            yield Part.whole(name, one, owned=self.world.is_first)

    def held(self) -> list[Any]:
        return [*self.model.parameters(), *self.model.buffers(), *self.buckets.flats, *optimizer_tensors(self.optimizer)]

    @classmethod
    def cost(cls, shape: ModelShape, axes: Axes, work: Workload, config: Config) -> Cost:
        """Everything whole on each rank; the gradients' all-reduce: 2(N-1)/N × their bytes (Rajbhandari et al., "ZeRO", 2020,
        section 7.1: 2Ψ)."""
        gradients = total_bytes(shape.trained)
        elements = sum(one.numel for one in shape.trained)
        return Cost(
            parameters=shape.parameter_bytes + shape.buffer_bytes,
            gradients=gradients,
            optimizer=elements * shape.optimizer_bytes_per_element,
            activations=work.activation_bytes,
            traffic={"all_reduce": all_reduce_bytes(gradients, axes.data)},
        )


class Single(DistributedDataParallel):
    """One rank: no collective is issued."""

    name = "single"


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients of ``norm`` are multiplied by. As torch.nn.utils.clip_grad_norm_: never scales up. No branch on the value,
    so no wait for the device."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def changing_buffers(model: nn.Module) -> list[torch.Tensor]:
    """The running statistics of normalisation layers, which each rank would gather from its own share."""
    norms = (nn.modules.batchnorm._NormBase,)
    return [one for module in model.modules() if isinstance(module, norms) for one in module.buffers()]
