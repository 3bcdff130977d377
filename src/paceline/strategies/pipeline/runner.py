"""Run a model as a pipeline: consecutive blocks are on different ranks, which pass micro-batches to
each other.

This component of a strategy partitions the model in place, runs the schedules of
torch.distributed.pipelining, evaluates stage by stage, and determines which rank holds and owns
which tensors.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.config.schema import Config
from paceline.core.texts import UserText
from paceline.distributed import torch_compat
from paceline.distributed.communicator import Communicator
from paceline.distributed.traffic import uncounted
from paceline.models.blocks import evaluation_mode, find_blocks, tied_names
from paceline.models.shape.trace import Trace
from paceline.models.weights.load import converted_weights
from paceline.parallel.state import local_tensor
from paceline.parallel.strategy import MicroStep
from paceline.strategies.pipeline.model_check import check_blocks, check_bypasses
from paceline.strategies.pipeline.partition import PartitionedModel, drop, partition_error
from paceline.strategies.pipeline.schedule import (
    DynamicStage,
    Hidden,
    PipelineSchedule,
    make_schedule,
    supported_schedule,
)
from paceline.strategies.pipeline.stages import StagePlan, divide, num_chunks, rank_of_stage

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
_MAX_DIMS = 8
_NAMES = {"looped": "a breadth-first schedule (all forwards, then all backwards)", "gpipe": "gpipe"}


class PipelineRunner:
    """Runs this rank's stages of a model.

    Args:
        model: full model with the same values on every rank of the pipeline. It is partitioned in
            place.
        comm: communicator of the pipeline's ranks, in the order of the stages.
        config: config; only ``parallel.pipeline_schedule`` and ``parallel.stages_per_rank`` are
            used.
        run: function that runs a forward pass of the task, to determine the order of modules in a
            model whose inputs are unknown.

    Raises:
        ConfigError: if the model has too few blocks or cannot run as a pipeline.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        config: Config,
        run: Callable[[nn.Module], object] | None = None,
    ) -> None:
        self.model, self.comm, self.config = model, comm, config
        #: Notices as (level, message); a step that needs another schedule adds one.
        self.notices: list[tuple[str, str]] = []
        #: Called before each backward with (stage, whether it is the stage's last of the step).
        self.before_backward: Callable[[int, bool], None] = lambda stage, is_last: None
        blocks = find_blocks(model)
        with converted_weights(model):
            forms, trace = check_blocks(model, blocks, run)
        settings = config.parallel
        self.schedule = settings.pipeline_schedule
        num_stages = comm.size * num_chunks(self.schedule, settings.stages_per_rank)
        self.division = divide_model(model, blocks, num_stages, trace)
        self.local_stages = [
            stage for stage in range(num_stages) if rank_of_stage(stage, comm.size) == comm.rank
        ]
        self.partitioned = PartitionedModel(model, blocks, forms, self.division, self.local_stages)
        self._shared = self._find_shared()  # while all parameters exist
        drop(model, self.division, self.local_stages)
        self._micro_step: MicroStep | None = None
        self.stages: list[DynamicStage] = []
        self._schedules: dict[int, PipelineSchedule] = {}
        # shape before the blocks → hidden states after each stage
        self._known: dict[tuple[int, ...], tuple[Hidden, ...]] = {}
        self._keeps_shape = True
        #: The same stage's ranks in other replicas, if a forward has collectives among them (FSDP).
        self.replica_group: Communicator | None = None
        #: Data type in which weights are gathered, if they are sharded in another one. A probe
        #: computes with the weights as they are stored.
        self.gathered_dtype: torch.dtype | None = None
        self._checked: set[int] = set()
        self._supported_schedule(config.train_args.gradient_accumulation_steps)

    # -- ownership
    def owns(self, name: str) -> bool:
        """Whether this rank owns a parameter or buffer; exactly one rank of the pipeline does."""
        return self.division.stages[name][0] in self.local_stages

    def _find_shared(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the trained parameters that several ranks hold, and these ranks, in the same order
        on all ranks."""
        trained = [
            name for name, parameter in self.model.named_parameters() if parameter.requires_grad
        ]
        holders = [(name, self.division.ranks_of(name, self.comm.size)) for name in trained]
        return [(name, ranks) for name, ranks in holders if len(ranks) > 1]

    def sum_shared_gradients(self) -> None:
        """Sum the gradients of tied weights over the ranks that hold them.

        Each rank sends its gradients to the others.
        """
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name, ranks in self._shared:
            if self.comm.rank not in ranks:
                continue
            parameter = parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local_tensor(parameter.grad)
            local = gradient.detach().clone(memory_format=torch.contiguous_format)
            parts = {rank: torch.empty_like(local) for rank in ranks}
            operations = []
            for rank in ranks:
                if rank != self.comm.rank:
                    peer = self.comm.ranks[rank]
                    operations.append(dist.P2POp(dist.isend, local, peer, self.comm.group))
                    operations.append(dist.P2POp(dist.irecv, parts[rank], peer, self.comm.group))
            for work in dist.batch_isend_irecv(operations):
                self.comm.wait(work)
            parts[self.comm.rank] = local
            total = torch.zeros_like(local)
            for rank in ranks:  # in the same order on all ranks, so that copies are bit-identical
                total += parts[rank]
            with torch.no_grad():
                gradient.copy_(total)

    # -- a step
    def backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        """Run forward and backward over the micro-batches in the order of the schedule, and add the
        gradients to ``.grad``.

        ``micro_step`` returns the loss on the rank of the last stage. On other ranks, its forward
        pass ends early.
        """
        self._micro_step = micro_step
        shapes = self._shapes(num_micro_batches)
        if num_micro_batches not in self._schedules:
            self.stages = self.stages or [self._make_stage(stage) for stage in self.local_stages]
            name = self._supported_schedule(num_micro_batches)
            self._schedules[num_micro_batches] = make_schedule(name, self.stages, num_micro_batches)
        for stage in self.stages:
            stage.shapes = shapes
        try:
            # the stages count what they send, however the schedule batches it
            with uncounted("send"):
                schedule = self._schedules[num_micro_batches]
                schedule.step(target=torch.arange(num_micro_batches))
        finally:
            self._micro_step = None
            for stage in self.stages:
                stage.clear_runtime_states()

    def _supported_schedule(self, num_micro_batches: int) -> str:
        schedule, reason = supported_schedule(self.schedule, self.comm.size, num_micro_batches)
        if reason is not None:
            text = UserText(
                "`parallel.pipeline_schedule: {schedule}` is not supported with {reason}:"
                " {names} is used instead, with the same result",
                code="other-schedule-used",
                schedule=self.schedule,
                reason=reason,
                names=_NAMES[schedule],
            )
            if ("warning", text) not in self.notices:
                self.notices.append(("warning", text))
        return schedule

    def _make_stage(self, stage: int) -> DynamicStage:
        trained = {
            id(parameter): parameter
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
            if parameter.requires_grad and stage in self.division.stages.get(name, (stage,))
        }
        peers = [self._rank_of(other) for other in range(self.division.num_stages)]
        return DynamicStage(
            stage,
            peers,
            self.comm.device,
            self.comm.group,
            list(trained.values()),
            self._run_stage,
            lambda index, is_last: self.before_backward(index, is_last),
        )

    def _run_stage(self, stage: int, number: int, received: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = self.partitioned.run(stage, partial(self._loss, number), received)
        has_values = isinstance(out, torch.Tensor) and torch_compat.has_values(out)
        if has_values and stage not in self._checked:
            self._checked.add(stage)
            self._check_leak(stage, received, out)
        return out

    def _loss(self, number: int) -> torch.Tensor:
        assert self._micro_step is not None
        return self._micro_step(number, self.model)

    def _check_leak(self, stage: int, received: torch.Tensor | None, out: torch.Tensor) -> None:
        """Raise RunError if a placeholder, which contains NaN, reached the output of a stage."""
        is_finite = received is None or not bool(torch.isnan(received.detach()).any())
        if is_finite and bool(torch.isnan(out.detach()).any()):
            raise partition_error(
                f"stage {stage} returns NaN: it uses a value of an earlier stage other than the"
                " blocks' output"
            )

    # -- shapes
    def _shapes(self, num_micro_batches: int) -> list[tuple[Hidden, ...]]:
        """Return the hidden states after each stage but the last, for each micro-batch; every rank
        of the pipeline gets the same result.

        Most blocks keep the shape, which the first micro-batch shows. Otherwise one micro-batch of
        each new shape runs a forward through the stages. A shape may be new to one replica and
        known to another: if the replicas' forwards have collectives in common
        (:attr:`replica_group`), all replicas run as many of these forwards.
        """
        with torch.no_grad():
            inputs = [
                self.partitioned.probe(partial(self._loss, number))
                for number in range(num_micro_batches)
            ]
        before = [shape for shape, _ in inputs]
        if not self.comm.has_peers:  # then the blocks are assumed to keep shape and dtype
            hidden = [(shape, self.gathered_dtype or dtype) for shape, dtype in inputs]
            return [(each,) * (self.division.num_stages - 1) for each in hidden]
        if not self._known:
            self._learn_shapes(before[0], 0)
        new = {
            shape: number
            for number, shape in reversed(list(enumerate(before)))
            if shape not in self._known
        }
        if self._keeps_shape:
            first = next(iter(self._known.values()))
            self._known |= {shape: tuple((shape, dtype) for _, dtype in first) for shape in new}
        else:
            num_forwards = len(new)
            if self.replica_group is not None:
                num_forwards = int(max(self.replica_group.gather_numbers(len(new))))
            forwards = [*new.items(), *[(before[0], 0)] * (num_forwards - len(new))]
            if num_forwards and self.comm.axes.context > 1:
                # The ranks of a context group must compute parts of the same rows.
                forwards = list(zip(before, range(num_micro_batches), strict=True))
            for shape, number in forwards:
                self._learn_shapes(shape, number)
        return [self._known[shape] for shape in before]

    def _learn_shapes(self, before: tuple[int, ...], number: int) -> None:
        local: dict[int, Hidden] = {}
        with evaluation_mode(self.model), torch.no_grad(), uncounted():
            self._forward(partial(self._loss, number), local, with_last=False)
        hidden: dict[int, Hidden] = {}
        for shapes in self.comm.gather_objects(local):
            hidden.update(shapes)
        self._known[before] = tuple(hidden[stage] for stage in range(self.division.num_stages - 1))
        self._keeps_shape = self._keeps_shape and all(
            shape == before for shape, _ in self._known[before]
        )

    # -- forward without backward
    def evaluate(
        self, run: Callable[[nn.Module], dict[str, torch.Tensor]], model: nn.Module
    ) -> dict[str, torch.Tensor] | None:
        """Run ``run(model)`` through the stages. A collective of the pipeline.

        Returns:
            The result on the rank of the last stage, and None on the others.
        """
        with torch.no_grad(), uncounted():
            return self._forward(lambda: run(model), {}, with_last=True)  # type: ignore[no-any-return]

    def _forward(self, call: Callable[[], Any], shapes: dict[int, Hidden], with_last: bool) -> Any:
        """Run ``call`` through the stages, recording the hidden states after each in ``shapes``."""
        for stage in self.local_stages:
            received = self._receive(self._rank_of(stage - 1)) if stage > 0 else None
            if stage == self.division.num_stages - 1:
                return self.partitioned.run(stage, call, received) if with_last else None
            out = self.partitioned.run(stage, call, received).detach()
            shapes[stage] = (tuple(out.shape), out.dtype)
            self._send(out, self._rank_of(stage + 1))
        return None

    def _rank_of(self, stage: int) -> int:
        """Return the global rank of a stage."""
        return self.comm.ranks[rank_of_stage(stage, self.comm.size)]

    def _send(self, tensor: torch.Tensor, target: int) -> None:
        header = [tensor.dim(), _DTYPES.index(tensor.dtype), *tensor.shape]
        header += [0] * (_MAX_DIMS + 2 - len(header))
        dist.send(torch.tensor(header, device=self.comm.device), target, group=self.comm.group)
        dist.send(tensor.contiguous(), target, group=self.comm.group)

    def _receive(self, source: int) -> torch.Tensor:
        header = torch.empty(_MAX_DIMS + 2, dtype=torch.int64, device=self.comm.device)
        dist.recv(header, source, group=self.comm.group)
        dims, dtype, *shape = header.tolist()
        tensor = torch.empty(shape[:dims], dtype=_DTYPES[dtype], device=self.comm.device)
        dist.recv(tensor, source, group=self.comm.group)
        return tensor


def divide_model(
    model: nn.Module,
    blocks: list[tuple[str, nn.Module]],
    num_stages: int,
    trace: Trace | None = None,
) -> StagePlan:
    """Assign the blocks of a full model to stages.

    Raises:
        ConfigError: if there are too few blocks, or if a later stage needs more than the hidden
            states of the stage before it.
    """
    division = divide(
        {name: parameter.numel() for name, parameter in model.named_parameters()},
        [name for name, _ in blocks],
        num_stages,
        tied_names(model),
        [name for name, _ in model.named_buffers(remove_duplicate=False)],
        trace.phases if trace else None,
    )
    check_bypasses(trace, division.blocks[0][1])
    return division
