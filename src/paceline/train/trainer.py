"""The training loop. Every rank runs it; only rank 0 logs and writes reports."""

import logging
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from paceline.checkpoint.saver import CheckpointManager
from paceline.checkpoint.train_state import collect_train_state, load_train_state
from paceline.checkpoint.transfer import open_checkpoint
from paceline.core.log import log_notices
from paceline.data.loader import MicroBatch
from paceline.data.pipeline import DataPipeline
from paceline.distributed.seeds import seed_everything
from paceline.distributed.traffic import uncounted
from paceline.health.anomalies import AnomalyDetector
from paceline.health.loss_spikes import LossSpike, LossSpikeDetector
from paceline.observe.metrics import StepMetrics
from paceline.parallel.strategy import MicroStep
from paceline.train.callbacks.balance import Balancer, ComputeTimer
from paceline.train.callbacks.base import Requests
from paceline.train.callbacks.callback_list import CallbackList
from paceline.train.evaluation import EvalResult, evaluate
from paceline.train.memory_trial import needs_trial, try_largest_micro_batch
from paceline.train.rollouts.evaluation import evaluate_rewards
from paceline.train.rollouts.pipeline import RolloutPipeline
from paceline.train.run_spec import RunSpec
from paceline.train.state import (
    RankContext,
    RollbackTarget,
    StepResult,
    TrainComponents,
    TrainState,
    checkpoint_meta,
    find_target,
    recent_losses_from,
    report_no_rollback,
    report_rollback,
)
from paceline.train.step_counts import CountQueue, LossAccumulator, StepCounts, check_task_loss
from paceline.train.survivors import Survivors
from paceline.train.totals import add_totals

logger = logging.getLogger(__name__)


