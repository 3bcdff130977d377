"""Pipeline parallelism: runs of blocks on different ranks, micro-batches passed from one to the
next.

A component for a strategy: it cuts the model in place, drives the schedules of
torch.distributed.pipelining, evaluates hop by hop, and says which rank holds and owns what.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.config.schema import Config
from paceline.distributed.communicator import Communicator
from paceline.distributed.traffic import uncounted
from paceline.models.blocks import evaluation_mode, find_blocks, tied_names
from paceline.models.shape.trace import Trace
from paceline.parallel.base import MicroStep
from paceline.parallel.pipeline.check import check_blocks
from paceline.parallel.pipeline.partition import PartitionedModel, drop, unfit
from paceline.parallel.pipeline.schedule import DynamicStage, Hidden, legal_schedule, make_schedule
from paceline.parallel.pipeline.stages import StagePlan, divide, num_chunks, rank_of_stage
from paceline.parallel.state import local_tensor

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
_MOST_DIMS = 8
_NAMES = {"looped": "a breadth-first schedule (all forwards, then all backwards)", "gpipe": "gpipe"}


class PipelineRunner:
    """This rank's stages of a model.

    Args:
        model: whole, with the same values on every rank of the pipeline; it is cut in place: what
            other ranks hold becomes None.
        comm: the ranks of the pipeline, in the order of the stages.
        config: its ``parallel.pipeline_schedule`` and ``parallel.stages_per_rank`` count.
        run: a forward of the task, which shows the order of the modules of a model whose inputs are
            not known.

    Raises:
        ConfigError: the model has too few blocks, or cannot run as a pipeline.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        config: Config,
        run: Callable[[nn.Module], object] | None = None,
    ) -> None:
        self.model, self.comm, self.config = model, comm, config
        #: (level, text) for the person; grows where a step cannot run as asked for
        self.notices: list[tuple[str, str]] = []
        #: called before each backward with (stage, True where it is the last of the step for this
        #: stage)
        self.before_backward: Callable[[int, bool], None] = lambda stage, last: None
        blocks = find_blocks(model)
        forms, trace = check_blocks(model, blocks, run)
        settings = config.parallel
        self.schedule = settings.pipeline_schedule
        num_stages = comm.size * num_chunks(self.schedule, settings.stages_per_rank)
        self.division = divide_model(model, blocks, num_stages, trace)
        self.mine = [
            stage for stage in range(num_stages) if rank_of_stage(stage, comm.size) == comm.rank
        ]
        self.cut = PartitionedModel(model, blocks, forms, self.division, self.mine)
        self._shared = self._find_shared()  # while all are there
        drop(model, self.division, self.mine)
        self._micro_step: MicroStep | None = None
        self._stages: list[DynamicStage] = []
        self._schedules: dict[int, Any] = {}
        # shape before the blocks → hidden behind each stage
        self._known: dict[tuple[int, ...], tuple[Hidden, ...]] = {}
        self._keeps_shape = True
        #: The same stage's ranks in other replicas, where a forward has collectives among them
        #: (shards).
        self.together: Communicator | None = None
        self._checked: set[int] = set()
        self._legal(config.train_args.gradient_accumulation_steps)

    # -- who has what
    def owns(self, name: str) -> bool:
        """True on exactly one rank of the pipeline."""
        return self.division.stages[name][0] in self.mine

    def _find_shared(self) -> list[tuple[str, list[int]]]:
        """Trained parameters that several ranks hold, with their places in the pipeline; in one
        order on all ranks."""
        trained = [
            name for name, parameter in self.model.named_parameters() if parameter.requires_grad
        ]
        holders = [(name, self.division.ranks_of(name, self.comm.size)) for name in trained]
        return [(name, ranks) for name, ranks in holders if len(ranks) > 1]

    def sum_shared_gradients(self) -> None:
        """Add up the gradients of tied weights over the ranks that hold them: each sends its own to
        the others."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name, ranks in self._shared:
            if self.comm.rank not in ranks:
                continue
            parameter = parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local_tensor(parameter.grad)
            mine = gradient.detach().clone(memory_format=torch.contiguous_format)
            parts = {rank: torch.empty_like(mine) for rank in ranks}
            operations = []
            for rank in ranks:
                if rank != self.comm.rank:
                    peer = self.comm.ranks[rank]
                    operations.append(dist.P2POp(dist.isend, mine, peer, self.comm.group))
                    operations.append(dist.P2POp(dist.irecv, parts[rank], peer, self.comm.group))
            for work in dist.batch_isend_irecv(operations):
                self.comm.wait(work)
            parts[self.comm.rank] = mine
            total = torch.zeros_like(mine)
            for rank in ranks:  # in one order, so that every copy gets the same bits
                total += parts[rank]
            with torch.no_grad():
                gradient.copy_(total)

    # -- a step
    def backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        """Forward and backward over the micro-batches by the schedule; gradients are added to
        ``.grad``. ``micro_step`` returns the loss on the rank of the last stage alone; on the
        others it is left before its end."""
        self._micro_step = micro_step
        shapes = self._shapes(num_micro_batches)
        if num_micro_batches not in self._schedules:
            self._stages = self._stages or [self._make_stage(stage) for stage in self.mine]
            schedule = make_schedule(
                self._legal(num_micro_batches), self._stages, num_micro_batches
            )
            self._schedules[num_micro_batches] = schedule
        for stage in self._stages:
            stage.shapes = shapes
        numbers = torch.arange(num_micro_batches)
        try:
            # the stages count what they send, whichever way the schedule bundles it
            with uncounted("send"):
                self._schedules[num_micro_batches].step(target=numbers)
        finally:
            self._micro_step = None
            for stage in self._stages:
                stage.clear_runtime_states()

    def _legal(self, num_micro_batches: int) -> str:
        schedule, why = legal_schedule(self.schedule, self.comm.size, num_micro_batches)
        if why is not None:
            text = (
                f"`pipeline_schedule: {self.schedule}` cannot run {why}: {_NAMES[schedule]} runs"
                " instead, with the same result"
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
        peers = [
            self.comm.ranks[rank_of_stage(other, self.comm.size)]
            for other in range(self.division.num_stages)
        ]
        return DynamicStage(
            stage,
            peers,
            self.comm.device,
            self.comm.group,
            list(trained.values()),
            self._run_stage,
            lambda *place: self.before_backward(*place),
        )

    def _run_stage(self, stage: int, number: int, received: torch.Tensor | None) -> torch.Tensor:
        out = self.cut.run(stage, partial(self._micro, number), received)
        self._check_leak(stage, received, out)
        return out  # type: ignore[no-any-return]

    def _micro(self, number: int) -> torch.Tensor:
        assert self._micro_step is not None
        return self._micro_step(number, self.model)

    def _check_leak(self, stage: int, received: torch.Tensor | None, out: Any) -> None:
        """Once a stage: what stands in for the other stages' values is NaN; none of it may reach
        the output."""
        if stage in self._checked or not isinstance(out, torch.Tensor):
            return
        self._checked.add(stage)
        clean = received is None or not bool(torch.isnan(received.detach()).any())
        if clean and bool(torch.isnan(out.detach()).any()):
            raise unfit(
                f"stage {stage} makes NaN of numbers: it uses what an earlier stage computes,"
                " beside the blocks' output"
            )

    # -- shapes
    def _shapes(self, num_micro_batches: int) -> list[tuple[Hidden, ...]]:
        """What is passed behind each stage but the last, for each micro-batch; every rank of the
        pipeline finds the same.

        Most blocks keep the shape (seen at the first micro-batch). For those that do not, one
        micro-batch of each new shape is sent through the stages once, forward alone. Shapes may be
        new to one replica and not to another: where the replicas' forwards have collectives in
        common (:attr:`together`), all run as many as the one with the most.
        """
        with torch.no_grad():
            before = [
                self.cut.probe(partial(self._micro, number)) for number in range(num_micro_batches)
            ]
        if not self._known:
            self._learn(before[0], 0)
        new = {
            shape: number
            for number, shape in reversed(list(enumerate(before)))
            if shape not in self._known
        }
        if self._keeps_shape:
            first = next(iter(self._known.values()))
            self._known |= {shape: tuple((shape, dtype) for _, dtype in first) for shape in new}
        else:
            most = (
                int(max(self.together.gather_numbers(len(new))))
                if self.together is not None
                else len(new)
            )
            for shape, number in [*new.items(), *[(before[0], 0)] * (most - len(new))]:
                self._learn(shape, number)
        return [self._known[shape] for shape in before]

    def _learn(self, before: tuple[int, ...], number: int) -> None:
        mine: dict[int, Hidden] = {}
        with evaluation_mode(self.model), torch.no_grad(), uncounted():
            self._hop(partial(self._micro, number), mine, with_last=False)
        hidden: dict[int, Hidden] = {}
        for sent in self.comm.gather_objects(mine):
            hidden.update(sent)
        self._known[before] = tuple(hidden[stage] for stage in range(self.division.num_stages - 1))
        self._keeps_shape = self._keeps_shape and all(
            shape == before for shape, _ in self._known[before]
        )

    # -- forward alone
    def evaluate(
        self, run: Callable[[nn.Module], dict[str, torch.Tensor]], model: nn.Module
    ) -> dict[str, torch.Tensor] | None:
        """``run(model)`` passed through the stages; its result on the rank of the last stage, None
        on the others. A collective of the pipeline."""
        with torch.no_grad(), uncounted():
            return self._hop(lambda: run(model), {}, with_last=True)  # type: ignore[no-any-return]

    def _hop(self, call: Callable[[], Any], seen: dict[int, Hidden], with_last: bool) -> Any:
        last = self.division.num_stages - 1
        for stage in self.mine:
            received = None
            if stage > 0:
                received = self._receive(self.comm.ranks[rank_of_stage(stage - 1, self.comm.size)])
            if stage == last:
                return self.cut.run(stage, call, received) if with_last else None
            out = self.cut.run(stage, call, received).detach()
            seen[stage] = (tuple(out.shape), out.dtype)
            self._send(out, self.comm.ranks[rank_of_stage(stage + 1, self.comm.size)])
        return None

    def _send(self, tensor: torch.Tensor, target: int) -> None:
        header = [tensor.dim(), _DTYPES.index(tensor.dtype), *tensor.shape]
        header += [0] * (_MOST_DIMS + 2 - len(header))
        dist.send(torch.tensor(header, device=self.comm.device), target, group=self.comm.group)
        dist.send(tensor.contiguous(), target, group=self.comm.group)

    def _receive(self, source: int) -> torch.Tensor:
        header = torch.empty(_MOST_DIMS + 2, dtype=torch.int64, device=self.comm.device)
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
    """The stages of a model that is still whole."""
    return divide(
        {name: parameter.numel() for name, parameter in model.named_parameters()},
        [name for name, _ in blocks],
        num_stages,
        tied_names(model),
        [name for name, _ in model.named_buffers(remove_duplicate=False)],
        trace.phases if trace else None,
    )
