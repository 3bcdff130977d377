"""Axes combined: pipeline stages, cut layers and shards or replicas, composed in one fixed order.

The order: the pipeline deals the blocks to stages; tensor parallelism cuts the layers of a stage; what is left is sharded
(`shard` > 1: FSDP over the axes data and shard) or replicated (gradients in buckets over the axis data). Each step finds plain
modules with plain parameters, smaller than before; sharding first and cutting afterwards would train with wrong gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.models.tensor_plan import find_tensor_plan
from paceline.parallel.base import (
    BuildOptimizer,
    MicroStep,
    Part,
    Strategy,
    local_tensor,
    optimizer_tensors,
    persistent_buffers,
)
from paceline.parallel.buckets import GradientBuckets
from paceline.parallel.cost import Cost, ModelShape, Workload
from paceline.parallel.hybrid_cost import hybrid_cost
from paceline.parallel.replicated import changing_buffers, clip_factor
from paceline.parallel.tensor import TensorSplit, check_plan_sizes
from paceline.world.group import World
from paceline.world.mesh import Axes

if TYPE_CHECKING:
    from paceline.parallel.pipeline import Pipeline
    from paceline.parallel.sharded import Sharding


class Hybrid(Strategy):
    """Any product of the axes data, shard, tensor and pipeline."""

    name = "hybrid"
    whole_on_first = False

    def __init__(self, config: Config, world: World) -> None:
        super().__init__(config, world)
        self.model: nn.Module
        self.trained: dict[str, nn.Parameter] = {}
        self.tensor: TensorSplit | None = None
        self.pipeline: Pipeline | None = None
        self.sharding: Sharding | None = None
        self.buckets: GradientBuckets | None = None

    @staticmethod
    def check(config: Config, axes: Axes) -> None:
        _check(config, axes)

    # -- placing ------------------------------------------------------------------------------------------------------------
    def place(self, model: nn.Module) -> nn.Module:
        axes = self.world.axes
        for line in (("tensor",), ("pipeline",), ("data",), ("data", "shard"), ("shard", "tensor", "pipeline")):
            self.world.line(*line)  # every rank makes its lines in this order
        self.world.broadcast([*model.parameters(), *model.buffers()])
        plan = None
        if axes.tensor > 1:
            plan = find_tensor_plan(model, self.settings.tensor_plan)
            check_plan_sizes(model, plan, axes.tensor)
        if axes.pipeline > 1:
            from paceline.parallel.pipeline import Pipeline

            self.pipeline = Pipeline(model, self.world.line("pipeline"), self.config)
            model = self.pipeline.model
        if plan is not None:
            self.tensor = TensorSplit(model, self.world.line("tensor"), self.settings, plan)
            self.notices += self.tensor.notices
        self.model = model.to(self.world.device)
        self._remember_names()
        self.changing_buffers = changing_buffers(model) if axes.replicas > 1 else []
        if axes.shard > 1:
            self._shard()
        else:
            cap_bytes = int(self.settings.bucket_cap_mb * 2**20)
            self.buckets = GradientBuckets(self.trained.values(), cap_bytes, self.world.line("data"))
        return self.model

    def _remember_names(self) -> None:
        """Taken while parameters are plain: sharding makes new ones of them, under the same names."""
        self.trained = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        partial = {id(one) for one in self.tensor.partial} if self.tensor else set()
        self.partial_names = [name for name, one in self.trained.items() if id(one) in partial]

    def build_optimizer(self, build: BuildOptimizer) -> torch.optim.Optimizer:
        self.optimizer = build(list(self.trained.items()))
        return self.optimizer

    # -- a step -------------------------------------------------------------------------------------------------------------
    def backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        if self.sharding is not None:
            self._backward_sharded(micro_step, num_micro_batches)
        else:
            self._backward_replicated(micro_step, num_micro_batches)
        if self.tensor is not None:
            self.tensor.sum_partial_gradients(self._gradients(self.partial_names))
        if self.pipeline is not None:
            self.pipeline.sum_shared_gradients()
        self.world.line("data", "shard").broadcast(self.changing_buffers)

    def _backward_replicated(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        assert self.buckets is not None
        self.buckets.zero()
        if self.pipeline is not None:
            self.pipeline.backward(micro_step, num_micro_batches)
            self.buckets.start_reducing()
        else:
            for number in range(num_micro_batches):
                loss = micro_step(number, self.model)
                if number == num_micro_batches - 1:
                    self.buckets.start_reducing()
                loss.backward()
        self.buckets.finish()

    def _gradients(self, names: Iterable[str]) -> list[torch.Tensor]:
        """Local gradients of trained parameters; zeros are put where a parameter took no part."""
        found = []
        for name in names:
            one = self.trained[name]
            if one.grad is None:
                one.grad = torch.zeros_like(one)
            found.append(local_tensor(one.grad))
        return found

    def clip(self, max_norm: float) -> torch.Tensor:
        mine = [local_tensor(one.grad) for name, one in self.trained.items() if one.grad is not None and self._counts(name)]
        total = torch.zeros((), device=self.world.device)
        if mine:
            norms = torch._foreach_norm(mine, 2, dtype=torch.float32)
            total += torch.stack([one.to(total.device) for one in norms]).square().sum()
        line = self.world.line("shard", "tensor", "pipeline")
        line.wait(line.all_reduce(total))
        norm = total.sqrt()
        if max_norm > 0:
            factor = clip_factor(norm, max_norm)
            for one in self.trained.values():
                if one.grad is not None:
                    local = local_tensor(one.grad)
                    local.mul_(factor.to(local.dtype))
        return norm

    def _counts(self, name: str) -> bool:
        """True on one rank of the tensor and pipeline lines for each element that this rank holds of ``name``."""
        if self.pipeline is not None and not self.pipeline.owns(name):
            return False
        return self.tensor is None or name in self.tensor.cuts or self.tensor.line.is_first

    def evaluate(self, run: Callable[[nn.Module], dict[str, torch.Tensor]], model: nn.Module) -> dict[str, torch.Tensor] | None:
        if self.pipeline is not None:
            return self.pipeline.evaluate(run, model)
        return super().evaluate(run, model)

    # -- state --------------------------------------------------------------------------------------------------------------
    def parts(self) -> Iterable[Part]:
        first_replica = self.world.coordinates["data"] == 0
        for part in self._local_parts():
            owned = part.owned and first_replica and self._counts(part.name)
            cut = self.tensor.cuts.get(part.name) if self.tensor is not None else None
            if cut is None:
                yield replace(part, owned=owned)
                continue
            offset = tuple(inner + outer for inner, outer in zip(part.offset, cut.offset, strict=True))
            yield replace(part, owned=owned, shape=cut.shape, offset=offset)

    def _local_parts(self) -> Iterable[Part]:
        """Parts of what this rank's tensor part of this stage is, as if that were the whole."""
        if self.sharding is not None:
            yield from self.sharding.parts()
            return
        for name, one in self.trained.items():
            yield Part.whole(name, one, key=one)
        for name, one in persistent_buffers(self.model).items():
            yield Part.whole(name, one)

    def held(self) -> list[Any]:
        if self.sharding is not None:
            return [*self.sharding.held(), *optimizer_tensors(self.optimizer)]
        assert self.buckets is not None
        return [*self.model.parameters(), *self.model.buffers(), *self.buckets.flats, *optimizer_tensors(self.optimizer)]

    @classmethod
    def cost(cls, shape: ModelShape, axes: Axes, work: Workload, config: Config) -> Cost:
        return hybrid_cost(shape, axes, work, config)


