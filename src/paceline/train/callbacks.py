"""Callbacks that the trainer calls at fixed points of the training loop."""

import logging
import math
from functools import partial

from torch import nn

from paceline.core.event_log import EventLog
from paceline.core.formatting import counted
from paceline.core.log import log_notices
from paceline.data.order import SampleOrder
from paceline.health.anomalies import AnomalyDetector
from paceline.health.replicas import check_replicas
from paceline.models.transforms.compile import CompileTimes
from paceline.observe.comm_advisor import CommAdvisor
from paceline.observe.memory import STEPS_BEFORE, emit_memory
from paceline.observe.metrics import StepMetrics, restart_peak
from paceline.parallel.base import Strategy
from paceline.train.evaluation import EvalResult
from paceline.train.state import RankContext, StepResult, TrainState

logger = logging.getLogger(__name__)


class Callback:
    """Base class of callbacks. A callback reads the training state but never assigns to it.
    Callbacks run on every rank, in the order of the list, and may issue collectives."""

    def on_step_begin(self, state: TrainState) -> None:
        pass

    def on_step_end(self, result: StepResult, state: TrainState) -> None:
        """Called after each step, including steps that skipped their batch or rolled back."""

    def on_evaluation_end(self, result: EvalResult, state: TrainState) -> None:
        """Called while the strategy still holds the weights that were evaluated."""

    def before_checkpoint(self, state: TrainState) -> None:
        pass


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
    """Gathers the metrics since the last logged step and emits a ``step`` event."""

    def __init__(
        self, metrics: StepMetrics, anomalies: AnomalyDetector, order: SampleOrder, ctx: RankContext
    ) -> None:
        self.metrics = metrics
        self.anomalies = anomalies
        self.order = order
        self.ctx = ctx
        self._has_reported_nan = False

    def on_step_end(self, result: StepResult, state: TrainState) -> None:
        if not result.is_logged:
            return
        assert result.grad_norm is not None
        with self.ctx.progress.waiting("the device"):
            grad_norm = float(result.grad_norm)
        figures = self.metrics.gather(grad_norm, self.anomalies.local_counts())
        self.anomalies.report_local_skips(state.step, self.metrics.extra_by_rank)
        self.ctx.events.emit(
            {
                "type": "step",
                "step": state.step,
                "epoch": state.step / self.order.steps_per_epoch,
                "learning_rate": result.learning_rate,
                **figures,
            }
        )
        if math.isnan(figures["loss"]) and not self._has_reported_nan:
            self._has_reported_nan = True
            logger.warning(
                f"step {state.step}: the loss is NaN; lower `learning_rate` or set"
                " `precision: bf16-mixed`"
            )


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
