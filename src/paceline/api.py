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
    from paceline.distributed.devices import Devices
    from paceline.distributed.environment import RankEnv
    from paceline.launch.preflight import LeaderPlan, Plan


@dataclass(frozen=True)
class Options:
    """What the command line may say beside the config.

    Args:
        fault: content of the `fault` event, if an outer launcher has started the ranks again after
            a failure.
    """

    dry_run: bool = False
    debug: bool = False
    allow_config_change: bool = False
    fault: dict[str, Any] | None = None


@dataclass(frozen=True)
class Result:
    """How a run ended: the process's exit code and the report. Under an outer launcher such as
    torchrun every rank has it."""

    exit_code: int
    report: dict[str, Any] | None = None
    resolved: dict[str, Any] | None = None


def train(config: str | Path | Mapping[str, Any], **overrides: Any) -> dict[str, Any]:
    """Train as ``paceline train CONFIG`` does, and return the report (the content of
    ``report.json``). Under an outer launcher (``torchrun script.py``) every rank calls this
    function, and every rank gets the report.

    Args:
        config: path of a config file, or its content as a mapping.
        overrides: further keys; dotted ones as ``**{"train_args.max_steps": 10}``.

    Raises:
        ConfigError: the config or the data is wrong; nothing was started or written.
        RunError: the run failed.
        StoppedError: a signal stopped the run (a RunError too).
    """
    from paceline.config.load import load_config
    from paceline.core.stop import handlers_restored

    if isinstance(config, Mapping):
        loaded = load_config(None, {**config, **overrides})
    else:
        loaded = load_config(config, overrides)
    with handlers_restored():
        result = run(loaded, Options(), time.time())
    if result.report is None:
        raise StoppedError(
            "the run was stopped by a signal before the training began", result.exit_code
        )
    if result.exit_code != EXIT_DONE:
        raise StoppedError(
            f"the run was stopped by a signal; a checkpoint is in {loaded.config.output_dir}",
            result.exit_code,
        )
    return result.report


def run(loaded: Loaded, options: Options, started_at: float) -> Result:
    """Check, prepare, launch, and wait. ``started_at``: seconds since the epoch.

    Raises:
        PacelineError: with its exit code and one paragraph of text.
    """
    from paceline.distributed.environment import outer_launcher, scheduled_host, with_scheduler
    from paceline.launch.preflight import check_early
    from paceline.models.positions import fit_length
    from paceline.tasks import load_task

    outer = outer_launcher()
    speaks = outer is None or outer.rank == 0
    said: list[str] = []

    def say(level: str, text: str) -> None:
        said.append(text)
        if speaks:
            # whoever read this has gone; the run goes on
            with contextlib.suppress(OSError, ValueError):
                print(
                    f"{'warning: ' if level == 'warning' else ''}{text}",
                    file=sys.stderr,
                    flush=True,
                )

    parallel = with_scheduler(loaded.config.parallel, scheduled_host() if outer is None else None)
    loaded = fit_length(loaded.with_parallel(parallel))
    for level, text in loaded.notices:
        say(level, text)
    check_early(loaded.config)
    if outer is not None and not options.dry_run:
        return _run_under_agent(loaded, options, started_at, said, say)
    several_hosts = loaded.config.parallel.hosts != (1, 1)
    # Of several hosts, the one with rank 0 holds the folder (cluster/member.py).
    is_exclusive = not several_hosts and not options.dry_run
    with _exclusive(loaded.config, say) if is_exclusive else contextlib.nullcontext():
        if outer is None and not options.dry_run:
            from paceline.launch.fork_server import start_fork_server

            start_fork_server(loaded.config)
        load_task(loaded.config).check()
        if several_hosts and not options.dry_run:
            return _run_on_hosts(loaded, options, started_at, said, say)
        return _run_planned(loaded, options, started_at, say)


def _exclusive(config: Config, say: Any) -> LaunchLock:
    from paceline.core.launch_lock import LaunchLock
    from paceline.core.run_dir import RunDir

    return LaunchLock(RunDir(Path(config.output_dir)), say)


@dataclass(frozen=True)
class PreparedHost:
    """This host's devices, and the config with what follows from them."""

    loaded: Loaded
    devices: Devices


def prepare_host(loaded: Loaded, outer: RankEnv | None, say: Any) -> PreparedHost:
    """Choose this host's devices and the precision, and check what would make a run fail here.

    Raises:
        ConfigError: the devices that the config asks for do not exist, or this machine cannot run
            it.
    """
    from paceline.distributed.devices import choose_devices, with_precision, without_idle_offload
    from paceline.doctor.quick import quick_checks

    config = loaded.config
    devices = choose_devices(
        config.parallel, ranks_given=None if outer is None else outer.local_world_size
    )
    parallel, notices = without_idle_offload(config.parallel, devices.type)
    devices.notices.extend(notices)
    config = config.model_copy(update={"parallel": parallel})
    for check in quick_checks(config, devices.type, devices.count):
        if check.fatal:
            raise ConfigError(
                f"this machine cannot run it: {check.name}: {check.value}", fix=check.advice
            )
        devices.notices.append(("warning", f"{check.name}: {check.value}; {check.advice}"))
    config, precision = with_precision(config, devices.type, devices.names[: devices.count])
    devices.notices.append(("info", precision))
    for level, text in devices.notices:
        say(level, text)
    return PreparedHost(replace(loaded, config=config), devices)


