"""Run a training on one rank, from its spec to its report.

Builds the model, the strategy, the optimizer and the trainer, resumes and trains, and writes the
model folder and the report.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

from pydantic import JsonValue
from torch import nn

from paceline.checkpoint.remote import CheckpointStore
from paceline.checkpoint.saver import CheckpointManager
from paceline.checkpoint.train_state import check_same_model, frozen_digest
from paceline.checkpoint.transfer import open_checkpoint, transfer_notices
from paceline.config.derive import ResolvedValues
from paceline.config.load import to_yaml
from paceline.config.schema import Config
from paceline.core.errors import Outcome, PacelineError, RunError
from paceline.core.event_log import EventLog
from paceline.core.events import RunEndEvent
from paceline.core.files import write_atomic
from paceline.core.log import log_to_events
from paceline.core.run_dir import RunDir, clear_debris, lock_run
from paceline.core.stop import StopFlag
from paceline.data.loader import LoaderOptions
from paceline.data.order import SampleOrder
from paceline.data.pipeline import DataPipeline
from paceline.distributed.communicator import Communicator, init_communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims
from paceline.distributed.progress import PROGRESS
from paceline.distributed.seeds import seed_everything
from paceline.distributed.side_group import SideGroup
from paceline.health.anomalies import AnomalyDetector
from paceline.health.loss_spikes import LossSpikeDetector
from paceline.health.watchdog import Watchdog
from paceline.models.adapters.lora import learning_rate_factors
from paceline.models.adapters.quantize import move_scales
from paceline.models.shape.outline import Probe, outline
from paceline.models.transforms.activation_offloading import reduce_activations
from paceline.models.transforms.compile import compile_blocks, compile_times
from paceline.models.transforms.float8 import convert_to_float8
from paceline.models.weights import converted_weights, move_model
from paceline.observe.comm_advisor import CommAdvisor, make_advisor
from paceline.observe.device_stats import DeviceMonitor
from paceline.observe.metrics import StepMetrics
from paceline.observe.out_of_memory import is_out_of_memory, out_of_memory
from paceline.observe.report.build import build_report
from paceline.observe.report.html import write_reports
from paceline.observe.run_start import RunInfo, emit_run_start
from paceline.observe.throughput import mean_peak, model_flops
from paceline.parallel.base import Strategy, make_strategy
from paceline.parallel.protocols import (
    close_servers,
    has_data,
    model_init_context,
    replica_of,
    traffic_period,
)
from paceline.tasks import load_task
from paceline.tasks.base import Task
from paceline.tasks.user import UserTask, guard_model
from paceline.train.balance import Balancer
from paceline.train.callbacks import (
    Callback,
    CommAdvice,
    CompileReport,
    MemoryReport,
    ReplicaCheck,
    StepLogger,
)
from paceline.train.final_model import save_model_folder
from paceline.train.mixed_devices import check_mixed_devices, mixed_devices_notices
from paceline.train.optimizer import Schedule, build_optimizer, matrices_of, optimizer_notices
from paceline.train.optimizers.host_state import offload_state
from paceline.train.optimizers.rounding import add_rounding
from paceline.train.precision import Precision, check_same_precision
from paceline.train.profiler import StepProfiler
from paceline.train.rank_loss import event_listeners
from paceline.train.run_spec import RunSpec
from paceline.train.sampling import SampleGenerator
from paceline.train.state import (
    RankContext,
    TrainComponents,
    claim_store,
    initialize_adapters,
    open_side_group,
    resume,
)
from paceline.train.trainer import Trainer

logger = logging.getLogger(__name__)


def run_rank(spec: RunSpec, env: RankEnv, stop: StopFlag) -> Outcome:
    """Run one rank from start to end.

    Returns:
        ``{"status": "done" | "stopped", "report": …}``. If Paceline's launcher collects the report,
        only rank 0 returns it, and it is None on the other ranks.
    """
    axes = spec.layout.axes if spec.layout.num_processes > 1 else ParallelDims()
    PROGRESS.start(active=spec.config.recovery.watchdog, on_cpu=spec.device_type == "cpu")
    comm = init_communicator(env, spec.device_type, spec.config.parallel.collective_timeout_s, axes)
    run_dir = RunDir(Path(spec.config.output_dir))
    events = EventLog(None)
    watchdog = Watchdog(
        spec.config.recovery, spec.config.parallel.collective_timeout_s, comm, stop, run_dir.root
    )
    watchdog.start()
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
            if comm.is_rank_zero:
                _open_run(spec, run_dir, events, cleanup)
            watchdog.watch(components.strategy, events)
            ctx = RankContext(comm, run_dir, events, stop, cleanup)
            store = claim_store(spec, ctx)
            trainer = build_trainer(spec, ctx, components, data, notices, side, store)
            return _run(trainer)
    except BaseException as caught:
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
        comm.close()


def _run(trainer: Trainer) -> Outcome:
    """Train, save the model and write the report. Return the result of :func:`run_rank`."""
    spec, ctx, strategy = trainer.spec, trainer.ctx, trainer.strategy
    state, events = trainer.state, ctx.events
    advisor = make_advisor(strategy, trainer.metrics, state.first_step, spec.derived.steps)
    trainer.callbacks += _monitoring(trainer, advisor)
    with trainer.checkpoints:  # waits for the last save, however the training ends
        try:
            status = trainer.train()
        except BaseException as error:
            # With Paceline's launcher the process exits at once, so nothing needs to be freed.
            if spec.launcher_pid is None:
                trainer.data.close()
            if is_out_of_memory(error):
                parts = trainer.components
                raise out_of_memory(error, parts.strategy, parts.model) from error
            raise
        trainer.data.close()
        ctx.progress.enter("saving")
    if status == "done":
        build_model = partial(_build_model, trainer.components.task, spec.config)
        save_model_folder(
            ctx, trainer.components, build_model, state.step, trainer.handle_rank_loss
        )
    report = build_report(
        _run_info(spec, ctx, trainer.components, trainer.data),
        trainer.metrics,
        advisor,
        status=status,
        step=state.step,
        resumed_from_step=state.first_step if spec.resume_from is not None else None,
        skipped_batches=state.skipped_batches,
        shares=None if trainer.balancer.is_equal else trainer.balancer.counts,
    )
    if ctx.comm.is_rank_zero:
        write_reports(ctx.run_dir, report)
        reason = None
        if status == "stopped":
            reason = "stopped by a signal" if ctx.stop.wanted else "another rank was stopped"
        end: RunEndEvent = {
            "type": "run_end",
            "status": status,
            "step": state.step,
            "reason": reason,
            "wall_s": report["wall_s"],
        }
        if advisor is not None and advisor.summary is not None:
            end["network"] = advisor.summary
        events.emit(end)
    if spec.reports_everywhere:
        report = ctx.comm.broadcast_object(report)
    ctx.comm.barrier()
    close_servers(strategy)
    has_report = ctx.comm.is_rank_zero or spec.reports_everywhere
    result = cast("dict[str, JsonValue] | None", report if has_report else None)
    return {"status": status, "report": result}


def _monitoring(trainer: Trainer, advisor: CommAdvisor | None) -> list[Callback]:
    """Return the callbacks of a run other than the step logger."""
    spec, parts, events = trainer.spec, trainer.components, trainer.ctx.events
    eval_dataset, progress = trainer.data.eval_dataset, trainer.ctx.progress
    samples = SampleGenerator(spec.config, parts, eval_dataset, events, progress)
    callbacks: list[Callback] = [
        MemoryReport(parts.strategy, parts.model, events),
        ReplicaCheck(parts.strategy, events, spec.config.recovery.replica_check_steps),
        trainer.balancer,
        samples,
    ]
    profile = spec.config.train_args.profile
    if profile is not None:
        callbacks.append(StepProfiler(profile, trainer.ctx))
    times = compile_times()
    if times is not None:
        callbacks.append(CompileReport(times))
    return callbacks if advisor is None else [*callbacks, CommAdvice(advisor)]


def _open_run(spec: RunSpec, run_dir: RunDir, events: EventLog, cleanup: ExitStack) -> None:
    """Lock the run's folder, so that no other run writes to it, and start its event log."""
    run_dir.root.mkdir(parents=True, exist_ok=True)
    cleanup.callback(lock_run(run_dir, wait_s=20.0).close)
    clear_debris(run_dir)
    write_atomic(run_dir.config, to_yaml(spec.config))
    events.open(run_dir.events, event_listeners(spec.config, run_dir))


