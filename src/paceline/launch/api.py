"""Run a config from Python or from the command line: the same path for both."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import (
    EXIT_DONE,
    EXIT_SIGINT,
    EXIT_SIGTERM,
    EXIT_USAGE,
    ConfigError,
    ReportedError,
    StoppedError,
)

if TYPE_CHECKING:
    from paceline.config.load import Loaded
    from paceline.config.schema import Config
    from paceline.core.launch_lock import LaunchLock
    from paceline.launch.apart import Elsewhere
    from paceline.launch.preflight import Plan
    from paceline.parallel import Layout


@dataclass(frozen=True)
class Options:
    """What the command line may say beside the config.

    Args:
        fault: content of the `fault` event, if an outer launcher has started the ranks again after a failure.
    """

    dry_run: bool = False
    debug: bool = False
    allow_config_change: bool = False
    fault: dict[str, Any] | None = None


@dataclass(frozen=True)
class Result:
    """How a run ended: the process's exit code and the report. Under an outer launcher such as torchrun every rank has it."""

    exit_code: int
    report: dict[str, Any] | None = None
    resolved: dict[str, Any] | None = None


def train(config: str | Path | Mapping[str, Any], **overrides: Any) -> dict[str, Any]:
    """Train as ``paceline train CONFIG`` does, and return the report (the content of ``report.json``). Under an outer launcher
    (``torchrun script.py``) every rank calls this function, and every rank gets the report.

    Args:
        config: path of a config file, or its content as a mapping.
        overrides: further keys; dotted ones as ``**{"train_args.max_steps": 10}``.

    Raises:
        ConfigError: the config or the data is wrong; nothing was started or written.
        RunError: the run failed.
        StoppedError: a signal stopped the run (a RunError too).
    """
    from paceline.config.load import load_config
    from paceline.engine.stop import handlers_restored

    if isinstance(config, Mapping):
        loaded = load_config(None, {**config, **overrides})
    else:
        loaded = load_config(config, overrides)
    with handlers_restored():
        result = run(loaded, Options(), time.time())
    if result.report is None:
        raise StoppedError("the run was stopped by a signal before the training began", result.exit_code)
    if result.exit_code != EXIT_DONE:
        raise StoppedError(f"the run was stopped by a signal; a checkpoint is in {loaded.config.output_dir}", result.exit_code)
    return result.report


def run(loaded: Loaded, options: Options, started_at: float) -> Result:
    """Check, prepare, launch, and wait. ``started_at``: seconds since the epoch.

    Raises:
        PacelineError: with its exit code and one paragraph of text.
    """
    from paceline.launch.preflight import check_early
    from paceline.models.positions import fit_length
    from paceline.tasks import load_task
    from paceline.world.env import outer_launcher, scheduled_host, with_scheduler

    outer = outer_launcher()
    speaks = outer is None or outer.rank == 0

    def say(level: str, text: str) -> None:
        if speaks:
            with contextlib.suppress(OSError, ValueError):  # whoever read this has gone; the run goes on
                print(f"{'warning: ' if level == 'warning' else ''}{text}", file=sys.stderr, flush=True)

    parallel = with_scheduler(loaded.config.parallel, scheduled_host() if outer is None else None)
    loaded = fit_length(loaded.with_parallel(parallel))
    for level, text in loaded.notices:
        say(level, text)
    check_early(loaded.config)
    # Under an outer launcher rank 0 holds the folder for all ranks; of several hosts, the head does (in _run_planned).
    locks_here = outer.rank == 0 if outer is not None else loaded.config.parallel.hosts == (1, 1)
    with _exclusive(loaded.config, say) if locks_here and not options.dry_run else contextlib.nullcontext():
        if outer is None and not options.dry_run:
            from paceline.launch.preload import start_fork_server

            start_fork_server(loaded.config)
        load_task(loaded.config).check()
        return _run_planned(loaded, options, started_at, say)


def _exclusive(config: Config, say: Any) -> LaunchLock:
    from paceline.core.launch_lock import LaunchLock
    from paceline.core.run_dir import RunDir

    return LaunchLock(RunDir(Path(config.output_dir)), say)


