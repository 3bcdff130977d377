"""Run a training on one rank, from its spec to its report.

Builds the model, the strategy, the optimizer and the trainer, resumes and trains, and writes the
model folder and the report.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from paceline.checkpoint.remote import CheckpointStore
from paceline.checkpoint.saver import CheckpointManager
from paceline.checkpoint.train_state import check_same_model
from paceline.checkpoint.transfer import open_checkpoint, transfer_notices
from paceline.config.chosen import open_settings, values_of
from paceline.config.load import to_yaml
from paceline.core.errors import PacelineError
from paceline.core.event_log import EventLog
from paceline.core.events import RunEndEvent
from paceline.core.failures import ExitRecord, is_out_of_memory
from paceline.core.files import write_atomic, write_json_atomic
from paceline.core.log import log_to_events
from paceline.core.report import Report
from paceline.core.run_dir import RunDir, clear_debris, lock_run
from paceline.core.stop import StopFlag
from paceline.data.loader_process import start_loader_server
from paceline.data.pipeline import DataPipeline
from paceline.distributed.communicator import init_communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims
from paceline.distributed.rank_zero import rank_zero_phase
from paceline.distributed.side_group import SideGroup
from paceline.distributed.timing.device_timer import DeviceTimer
from paceline.distributed.timing.progress import PROGRESS
from paceline.health.anomalies import AnomalyDetector
from paceline.health.loss_spikes import LossSpikeDetector
from paceline.health.watchdog import Watchdog
from paceline.observe.device_stats import DeviceMonitor
from paceline.observe.loggers.metric_logger import MetricLogger
from paceline.observe.metrics import StepMetrics
from paceline.observe.out_of_memory import out_of_memory
from paceline.observe.report.html import write_reports
from paceline.observe.throughput import mean_peak, model_flops
from paceline.train.callback_setup import build_callbacks
from paceline.train.callbacks.balance import Balancer
from paceline.train.callbacks.callback_list import CallbackList, States
from paceline.train.callbacks.monitoring import (
    CommAdvice,
)
from paceline.train.callbacks.selection import ModelSelection
from paceline.train.components import build_components, build_model
from paceline.train.final_model import save_model_folder
from paceline.train.mixed_devices import check_mixed_devices, mixed_devices_notices
from paceline.train.precision import check_same_precision, use_deterministic_algorithms
from paceline.train.reports.end import build_report
from paceline.train.reports.start import emit_run_start
from paceline.train.run_spec import RunSpec
from paceline.train.state import (
    RankContext,
    TrainComponents,
    claim_store,
    open_side_group,
    resume,
)
from paceline.train.survivors import event_listeners
from paceline.train.trainer import Trainer

logger = logging.getLogger(__name__)

BuildCallbacks = Callable[[Trainer, States], CallbackList]


def run_rank(spec: RunSpec, env: RankEnv, stop: StopFlag) -> ExitRecord:
    """Run one rank from start to end.

    Returns:
        Whether the run is "done" or "stopped", and the report. If Paceline's launcher collects the
        report, it is None on all ranks except rank 0.
    """
    axes = spec.layout.axes if spec.layout.num_processes > 1 else ParallelDims()
    if spec.config.train_args.deterministic:
        use_deterministic_algorithms()
    if spec.device_type != "cpu" and spec.config.train_args.dataloader_num_workers != 0:
        start_loader_server()
    PROGRESS.start(active=spec.config.recovery.watchdog, on_cpu=spec.device_type == "cpu")
    recovery, timeout_s = spec.config.recovery, spec.config.parallel.collective_timeout_s
    comm = init_communicator(env, spec.device_type, timeout_s, axes, recovery.rank0_timeout_s)
    PROGRESS.timer = DeviceTimer.of(comm.device)
    run_dir = RunDir(Path(spec.config.output_dir))
    events = EventLog(None)
    watchdog = Watchdog(recovery, timeout_s, comm, stop, run_dir.root)
    watchdog.start()
    has_failed = False
    try:
        check_mixed_devices(comm, spec.config, spec.layout.strategy)
        check_same_precision(comm, spec.config.train_args)
        side, spec = open_side_group(spec, comm)
        # Built before anything is written, so that a failure to build the model leaves no files.
        components, data, notices = build_components(spec, comm, side=side)
        comm = components.strategy.world  # the same ranks, perhaps in another process group
        if spec.resume_from is not None:
            with open_checkpoint(Path(spec.resume_from), side) as opened:
                digest = components.frozen_digest
                check_same_model(opened, spec.resume_from, components.shape, digest)
        with ExitStack() as cleanup, log_to_events(events):
            ctx = RankContext(comm, run_dir, events, stop, cleanup)
            with rank_zero_phase(comm, "opening the run's folder and `checkpoint_dir`"):
                if comm.is_rank_zero:
                    _open_run(spec, run_dir, events, cleanup)
                store = claim_store(spec, ctx)
            watchdog.watch(components.strategy, events)
            trainer = build_trainer(spec, ctx, components, data, notices, side, store)
            return _run(trainer)
    except BaseException as caught:
        has_failed = True
        error = watchdog.explain(caught)
        # Paceline's launcher prints the error once, after all ranks have ended.
        if comm.is_rank_zero and spec.launcher_pid is None:
            text = str(error)
            if not isinstance(error, PacelineError):
                text = f"{type(error).__name__}: {text}"
            events.emit(
                {
                    "type": "run_end",
                    "status": "failed",
                    "step": None,
                    "reason": text[:2000],
                },
                file_only=True,
            )
        if error is not caught:
            raise error from caught
        raise
    finally:
        watchdog.close()
        events.close()
        for listener in events.listeners:
            close = getattr(listener, "close", None)
            if close is not None:
                close()
        if not has_failed:  # NCCL would wait for the other ranks, which wait for this one
            comm.close()


def _run(trainer: Trainer) -> ExitRecord:
    """Train, save the model and write the report. Return the result of :func:`run_rank`."""
    spec, ctx, strategy = trainer.spec, trainer.ctx, trainer.strategy
    state = trainer.state
    with trainer.checkpoints:  # waits for the last save, however the training ends
        try:
            status = trainer.train()
        except BaseException as error:
            trainer.callbacks.after_error()
            # With Paceline's launcher the process exits at once, so nothing needs to be freed.
            if spec.launcher_pid is None:
                trainer.data.close()
            if is_out_of_memory(error):
                parts = trainer.components
                raise out_of_memory(error, parts.strategy, parts.model) from error
            raise
        trainer.data.close()
        ctx.progress.enter("saving")
    selection = trainer.callbacks.find(ModelSelection)
    if status == "done" and spec.saves_state:
        rebuild_model = partial(build_model, trainer.components.task, spec.config)
        final_step = None if selection is None else selection.final_step
        saved_step = state.step if final_step is None else final_step
        trainer.survivors.repeat(
            partial(save_model_folder, ctx, trainer.components, rebuild_model, saved_step)
        )
    report = build_report(trainer, status, None if selection is None else selection.report())
    with rank_zero_phase(ctx.comm, "writing the report"):
        if ctx.comm.is_rank_zero:
            _write_end(trainer, report)
    if spec.reports_everywhere:
        report = ctx.comm.broadcast_object(report)
    ctx.comm.barrier()
    strategy.close()
    has_report = ctx.comm.is_rank_zero or spec.reports_everywhere
    return ExitRecord(status, report=report if has_report else None)


def _write_end(trainer: Trainer, report: Report) -> None:
    """Write the report, close the metric loggers with it, and emit the last event."""
    state, ctx = trainer.state, trainer.ctx
    write_reports(ctx.run_dir, report)
    for listener in ctx.events.listeners:
        if isinstance(listener, MetricLogger):
            listener.finish(report)
    reason = state.stop_reason
    if report["status"] == "stopped":
        reason = "stopped by a signal" if ctx.stop.wanted else "another rank was stopped"
    end: RunEndEvent = {
        "type": "run_end",
        "status": report["status"],
        "step": state.step,
        "reason": reason,
        "wall_s": report["wall_s"],
    }
    advice = trainer.callbacks.find(CommAdvice)
    if advice is not None and advice.advisor.summary is not None:
        end["network"] = advice.advisor.summary
    ctx.events.emit(end)


def _open_run(spec: RunSpec, run_dir: RunDir, events: EventLog, cleanup: ExitStack) -> None:
    """Lock the run's folder, so that no other run writes to it, and start its event log."""
    run_dir.root.mkdir(parents=True, exist_ok=True)
    cleanup.callback(lock_run(run_dir, wait_s=20.0).close)
    clear_debris(run_dir)
    chosen = values_of(spec.config, open_settings(spec.config, is_cpu=spec.device_type == "cpu"))
    write_json_atomic(run_dir.chosen, chosen)
    write_atomic(run_dir.config, to_yaml(spec.config))
    events.open(run_dir.events, event_listeners(spec.config, run_dir))


