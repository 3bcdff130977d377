"""From a spec to a finished run, on one rank: model, strategy, optimizer, resume, training, model
folder, report."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from torch import nn

from paceline.checkpoint.remote import CheckpointStore
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.train_state import check_same_model, frozen_digest, load_training_state
from paceline.checkpoint.transfer import open_checkpoint, transfer_notices
from paceline.config.load import to_yaml
from paceline.config.schema import Config
from paceline.core.errors import PacelineError, RunError
from paceline.core.events import EventLog
from paceline.core.files import write_atomic
from paceline.core.log import log_to_events, shows_progress
from paceline.core.run_dir import RunDir, clear_debris, lock_run
from paceline.core.stop import StopFlag
from paceline.data.loader import LoaderOptions
from paceline.data.order import SampleOrder
from paceline.distributed.communicator import Communicator, init_communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims
from paceline.distributed.progress import PROGRESS
from paceline.distributed.seeds import seed_everything
from paceline.distributed.side_group import SideGroup
from paceline.health.watchdog import Watchdog
from paceline.models.shape.outline import Probe, outline
from paceline.models.shape.record import ModelShape
from paceline.observe.comm_advisor import make_judge
from paceline.observe.device_stats import DeviceReader
from paceline.observe.metrics import Meter
from paceline.observe.report.build import build_report
from paceline.observe.report.write import write_reports
from paceline.observe.run_start import announce
from paceline.parallel.base import Strategy
from paceline.parallel.registry import make_strategy
from paceline.tasks import is_user_task, load_task
from paceline.tasks.base import Task
from paceline.tasks.user import guard_model
from paceline.train.final_model import save_model_folder
from paceline.train.mixed_devices import check_mixed_devices, mixed_devices_notices
from paceline.train.optimizer import Schedule, build_optimizer, matrices_of
from paceline.train.precision import Precision, check_same_precision, checkpoint_activations
from paceline.train.rank_loss import batches_of, close_batches, listeners
from paceline.train.run_spec import RunSpec
from paceline.train.trainer import Session, train


def run_rank(spec: RunSpec, env: RankEnv, stop: StopFlag) -> dict[str, Any]:
    """Run one rank from start to end. Returns ``{"status": "done" | "stopped", "report": …}``: the
    report on every rank, or on rank 0 only if a launcher of Paceline collects it."""
    axes = spec.layout.axes if spec.layout.num_processes > 1 else ParallelDims()
    PROGRESS.start(active=spec.config.recovery.watchdog, on_cpu=spec.device_type == "cpu")
    world = init_communicator(env, spec.device_type, spec.config.parallel.timeout_s, axes)
    run_dir = RunDir(Path(spec.config.output_dir))
    events, logged = EventLog(None), ExitStack()
    watchdog = Watchdog(
        spec.config.recovery, spec.config.parallel.timeout_s, world, stop, run_dir.root
    )
    watchdog.start()
    try:
        check_mixed_devices(world, spec.config, spec.layout.strategy)
        check_same_precision(world, spec.config.train_args)
        side, spec = _open_side_group(spec, world)
        # before anything is written: a model that cannot be had leaves no trace
        built = build(spec, world)
        world = built.strategy.world  # the same ranks, perhaps with other means to talk
        if spec.resume_from is not None:
            with open_checkpoint(Path(spec.resume_from), side) as opened:
                check_same_model(opened, spec.resume_from, built.shape, built.frozen)
        with _locked(run_dir, world):
            if world.is_rank_zero:
                events = _open_events(spec, run_dir)
                logged.enter_context(log_to_events(events, replaces_console=shows_progress()))
            watchdog.watch(built.strategy, events)
            session = begin(
                spec,
                world,
                built,
                run_dir,
                events,
                stop,
                side,
                _claim_store(spec, world, run_dir, events),
            )
            session.judge = make_judge(session)
            # what is being written when the training ends, however it ends, is waited for
            with session.saver:
                status = _train(session, exits_by_itself=spec.launcher_pid is None)
                PROGRESS.enter("saving")
            if status == "done":
                save_model_folder(session, lambda: _build_model(built.task, spec.config))
            report = build_report(session, spec, status)
            if world.is_rank_zero:
                write_reports(run_dir, report)
                reason = _stop_reason(stop) if status == "stopped" else None
                network = session.judge.said if session.judge is not None else None
                more = {"network": network} if network is not None else {}
                events.emit(
                    "run_end",
                    status=status,
                    step=session.step,
                    reason=reason,
                    wall_s=report["wall_s"],
                    **more,
                )
            if spec.reports_everywhere:
                report = world.broadcast_object(report)  # type: ignore[assignment]
            world.barrier()
            built.strategy.close()
            return {
                "status": status,
                "report": report if world.is_rank_zero or spec.reports_everywhere else None,
            }
    except BaseException as caught:
        error = watchdog.explain(caught)
        # the command line says the same, once, when all ranks have ended
        if world.is_rank_zero and spec.launcher_pid is None:
            events.emit(
                "run_end", file_only=True, status="failed", step=None, reason=_failure(error)[:2000]
            )
        if error is not caught:
            raise error from caught
        raise
    finally:
        watchdog.close()
        logged.close()
        events.close()
        for listener in events.listeners:
            close = getattr(listener, "close", None)
            if close is not None:
                close()
        world.close()


def _open_side_group(spec: RunSpec, world: Communicator) -> tuple[SideGroup | None, RunSpec]:
    """The group over which checkpoints travel if some rank does not see the run's folder; rank 0
    then says which checkpoint the run resumes from."""
    side = SideGroup.open(world, spec.sees_run_folder)
    if side is None:
        return None, spec
    return side, replace(spec, resume_from=world.broadcast_object(spec.resume_from))


def _claim_store(
    spec: RunSpec, world: Communicator, run_dir: RunDir, events: EventLog
) -> CheckpointStore | None:
    """``checkpoint_dir``, on rank 0, which uploads."""
    if spec.config.checkpoint_dir is None or not world.is_rank_zero:
        return None
    store = CheckpointStore(spec.config.checkpoint_dir)
    before = store.claim(run_dir.root)
    if before is not None:
        text = (
            f"`checkpoint_dir: {store.url}` was last written by the run in"
            f" {before.get('output_dir')} on host {before.get('host')}; this run takes it over, and"
            " that one ends at its next checkpoint if it still runs"
        )
        events.notice(text, level="warning")
    return store


def _train(session: Session, exits_by_itself: bool) -> str:
    """Train, then shut down the loader's workers. After a failure that is left out where the
    process ends at once anyway."""
    try:
        status = train(session)
    except BaseException:
        if exits_by_itself:
            close_batches(session)
        raise
    close_batches(session)
    return status


def _failure(error: BaseException) -> str:
    return str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"


def _stop_reason(stop: StopFlag) -> str:
    return "asked to stop by a signal" if stop.wanted else "another rank was asked to stop"


@contextmanager
def _locked(run_dir: RunDir, world: Communicator) -> Any:
    """Rank 0 holds the run's folder, so that no second run writes into it. The lock ends with the
    process."""
    handle: IO[str] | None = None
    if world.is_rank_zero:
        run_dir.root.mkdir(parents=True, exist_ok=True)
        handle = lock_run(run_dir, wait_s=20.0)
    try:
        yield
    finally:
        if handle is not None:
            handle.close()


def _open_events(spec: RunSpec, run_dir: RunDir) -> EventLog:
    clear_debris(run_dir)
    write_atomic(run_dir.config, to_yaml(spec.config))
    return EventLog(run_dir.events, listeners(spec.config, run_dir))


@dataclass
class Built:
    """The model as the strategy has placed it, its shape before that, and what the optimizer must
    know of it."""

    task: Task
    datasets: tuple[Any, Any | None]
    model: nn.Module
    shape: ModelShape
    matrices: frozenset[str]
    strategy: Strategy
    notices: list[tuple[str, str]]
    frozen: str | None  # digest of the weights that are not trained


def build(
    spec: RunSpec, world: Communicator, adjust: Callable[[nn.Module], object] | None = None
) -> Built:
    """The task and the model, placed; from torch's random state as the seed sets it. ``adjust`` may
    change the model before that.

    The order is fixed here, for every strategy: activation checkpointing is a switch on the blocks'
    own forward, so that whatever a strategy hangs on a block runs around it; then the strategy
    places the model.
    """
    _quiet_libraries(spec.config, world.device.type)
    task = load_task(spec.config)
    task.prepared = spec.data
    strategy = make_strategy(spec.layout.strategy, spec.config, world)
    with strategy.model_init_context():
        model = _build_model(task, spec.config)
    if adjust is not None:
        adjust(model)
    strategy.num_devices = spec.layout.axes.replicas if spec.layout.num_processes == 1 else 1
    if not any(one.requires_grad for one in model.parameters()):
        raise RunError(
            "the model has no parameter to train: all are frozen",
            fix="set requires_grad on what shall be trained",
        )
    if strategy.rank0_has_full_model:
        # else a model that no single device holds stays on the CPU until it is cut
        model.to(world.device)
    notices = task.setup(model)
    datasets = task.build_datasets()
    # on every rank: the loss may call collectives
    if is_user_task(spec.config) and spec.resume_from is None:
        notices += _check_loss(task, model, datasets[0], spec.config)
    probe = _probe(task, datasets[0]) if spec.layout.axes.pipeline > 1 else None
    strategy.probe = None if probe is None else probe.run
    shape, matrices = outline(model, spec.config, probe), matrices_of(model)
    frozen = frozen_digest(model)
    placed = strategy.setup(model)
    return Built(
        task, datasets, placed, shape, matrices, strategy, notices + strategy.notices, frozen
    )


def _probe(task: Task, dataset: Any) -> Probe:
    """The task's loss on one sample: what its blocks hand on is what pipeline stages send."""
    return Probe(lambda model: task.loss(model, task.collate([dataset[0]])), rows=1)


