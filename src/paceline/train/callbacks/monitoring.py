"""Callbacks that log steps, memory, compilation and advice, and compare replicas."""

import logging
import math
from functools import partial

from torch import nn

from paceline.core.event_log import EventLog
from paceline.core.events import StepEvent
from paceline.core.formatting import counted
from paceline.core.log import log_notices
from paceline.data.order.base import Order
from paceline.distributed.progress import DEVICE
from paceline.health.anomalies import AnomalyDetector
from paceline.health.replicas import check_replicas
from paceline.models.transforms.compile import CompileTimes
from paceline.observe.comm_advisor import CommAdvisor
from paceline.observe.memory import STEPS_BEFORE, emit_memory
from paceline.observe.metrics import StepMetrics, restart_peak
from paceline.parallel.base import Strategy
from paceline.train.callbacks.base import Callback
from paceline.train.callbacks.sources import SourceRecorder
from paceline.train.callbacks.task_metrics import MetricRecorder
from paceline.train.state import RankContext, StepResult, TrainState

logger = logging.getLogger(__name__)


class CompileReport(Callback):
    """Logs how long torch.compile took, and warns about recompilations."""

    def __init__(self, times: CompileTimes) -> None:
        self.times = times
        self._next_warning = 1

    def on_step_end(self, result: StepResult, state: TrainState) -> None:
        times, steps_done = self.times, state.step - state.first_step
        if steps_done == 1:
            logger.info(f"torch.compile: {times.count} graphs in {times.seconds:.0f} s")
        if steps_done <= 2:
            times.num_expected = times.count
        elif times.recompilations >= self._next_warning:
            self._next_warning = 2 * times.recompilations
            logger.warning(
                f"torch.compile compiled again after the first steps:"
                f" {counted(times.recompilations, 'graph')} up to step {state.step},"
                f" {times.seconds:.0f} s in all; the reasons are printed with TORCH_LOGS=recompiles"
            )


class StepLogger(Callback):
    """Gathers the metrics since the last logged step and emits a ``step`` event.

    Args:
        row_tokens: capacity of a packed row, or None if rows are samples.
        sources: the recorder of several sources, or None.
        task_metrics: the recorder of the task's metrics, or None.
    """

    def __init__(
        self,
        metrics: StepMetrics,
        anomalies: AnomalyDetector,
        order: Order,
        ctx: RankContext,
        row_tokens: int | None = None,
        sources: SourceRecorder | None = None,
        task_metrics: MetricRecorder | None = None,
    ) -> None:
        self.task_metrics = task_metrics
        self.row_tokens = row_tokens
        self.sources = sources
        self._logged_step: int | None = None
        self.metrics = metrics
        self.anomalies = anomalies
        self.order = order
        self.ctx = ctx
        self._has_reported_nan = False

    def on_step_end(self, result: StepResult, state: TrainState) -> None:
        if self.sources is not None and result.outcome == "updated":
            self.sources.add_step()
        if self.task_metrics is not None and result.outcome == "updated":
            self.task_metrics.add_step()
        if not result.is_logged:
            return
        assert result.grad_norm is not None
        with self.ctx.progress.waiting(DEVICE):
            grad_norm = float(result.grad_norm)
        extra = [*self.anomalies.local_counts()]
        num_extra = len(extra)
        if self.sources is not None:
            extra += self.sources.take()
        num_before_metrics = len(extra)
        if self.task_metrics is not None:
            extra += self.task_metrics.take()
        figures = self.metrics.gather(grad_norm, extra)
        result.figures.update(figures)
        self.anomalies.report_local_skips(state.step, self.metrics.extra_by_rank)
        event: StepEvent = {
            "type": "step",
            "step": state.step,
            "epoch": self.order.epochs(state.step),
            "learning_rate": result.learning_rate,
            **figures,
        }
        if self.ctx.comm.is_rank_zero:
            rows = [row[num_extra:num_before_metrics] for row in self.metrics.extra_by_rank]
            self._add_rows(event, rows, state)
            if self.task_metrics is not None:
                event["metrics"] = self.task_metrics.means(
                    [row[num_before_metrics:] for row in self.metrics.extra_by_rank]
                )
        self._logged_step = state.step
        self.ctx.events.emit(event)
        if math.isnan(figures["loss"]) and not self._has_reported_nan:
            self._has_reported_nan = True
            logger.warning(
                f"step {state.step}: the loss is NaN; lower `learning_rate` or set"
                " `precision: bf16-mixed`"
            )

    def _add_rows(
        self, event: StepEvent, sums_by_rank: list[list[float]], state: TrainState
    ) -> None:
        """Add the fill of packed rows, and the figures of the sources."""
        first = state.first_step if self._logged_step is None else self._logged_step
        if first >= state.step:  # after a rollback
            first = state.step - 1
        steps = range(first, state.step)
        num_rows = self.order.rows_read(steps.stop) - self.order.rows_read(steps.start)
        if self.row_tokens is not None and num_rows and event["tokens"] is not None:
            event["fill"] = event["tokens"] * len(steps) / (num_rows * self.row_tokens)
        if self.sources is not None:
            event["sources"] = self.sources.figures(sums_by_rank)


class MemoryReport(Callback):
    """Emits one ``memory`` event, after the first steps of this attempt."""

    def __init__(self, strategy: Strategy, model: nn.Module, events: EventLog) -> None:
        self.strategy = strategy
        self.model = model
        self.events = events
        self._is_done = False

    def on_step_begin(self, state: TrainState) -> None:
        if state.step == state.first_step + STEPS_BEFORE - 1:
            restart_peak(self.strategy.world.device)

    def on_step_end(self, result: StepResult, state: TrainState) -> None:
        is_settled = state.step >= state.first_step + STEPS_BEFORE
        if result.outcome == "updated" and is_settled and not self._is_done:
            self._is_done = True
            emit_memory(self.strategy, self.model, self.events, state.step)


class ReplicaCheck(Callback):
    """Compares replicas regularly and before each checkpoint, so that the state of diverged
    replicas is never saved.

    Args:
        every_steps: number of steps between comparisons; 0 disables them.
    """

    def __init__(self, strategy: Strategy, events: EventLog, every_steps: int) -> None:
        self.check = partial(check_replicas, strategy, events)
        self.every_steps = every_steps
        self._checked_step: int | None = None

    def on_step_end(self, result: StepResult, state: TrainState) -> None:
        if self.every_steps and state.step % self.every_steps == 0:
            self._check_once(state.step)

    def before_checkpoint(self, state: TrainState) -> None:
        if self.every_steps:
            self._check_once(state.step)

    def _check_once(self, step: int) -> None:
        if self._checked_step != step:
            self._checked_step = step
            self.check(step)


class CommAdvice(Callback):
    """Reports once whether a method that reduces traffic, such as gradient compression, makes
    training faster on this link."""

    def __init__(self, advisor: CommAdvisor) -> None:
        self.advisor = advisor

    def on_step_end(self, result: StepResult, state: TrainState) -> None:
        advice = self.advisor.after_step(state.step)
        if advice is not None:
            log_notices(logger, [advice])
