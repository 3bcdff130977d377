"""Preflight checks: check the options, the devices of this host, the data and the checkpoint, and
prepare the run before its ranks are started.

Errors in the config are reported here, before any rank is started and any file is written.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.format import name_of
from paceline.checkpoint.reader import read_meta
from paceline.checkpoint.remote import check_url, is_url
from paceline.config.derive import ResolvedValues, derive
from paceline.config.load import Loaded
from paceline.config.metrics.best import check_best_metric
from paceline.config.metrics.evaluation import check_lm_eval, check_metrics, idle_notice
from paceline.config.packages import check_loggers, check_optimizer_package
from paceline.config.schema import Config
from paceline.config.schema.schedules import schedule_problem
from paceline.config.schema.train_args import TrainArgs
from paceline.core.errors import (
    EXIT_DONE,
    EXIT_SIGINT,
    EXIT_SIGTERM,
    EXIT_USAGE,
    ConfigError,
    Outcome,
    ReportedError,
)
from paceline.core.formatting import counted
from paceline.core.log import CONSOLE_ONLY, log_notices, write_line
from paceline.core.report import Report
from paceline.core.run_dir import RunDir
from paceline.distributed.devices import (
    check_several_ranks,
    choose_devices,
    cpu_cores,
    expands_segments,
    gpu_capability,
    with_precision,
    with_supported_tf32,
    without_idle_offload,
)
from paceline.distributed.environment import outer_launcher
from paceline.distributed.mesh import ParallelDims
from paceline.launch.after_training.hub_upload import check_hub_upload
from paceline.launch.host_checks import quick_checks
from paceline.launch.layout import ChosenLayout, check_sizes, sharing_text
from paceline.launch.memory_settings import (
    RankMemory,
    choose_memory_settings,
    preferred_settings,
    rank_memory,
)
from paceline.launch.model_check import check_model, checking_in_background
from paceline.launch.resume import (
    check_checkpoint_dir,
    check_output_dir,
    check_restart,
    check_resume,
    check_run_folder,
    checkpoint_after_restart,
    checkpoint_to_resume,
    fetch_latest,
)
from paceline.models.kernels.attention_choice import check_attention
from paceline.models.kernels.liger import check_liger
from paceline.models.transforms.compile_check import check_compile
from paceline.models.transforms.float8_check import check_float8
from paceline.observe.console import derived_lines
from paceline.parallel.balance import equal_notice
from paceline.parallel.registry import ParallelLayout, check_steps, mode_of, notice_of_compression
from paceline.planner.devices import peak_rate
from paceline.planner.estimate import with_accumulation
from paceline.planner.machine.local import device_memory, local_machine
from paceline.planner.machine.memory_history import memory_key
from paceline.planner.run_prediction import predict_step
from paceline.planner.scale.save_interval import with_save_interval
from paceline.planner.search.trials import Settings, with_settings
from paceline.tasks import load_task
from paceline.tasks.base import Prepared, Task
from paceline.train.answers.text_metrics import load_user_metrics
from paceline.train.run_spec import RunSpec, TrainOptions, TrainResult

if TYPE_CHECKING:
    from pydantic import JsonValue

    from paceline.distributed.devices import Devices
    from paceline.distributed.environment import RankEnv


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedRun:
    """A run that can start.

    Args:
        spec: spec for the ranks.
        finished: report of the run in the same folder if it is already complete, else None.
        chosen: the layout, and the settings that were chosen for the run; part of the spec.
        history_key: key under which memory settings that work are stored; None if they depend on
            what other processes hold.
    """

    spec: Any  # a RunSpec; None on a rank that is only notified that the run is complete
    devices: Devices | None
    finished: Report | None = None
    chosen: ChosenLayout | None = None
    history_key: str | None = None


@dataclass(frozen=True)
class LeaderPlan:
    """The state of the run's folder on rank 0's host, for the ranks on other hosts.

    Args:
        resume_from: path of the checkpoint to resume from, on rank 0's host.
    """

    resume_from: str | None = None
    global_batch_size: int | None = None


def check_early(config: Config) -> None:
    """Run the fast checks: the mode, the output folder, and the required packages.

    Raises:
        ConfigError: if the config cannot run.
    """
    mode_of(config.parallel)
    check_output_dir(Path(config.output_dir))
    if config.checkpoint_dir is not None:
        check_checkpoint_dir(config.checkpoint_dir, Path(config.output_dir))
    if is_url(config.resume):
        check_url("resume", config.resume)
    elif config.resume not in ("auto", "never") and not Path(config.resume).exists():
        raise ConfigError(
            f"`resume: {config.resume}` does not exist",
            allowed=f"auto, never, or a checkpoint such as RUN/checkpoints/{name_of(40)}",
            fix="check the path, or remove `resume`: the default resumes the latest checkpoint",
        )
    check_loggers(config)
    check_optimizer_package(config.train_args.optim)
    check_metrics(config)
    load_user_metrics(config)
    check_hub_upload(config)
    check_lm_eval(config)


def read_data_early(loaded: Loaded, *, dry_run: bool, checks_folder: bool) -> Prepared:
    """Read and tokenize the data for :func:`prepare_run` before the layout is chosen.

    Raises:
        ConfigError: if the run folder, the data or the model cannot be used.
    """
    if checks_folder:
        check_run_folder(loaded, RunDir(Path(loaded.config.output_dir)), is_first_attempt=True)
    single = ParallelLayout("single", ParallelDims(), 1)
    if dry_run:
        check_model(loaded.config, single)
    return _read_data(load_task(loaded.config), loaded.config, single, dry_run)


def prepare_run(
    loaded: Loaded,
    *,
    started_at: float,
    chosen: ChosenLayout,
    device_type: str,
    devices: Devices | None,
    memory: RankMemory | None = None,
    kept: Settings | None = None,
    allow_config_change: bool = False,
    global_batch_size: int | None = None,
    attempt: int = 1,
    leader: LeaderPlan | None = None,
    data: Prepared | None = None,
    dry_run: bool = False,
) -> PreparedRun:
    """Read and tokenize the data, derive batch size and steps, and find the checkpoint to resume.

    Args:
        started_at: start time of the command, in seconds since the epoch.
        chosen: the layout, and the settings that it needs.
        memory: memory of a rank, for which the memory settings are chosen that the config leaves
            open; None to leave them as they are.
        kept: memory settings of the previous attempt; None to read them from the run's folder.
        global_batch_size: global batch size of the previous attempt, which may have ended before
            its first checkpoint; None to use the size in the checkpoint.
        attempt: number of the attempt. From the second on, the latest checkpoint of the run is
            resumed regardless of ``resume``.
        leader: state of rank 0's run folder, on the other ranks of a run over several hosts, which
            ignore their local folder.
        data: result of :func:`read_data_early`, if it was called.
        dry_run: whether to check the model too; otherwise the ranks do that.

    Raises:
        ConfigError: if the run cannot start or cannot be resumed exactly.
    """
    loaded, layout, is_first_attempt = chosen.applied_to(loaded), chosen.layout, attempt == 1
    config = with_accumulation(loaded.config, layout.axes.replicas)
    run_dir = RunDir(Path(config.output_dir))
    if leader is None:
        check_run_folder(loaded, run_dir, is_first_attempt)
    task = load_task(config)
    if config.callbacks:
        from paceline.train.callbacks.user import check_callbacks  # not needed by most runs

        check_callbacks(config)
    if dry_run:
        log_notices(logger, check_model(config, layout))
    if data is None:
        data = _read_data(task, config, layout, dry_run)
    log_notices(logger, data.notices)
    history_key = None
    if memory is not None and leader is None:
        history_key = memory_key(config, layout, memory.device_name)
        preferred = preferred_settings(config, kept, history_key)
        settings = choose_memory_settings(config, layout, device_type, memory, preferred)
        if memory.is_shared:
            history_key = None
        chosen = chosen.with_settings(settings)
        config = with_accumulation(with_settings(config, settings), layout.axes.replicas)
    if config.recovery.mtbf_hours is not None:
        dtype = config.train_args.compute_format
        machine = local_machine(layout.num_processes, device_type == "cpu", dtype)
        config = with_save_interval(config, layout, machine)
    _warn_about_idle_settings(config, layout, devices)
    path: Path | None = None
    if leader is None:
        if config.checkpoint_dir is not None:
            fetch_latest(config, run_dir, is_first_attempt=is_first_attempt, dry_run=dry_run)
        choose = checkpoint_to_resume if is_first_attempt else checkpoint_after_restart
        path = choose(config, run_dir)
    meta = None if path is None else read_meta(path)
    if meta is not None:
        global_batch_size = int(meta["global_batch_size"])
    elif leader is not None:
        global_batch_size = leader.global_batch_size
    _check_global_batch(config, global_batch_size)
    derived = _resolve_sizes(task, config, layout, data, global_batch_size)
    resume_from = leader.resume_from if leader is not None else None if path is None else str(path)
    peak = None
    if devices is not None and devices.type != "cpu":
        peak = peak_rate(devices.names[0], device_memory(), config.train_args.compute_format)
    spec = RunSpec(
        config,
        derived,
        data,
        layout,
        device_type,
        started_at,
        resume_from,
        peak,
        predict=predict_step,
    )
    finished = None
    if path is not None and meta is not None:
        finished = check_resume(spec, path, meta, allow_config_change)
    elif leader is None and config.resume == "auto" and run_dir.config.is_file():
        check_restart(config, run_dir, allow_config_change)
    return PreparedRun(spec, devices, finished, chosen, history_key)


def _check_global_batch(config: Config, resumed: int | None) -> None:
    """Check that a run does not resume with another global batch size."""
    configured = config.train_args.global_batch_size
    if resumed is not None and configured not in (None, resumed):
        raise ConfigError(
            f"`train_args.global_batch_size: {configured}`: the run in `output_dir` has a global"
            f" batch of {counted(resumed, 'sample')}, which does not change when it resumes",
            allowed=str(resumed),
            fix="set another `output_dir` for a new run",
        )


def _read_data(task: Task, config: Config, layout: ParallelLayout, dry_run: bool) -> Prepared:
    _check_schedule(config.train_args, task.default_learning_rate)
    # Under an outer launcher there is no fork server, and the ranks check the model themselves.
    can_check = not dry_run and not outer_launcher()
    with checking_in_background(config, layout) if can_check else contextlib.nullcontext():
        return task.prepare()


def _check_schedule(args: TrainArgs, default_learning_rate: float) -> None:
    """Raise ConfigError if the schedule does not fit the learning rate that the task determines. A
    rate in the config is checked when the config is loaded."""
    if args.learning_rate is not None:
        return
    problem = schedule_problem(
        args.lr_scheduler_type, args.lr_scheduler_kwargs, default_learning_rate
    )
    if problem is not None:
        raise ConfigError(
            f"`train_args.lr_scheduler_kwargs`: {problem}",
            fix="set `train_args.learning_rate`, or correct it",
        )


def _resolve_sizes(
    task: Task,
    config: Config,
    layout: ParallelLayout,
    data: Prepared,
    global_batch_size: int | None,
) -> ResolvedValues:
    """Derive batch size, steps and learning rate, and check that the data and the strategy allow
    them."""
    derived = derive(
        config,
        world_size=layout.world_size,
        rows_per_epoch=partial(data.rows_per_epoch, config),
        num_eval=data.num_eval,
        default_learning_rate=task.default_learning_rate,
        tokens_per_row=data.tokens_per_row(config),
        replicas=layout.axes.replicas,
        global_batch_size=global_batch_size,
    )
    task.check_batch(derived.global_batch_size)
    num_rows = data.rows_per_epoch(config, derived.global_batch_size)
    log_notices(logger, check_sizes(derived, num_rows, layout.strategy))
    shared = sharing_text(config, derived)
    if shared is not None:
        logger.info(shared)
    unbalanced = equal_notice(config, derived)
    log_notices(logger, [] if unbalanced is None else [unbalanced])
    check_steps(layout.strategy, config, derived.steps)
    if not derived.eval_every_steps:
        _check_selection_is_off(config.train_args)
    else:
        check_best_metric(config.train_args, task.metric_names(data))
    profile = config.train_args.profile
    if profile is not None and profile.last_step > derived.steps:
        raise ConfigError(
            f"`train_args.profile`: step {profile.last_step} is to be recorded, and the run has"
            f" {counted(derived.steps, 'step')}",
            fix="lower `profile.start_step` or `profile.num_steps`",
        )
    return derived


def _check_selection_is_off(args: TrainArgs) -> None:
    """Raise ConfigError for settings that require evaluations, if there are none."""
    is_off = args.eval_steps == "never"
    why = "`train_args.eval_steps: never` is set" if is_off else "there is no validation data"
    fix = "set `train_args.eval_steps`" if is_off else "set `val_dataset` or `split_dataset_ratio`"
    settings = {
        "load_best_model_at_end": args.load_best_model_at_end,
        "save_best": args.save_best,
        "early_stopping": args.early_stopping is not None,
    }
    names = [f"`train_args.{name}`" for name, is_set in settings.items() if is_set]
    if names:
        raise ConfigError(
            f"{' and '.join(names)} compare evaluations, and {why}",
            code="no-validation-data",
            fix=f"{fix}, or remove these settings",
        )
    if args.metric_for_best_model is not None:
        logger.warning(f"`train_args.metric_for_best_model` has no effect: {why}")


def _warn_about_idle_settings(
    config: Config, layout: ParallelLayout, devices: Devices | None
) -> None:
    """Warn about settings that have no effect or slow the run down."""
    idle_metrics = idle_notice(config)
    if idle_metrics is not None:
        logger.warning(idle_metrics)
    for name in config.preference.unused(config.task):
        logger.warning(f"`preference.{name}` has no effect with the loss of `task: {config.task}`")
    num_ranks = layout.num_processes
    if devices is not None:
        num_ranks = min(devices.count, num_ranks)
    loaders, cores = config.train_args.dataloader_num_workers, cpu_cores()
    if loaders != "auto" and loaders * num_ranks > cores:
        logger.warning(
            "%d loader processes on %d cores: fewer (`dataloader_num_workers`) may be faster",
            loaders * num_ranks,
            cores,
        )
    wasted = notice_of_compression(layout.strategy, config, layout.axes)
    log_notices(logger, [] if wasted is None else [wasted])


_STOP_CODES = (EXIT_SIGINT, EXIT_SIGTERM)


@dataclass(frozen=True)
class PreparedHost:
    """The devices of this host, the config adapted to them, and the memory of a rank."""

    loaded: Loaded
    devices: Devices
    memory: RankMemory


def log_and_check(loaded: Loaded) -> None:
    """Log the notices of a config and run the fast checks.

    Raises:
        ConfigError: if the config cannot run.
    """
    log_notices(logger, loaded.notices)
    check_early(loaded.config)


def prepare_host(loaded: Loaded, outer: RankEnv | None) -> PreparedHost:
    """Choose the devices and the precision of this host, and check that it can run the config.

    Raises:
        ConfigError: if the requested devices do not exist, or if this host cannot run the config.
    """
    config = loaded.config
    devices = choose_devices(
        config.parallel, num_launched=None if outer is None else outer.local_world_size
    )
    num_ranks = devices.count * config.parallel.hosts[1] if outer is None else outer.world_size
    check_several_ranks(devices.type, num_ranks)
    log_notices(logger, devices.notices)
    parallel, notices = without_idle_offload(config.parallel, devices.type)
    log_notices(logger, notices)
    config = config.model_copy(update={"parallel": parallel})
    for check in quick_checks(config, devices.type, devices.count):
        if check.fatal:
            raise ConfigError(
                f"this host cannot run the config: {check.name}: {check.value}", fix=check.advice
            )
        logger.warning("%s: %s; %s", check.name, check.value, check.advice)
    if expands_segments(devices.type):
        logger.info(
            "memory: torch's allocator uses expandable segments, which fragment less; another"
            " setting in PYTORCH_ALLOC_CONF takes precedence"
        )
    config, precision = with_precision(config, devices.type, devices.names[: devices.count])
    logger.info(precision)
    capability = gpu_capability(devices.type, devices.count)
    config, idle_tf32 = with_supported_tf32(config, devices.type, capability)
    if idle_tf32 is not None:
        logger.warning(idle_tf32)
    check_liger(config, devices.type)
    check_compile(config, devices.type)
    check_float8(config, devices.type, capability)
    check_attention(config, devices.type, capability)
    return PreparedHost(replace(loaded, config=config), devices, rank_memory(devices))


def result_of(outcome: Outcome, options: TrainOptions, config: Config) -> TrainResult:
    """Convert the outcome of a launcher or of this rank into the result of the run.

    Raises:
        ConfigError: if a rank rejected the config.
        ReportedError: if the run failed.
    """
    if outcome["status"] == "finished":
        report: Report = outcome["report"]
        log_finished(config, report.get("steps"))
        return TrainResult(EXIT_DONE, report)
    if outcome["status"] == "failed":
        if options.debug and outcome.get("traceback"):
            write_line(outcome["traceback"])
        if outcome["exit_code"] == EXIT_USAGE:
            raise ConfigError(outcome["text"])
        raise ReportedError(
            outcome["text"], outcome["exit_code"], would_repeat=outcome.get("fault") is False
        )
    has_report = outcome.get("report") is not None
    if outcome["status"] == "stopped" and not has_report and outcome["exit_code"] in _STOP_CODES:
        logger.info("stopped before training began", extra=CONSOLE_ONLY)
        return TrainResult(outcome["exit_code"])
    return TrainResult(outcome["exit_code"], outcome["report"])


def log_finished(config: Config, steps: JsonValue) -> None:
    """Log that the run in the output folder is already complete."""
    folder = config.output_dir
    logger.info(
        f"{folder}: run already finished after {steps} steps; nothing to do. Report:"
        f" {folder}/report.html. For a new run, set another `output_dir` or delete the folder",
        extra=CONSOLE_ONLY,
    )


def log_dry_run(derived: ResolvedValues) -> None:
    """Log the values derived from a config."""
    for label, text in derived_lines(derived.as_dict()):
        logger.info("%-14s %s", label, text, extra=CONSOLE_ONLY)
