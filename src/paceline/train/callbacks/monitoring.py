"""Callbacks that log steps, memory, compilation and advice, and compare replicas."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from paceline.core.event_log import EventLog
from paceline.core.events import StepEvent, StepFigures
from paceline.core.log import log_notices
from paceline.core.report import RolloutFigures
from paceline.core.texts import UserText
from paceline.data.order.base import Order
from paceline.health.anomalies import AnomalyDetector
from paceline.health.replicas import check_replicas
from paceline.models.transforms.compile import CompileTimes
from paceline.observe.comm_advisor import CommAdvisor
from paceline.observe.memory import STEPS_BEFORE, emit_memory
from paceline.observe.metrics import PendingFigures, StepMetrics, restart_peak
from paceline.parallel.strategy import Strategy
from paceline.train.callbacks.base import Callback
from paceline.train.callbacks.experts import ExpertRecorder, PendingExperts
from paceline.train.callbacks.rollouts import RolloutRecorder
from paceline.train.callbacks.sources import SourceRecorder
from paceline.train.callbacks.task_metrics import MetricRecorder
from paceline.train.state import RankContext, StepResult, TrainState

logger = logging.getLogger(__name__)

#: The gather of a step's figures was started before the next step, so it is done by then or never.
_MAX_WAIT_AFTER_ERROR_S = 2.0


class CompileReport(Callback):
    """Logs how long torch.compile took, and warns about recompilations."""

    def __init__(self, times: CompileTimes) -> None:
        self.times = times
        self._next_warning = 1

    def on_step_end(self, result: StepResult, state: TrainState) -> None:
        times, steps_done = self.times, state.step - state.first_step
        if steps_done == 1:
            logger.info(
                UserText(
                    "torch.compile: {count} graphs in {seconds} s",
                    code="compiled-graphs",
                    count=times.count,
                    seconds=f"{times.seconds:.0f}",
                )
            )
        if steps_done <= 2:
            times.num_expected = times.count
        elif times.recompilations >= self._next_warning:
            self._next_warning = 2 * times.recompilations
            logger.warning(
                UserText(
                    "torch.compile compiled again after the first steps: {recompilations:graph} up"
                    " to step {step}, {seconds} s in all; the reasons are printed with"
                    " TORCH_LOGS=recompiles",
                    code="compiled-again",
                    recompilations=times.recompilations,
                    step=state.step,
                    seconds=f"{times.seconds:.0f}",
                )
            )


@dataclass(frozen=True)
class _LoggedStep:
    """A logged step whose figures are being gathered.

    Args:
        steps: the steps since the logged one before, from 0.
        starts: index of the first number of the sources, and of the task's metrics, in the further
            numbers of a rank.
        experts: the figures of the experts, or None.
        rollouts: the figures of the rollouts, or None.
    """

    step: int
    steps: range
    learning_rate: float | None
    figures: PendingFigures
    starts: tuple[int, int]
    experts: PendingExperts | None
    rollouts: RolloutFigures | None


class StepLogger(Callback):
    """Gathers the metrics since the last logged step and emits a ``step`` event. On accelerators,
    they are read a step later, so that the device is not idle while the host reads them.

    Args:
        row_tokens: capacity of a packed row, or None if rows are samples.
        sources: the recorder of several sources, or None.
        task_metrics: the recorder of the task's metrics, or None.
        experts: the recorder of the model's experts, or None.
        rollouts: the recorder of the rollouts, or None.

    Attributes:
        on_logged: called on every rank with each logged step and its figures.
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
        experts: ExpertRecorder | None = None,
        rollouts: RolloutRecorder | None = None,
    ) -> None:
        self.experts, self.rollouts = experts, rollouts
        self.task_metrics = task_metrics
        self.row_tokens = row_tokens
        self.sources = sources
        self.metrics = metrics
        self.anomalies = anomalies
        self.order = order
        self.ctx = ctx
        self.on_logged: Callable[[int, StepFigures], None] = lambda step, figures: None
        self._is_late = ctx.comm.device_types != {"cpu"}
        self._pending: _LoggedStep | None = None
        self._last_step: int | None = None  # the last logged one
        self._has_reported_nan = False

    def on_step_end(self, result: StepResult, state: TrainState) -> None:
        if self.sources is not None and result.outcome == "updated":
            self.sources.add_step()
        if self.task_metrics is not None and result.outcome == "updated":
            self.task_metrics.add_step()
        started = self._start(result, state) if result.is_logged else None
        self._finish(result)
        self._pending = started
        # The host has waited for the first step, so its figures are known at once.
        if not self._is_late or state.step == state.first_step + 1:
            self._finish(result)

    def before_pause(self, state: TrainState) -> None:
        self._finish(None)

    def after_error(self) -> None:
        """Emit the event of the pending step. If a rank was lost before it took part in the gather,
        the figures never arrive."""
        deadline = time.monotonic() + _MAX_WAIT_AFTER_ERROR_S
        while self._pending is not None and time.monotonic() < deadline:
            if self._pending.figures.is_ready:
                self._finish(None)
            else:
                time.sleep(0.01)

    def _start(self, result: StepResult, state: TrainState) -> _LoggedStep:
        """Start to gather the figures of a step. A collective."""
        assert result.grad_norm is not None
        parts = [self.metrics.as_tensor(self.anomalies.take_local_counts())]
        starts = [len(parts[0])]
        for recorder in (self.sources, self.task_metrics):
            if recorder is not None:
                parts.append(self.metrics.as_tensor(recorder.take()))
            starts.append(sum(map(len, parts)))
        figures = self.metrics.start_gather(result.grad_norm, torch.cat(parts))
        first = state.first_step if self._last_step is None else self._last_step
        if first >= state.step:  # after a rollback
            first = state.step - 1
        self._last_step = state.step
        steps = range(first, state.step)
        experts = None if self.experts is None else self.experts.start()
        rollouts = None if self.rollouts is None else self.rollouts.take()
        both = starts[0], starts[1]
        return _LoggedStep(
            state.step, steps, result.learning_rate, figures, both, experts, rollouts
        )

    def _finish(self, result: StepResult | None) -> None:
        """Emit the event of the pending step, if there is one, and add its figures to the result of
        the step that has just ended."""
        logged, self._pending = self._pending, None
        if logged is None:
            return
        figures = logged.figures.read()
        experts = None if logged.experts is None else logged.experts.read()
        if experts is not None:
            figures["experts"] = experts
        if logged.rollouts is not None:
            _add_rollouts(figures, logged.rollouts)
        self.anomalies.report_local_skips(logged.step, self.metrics.extra_by_rank)
        event: StepEvent = {
            "type": "step",
            "step": logged.step,
            "epoch": self.order.epochs(logged.step),
            "learning_rate": logged.learning_rate,
            **figures,
        }
        if self.ctx.comm.is_rank_zero:
            self._add_rows(event, logged)
        self.ctx.events.emit(event)
        if math.isnan(figures["loss"]) and not self._has_reported_nan:
            self._has_reported_nan = True
            logger.warning(
                UserText(
                    "step {step}: the loss is NaN; lower `learning_rate` or set `precision:"
                    " bf16-mixed`",
                    code="loss-is-nan",
                    step=logged.step,
                )
            )
        if result is not None:
            result.figures.update(figures)
        self.on_logged(logged.step, figures)

    def _add_rows(self, event: StepEvent, logged: _LoggedStep) -> None:
        """Add the fill of packed rows, and the figures of the sources and of the task."""
        rows, steps = self.metrics.extra_by_rank, logged.steps
        first, second = logged.starts
        num_rows = self.order.rows_read(steps.stop) - self.order.rows_read(steps.start)
        if self.row_tokens is not None and num_rows and event["tokens"] is not None:
            event["fill"] = event["tokens"] * len(steps) / (num_rows * self.row_tokens)
        if self.sources is not None:
            event["sources"] = self.sources.figures([row[first:second] for row in rows])
        if self.task_metrics is not None:
            means = self.task_metrics.means([row[second:] for row in rows])
            if self.rollouts is None:
                event["metrics"] = means
            else:
                event.update(means)  # type: ignore[typeddict-item]


def _add_rollouts(figures: StepFigures, rollouts: RolloutFigures) -> None:
    """Add the figures of the rollouts to the figures of a step."""
    figures.update(rollouts)  # type: ignore[typeddict-item]
    spent = (rollouts["rollout_s"] or 0.0) + (rollouts["reward_s"] or 0.0)
    figures["update_s"] = max(0.0, figures["step_time_s"] - spent)


class MemoryReporter(Callback):
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