def _run_planned(loaded: Loaded, options: Options, started_at: float, say: Any) -> Result:
    from paceline.doctor.quick import quick_checks
    from paceline.launch.layout import choose_layout
    from paceline.launch.preflight import plan_run
    from paceline.world.device import choose_devices, without_idle_offload
    from paceline.world.env import outer_launcher
    from paceline.world.precision import with_precision

    config = loaded.config
    outer = outer_launcher()
    devices = choose_devices(config.parallel, ranks_given=None if outer is None else outer.local_world_size)
    parallel, notices = without_idle_offload(config.parallel, devices.type)
    devices.notices.extend(notices)
    config = config.model_copy(update={"parallel": parallel})
    for one in quick_checks(config, devices.type, devices.count):
        if one.fatal:
            raise ConfigError(f"this machine cannot run it: {one.name}: {one.value}", fix=one.advice)
        devices.notices.append(("warning", f"{one.name}: {one.value}; {one.advice}"))
    config, precision = with_precision(config, devices.type, devices.names[: devices.count])
    devices.notices.append(("info", precision))
    for level, text in devices.notices:
        say(level, text)
    loaded = replace(loaded, config=config)

    def plan_for(
        num_devices: int,
        life: int = 1,
        global_batch_size: int | None = None,
        given: Layout | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> Plan:
        return plan_run(
            loaded,
            started_at=started_at,
            layout=given or choose_layout(config, num_devices, devices.type, outer, say),
            device_type=devices.type,
            devices=devices,
            say=say,
            allow_config_change=options.allow_config_change,
            global_batch_size=global_batch_size,
            life=life,
            elsewhere=elsewhere,
            dry_run=options.dry_run,
        )

    if outer is None and config.parallel.hosts != (1, 1) and not options.dry_run:
        from paceline.launch.hosts import HostsRun
        from paceline.launch.meeting import meet

        meeting = meet(config, say)
        with _exclusive(config, say) if meeting.leads else contextlib.nullcontext():
            run = HostsRun(config, meeting, devices.count, devices.type, plan_for, say)
            return _result(run.run(), options, config, say)
    num_devices = devices.count * config.parallel.hosts[1] if outer is None else outer.world_size
    plan = plan_for(num_devices, life=1 if options.fault is None else 2)
    job, layout = plan.job, plan.job.layout
    if options.dry_run:
        for line in job.derived.lines():
            say("info", line)
        resolved = {"config": config.model_dump(mode="json"), "derived": job.derived.as_dict(), "strategy": layout.strategy}
        return Result(EXIT_DONE, resolved={**resolved, "axes": asdict(layout.axes), "device": devices.type})
    if plan.finished is not None:
        return _result({"status": "finished", "report": plan.finished}, options, config, say)
    from paceline.launch.recover import Recovery

    recovery = Recovery(config, job.resume_from, say)
    if outer is not None:
        from paceline.engine.stop import StopFlag
        from paceline.launch.worker import run_guarded

        stop = StopFlag()
        stop.install(sigint=True)
        if outer.rank == 0:
            stop.on_haste = recovery.cut
        outcome = run_guarded(replace(job, fault=options.fault), outer, stop)
    else:
        from paceline.launch.local import LocalRun

        ranks = LocalRun(replace(job, launcher=os.getpid()), layout.num_processes, follow=recovery.follow)
        ranks.signals.on_haste = recovery.cut
        outcome = ranks.run()
    return _result(outcome, options, config, say)


def _result(outcome: dict[str, Any], options: Options, config: Config, say: Any) -> Result:
    if outcome["status"] == "finished":
        report = outcome["report"]
        say("info", f"{config.output_dir} holds this run, done already: {report['steps']} steps, nothing left to do")
        say("info", f"for a new run set another output_dir, or delete the folder; the report: {config.output_dir}/report.html")
        return Result(EXIT_DONE, report)
    if outcome["status"] == "failed":
        if options.debug and outcome.get("traceback"):
            print(outcome["traceback"], file=sys.stderr)
        if outcome["exit_code"] == EXIT_USAGE:
            raise ConfigError(outcome["text"])
        raise ReportedError(outcome["text"], outcome["exit_code"], would_repeat=outcome.get("fault") is False)
    if outcome["status"] == "stopped" and outcome.get("report") is None and outcome["exit_code"] in (EXIT_SIGINT, EXIT_SIGTERM):
        with contextlib.suppress(OSError, ValueError):
            print("stopped before the training began", file=sys.stderr, flush=True)
        return Result(outcome["exit_code"])
    return Result(outcome["exit_code"], outcome["report"])


__all__: Sequence[str] = ["ConfigError", "Options", "Result", "run", "train"]