def _plan(
    host: PreparedHost,
    num_ranks: int,
    options: Options,
    started_at: float,
    say: Any,
    leader: LeaderPlan | None = None,
) -> Plan:
    from paceline.launch.layout import choose_layout
    from paceline.launch.preflight import plan_run

    return plan_run(
        host.loaded,
        started_at=started_at,
        layout=choose_layout(host.loaded.config, num_ranks, host.devices.type, None, say),
        device_type=host.devices.type,
        devices=host.devices,
        say=say,
        allow_config_change=options.allow_config_change,
        leader=leader,
        dry_run=options.dry_run,
    )


def _run_under_agent(
    loaded: Loaded, options: Options, started_at: float, said: list[str], say: Any
) -> Result:
    """This process is a rank that torchrun, `accelerate launch` or Ray has started."""
    from paceline.cluster.failures import AgentFolder, folder_of_agent
    from paceline.cluster.member import RunRequest, train_member
    from paceline.cluster.rounds import join_round, next_call
    from paceline.core.files import Scratch
    from paceline.core.stop import StopFlag
    from paceline.launch.restart import Recovery

    has_agent = "TORCHELASTIC_RUN_ID" in os.environ
    restarts, most = (
        int(os.environ.get(f"TORCHELASTIC_{name}", "0"))
        for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    parallel, call = loaded.config.parallel, next_call()
    with contextlib.nullcontext() if has_agent else Scratch() as scratch:
        member = join_round(
            folder_of_agent(call) if has_agent else AgentFolder(scratch),
            agent_pid=os.getppid(),
            is_endpoint=None,
            node_rank=None if parallel.node_rank == "auto" else int(parallel.node_rank),
            can_restart=has_agent and restarts < most,
            call=call,
        )
        stop = StopFlag()
        stop.install(sigint=True)
        stop.fail = member.fail
        if member.round.is_first:
            stop.on_haste = lambda number: Recovery(
                loaded.config, None, say, member.policy_state()
            ).cut(number)
        outcome = train_member(
            RunRequest(loaded, options, started_at, frozenset(said)), member, stop
        )
        member.end(outcome)
        member.round.leave()
        return _result(
            outcome, options, loaded.config, say if member.round.is_first else lambda *_: None
        )


def _run_on_hosts(
    loaded: Loaded, options: Options, started_at: float, said: list[str], say: Any
) -> Result:
    """Check everything that this host can check alone, then join the other hosts."""
    from paceline.cluster.elastic import ElasticRun
    from paceline.cluster.endpoint import resolve_endpoint
    from paceline.cluster.member import RunRequest, train_member
    from paceline.launch.preflight import LeaderPlan

    config = loaded.config
    host = prepare_host(loaded, None, say)
    request = RunRequest(loaded, options, started_at, frozenset())
    run = ElasticRun(config, host.devices.count, train_member, request, say)
    try:
        holds_folder = resolve_endpoint(config).is_local
    except OSError:  # the name is not known yet
        holds_folder = False
    num_ranks = host.devices.count * config.parallel.hosts[1]
    _plan(host, num_ranks, options, started_at, say, leader=None if holds_folder else LeaderPlan())
    run.payload = replace(request, said=frozenset(said))
    return _result(run.run(), options, host.loaded.config, say)


def _run_planned(loaded: Loaded, options: Options, started_at: float, say: Any) -> Result:
    """Plan, and run on this host alone; or, as a dry run, only plan."""
    from paceline.distributed.environment import outer_launcher
    from paceline.launch.local import LocalRun
    from paceline.launch.restart import Recovery

    outer = outer_launcher()
    host = prepare_host(loaded, outer, say)
    num_devices = (
        host.devices.count * loaded.config.parallel.hosts[1] if outer is None else outer.world_size
    )
    plan = _plan(host, num_devices, options, started_at, say)
    config, spec, layout = host.loaded.config, plan.spec, plan.spec.layout
    if options.dry_run:
        for line in spec.derived.lines():
            say("info", line)
        resolved = {
            "config": config.model_dump(mode="json"),
            "derived": spec.derived.as_dict(),
            "strategy": layout.strategy,
        }
        return Result(
            EXIT_DONE,
            resolved={**resolved, "axes": asdict(layout.axes), "device": host.devices.type},
        )
    if plan.finished is not None:
        return _result({"status": "finished", "report": plan.finished}, options, config, say)
    recovery = Recovery(config, spec.resume_from, say)
    ranks = LocalRun(
        replace(spec, launcher_pid=os.getpid()), layout.num_processes, follow=recovery.follow
    )
    ranks.signals.on_haste = recovery.cut
    return _result(ranks.run(), options, config, say)


def _result(outcome: dict[str, Any], options: Options, config: Config, say: Any) -> Result:
    if outcome["status"] == "finished":
        report = outcome["report"]
        say(
            "info",
            f"{config.output_dir} holds this run, done already: {report['steps']} steps, nothing"
            " left to do",
        )
        say(
            "info",
            "for a new run set another output_dir, or delete the folder; the report:"
            f" {config.output_dir}/report.html",
        )
        return Result(EXIT_DONE, report)
    if outcome["status"] == "failed":
        if options.debug and outcome.get("traceback"):
            print(outcome["traceback"], file=sys.stderr)
        if outcome["exit_code"] == EXIT_USAGE:
            raise ConfigError(outcome["text"])
        raise ReportedError(
            outcome["text"], outcome["exit_code"], would_repeat=outcome.get("fault") is False
        )
    if (
        outcome["status"] == "stopped"
        and outcome.get("report") is None
        and outcome["exit_code"] in (EXIT_SIGINT, EXIT_SIGTERM)
    ):
        with contextlib.suppress(OSError, ValueError):
            print("stopped before the training began", file=sys.stderr, flush=True)
        return Result(outcome["exit_code"])
    return Result(outcome["exit_code"], outcome["report"])


__all__: Sequence[str] = ["ConfigError", "Options", "Result", "run", "train"]