def _check_loss(
    task: Task, model: nn.Module, dataset: Any, config: Config
) -> list[tuple[str, str]]:
    from paceline.tasks.additivity import check_additive  # built-in tasks start without it

    return check_additive(task, model, dataset, config.train_args.seed)


def _build_model(task: Task, config: Config) -> nn.Module:
    seed_everything(config.train_args.seed, "init")
    model = task.build_model()
    guard_model(model)
    if config.train_args.gradient_checkpointing:
        checkpoint_activations(model)
    return model


def begin(
    spec: RunSpec,
    world: Communicator,
    built: Built,
    run_dir: RunDir,
    events: EventLog,
    stop: StopFlag,
    side: SideGroup | None = None,
    store: CheckpointStore | None = None,
) -> Session:
    """Everything that a rank's training needs, at the step it shall go on from."""
    config, args = spec.config, spec.config.train_args
    task, strategy = built.task, built.strategy
    train_dataset, eval_dataset = built.datasets
    optimizer = strategy.setup_optimizer(
        lambda named: build_optimizer(args, spec.derived.learning_rate, named, built.matrices)
    )
    precision = Precision(args, world)
    strategy.use_scaler(precision.scaler)
    options = LoaderOptions(
        args.dataloader_num_workers,
        args.dataloader_prefetch_factor,
        args.dataloader_pin_memory and world.device.type != "cpu",
    )
    order = SampleOrder(
        len(train_dataset),
        spec.derived.global_batch_size,
        args.seed,
        _balance_lengths(train_dataset, task),
        args.shuffle,
    )
    session = Session(
        config=config,
        derived=spec.derived,
        world=world,
        task=task,
        model=built.model,
        shape=built.shape,
        strategy=strategy,
        optimizer=optimizer,
        schedule=Schedule(optimizer, args, spec.derived),
        precision=precision,
        order=order,
        train_dataset=train_dataset,
        batches=iter(()),
        eval_dataset=eval_dataset,
        loader_options=options,
        events=events,
        run_dir=run_dir,
        stop=stop,
        meter=Meter(
            world,
            _life_began(spec),
            spec.data.train_tokens is not None,
            strategy.traffic_period,
            serves=not strategy.has_data,
            devices=DeviceReader(world.device),
        ),
        saver=Saver(
            world,
            run_dir.checkpoints,
            args.save_total_limit,
            events,
            background=args.async_save,
            every_s=config.recovery.save_every_s,
            pause=config.recovery.on_save_error == "pause",
            stop=lambda: stop.wanted,
            side=side,
            store=store,
        ),
        fingerprint=spec.data.fingerprint,
        frozen=built.frozen,
    )
    said = len(strategy.notices)
    with PROGRESS.during("loading"):
        resumed = _resume(session, spec)
    # what the checkpoint did not hold, or held in vain
    notices = built.notices + strategy.notices[said:]
    notices += transfer_notices(session, side) + mixed_devices_notices(world)
    accumulation = spec.derived.gradient_accumulation_steps
    if spec.layout.num_processes == 1:  # one process works on the micro-batches of all devices
        accumulation *= spec.layout.axes.replicas
    session.accumulation = accumulation if strategy.has_data else 0
    session.balancer.begin()
    session.batches = batches_of(session)
    announce(session, spec, notices, resumed)
    session.balancer.announce()
    return session


