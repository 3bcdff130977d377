"""Stages for the schedules of torch.distributed.pipelining, with micro-batches of different shapes.

torch's own ``PipelineStage`` requires one shape for all micro-batches, and its internals differ
between versions. This stage implements what the schedules call: the messages before and after a
micro-batch, and its forward and backward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining._backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase

from paceline.core.errors import RunError
from paceline.distributed.timing.progress import PROGRESS
from paceline.distributed.traffic import TRAFFIC, counted_again, uncounted

#: Shape and dtype of the hidden states after a stage.
Hidden = tuple[tuple[int, ...], torch.dtype]
PipelineSchedule = PipelineScheduleSingle | PipelineScheduleMulti


class DynamicStage(_PipelineStageBase):
    """One stage of a pipeline, as a schedule runs it.

    Args:
        peers: global rank of each stage.
        parameters: the parameters that the stage trains.
        run: the forward, called with (stage, micro-batch, received hidden states).
        before_backward: called before each backward with (stage, whether it is the stage's last of
            this step).
    """

    def __init__(
        self,
        index: int,
        peers: Sequence[int],
        device: torch.device,
        group: dist.ProcessGroup | None,
        parameters: list[nn.Parameter],
        run: Callable[[int, int, torch.Tensor | None], torch.Tensor],
        before_backward: Callable[[int, bool], None],
    ) -> None:
        super().__init__(nn.Module(), index, len(peers), device, group)
        self._peers = list(peers)
        self._trained = parameters
        self._run = run
        self._before_backward = before_backward
        # for each micro-batch, the hidden states after each stage but the last
        self.shapes: list[tuple[Hidden, ...]] = []
        self._inputs: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._output_grads: dict[int, torch.Tensor] = {}
        self._input_grads: dict[int, torch.Tensor | None] = {}
        self._split: dict[int, tuple[Any, ...]] = {}
        self.clear_runtime_states()

    # -- called once by a schedule
    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return ()

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return None

    def _create_grad_recv_info(self, *args: Any, **kwargs: Any) -> Any:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []  # the ranks are already connected

    def clear_runtime_states(self) -> None:
        for store in (
            self._inputs,
            self._outputs,
            self._output_grads,
            self._input_grads,
            self._split,
        ):
            store.clear()
        self.output_chunks: list[Any] = []
        self.args_recv_info = {0: ()}
        self.act_send_info = {}

    def scale_grads(self, grad_scale_factor: int) -> None:
        pass

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        pass

    # -- messages
    def _receive(
        self, store: dict[int, torch.Tensor], number: int, behind: int, source: int
    ) -> list[dist.P2POp]:
        shape, dtype = self.shapes[number][behind]
        store[number] = torch.empty(shape, dtype=dtype, device=self.device)
        return [dist.P2POp(dist.irecv, store[number], self._peers[source], self.group)]

    def _send(self, tensor: torch.Tensor, target: int) -> list[dist.P2POp]:
        tensor = tensor.detach().contiguous()
        TRAFFIC.add("send", tensor.nbytes)
        return [dist.P2POp(dist.isend, tensor, self._peers[target], self.group)]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        return self._receive(self._inputs, fwd_chunk_id, self.stage_index - 1, self.stage_index - 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return [] if self.is_last else self._send(self._outputs[fwd_chunk_id], self.stage_index + 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or not self.has_backward:
            return []
        return self._receive(
            self._output_grads, bwd_chunk_id, self.stage_index, self.stage_index + 1
        )

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or not self.has_backward:
            return []
        gradient = self._input_grads.pop(bwd_chunk_id)
        # the output does not depend on the input, but the receiver waits for a message
        if gradient is None:
            shape, dtype = self.shapes[bwd_chunk_id][self.stage_index - 1]
            gradient = torch.zeros(shape, dtype=dtype, device=self.device)
        return self._send(gradient, self.stage_index - 1)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self._inputs[mb_index] = prev_stage_outputs.detach()

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return (self._input_grads.pop(mb_index),)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        self._output_grads[mb_index] = next_stage_bwd_outputs[0]

    # -- work
    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: Any,
        kwargs: Any = None,
        save_forward_output: bool = True,
        **others: Any,
    ) -> Any:
        received = None
        if not self.is_first:
            received = self._inputs[fwd_chunk_id].requires_grad_()
        with counted_again():
            out = self._run(self.stage_index, fwd_chunk_id, received)
        if self.is_last:
            self.output_chunks.append(out.detach().reshape(1))
        else:
            hidden = (tuple(out.shape), out.dtype)
            if hidden != self.shapes[fwd_chunk_id][self.stage_index]:
                raise RunError(
                    "hidden states after pipeline stage {stage_index} have shape and dtype"
                    " {hidden}, expected {shapes}",
                    code="stage-shape-mismatch",
                    allowed="blocks whose output shape follows from the shape of their input",
                    fix="use a mode that does not partition the model, such as `zero3`",
                    stage_index=self.stage_index,
                    hidden=hidden,
                    shapes=self.shapes[fwd_chunk_id][self.stage_index],
                )
            # stage_backward detaches the output in place, which a view does not support
            out = out.clone() if out._is_view() else out
        self._outputs[fwd_chunk_id] = out
        return out

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
        **others: Any,
    ) -> None:
        PROGRESS.enter("backward")
        output = self._outputs.pop(bwd_chunk_id)
        received = self._inputs.pop(bwd_chunk_id, None)
        inputs = [] if received is None else [received]
        gradients = None if self.is_last else (self._output_grads.pop(bwd_chunk_id),)
        if not output.requires_grad:  # all parameters up to here are frozen
            self._input_grads[bwd_chunk_id] = None
            return
        with counted_again():
            self._before_backward(self.stage_index, last_backward)
            if full_backward:
                result = _run_backward(stage_backward, (output,), gradients or (None,), inputs)
            elif self.is_first:
                self._split[bwd_chunk_id] = (output, gradients, None)
                return
            else:
                result, groups = _run_backward(
                    stage_backward_input, [output], gradients, inputs, iter(self._trained)
                )
                self._split[bwd_chunk_id] = (output, gradients, groups)
        self._input_grads[bwd_chunk_id] = result[0] if result else None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if bwd_chunk_id not in self._split:
            return
        PROGRESS.enter("backward")
        output, gradients, groups = self._split.pop(bwd_chunk_id)
        with counted_again():
            self._before_backward(self.stage_index, last_backward)
            if groups is None:
                _run_backward(stage_backward, (output,), gradients, [])
            else:
                stage_backward_weight(iter(self._trained), groups)


def _run_backward(run: Callable[..., Any], *args: Any) -> Any:
    """Call a function of torch that runs the backward pass of a stage, and wraps every error in a
    RuntimeError about the stage. Raise the error itself, so that the caller knows whether memory
    was lacking."""
    try:
        return run(*args)
    except RuntimeError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


def _loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss, which the last stage computes, without its graph: the schedule keeps it
    until the end of the step, and the graph has the hidden states that the stage received."""
    return output.detach()