@dataclass
class Trainer:
    """Runs the training loop on one rank. Built by :mod:`paceline.train.setup`.

    Args:
        resumed_from: path of the checkpoint that this attempt resumed from, or None.
        callbacks: callbacks of the run, which are built from the trainer's other parts.
    """

    spec: RunSpec
    ctx: RankContext
    components: TrainComponents
    state: TrainState
    data: DataPipeline
    metrics: StepMetrics
    checkpoints: CheckpointManager
    anomalies: AnomalyDetector
    spikes: LossSpikeDetector
    balancer: Balancer
    resumed_from: str | None = None
    callbacks: CallbackList = field(init=False)

    def __post_init__(self) -> None:
        self.strategy = self.components.strategy
        self.counts = CountQueue(self.components, self.ctx, self.checkpoints, self.metrics)
        self.survivors = Survivors(
            self.spec, self.ctx, self.strategy, self.state, self.data, self.checkpoints
        )
        self._has_reported_no_rollback = False

    @property
    def is_streamed(self) -> bool:
        """Whether rows are tokenized while the run trains."""
        return self.data.counts is not None

    @property
    def has_packed_rows(self) -> bool:
        """Whether the batch size counts packed rows."""
        has_tokens = bool(self.spec.data.sources) or self.is_streamed
        return self.spec.config.train_args.packs_rows and has_tokens

    def train(self) -> Literal["done", "stopped"]:
        """Train to the last step or until a stop is requested, and save the state."""
        self.components.model.train()
        state, derived = self.state, self.spec.derived
        if needs_trial(self.spec, self.components, self.data):
            try_largest_micro_batch(self.spec, self.components, self.data, state.step)
        self.callbacks.on_train_begin(state)
        self.handle_requests(self.callbacks.take_requests())
        while not state.is_complete(derived.steps):
            result = self.run_step()
            self.checkpoints.poll()
            requests, step = self.callbacks.take_requests(), state.step
            state.stop_reason = requests.stop
            if state.is_complete(derived.steps) or result.stop or self.anomalies.is_exhausted:
                break
            due = Requests(None, derived.is_eval_step(step), self.checkpoints.is_due(step))
            self.handle_requests(requests | due)
        self.callbacks.before_pause(state)
        self.anomalies.flush()
        if self.spec.saves_state:
            self.save(must_succeed=True)
        self.anomalies.raise_if_exhausted()
        self.survivors.update()
        if not state.is_complete(derived.steps):
            return "stopped"
        self.evaluate()
        self.callbacks.on_train_end(state)
        return "done"

    def handle_requests(self, requests: Requests) -> None:
        """Evaluate, save a checkpoint, or end the training, as callbacks request. A collective."""
        if requests.evaluate:
            self.evaluate()
            requests |= self.callbacks.take_requests()
        self.state.stop_reason = requests.stop or self.state.stop_reason
        if requests.save:
            self.save(must_succeed=False)

    def run_step(self) -> StepResult:
        """Run one step, or skip its batch after a rollback, and call the callbacks."""
        self.callbacks.on_step_begin(self.state)
        if self.state.step in self.state.skipped_batches:
            self.data.next()
            self.state.step += 1
            result = StepResult("batch_skipped")
        else:
            result = self.step()
        self.callbacks.on_step_end(result, self.state)
        return result

    def step(self) -> StepResult:
        """Run forward and backward over a global batch and update the weights."""
        state, strategy, progress = self.state, self.strategy, self.ctx.progress
        progress.begin_step(state.step + 1)
        self.metrics.begin()
        batches = [batch.to(self.ctx.device) for batch in self.data.next()]
        self.metrics.data_ready(self.data.busy_s)
        progress.enter("forward")
        counts = self.counts.start(batches)  # all-reduced during the first forward pass
        add_totals(self.components, batches)
        losses = LossAccumulator(self.ctx.device)
        timer = self.balancer.begin_step(batches)
        strategy.set_token_counts(counts.local_count, counts.denominator)
        strategy.forward_backward(self.micro_step(batches, counts, losses, timer), len(batches))
        counts.denominator()  # pipeline stages that compute no loss wait for the counts here
        progress.enter("optimizer")
        loss = losses.total()
        reported_loss = loss if strategy.computes_loss else torch.zeros_like(loss)
        if self.roll_back_on_spike(reported_loss, counts.local_count):
            stop = self.counts.settle(now=True)
            self.metrics.reset()
            return StepResult("rolled_back", stop)
        strategy.unscale_gradients()
        grad_norm = strategy.clip_grad_norm(self.spec.config.train_args.max_grad_norm)
        learning_rate = self.components.lr_schedule.set_step(state.step)
        self.update(grad_norm, loss)
        state.step += 1
        progress.end_step(disturbed=self.checkpoints.is_writing)
        is_logged = self.spec.is_log_step(state.step, state.first_step)
        # The time of the first step, which is always logged, includes the device's.
        is_first = state.step == state.first_step + 1
        self.metrics.end(reported_loss, counts.local_count, drains=is_first)
        stop = self.counts.settle(now=is_logged)
        self.survivors.update()
        return StepResult("updated", stop, grad_norm, learning_rate, is_logged)

    def micro_step(
        self,
        batches: list[MicroBatch],
        counts: StepCounts,
        losses: LossAccumulator,
        timer: ComputeTimer | None,
    ) -> MicroStep:
        """Return the function with which the strategy computes the loss of a micro-batch."""
        components, task = self.components, self.components.task
        precision = components.precision
        progress, step, args = self.ctx.progress, self.state.step, self.spec.config.train_args
        first_number, is_first_step = self.data.first_micro_batch, step == self.state.first_step
        world = self.strategy.world
        # Ranks that divide rows draw other masks of dropout.
        part = (world.coordinates["context"],) if world.axes.context > 1 else ()

        def micro_step(number: int, model: nn.Module) -> torch.Tensor:
            batch = batches[number]
            progress.enter("forward")
            seed_everything(args.seed, "step", step, first_number + number, *part)
            with precision.autocast(), components.counting(batch):
                loss = task.loss(model, batch.data)
            if is_first_step:
                check_task_loss(loss)
            loss = loss * batch.weight
            losses.add(number, loss)
            progress.enter("backward")
            with nullcontext() if timer is None else timer.waiting():
                denominator = counts.denominator()
            return precision.scale(loss / denominator)

        return micro_step

    def update(self, grad_norm: torch.Tensor, loss: torch.Tensor) -> None:
        """Step the optimizer if the gradient is finite. ``loss`` is this rank's loss."""
        precision = self.components.precision
        decision = self.anomalies.decide(grad_norm)
        updated = self.strategy.optimizer_step(partial(precision.step, decision=decision))
        if decision.grad_norm is None:
            precision.update_scale(updated)
        self.anomalies.record(self.state.step + 1, decision, updated, loss)

    def roll_back_on_spike(self, loss_sum: torch.Tensor, count: float) -> bool:
        """Roll back instead of updating the weights if the loss spiked. ``loss_sum`` and ``count``
        are this rank's terms of the global loss sum and of its divisor. A collective."""
        state, settings = self.state, self.spec.config.recovery
        if not settings.rollback_on_loss_spike:
            return False
        with uncounted():
            total, global_count = self.ctx.comm.sum(float(loss_sum), count)
        loss = total / (global_count or 1.0)
        spike = self.spikes.observe(loss, state.recent_losses)
        if spike is not None and self.roll_back(spike):
            return True
        if math.isfinite(loss):
            state.recent_losses.append(loss)
        return False

    def roll_back(self, spike: LossSpike) -> bool:
        """Load the latest checkpoint before this step, and skip this step's batch from now on.
        Returns False if too many batches have been skipped since then. A collective."""
        state, comm = self.state, self.ctx.comm
        settings, step = self.spec.config.recovery, state.step
        self.checkpoints.finish_on_all_ranks()
        target = find_target(comm, self.ctx.run_dir, step, self.resumed_from)
        if target.is_exhausted(state.skipped_batches, settings):
            if not self._has_reported_no_rollback:
                self._has_reported_no_rollback = True
                report_no_rollback(step, target, settings)
            return False
        self.callbacks.before_pause(state)
        state.skipped_batches.add(step)
        report_rollback(self.ctx.events, step, spike, target)
        self.strategy.optimizer_step(lambda _: False)
        if target.path is None:
            state.step += 1
        else:
            with self.ctx.progress.during("loading"):
                self._load(target)
        return True

    def _load(self, target: RollbackTarget) -> None:
        state, strategy = self.state, self.strategy
        num_notices = len(strategy.notices)
        with open_checkpoint(Path(str(target.path)), self.checkpoints.side) as opened:
            load_train_state(strategy, opened, self.components.precision.scaler)
        state.step = opened.meta["step"]
        state.first_step = min(state.first_step, state.step)
        state.recent_losses = recent_losses_from(opened.meta, self.spec.config.recovery)
        self.callbacks.load_states(opened.meta.get("callbacks", {}))
        state.eval_losses = {at: loss for at, loss in state.eval_losses.items() if at <= state.step}
        self.checkpoints.resume_at(state.step, target.is_own)
        self.data.seek(state.step)
        self.ctx.events.emit({"type": "resume", "step": state.step, "path": target.path})
        log_notices(logger, strategy.notices[num_notices:])

    def evaluate(self) -> None:
        """Evaluate the model, unless it has already been evaluated at this step."""
        state = self.state
        if self.data.eval_dataset is None or state.step in state.eval_losses:
            return
        self.metrics.drain()
        self.callbacks.before_pause(state)
        result = self.survivors.repeat(self._evaluate)
        state.eval_losses[state.step] = result.loss
        self.ctx.events.emit(result.event(state.step))

    def _evaluate(self) -> EvalResult:
        parts, dataset = self.components, self.data.eval_dataset
        assert dataset is not None
        with self.ctx.progress.during("evaluation"), self.strategy.consolidated():
            if isinstance(self.data, RolloutPipeline):
                result = evaluate_rewards(self.data)
            else:
                result = evaluate(
                    parts.task,
                    parts.model,
                    parts.strategy,
                    dataset,
                    self.spec.config,
                    parts.precision,
                    self.data.options,
                    self.ctx.progress,
                )
            self.callbacks.on_evaluation_end(result, self.state)
        return result

    def save(self, *, must_succeed: bool) -> None:
        """Save a checkpoint, unless this step has already been saved. With ``must_succeed``, wait
        for it, and raise RunError on every rank if it fails; otherwise it continues in the
        background, and a failure is logged as a warning."""
        self.metrics.drain()
        self.callbacks.before_pause(self.state)
        self.anomalies.flush()
        self.callbacks.before_checkpoint(self.state)
        step, scaler = self.state.step, self.components.precision.scaler
        collect = partial(collect_train_state, self.strategy, step, self.data.order, scaler)
        states, shares = self.callbacks.states(), self.balancer.record()
        meta = checkpoint_meta(self.state, self.spec, self.components, shares, states)
        with self.strategy.averaged_weights():
            self.checkpoints.save(step, collect, meta, must_succeed=must_succeed)