class TensorParallel(Hybrid):
    """Each layer cut over the axis tensor, beside replicas."""

    name = "tensor"


class PipelineParallel(Hybrid):
    """Blocks dealt to stages along the axis pipeline, beside replicas."""

    name = "pipeline"


def _check(config: Config, axes: Axes) -> None:
    cut = " × ".join(f"{axis} {getattr(axes, axis)}" for axis in ("shard", "tensor", "pipeline") if getattr(axes, axis) > 1)
    if not cut:
        return
    if config.evaluation.where == "rank0":
        raise ConfigError(
            f"`evaluation.where: rank0` with {cut}: no rank holds the whole model",
            fix="set `evaluation.where: all`: the same figures, computed by all ranks",
        )
    if config.parallel.offload != "none":
        raise ConfigError(
            f"`parallel.offload: {config.parallel.offload}` with {cut} is not built in",
            allowed="`parallel.mode: zero2`, `zero3` or `deepspeed` on accelerators",
            fix="set `parallel.offload: none`, or `parallel.mode: zero3`",
        )
    if config.train_args.optim == "adafactor" and (axes.tensor > 1 or axes.shard > 1):
        raise ConfigError(
            f"`train_args.optim: adafactor` with {cut}: its factored state needs whole matrices",
            fix="set `train_args.optim: adamw`, or `parallel.mode: ddp`",
        )
    if config.parallel.sequence_parallel and axes.tensor == 1:
        raise ConfigError(
            "`parallel.sequence_parallel: true` without tensor parallelism: there is nothing between cut layers",
            fix="set `parallel.tensor: 2`, or leave `parallel.sequence_parallel` out",
        )
