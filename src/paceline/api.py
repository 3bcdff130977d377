"""Run a config from Python or from the command line: the same path for both."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import EXIT_DONE, StoppedError

if TYPE_CHECKING:
    from paceline.config.load import Loaded
    from paceline.config.yaml_read import YamlValue
    from paceline.core.log import NoticeRecorder
    from paceline.core.report import Report
    from paceline.distributed.environment import RankEnv
    from paceline.launch.preflight import (
        LeaderPlan,
        PreparedHost,
        PreparedRun,
    )
    from paceline.tasks.base import Prepared
    from paceline.train.run_spec import TrainOptions, TrainResult


def train(config: str | Path | Mapping[str, YamlValue], **overrides: YamlValue) -> Report:
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
    from paceline.train.run_spec import TrainOptions

    if isinstance(config, Mapping):
        loaded = load_config(None, {**config, **overrides})
    else:
        loaded = load_config(config, overrides)
    with handlers_restored():
        result = run(loaded, TrainOptions(), time.time())
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


def run(loaded: Loaded, options: TrainOptions, started_at: float) -> TrainResult:
    """Check, prepare, launch, and wait. ``started_at``: seconds since the epoch.

    Raises:
        PacelineError: with its exit code and one paragraph of text.
    """
    from paceline.core.log import configure_logging, recorded_notices
    from paceline.core.run_dir import LaunchLock, RunDir
    from paceline.distributed.environment import outer_launcher, scheduled_host, with_scheduler
    from paceline.models.files import fit_to_model

    outer = outer_launcher()
    if outer is not None and not options.dry_run:
        from paceline.cluster.member import run_under_agent

        return run_under_agent(loaded, options, started_at)
    configure_logging()
    scheduled = scheduled_host() if outer is None else None
    loaded = fit_to_model(loaded.with_parallel(with_scheduler(loaded.config.parallel, scheduled)))
    if outer is None and not options.dry_run:
        from paceline.launch.fork_server import start_fork_server

        # Its imports take longest, so it starts before the checks are imported. If one fails, it
        # ends with this process.
        start_fork_server(loaded.config)
    from paceline.launch.preflight import log_and_check
    from paceline.tasks import check_inputs, load_task

    with recorded_notices() as recorder, contextlib.ExitStack() as stack:
        log_and_check(loaded)
        check_inputs(loaded.config)
        has_several_hosts = loaded.config.parallel.hosts != (1, 1)
        # Of several hosts, the one with rank 0 holds the folder (cluster/member.py).
        if not has_several_hosts and not options.dry_run:
            stack.enter_context(LaunchLock(RunDir(Path(loaded.config.output_dir))))
        load_task(loaded.config).check()
        if options.dry_run:
            return _dry_run(loaded, options, started_at, outer)
        if has_several_hosts:
            return _run_on_hosts(loaded, options, started_at, recorder)
        return _run_on_this_host(loaded, options, started_at, recorder)


def _dry_run(
    loaded: Loaded, options: TrainOptions, started_at: float, outer: RankEnv | None
) -> TrainResult:
    from paceline.launch.preflight import log_dry_run, prepare_host
    from paceline.tasks import load_task
    from paceline.train.run_spec import TrainResult

    host = prepare_host(loaded, outer)
    num_devices = (
        host.devices.count * loaded.config.parallel.hosts[1] if outer is None else outer.world_size
    )
    prepared = _prepare(host, num_devices, options, started_at)
    spec = prepared.spec
    log_dry_run(spec.derived)
    resolved = {
        "config": spec.config.model_dump(mode="json"),
        "derived": spec.derived.as_dict(),
        "strategy": spec.layout.strategy,
        "axes": asdict(spec.layout.axes),
        "device": host.devices.type,
        "metrics": load_task(spec.config).metric_names(spec.data),
    }
    return TrainResult(EXIT_DONE, prepared.finished, resolved)


def _run_on_hosts(
    loaded: Loaded, options: TrainOptions, started_at: float, recorder: NoticeRecorder
) -> TrainResult:
    """Check everything that this host can check alone, then join the other hosts."""
    from paceline.cluster.elastic import HostAgent
    from paceline.cluster.endpoint import resolve_endpoint
    from paceline.cluster.member import RunRequest, train_member
    from paceline.launch.after_training.finish import finish_run
    from paceline.launch.preflight import LeaderPlan, prepare_host, result_of

    config = loaded.config
    host = prepare_host(loaded, None)
    request = RunRequest(loaded, options, started_at)
    agent = HostAgent(config, host.devices.count, train_member, request)
    try:
        # All agents of one machine have the endpoint's address; only node 0 holds the folder.
        is_local, node_rank = resolve_endpoint(config).is_local, config.parallel.node_rank
        holds_folder = is_local and node_rank in ("auto", 0)
    except OSError:  # the name is not known yet
        holds_folder = False
    num_ranks = host.devices.count * config.parallel.hosts[1]
    leader = None if holds_folder else LeaderPlan()
    prepared = _prepare(host, num_ranks, options, started_at, leader)
    agent.payload = replace(request, chosen=prepared.chosen, printed=frozenset(recorder.messages))
    config = host.loaded.config
    result = result_of(agent.run(), options, config)
    return finish_run(result, config, prepared.history_key) if holds_folder else result


def _run_on_this_host(
    loaded: Loaded, options: TrainOptions, started_at: float, recorder: NoticeRecorder
) -> TrainResult:
    from paceline.core.failures import ExitRecord
    from paceline.launch.after_training.finish import finish_run
    from paceline.launch.local import LocalLauncher
    from paceline.launch.preflight import prepare_host, result_of
    from paceline.launch.restart import RestartPolicy

    host = prepare_host(loaded, None)
    config = host.loaded.config
    prepared = _prepare(host, host.devices.count, options, started_at)
    if prepared.finished is not None:
        finished = ExitRecord("finished", report=prepared.finished)
        return result_of(finished, options, config)
    policy = RestartPolicy(config, prepared.spec.resume_from)
    spec = replace(
        prepared.spec,
        notices=list(recorder.notices),
        launcher_pid=os.getpid(),
        saves_state=options.saves_state,
    )
    launcher = LocalLauncher(spec, spec.layout.num_processes, follow=policy.follow)
    launcher.signals.on_second_signal = policy.end_at_once
    result = result_of(launcher.run(), options, config)
    return finish_run(result, config, prepared.history_key)


def _prepare(
    host: PreparedHost,
    num_devices: int,
    options: TrainOptions,
    started_at: float,
    leader: LeaderPlan | None = None,
) -> PreparedRun:
    from paceline.launch.layout import choose_layout
    from paceline.launch.preflight import prepare_run, read_data_early

    data: Prepared | None = None

    def read_data() -> None:
        nonlocal data
        data = read_data_early(host.loaded, dry_run=options.dry_run, checks_folder=leader is None)

    free_bytes = None if host.memory.device is None else host.memory.device.free_bytes
    chosen = choose_layout(
        host.loaded.config, num_devices, host.devices.type, None, read_data, free_bytes
    )
    return prepare_run(
        host.loaded,
        started_at=started_at,
        chosen=chosen,
        device_type=host.devices.type,
        devices=host.devices,
        memory=host.memory,
        allow_config_change=options.allow_config_change,
        leader=leader,
        data=data,
        dry_run=options.dry_run,
    )