def _life_began(spec: RunSpec) -> float:
    """When the command was given; in a later life, when the fault was seen that made it necessary."""
    return spec.started_at if spec.failure is None else float(spec.failure["seen_at"])


def _balance_lengths(dataset: Any, task: Task) -> Any:
    # Padded rows want equal counts a rank; packed rows want equal tokens.
    return getattr(dataset, "lengths", None) if getattr(task, "packed", True) else None


def _resume(session: Session, spec: RunSpec) -> str | None:
    path = spec.resume_from
    own = path is not None and Path(path).resolve().parent == session.run_dir.checkpoints.resolve()
    said, own = session.world.broadcast_object((path, own))  # type: ignore[misc]
    if said is None:
        return None
    path = str(said)
    with open_checkpoint(Path(str(path)), session.saver.side) as opened:
        load_training_state(session, opened, int(opened.meta["step"]))
    session.guard.resume(opened.meta, str(path))
    session.balancer.resume(opened.meta)
    if not own:
        session.saver.last_step = None  # saved, but not in this run's folder
    return str(path)


def _quiet_libraries(config: Config, device_type: str) -> None:
    import logging
    import sys
    import warnings

    if device_type == "cpu":
        # transformers imports DeepSpeed where it is installed, which else looks for accelerators
        # and says that it found none.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # peft calls what transformers deprecates: nothing that the person who trains could change.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\.")
    # said once, by the launcher
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    if "transformers" in sys.modules or config.task in ("sft", "pretrain"):
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
