"""The callbacks of a run, in the order in which they are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.config.metrics.best import selects_best_model
from paceline.models.head.router_coefficient import coefficient_of
from paceline.models.transforms.compile import compile_times
from paceline.observe.comm_advisor import make_advisor
from paceline.train.callbacks.base import Callback, TrainingInfo
from paceline.train.callbacks.callback_list import CallbackList, States
from paceline.train.callbacks.experts import ExpertRecorder
from paceline.train.callbacks.monitoring import (
    CommAdvice,
    CompileReport,
    MemoryReporter,
    ReplicaCheck,
    StepLogger,
)
from paceline.train.callbacks.profiler import StepProfiler
from paceline.train.callbacks.rollouts import RolloutRecorder
from paceline.train.callbacks.row_counts import RowCounter
from paceline.train.callbacks.sampling import SampleGenerator
from paceline.train.callbacks.selection import ModelSelection
from paceline.train.callbacks.sources import SourceRecorder
from paceline.train.callbacks.task_metrics import MetricRecorder
from paceline.train.rollouts.pipeline import RolloutPipeline

if TYPE_CHECKING:
    from paceline.train.trainer import Trainer


def build_callbacks(trainer: Trainer, states: States) -> CallbackList:
    """Return all callbacks of a run: Paceline's, then the user's.

    Args:
        states: states of the callbacks in the checkpoint that the run resumes from.
    """
    spec, parts, events = trainer.spec, trainer.components, trainer.ctx.events
    args, settings = spec.config.train_args, spec.config.recovery
    eval_dataset, progress = trainer.data.eval_dataset, trainer.ctx.progress
    callbacks: list[Callback] = [
        *_loggers(trainer),
        MemoryReporter(parts.strategy, parts.model, events),
        ReplicaCheck(parts.strategy, events, settings.replica_check_steps),
        trainer.balancer,
        SampleGenerator(spec.config, parts, eval_dataset, events, progress),
    ]
    if args.profile is not None:
        callbacks.append(StepProfiler(args.profile, trainer.ctx))
    times = compile_times()
    if times is not None:
        callbacks.append(CompileReport(times))
    first_step = trainer.state.first_step
    advisor = make_advisor(parts.strategy, trainer.metrics, first_step, spec.derived.steps)
    if advisor is not None:
        callbacks.append(CommAdvice(advisor))
    if selects_best_model(args) and spec.derived.eval_every_steps:
        callbacks.append(
            ModelSelection(args, spec.derived, trainer.ctx.comm, parts, trainer.checkpoints)
        )
    users: Mapping[str, Callback] = {}
    if spec.config.callbacks:
        from paceline.train.callbacks.user import load_callbacks  # not needed by most runs

        users = load_callbacks(spec.config)
    return _as_list(trainer, states, callbacks, users)


def build_loggers(trainer: Trainer, states: States) -> CallbackList:
    """Return the callbacks that emit the figures of steps, and no others."""
    return _as_list(trainer, states, _loggers(trainer), {})


def _as_list(
    trainer: Trainer, states: States, own: list[Callback], users: Mapping[str, Callback]
) -> CallbackList:
    """Return the list, which also hears of logged steps and of saved checkpoints."""
    ctx, spec = trainer.ctx, trainer.spec
    info = TrainingInfo(
        ctx.comm.rank,
        spec.derived.world_size,
        ctx.run_dir.root,
        spec.derived.steps,
        trainer.components.model,
    )
    callbacks = CallbackList(ctx.comm, info, states, own, users)
    step_logger = callbacks.find(StepLogger)
    assert step_logger is not None
    step_logger.on_logged = callbacks.on_step_logged
    trainer.checkpoints.on_saved = callbacks.on_checkpoint_saved
    return callbacks


def _loggers(trainer: Trainer) -> list[Callback]:
    """Return the callbacks that emit the figures of steps and count the rows of streams."""
    spec, data, strategy = trainer.spec, trainer.data, trainer.strategy
    names = [source["name"] for source in spec.data.source_figures]
    # The recorders see every micro-batch.
    sources = metrics = None
    if names:
        sources = SourceRecorder(
            names, strategy.computes_loss, strategy.reports_loss, strategy.world.device
        )
        data.observers.append(sources.observe)
    task = trainer.components.task
    if task.step_metrics:
        metrics = MetricRecorder(task, strategy.reports_loss, strategy.world.device)
        data.observers.append(metrics.observe)
    row_tokens = spec.config.train_args.max_length if trainer.has_packed_rows else None
    counter, experts = trainer.components.experts, None
    if counter is not None:
        is_balanced = coefficient_of(spec.config) > 0
        experts = ExpertRecorder(counter, strategy, trainer.ctx.comm, is_balanced)
    rollouts = None
    if isinstance(data, RolloutPipeline):
        run_dir, writes = trainer.ctx.run_dir.root, trainer.ctx.comm.is_rank_zero
        rollouts = RolloutRecorder(data, run_dir, writes)
    logger = StepLogger(
        trainer.metrics,
        trainer.anomalies,
        data.order,
        trainer.ctx,
        row_tokens,
        sources,
        metrics,
        experts,
        rollouts,
    )
    # The recorders add a step before it is logged.
    loggers: list[Callback] = [each for each in (experts, rollouts) if each is not None]
    loggers.append(logger)
    if data.counts is None:
        return loggers
    return [*loggers, RowCounter(trainer.ctx, strategy, data, names)]
