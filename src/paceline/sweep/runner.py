"""The process that runs combinations one after the other: ``python -m paceline.sweep.runner FD
CORES``.

It imports torch once, and so does its fork server, from which the ranks of every run are forked.
Requests and replies are lines of JSON on the socket FD.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from paceline.core.errors import EXIT_SIGINT, ConfigError, PacelineError
from paceline.core.log import configure_logging, is_shown
from paceline.core.processes import end_with_parent, process_start_time, temporary_environment
from paceline.core.report import Report


class CheckRequest(TypedDict):
    """Check combinations. ``runs``: the overrides of each. ``dry_run``: whether to check more than
    that the configs can be loaded."""

    kind: str
    config: str | None
    runs: list[list[str]]
    allow_config_change: bool
    dry_run: bool


class CheckReply(TypedDict):
    """``errors``: paragraphs by the number of the combination. Of a dry run also:
    ``has_evaluations``, whether every run evaluates, ``metrics``, the names of the results of an
    evaluation in every run (None if they are not known before one), and ``complete``, the numbers
    of the runs that are complete."""

    errors: dict[str, str]
    has_evaluations: bool
    metrics: list[str] | None
    complete: list[int]


class SweepRunRequest(TypedDict):
    """Run one combination."""

    kind: str
    config: str | None
    overrides: list[str]
    allow_config_change: bool
    debug: bool


class RunReply(TypedDict):
    """How a run ended. ``error``: the paragraph of a failure."""

    exit_code: int
    report: NotRequired[Report | None]
    error: NotRequired[str]


class Runner:
    """Carries out the requests. The first run counts its time from the start of this process."""

    def __init__(self) -> None:
        self._started_at: float | None = process_start_time()

    def check(self, request: CheckRequest) -> CheckReply:
        """Load the config of every combination, start the fork server for them, and check them as
        `paceline sft --dry-run` does (unless ``dry_run`` is False)."""
        from paceline.config.load import Loaded, load_config

        config = request["config"]
        loaded: list[Loaded] = []
        errors: dict[str, str] = {}
        for number, overrides in enumerate(request["runs"]):
            try:
                loaded.append(load_config(config, overrides))
                _check_for_sweep(loaded[-1])
            except ConfigError as error:
                errors[str(number)] = error.paragraph()
        reply: CheckReply = {
            "errors": errors,
            "has_evaluations": True,
            "metrics": None,
            "complete": [],
        }
        if errors:
            return reply
        metrics: list[list[str] | None] = []
        self._warm_up(loaded)
        for number, combination in enumerate(loaded if request["dry_run"] else []):
            try:
                result = _dry_run(combination, request["allow_config_change"])
            except PacelineError as error:
                errors[str(number)] = error.paragraph()
                continue
            if not result.resolved["derived"]["eval_every_steps"]:
                reply["has_evaluations"] = False
            metrics.append(result.resolved["metrics"])
            if result.report is not None:
                reply["complete"].append(number)
        reply["metrics"] = _common_names(metrics)
        return reply

    def run(self, request: SweepRunRequest) -> RunReply:
        """Run a combination until it ends."""
        from paceline.api import run as train
        from paceline.config.load import load_config

        started_at, self._started_at = self._started_at or time.time(), None
        loaded = load_config(request["config"], request["overrides"])
        result = train(
            loaded,
            started_at,
            debug=request["debug"],
            allow_config_change=request["allow_config_change"],
        )
        return {"exit_code": result.exit_code, "report": result.report}

    def _warm_up(self, loaded: list[Any]) -> None:
        from paceline.config.packages import unused_packages
        from paceline.core.user_code import hide_packages
        from paceline.launch.fork_server import start_fork_server

        configs = [combination.config for combination in loaded]
        start_fork_server(*configs)
        hide_packages(set.intersection(*(set(unused_packages(config)) for config in configs)))


def _check_for_sweep(loaded: Any) -> None:
    """Raise ConfigError for settings with which runs cannot share a host and a sweep."""
    from paceline.distributed.environment import scheduled_host, with_scheduler

    config = loaded.config
    if with_scheduler(config.parallel, scheduled_host()).hosts != (1, 1):
        raise ConfigError(
            "`paceline sweep` runs on one host, and `parallel.nnodes` is {nnodes}",
            code="sweep-on-several-hosts",
            fix="set `parallel.nnodes=1`, or submit one job per combination",
            nnodes=config.parallel.nnodes,
        )
    if config.train_args.push_to_hub:
        raise ConfigError(
            "`train_args.push_to_hub` is not supported in a sweep: every run would upload its"
            " model to the same repository",
            code="push-in-sweep",
            fix="remove it, and upload the best model afterwards with `hf upload`",
        )


def _common_names(names: Sequence[Sequence[str] | None]) -> list[str] | None:
    """Return the names that are in all lists; None if one of them is not known."""
    known = [each for each in names if each is not None]
    if not known or len(known) < len(names):
        return None
    return [name for name in known[0] if all(name in each for each in known)]


def _dry_run(loaded: Any, allow_config_change: bool) -> Any:
    """Check a combination without printing anything."""
    from paceline.api import run as train

    with temporary_environment({"PACELINE_LOG_LEVEL": "error"}):
        return train(loaded, time.time(), dry_run=True, allow_config_change=allow_config_change)


def serve(connection: socket.socket) -> None:
    """Carry out requests until the other end is closed."""
    runner = Runner()
    handlers: Mapping[str, Callable[[Any], Any]] = {"check": runner.check, "run": runner.run}
    with connection, connection.makefile("rw", encoding="utf-8") as stream:
        while True:
            try:
                line = stream.readline()
            except KeyboardInterrupt:  # there is no run to stop
                continue
            if not line:
                return
            request = json.loads(line)
            reply = _carry_out(handlers[request["kind"]], request)
            stream.write(json.dumps(reply) + "\n")
            stream.flush()


def _carry_out(handler: Callable[[Any], Any], request: Any) -> Any:
    try:
        return handler(request)
    except KeyboardInterrupt:
        return {"exit_code": EXIT_SIGINT}
    except PacelineError as error:
        return {"exit_code": error.exit_code, "error": error.paragraph()}
    except Exception as error:
        if request.get("debug"):
            traceback.print_exc()
        return {
            "exit_code": 1,
            "error": f"{type(error).__name__}: {error}. This is unexpected. Run the combination"
            " with `paceline sft --debug` for the full traceback.",
        }


def main(descriptor: str, cores: str) -> None:
    """Run as a process of its own."""
    end_with_parent()
    if cores:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the sweep asks the run to stop
    # The sweep prints one line per run, so this process and the ranks print only what is wrong.
    if is_shown() and not is_shown("debug"):
        configure_logging("warning")
    else:
        configure_logging()
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError, ConnectionResetError):
        serve(socket.socket(fileno=int(descriptor)))


if __name__ == "__main__":
    main(*sys.argv[1:3])