def build_trainer(
    spec: RunSpec,
    ctx: RankContext,
    components: TrainComponents,
    data: DataPipeline,
    notices: Sequence[tuple[str, str]],
    side: SideGroup | None = None,
    store: CheckpointStore | None = None,
    callbacks: BuildCallbacks = build_callbacks,
) -> Trainer:
    """Build the trainer, load the checkpoint that the run resumes from, and emit the events of a
    start. A collective.

    Args:
        notices: (level, text) of the messages that have not been printed yet.
        callbacks: function that builds the callbacks.
    """
    settings, strategy, events = spec.config.recovery, components.strategy, ctx.events
    peaks = ctx.comm.gather_objects(spec.peak)[: spec.layout.axes.size]
    peak, lengths = mean_peak(peaks), getattr(data.train_dataset, "lengths", None)
    num_devices = spec.layout.axes.size
    metrics = StepMetrics(
        ctx.comm,
        # When the command was started or, after a restart, when the failure was detected.
        spec.started_at if spec.failure is None else float(spec.failure["seen_at"]),
        spec.data.mean_tokens is not None,
        strategy.traffic_period,
        sends_between_steps=strategy.sends_between_steps,
        devices=DeviceMonitor(ctx.device),
        flops=model_flops(components.model, spec.config, lengths, num_devices, peak),
    )
    args = spec.config.train_args
    checkpoints = CheckpointManager(
        ctx.comm,
        ctx.run_dir.checkpoints,
        args.save_total_limit,
        events,
        background=args.async_save,
        every_steps=spec.derived.save_every_steps,
        every_s=settings.save_interval_s,
        pause=settings.on_save_error == "pause",
        stop=lambda: ctx.stop.wanted,
        side=side,
        store=store,
    )
    num_notices = len(strategy.notices)
    with ctx.progress.during("loading"):
        state, path, meta = resume(spec, ctx, components, checkpoints)
    data.seek(state.step)
    # These are about state that the checkpoint lacks or that this run does not use.
    resume_notices = strategy.notices[num_notices:]
    memory = components.shape.optimizer
    state_bytes = memory.element_bytes + memory.average_bytes
    resume_notices += transfer_notices(strategy, side, state_bytes)
    balancer = Balancer(spec.config, ctx, strategy, data, metrics, checkpoints)
    balancer.begin(state.step, meta.get("balance"))
    anomalies = AnomalyDetector(settings, strategy, components.precision.scaler, events)
    trainer = Trainer(
        spec,
        ctx,
        components,
        state,
        data,
        metrics,
        checkpoints,
        anomalies,
        LossSpikeDetector(settings),
        balancer,
        resumed_from=path,
    )
    emit_run_start(trainer, peak, [*notices, *resume_notices, *mixed_devices_notices(ctx.comm)])
    balancer.announce()
    trainer.callbacks = callbacks(trainer, meta.get("callbacks", {}))
    return trainer
