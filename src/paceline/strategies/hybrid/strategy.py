"""`hybrid`: combine pipeline, tensor, context, sharded and replicated data parallelism on one mesh.

They are applied in this order: the pipeline assigns the blocks to stages; tensor parallelism splits
the layers of a stage; the result is sharded (`shard` > 1: FSDP over the axes data, shard and
context) or replicated (gradients in buckets over the axes data and context). Each of them receives
plain modules with plain parameters, smaller than before. Sharding before splitting would produce
wrong gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.core.errors import RunError
from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import EXPERT, EXPERT_COPIES
from paceline.models.tensor_plan.plan import find_tensor_plan
from paceline.models.tensor_plan.style import RowRange
from paceline.models.weights.load import deferred_conversion, move_model
from paceline.parallel.buckets.gradients import GradientBuckets, squared_norm_of
from paceline.parallel.buckets.strategy import BucketedStrategy
from paceline.parallel.comm_profile import CommProfile
from paceline.parallel.gradients import changing_buffers, clip_to
from paceline.parallel.initial_weights import sync_weights
from paceline.parallel.optimizer_state import optimizer_tensors
from paceline.parallel.save_load import trained_state
from paceline.parallel.state import (
    TensorShard,
    frozen_parts,
    full_shards,
    low_dtype,
    trained_parameters,
)
from paceline.parallel.strategy import EvalFn, MicroStep
from paceline.strategies.reducers.buckets import make_buckets
from paceline.strategies.tensor.shard import TensorParallelizer, TensorSlice, check_plan_sizes
from paceline.strategies.tensor.vocabulary import vocabulary_notices

if TYPE_CHECKING:
    from paceline.strategies.expert.division import ExpertParallelizer
    from paceline.strategies.fsdp.sharding import FSDPSharding
    from paceline.strategies.pipeline.runner import PipelineRunner


class HybridStrategy(BucketedStrategy):
    """Trains on any product of the axes data, shard, context, tensor and pipeline."""

    name = "hybrid"
    rank0_has_full_model = False

    def __init__(self, config: Config, world: Communicator) -> None:
        super().__init__(config, world)
        self.tensor: TensorParallelizer | None = None
        self.pipeline: PipelineRunner | None = None
        self.sharding: FSDPSharding | None = None
        self.buckets: GradientBuckets | None = None
        self.experts: ExpertParallelizer | None = None
        self.expert_buckets: GradientBuckets | None = None

    # -- setup
    def model_init_context(self) -> AbstractContextManager[None]:
        return deferred_conversion()

    def setup(self, model: nn.Module) -> nn.Module:
        axes = self.world.axes
        for names in (
            ("tensor",),
            ("pipeline",),
            ("data",),
            ("data", "context"),
            ("shard", "context"),
            ("data", "shard", "context"),
            self._divided_axes,
        ):
            self.world.subgroup(*names)  # every rank makes its groups in this order
        if axes.expert > 1:
            self.world.subgroup(EXPERT)
            self.world.subgroup(EXPERT_COPIES)
        sync_weights(model, self.world)
        plan = None
        if axes.tensor > 1:
            plan = find_tensor_plan(model, self.config.parallel.tensor_plan)
            check_plan_sizes(model, plan, axes.tensor)
            self.notices += vocabulary_notices(model, plan)
        if axes.pipeline > 1:
            from paceline.strategies.pipeline.runner import PipelineRunner

            self.pipeline = PipelineRunner(
                model, self.world.subgroup("pipeline"), self.config, self.probe
            )
            model = self.pipeline.model
            self.notices += self.pipeline.notices
        if plan is not None:
            self.tensor = TensorParallelizer(
                model, self.world.subgroup("tensor"), self.config.parallel, plan
            )
            self.notices += self.tensor.notices
        if axes.expert > 1:
            from paceline.strategies.expert.division import ExpertParallelizer

            self.experts = ExpertParallelizer(
                model, self.world.subgroup(EXPERT), self.world.subgroup(EXPERT_COPIES)
            )
        self.model = model
        # Sharding replaces the parameters, under the same names.
        partial = {id(parameter) for parameter in self.tensor.partial} if self.tensor else set()
        self.partial_names = [
            name for name, parameter in model.named_parameters() if id(parameter) in partial
        ]
        if axes.shard > 1:
            from paceline.strategies.fsdp.sharding import FSDPSharding, OwnUnits

            own = None
            if self.experts is not None:
                own = OwnUnits(tuple(self.experts.modules), self.experts.copies)
            self.sharding = FSDPSharding(
                model,
                self.world,
                low_dtype=low_dtype(self.config),
                reduces_in_float32=self.config.parallel.reduce_dtype == "float32",
                own=own,
            )
            self.trained = self.sharding.trained
            if self.pipeline is not None:
                self.pipeline.gathered_dtype = low_dtype(self.config)
        else:
            move_model(model, self.world.device)
            self.trained = trained_parameters(model)
            self.changing_buffers = changing_buffers(model) if self.replica_group.size > 1 else []
            rest = {name: each for name, each in self.trained.items() if not self._divides(name)}
            self.buckets, self.reducer = make_buckets(self, rest, self.replica_group)
            if self.experts is not None:
                divided = [each for name, each in self.trained.items() if self._divides(name)]
                cap_bytes = int(self.config.parallel.bucket_cap_mb * 2**20)
                self.expert_buckets = GradientBuckets(divided, cap_bytes, self.experts.copies)
        if self.pipeline is not None and axes.shard * axes.context > 1:
            self.pipeline.replica_group = self.world.subgroup("shard", "context")
        return model

    # -- a step
    def forward_backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        if self.pipeline is None:
            self.accumulate(micro_step, self.model, num_micro_batches)
            return
        self.begin_accumulation()
        if self.sharding is not None:
            self._run_sharded_pipeline(micro_step, num_micro_batches, self.pipeline, self.sharding)
        else:
            assert self.buckets is not None
            self.pipeline.backward(micro_step, num_micro_batches)
            # Backward passes of several micro-batches overlap, so gradients are reduced after all
            # of them.
            self.buckets.start_reducing()
        self.end_accumulation()

    def begin_accumulation(self) -> None:
        super().begin_accumulation()
        if self.sharding is not None:
            self.sharding.begin_step()
        else:
            assert self.buckets is not None
            self.buckets.zero()
            if self.expert_buckets is not None:
                self.expert_buckets.zero()

    def last_backward(self, loss: torch.Tensor) -> None:
        if self.sharding is not None:
            self.sharding.prepare_last_backward()
            loss.backward()
            return
        assert self.buckets is not None
        axes = self.world.axes
        if (
            axes.tensor * axes.context > 1
            and self.reducer is not None
            and self.world.device.type != "cpu"
        ):
            # The reducer's thread would start collectives of the data group while autograd starts
            # collectives of these groups; NCCL needs the same order on all ranks.
            loss.backward()
            self.buckets.start_reducing()
            return
        self.buckets.start_reducing()
        loss.backward()

    def end_accumulation(self) -> None:
        if self.sharding is not None:
            self.sharding.end_step()
        else:
            assert self.buckets is not None
            self.buckets.finish()
            if self.expert_buckets is not None:
                # Not during backward, in which the ranks exchange tokens: their order would differ.
                self.expert_buckets.start_reducing()
                self.expert_buckets.finish()
            self.replica_group.broadcast(self.changing_buffers)
        if self.tensor is not None:
            size = self.tensor.group.size
            self.tensor.sum_over_copies(
                [(_gradient(self.trained[name]), size) for name in self.partial_names]
            )
            self.tensor.sum_over_copies(
                [(gradient, rows.copies) for gradient, rows in self._shared_gradients()]
            )
        if self.pipeline is not None:
            self.pipeline.sum_shared_gradients()

    def _run_sharded_pipeline(
        self,
        micro_step: MicroStep,
        num_micro_batches: int,
        pipeline: PipelineRunner,
        sharding: FSDPSharding,
    ) -> None:
        stages = pipeline.division.stages
        remaining = {stage for name in self.trained for stage in stages[name]}
        remaining &= set(pipeline.local_stages)

        def before_backward(stage: int, is_last: bool) -> None:
            if is_last:
                remaining.discard(stage)
            if not remaining:  # the last backward of the last stage that trains
                sharding.prepare_last_backward()

        pipeline.before_backward = before_backward
        pipeline.backward(micro_step, num_micro_batches)
        if remaining and sharding.copies.size > 1:
            raise RunError(
                "the last micro-batch of this step reaches no trained parameter of pipeline stage"
                " {remaining}, so the replicas cannot sum that stage's gradients",
                code="stage-without-gradients",
                fix="set `parallel.data: 1`, or train parameters that every batch reaches",
                remaining=min(remaining),
            )

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        counted = {name for name in self.trained if self._counts(name)}
        divided = {name for name in counted if self._divides(name)}
        total = self._squared_norm(counted - divided)
        if self.tensor is not None:  # another rank of the tensor group counts these
            shared = self._shared_gradients()
            total -= squared_norm_of(
                [gradient for gradient, rows in shared if not rows.owned], self.world.device
            )
        group = self.world.subgroup(*self._divided_axes)
        group.wait(group.all_reduce(total))
        if self.experts is not None:
            # Without sharding, each rank of the group has experts that the others do not have.
            of_experts = self._squared_norm(divided)
            group = self.experts.group if self.sharding is None else self.world
            group.wait(group.all_reduce(of_experts))
            total += of_experts
        return clip_to(max_norm, total.sqrt().float(), self._scale)

    def _squared_norm(self, names: set[str]) -> torch.Tensor:
        if self.sharding is not None:
            return self.sharding.squared_norm(names)
        gradients = [_gradient(self.trained[name]) for name in self.trained if name in names]
        return squared_norm_of(gradients, self.world.device)

    def _scale(self, factor: torch.Tensor) -> None:
        if self.sharding is not None:
            self.sharding.scale(factor)
            return
        for buckets in self._all_buckets():
            buckets.scale(factor)

    def _all_buckets(self) -> list[GradientBuckets]:
        return [each for each in (self.buckets, self.expert_buckets) if each is not None]

    def _divides(self, name: str) -> bool:
        """Return whether ranks divide the experts of this parameter."""
        return self.experts is not None and name in self.experts.cuts

    def local_grad_finite(self) -> torch.Tensor | None:
        if self.buckets is None:
            return None
        return torch.stack([each.local_sum() for each in self._all_buckets()]).sum()

    @property
    def replica_group(self) -> Communicator:
        is_sharded = self.world.axes.shard > 1
        return self.world.subgroup("data") if is_sharded else self.world.subgroup("data", "context")

    @property
    def _divided_axes(self) -> tuple[str, ...]:
        """The axes over which the parameters of a replica are divided."""
        sharded = ("shard", "context") if self.world.axes.shard > 1 else ("shard",)
        return (*sharded, "tensor", "pipeline")

    def replicated_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = chain(trained_state(self), frozen_parts(self.model))
        if self.experts is None:
            yield from tensors
            return
        # Other ranks have the copies of an expert. A value of the optimizer is `NAME/KEY`.
        yield from (each for each in tensors if not self._divides(each[0].partition("/")[0]))

    def _counts(self, name: str) -> bool:
        """Return whether this rank counts its elements of ``name`` in the norm. Exactly one rank of
        the tensor and pipeline groups does."""
        if self.pipeline is not None and not self.pipeline.owns(name):
            return False
        return self.tensor is None or name in self.tensor.cuts or self.tensor.group.is_rank_zero

    @property
    def bytes_to_gather(self) -> int:
        from paceline.strategies.fsdp.gather import gathered_bytes

        return 0 if self.sharding is None else gathered_bytes(self.sharding)

    def gathered(self) -> AbstractContextManager[None]:
        from paceline.strategies.fsdp.gather import gathered

        return nullcontext() if self.sharding is None else gathered(self.sharding)

    def evaluate(self, run: EvalFn, model: nn.Module) -> dict[str, torch.Tensor] | None:
        if self.pipeline is not None:
            sums = self.pipeline.evaluate(run, model)
            result = None if sums is None else self.reported(sums)
        else:
            result = super().evaluate(run, model)
        if self.sharding is not None:
            self.sharding.reshard()
        return result

    # -- state
    def tensor_shards(self) -> Iterable[TensorShard]:
        first_replica = self.replica_group.is_rank_zero
        for part in self._local_parts():
            owned = part.owned and first_replica and self._counts(part.name)
            cut = self.tensor.cuts.get(part.name) if self.tensor is not None else None
            if self.experts is not None and part.name in self.experts.cuts:
                cut = self.experts.cuts[part.name]
                is_first = self.sharding is not None or self.experts.copies.is_rank_zero
                owned = part.owned and is_first
            if cut is None:
                yield replace(part, owned=owned)
            else:
                yield from _cut_parts(part, cut, owned)

    def _shared_gradients(self) -> list[tuple[torch.Tensor, RowRange]]:
        """Return this rank's gradients of weights that several ranks of the tensor group hold."""
        assert self.tensor is not None
        shared = []
        for part in self._local_parts():
            cut = self.tensor.cuts.get(part.name)
            if cut is None or part.key is None:
                continue
            gradient = _gradient(self.trained[part.name])
            for first, length, rows in cut.pieces(part.offset[cut.dim], part.tensor.shape[cut.dim]):
                if rows.copies > 1:
                    shared.append((gradient.narrow(cut.dim, first, length), rows))
        return shared

    def _local_parts(self) -> Iterable[TensorShard]:
        """Return this rank's shards of its stage's tensor slices, as if these were the model."""
        if self.sharding is not None:
            return self.sharding.tensor_shards()
        return full_shards(self.trained, self.model)

    def memory_tensors(self) -> list[torch.Tensor]:
        if self.sharding is not None:
            return [*self.sharding.memory_tensors(), *optimizer_tensors(self.optimizer)]
        assert self.buckets is not None
        residuals = [] if self.reducer is None else self.reducer.memory_tensors()
        flats = [flat for buckets in self._all_buckets() for flat in buckets.flats]
        state = [*flats, *optimizer_tensors(self.optimizer), *residuals]
        return [*self.model.parameters(), *self.model.buffers(), *state]

    def after_load(self) -> None:
        if self.sharding is not None:
            self.sharding.reshard()

    @property
    def comm_profile(self) -> CommProfile | None:
        return None if self.reducer is None else self.reducer.comm_profile

    def exchanged_rows(self) -> tuple[float, float] | None:
        return None if self.experts is None else self.experts.rows.take()

    @property
    def transient_bytes(self) -> int:
        return 0 if self.sharding is None else self.sharding.gathered_bytes


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _cut_parts(part: TensorShard, cut: TensorSlice, owned: bool) -> Iterable[TensorShard]:
    """Return the shards of the full parameter in a shard of this rank's tensor slice: one for each
    range of rows."""
    pieces = cut.pieces(part.offset[cut.dim], part.tensor.shape[cut.dim])
    if not pieces:  # a shard without elements is needed for the optimizer's step count
        offset = tuple(cut.start if dim == cut.dim else 0 for dim in range(len(cut.shape)))
        yield replace(part, owned=owned, shape=cut.shape, offset=offset)
    for first, length, rows in pieces:
        offset = tuple(
            rows.start if dim == cut.dim else begin for dim, begin in enumerate(part.offset)
        )
        region = None
        if len(pieces) > 1:
            region = tuple(
                slice(first, first + length) if dim == cut.dim else slice(None)
                for dim in range(len(cut.shape))
            )
        is_all = length == part.tensor.shape[cut.dim]
        yield replace(
            part,
            tensor=part.tensor if is_all else part.tensor.detach().narrow(cut.dim, first, length),
            owned=owned and rows.owned,
            shape=cut.shape,
            offset=offset,
            region=region,
        )