def build_components(
    spec: RunSpec,
    comm: Communicator,
    adjust: Callable[[nn.Module], object] | None = None,
    side: SideGroup | None = None,
) -> tuple[TrainComponents, DataPipeline, list[tuple[str, str]]]:
    """Build the model and the data pipeline, seeded by ``train_args.seed``.

    The order is the same for every strategy: activation checkpointing and offloading wrap the
    forward of the blocks, so that the hooks run outside of it; then the strategy sets up the model.

    Args:
        adjust: function that may change the model before the strategy sets it up.
        side: the group through which checkpoints are read, if some rank does not see the folder.

    Returns:
        The components, the data pipeline, and notices as (level, text).
    """
    quiet_libraries(spec.config, comm.device.type)
    task = load_task(spec.config)
    task.prepared = spec.data
    task.device_type = comm.device.type
    strategy = make_strategy(spec.layout.strategy, spec.config, comm)
    with model_init_context(strategy):
        model = _build_model(task, spec.config)
    if adjust is not None:
        adjust(model)
    initialize_adapters(model, spec, comm, side)
    strategy.num_devices = spec.layout.axes.replicas if spec.layout.num_processes == 1 else 1
    if not any(param.requires_grad for param in model.parameters()):
        raise RunError(
            "the model has no trainable parameters: every parameter is frozen",
            fix="set requires_grad of the parameters to train",
        )
    if strategy.rank0_has_full_model:
        # Otherwise it stays on the CPU until it is split: it may not fit on one device.
        move_model(model, comm.device)
        move_scales(model, comm.device)
    with converted_weights(model):
        notices = task.setup(model)
    datasets = task.build_datasets()
    if isinstance(task, UserTask) and spec.resume_from is None:
        from paceline.tasks.additivity import check_additive  # not imported for built-in tasks

        # Runs on every rank, because the loss may issue collectives.
        seed = spec.config.train_args.seed
        notices += check_additive(task.task, model, datasets[0], seed)
    probe = None
    if spec.layout.axes.pipeline > 1:
        # The loss of one sample shows which tensors the stages must send to each other.
        probe = Probe(lambda model: task.loss(model, task.collate([datasets[0][0]])), rows=1)
    strategy.probe = None if probe is None else probe.run
    digest = frozen_digest(model)
    components = distribute(task, model, strategy, spec.config, spec.derived, probe, digest)
    notices += strategy.notices
    return components, _build_data(spec, components, *datasets), notices


