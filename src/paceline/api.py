"""Run a config from Python or from the command line: the same path for both."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import EXIT_DONE, StoppedError

if TYPE_CHECKING:
    from paceline.config.load import Loaded
    from paceline.config.yaml_read import YamlValue
    from paceline.core.log import NoticeRecorder
    from paceline.core.report import Report
    from paceline.launch.passes.draft import Draft
    from paceline.train.run_spec import ResolvedRun, TrainResult


def train(config: str | Path | Mapping[str, YamlValue], **overrides: YamlValue) -> Report:
    """Train as ``paceline sft CONFIG`` does, and return the report (the content of
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
        result = run(loaded, time.time())
    if result.report is None:
        raise StoppedError(
            "the run was stopped by a signal before the training began",
            result.exit_code,
            code="stopped",
        )
    if result.exit_code != EXIT_DONE:
        raise StoppedError(
            "the run was stopped by a signal; a checkpoint is in {output_dir}",
            result.exit_code,
            code="stopped",
            output_dir=loaded.config.output_dir,
        )
    return result.report


def run(
    loaded: Loaded,
    started_at: float,
    *,
    dry_run: bool = False,
    debug: bool = False,
    allow_config_change: bool = False,
    saves_state: bool = True,
) -> TrainResult:
    """Check, plan, launch, and wait.

    Args:
        started_at: start time of the command, in seconds since the epoch.
        dry_run: whether to check and plan the run only.
        debug: whether to print the traceback of a failure.
        allow_config_change: whether the run may resume with another config.
        saves_state: whether the run writes checkpoints and the trained model.

    Raises:
        PacelineError: with its exit code and one paragraph of text.
    """
    from paceline.core.log import configure_logging, recorded_notices, warnings_last
    from paceline.core.run_dir import LaunchLock
    from paceline.distributed.environment import outer_launcher
    from paceline.launch.passes.draft import Draft

    draft = Draft(
        loaded,
        started_at,
        dry_run=dry_run,
        allow_config_change=allow_config_change,
        saves_state=saves_state,
        outer=outer_launcher(),
    )
    if draft.outer is not None and not dry_run:
        from paceline.cluster.member import run_under_agent

        return run_under_agent(draft, debug=debug)
    configure_logging()
    if not dry_run:
        from paceline.launch.fork_server import start_fork_server

        # Its imports take longest, so it starts before the checks are imported. If one fails, it
        # ends with this process.
        start_fork_server(loaded.config)
    from paceline.launch.passes.early import fit_length
    from paceline.launch.plan import plan

    with (
        recorded_notices() as recorder,
        warnings_last() as print_warnings,
        contextlib.ExitStack() as stack,
    ):
        draft = plan(draft, last=fit_length)
        has_several_hosts = draft.config.parallel.hosts != (1, 1)
        # Of several hosts, the one with rank 0 holds the folder (cluster/member.py).
        if not has_several_hosts and not dry_run:
            stack.enter_context(LaunchLock(draft.run_dir))
        if dry_run:
            return _dry_run(draft)
        if has_several_hosts:
            print_warnings()
            return _run_on_hosts(draft, recorder, debug=debug)
        return _run_on_this_host(draft, recorder, print_warnings, debug=debug)


def _dry_run(draft: Draft) -> TrainResult:
    from paceline.launch.passes.devices import find_devices
    from paceline.launch.passes.draft import known
    from paceline.launch.plan import plan
    from paceline.tasks import load_task
    from paceline.train.run_spec import TrainResult

    draft = plan(draft, first=find_devices)
    resolved: ResolvedRun = {
        "config": draft.config.model_dump(mode="json"),
        "derived": known(draft.derived).as_dict(),
        "strategy": known(draft.layout).strategy,
        "axes": asdict(known(draft.layout).axes),
        "device": draft.device_type,
        "metrics": load_task(draft.config).metric_names(known(draft.data)),
    }
    return TrainResult(EXIT_DONE, draft.finished, resolved)


def _run_on_hosts(draft: Draft, recorder: NoticeRecorder, *, debug: bool) -> TrainResult:
    """Check everything that this host can check alone, then join the other hosts."""
    from paceline.launch.passes.devices import find_devices, resolve_tf32
    from paceline.launch.passes.draft import known
    from paceline.launch.passes.layout import choose_layout
    from paceline.launch.plan import plan

    on_host = plan(draft, first=find_devices, last=resolve_tf32)
    # These import torch, which takes seconds.
    from paceline.cluster.elastic import HostAgent
    from paceline.cluster.endpoint import resolve_endpoint
    from paceline.cluster.member import RunRequest, train_member
    from paceline.launch.after_training.finish import finish_run
    from paceline.launch.results import result_of

    config, host = on_host.config, known(on_host.host)
    agent = HostAgent(draft.config, host.devices.count, train_member, RunRequest(draft))
    try:
        # All agents of one machine have the endpoint's address; only node 0 holds the folder.
        is_local = resolve_endpoint(draft.config).is_local
        holds_folder = is_local and draft.config.parallel.node_rank in ("auto", 0)
    except OSError:  # the name is not known yet
        holds_folder = False
    planned = plan(replace(on_host, reads_folder=holds_folder), first=choose_layout)
    request = replace(draft, layout=planned.layout, settings=planned.settings)
    agent.payload = RunRequest(request, frozenset(recorder.messages))
    result = result_of(agent.run(), config, debug=debug)
    return finish_run(result, config, planned.history_key) if holds_folder else result


def _run_on_this_host(
    draft: Draft, recorder: NoticeRecorder, print_warnings: Callable[[], None], *, debug: bool
) -> TrainResult:
    from paceline.launch.passes.devices import find_devices
    from paceline.launch.plan import make_spec, plan

    draft = plan(draft, first=find_devices)
    print_warnings()
    # These import torch, which takes seconds.
    from paceline.core.failures import ExitRecord
    from paceline.launch.after_training.finish import finish_run
    from paceline.launch.local import LocalLauncher
    from paceline.launch.restart import RestartPolicy
    from paceline.launch.results import result_of

    config = draft.config
    if draft.finished is not None:
        return result_of(ExitRecord("finished", report=draft.finished), config, debug=debug)
    policy = RestartPolicy(config, draft.resume_from)
    spec = replace(make_spec(draft), notices=list(recorder.notices), launcher_pid=os.getpid())
    launcher = LocalLauncher(spec, spec.layout.num_processes, follow=policy.follow)
    launcher.signals.on_second_signal = policy.end_at_once
    result = result_of(launcher.run(), config, debug=debug)
    return finish_run(result, config, draft.history_key)