def supported_schedule(schedule: str, num_ranks: int, micro_batches: int) -> tuple[str, str | None]:
    """Return the schedule for ``micro_batches``: the requested one, or the closest that supports
    them and the reason."""
    too_few = f"fewer micro-batches ({micro_batches}) than ranks of the pipeline ({num_ranks})"
    if schedule == "1f1b" and micro_batches < num_ranks:
        return "gpipe", too_few
    if schedule in ("interleaved_1f1b", "zero_bubble"):
        if micro_batches < num_ranks:
            return "looped", too_few
        rounds = micro_batches // num_ranks
        if micro_batches % rounds:
            uneven = f"{micro_batches} micro-batches, which {rounds} rounds do not divide"
            return "looped", f"{uneven}, on {num_ranks} ranks"
    return schedule, None


def make_schedule(
    schedule: str, stages: list[DynamicStage], micro_batches: int
) -> PipelineSchedule:
    """Return a schedule of :mod:`torch.distributed.pipelining` over this rank's stages."""
    kinds: dict[str, Callable[..., PipelineSchedule]] = {
        "gpipe": ScheduleGPipe,
        "1f1b": Schedule1F1B,
        "interleaved_1f1b": ScheduleInterleaved1F1B,
        "zero_bubble": ScheduleInterleavedZeroBubble,
        "looped": ScheduleLoopedBFS,
    }
    driven = stages[0] if schedule in ("gpipe", "1f1b") else stages
    made = kinds[schedule](driven, micro_batches, loss_fn=_loss_of, scale_grads=False)
    connect = getattr(made, "_initialize_pipeline_distributed_state", None)
    if connect is not None:  # since torch 2.15; called in the first step of a schedule

        def connect_uncounted(*args: Any) -> None:
            with uncounted():
                connect(*args)

        made._initialize_pipeline_distributed_state = connect_uncounted  # type: ignore[union-attr]
    return made