def distribute(
    task: Task,
    model: nn.Module,
    strategy: Strategy,
    config: Config,
    derived: ResolvedValues,
    probe: Probe | None = None,
    digest: str | None = None,
) -> TrainComponents:
    """Distribute the model over the ranks, and build the optimizer. A collective.

    Args:
        digest: digest of the frozen weights.
    """
    with converted_weights(model):
        shape, decayed = outline(model, config, probe), matrices_of(model)
    rate_factors = learning_rate_factors(model, config)
    strategy.notices += convert_to_float8(model, config.train_args)
    placed = strategy.setup(model)
    move_scales(model, strategy.world.device)
    args = config.train_args
    optimizer = strategy.setup_optimizer(
        lambda named: build_optimizer(
            args, derived.learning_rate, named, decayed, shape.optimizer.matrices, rate_factors
        )
    )
    strategy.notices += optimizer_notices(args, shape.optimizer, optimizer)
    if args.weight_dtype == "bfloat16":
        add_rounding(optimizer, args.seed, strategy.tensor_shards())
    offload_state(optimizer, strategy)
    precision = Precision(args, strategy.world)
    strategy.scaler = precision.scaler
    schedule = Schedule(optimizer, args, derived)
    return TrainComponents(task, placed, shape, strategy, optimizer, schedule, precision, digest)


def _build_data(
    spec: RunSpec, components: TrainComponents, train_dataset: Any, eval_dataset: Any | None
) -> DataPipeline:
    args, strategy, task = spec.config.train_args, components.strategy, components.task
    replica, num_replicas = replica_of(strategy)
    accumulation = spec.derived.gradient_accumulation_steps
    if spec.layout.num_processes == 1:  # this process runs the micro-batches of all devices
        accumulation *= spec.layout.axes.replicas
    return DataPipeline(
        train_dataset,
        eval_dataset,
        SampleOrder(
            len(train_dataset),
            spec.derived.global_batch_size,
            args.seed,
            # Padded rows need equal counts per rank; packed rows need equal tokens.
            getattr(train_dataset, "lengths", None) if getattr(task, "packed", True) else None,
            args.shuffle,
        ),
        task.collate,
        LoaderOptions(
            args.dataloader_num_workers,
            args.dataloader_prefetch_factor,
            args.dataloader_pin_memory and strategy.world.device.type != "cpu",
        ),
        last_step=spec.derived.steps,
        accumulation=accumulation if has_data(strategy) else 0,
        replica=replica,
        num_replicas=num_replicas,
    )


def _build_model(task: Task, config: Config) -> nn.Module:
    seed_everything(config.train_args.seed, "init")
    model = task.build_model()
    guard_model(model)
    compile_blocks(model, config.train_args)
    reduce_activations(model, config)
    return model


def build_trainer(
    spec: RunSpec,
    ctx: RankContext,
    components: TrainComponents,
    data: DataPipeline,
    notices: Sequence[tuple[str, str]],
    side: SideGroup | None = None,
    store: CheckpointStore | None = None,
) -> Trainer:
    """Build the trainer, load the checkpoint that the run resumes from, and emit the events of a
    start. A collective."""
    settings, strategy, events = spec.config.recovery, components.strategy, ctx.events
    peaks = ctx.comm.gather_objects(spec.peak)[: spec.layout.axes.size]
    peak, lengths = mean_peak(peaks), getattr(data.train_dataset, "lengths", None)
    num_devices = spec.layout.axes.size
    metrics = StepMetrics(
        ctx.comm,
        # When the command was started or, after a restart, when the failure was detected.
        spec.started_at if spec.failure is None else float(spec.failure["seen_at"]),
        spec.data.train_tokens is not None,
        traffic_period(strategy),
        serves=not has_data(strategy),
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
    resume_notices += transfer_notices(strategy, side, components.shape.optimizer.element_bytes)
    balancer = Balancer(spec.config, ctx, strategy, data, metrics, checkpoints)
    balancer.begin(state.step, meta.get("balance"))
    emit_run_start(
        _run_info(spec, ctx, components, data),
        events,
        resumed=None if path is None else (path, state.first_step),
        failure=spec.failure,
        launcher_pid=spec.launcher_pid,
        peak=peak,
        launcher_notices=spec.notices,
        notices=[*notices, *resume_notices, *mixed_devices_notices(ctx.comm)],
    )
    balancer.announce()
    anomalies = AnomalyDetector(settings, strategy, components.precision.scaler, events)
    return Trainer(
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
        callbacks=[StepLogger(metrics, anomalies, data.order, ctx)],
    )


def _run_info(
    spec: RunSpec, ctx: RankContext, components: TrainComponents, data: DataPipeline
) -> RunInfo:
    return RunInfo(
        config=spec.config,
        derived=spec.derived,
        layout=spec.layout,
        data_counts=spec.data.counts.as_dict(),
        started_at=spec.started_at,
        run_dir=ctx.run_dir,
        strategy=components.strategy,
        model=components.model,
        shape=components.shape,
        train_dataset=data.train_dataset,
        order=data.order,
        predicts_activations=components.task.is_language_model,
    )


def quiet_libraries(config: Config, device_type: str) -> None:
    """Suppress messages of libraries that users cannot act on."""
    if device_type == "cpu":
        # transformers imports DeepSpeed if it is installed, which would search for accelerators and
        # print that it found none.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # peft calls deprecated functions of transformers, which users cannot change.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\.")
    # The launcher prints this warning once for all ranks.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    if "transformers" in sys.modules or config.task in ("sft", "pretrain"):
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
