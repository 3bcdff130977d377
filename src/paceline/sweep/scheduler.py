"""Run the combinations of a sweep on runner processes, one or several at a time."""

from __future__ import annotations

import contextlib
import json
import logging
import selectors
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.core.errors import EXIT_DONE, EXIT_SIGINT, EXIT_SIGTERM, ConfigError, RunError
from paceline.core.event_log import EventReader
from paceline.core.events import EvalEvent
from paceline.core.formatting import duration, finite, loss
from paceline.core.log import CONSOLE_ONLY
from paceline.data.progress import ProgressLine
from paceline.sweep.devices import DeviceShare
from paceline.sweep.metric import Metric
from paceline.sweep.process import RunnerProcess
from paceline.sweep.runner import CheckReply
from paceline.sweep.state import SweepRun, SweepState

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


class RunChooser(Protocol):
    """Decides which runs a sweep makes.

    Attributes:
        needs_values: whether :meth:`observe` is called for the evaluations of a run.
    """

    needs_values: bool

    def next_run(self) -> SweepRun | None:
        """Return the next run, or None if no other can be started now."""

    def observe(self, run: SweepRun, step: int, value: float) -> bool:
        """Take note of the metric at an evaluation. Return whether to stop the run."""

    def finish(self, run: SweepRun) -> None:
        """Take note of a run that has ended."""

    def progress(self) -> str:
        """Return a text such as ``run 2 of 6`` for the latest run."""


@dataclass(frozen=True)
class SweepSettings:
    """What all runs of a sweep have in common.

    Args:
        config: path of the config file, or None.
        fixed: overrides of every run.
        checkpoint_dir: folder or URL below which each run has its own, or None.
    """

    config: Path | None
    fixed: tuple[str, ...]
    folder: Path
    checkpoint_dir: str | None = None
    allow_config_change: bool = False
    debug: bool = False

    def overrides(self, arguments: Sequence[str], name: str) -> list[str]:
        """Return all overrides of a run, its folder included."""
        folders = [f"output_dir={json.dumps(str(self.folder / name))}"]
        if self.checkpoint_dir is not None:
            folders.append(f"checkpoint_dir={json.dumps(f'{self.checkpoint_dir}/{name}')}")
        return [*self.fixed, *arguments, *folders]

    def request(self, kind: str, **values: object) -> dict[str, object]:
        """Return a request to a runner."""
        return {
            "kind": kind,
            "config": None if self.config is None else str(self.config),
            "allow_config_change": self.allow_config_change,
            "debug": self.debug,
            **values,
        }


@dataclass
class _ActiveRun:
    """A run on a runner.

    Args:
        title: the run's number and overrides.
        started: time of the monotonic clock.
        last_step: number of the run's last step; None if unknown.
    """

    record: SweepRun
    title: str
    events: EventReader
    started: float
    step: int = 0
    last_step: int | None = None
    is_pruned: bool = False

    def progress(self) -> str:
        total = "" if self.last_step is None else f"/{self.last_step:,}"
        return f"{self.title}: {f'step {self.step:,}{total}' if self.step else 'starting'}"


class Scheduler:
    """Runs a sweep. A context manager, which leaves no process.

    Attributes:
        stopped_by: the number of the signal that stopped the sweep, or None.
    """

    def __init__(
        self, settings: SweepSettings, state: SweepState, shares: Sequence[DeviceShare]
    ) -> None:
        self.settings = settings
        self.state = state
        self.stopped_by: int | None = None
        self._selector = selectors.DefaultSelector()
        self._shares = shares
        self._runners: list[RunnerProcess] = []
        self._active: dict[RunnerProcess, _ActiveRun] = {}
        self._line = ProgressLine(plain_every_s=None)

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.clear()
        for runner, active in self._active.items():
            runner.stop()
            active.events.__exit__()
        for runner in self._runners:
            runner.close()
        self._selector.close()

    def check(self, runs: Sequence[tuple[Sequence[str], str]]) -> CheckReply:
        """Check every combination, and warm up the runners.

        Args:
            runs: (overrides, name of the folder) of each.

        Raises:
            ConfigError: a combination is invalid; nothing has been started.
        """
        overrides = [self.settings.overrides(arguments, name) for arguments, name in runs]
        for share in self._shares:
            runner = self._start_runner(share)
            is_first = len(self._runners) == 1
            runner.send(self.settings.request("check", runs=overrides, dry_run=is_first))
        replies: dict[RunnerProcess, CheckReply] = {}
        while len(replies) < len(self._runners):
            for runner in self._ready():
                try:
                    reply = runner.receive()
                except EOFError as error:
                    raise RunError(
                        "checking the combinations failed: {reason}",
                        code="combinations-not-checked",
                        reason=error,
                    ) from None
                if reply is not None:
                    replies[runner] = reply
            if self.stopped_by is not None:
                raise KeyboardInterrupt
        reply = replies[self._runners[0]]
        if "errors" not in reply:
            raise RunError(
                "checking the combinations failed: {reason}",
                code="combinations-not-checked",
                reason=reply.get("error"),
            )
        if reply["errors"]:
            raise _invalid({int(number): text for number, text in reply["errors"].items()}, runs)
        return reply

    def run(self, source: RunChooser, metric: Metric) -> None:
        """Run what ``source`` returns until it returns nothing more or a signal stops the sweep."""
        while True:
            while self.stopped_by is None and (runner := self._idle_runner()) is not None:
                record = source.next_run()
                if record is None:
                    break
                self._begin(runner, record, source.progress())
            if not self._active:
                return
            for runner in self._ready():
                self._receive(runner, source, metric)
            self._observe(source, metric)
            self._line.show(
                lambda: "; ".join(active.progress() for active in self._active.values())
            )

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Within the block, a signal asks the runs to stop after a checkpoint, and a second one
        ends them at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: object) -> None:
        is_closed_terminal = number == getattr(signal, "SIGHUP", None)
        if self.stopped_by is None:
            self.stopped_by = EXIT_SIGINT if number == signal.SIGINT else EXIT_SIGTERM
        elif is_closed_terminal:  # the kernel and the shell both send it
            return
        for runner in self._runners:
            runner.stop(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def _start_runner(self, share: DeviceShare) -> RunnerProcess:
        runner = RunnerProcess(share)
        runner.label = "check"
        self._runners.append(runner)
        self._selector.register(runner.socket, selectors.EVENT_READ, (runner, False))
        self._selector.register(runner.output, selectors.EVENT_READ, (runner, True))
        return runner

    def _remove(self, runner: RunnerProcess) -> None:
        """Remove a runner whose process has ended."""
        self._runners.remove(runner)
        self._selector.unregister(runner.socket)
        if runner.output in self._selector.get_map():
            self._selector.unregister(runner.output)
        runner.close()

    def _ready(self) -> list[RunnerProcess]:
        """Return the runners from which a reply can be read, and print what the runs have
        printed."""
        ready = []
        for key, _ in self._selector.select(_POLL_S):
            runner, is_output = key.data
            if not is_output:
                ready.append(runner)
                continue
            self._line.clear()
            if not runner.read_output():
                self._selector.unregister(key.fileobj)
        return ready

    def _idle_runner(self) -> RunnerProcess | None:
        for runner in self._runners:
            if runner not in self._active:
                return runner
        for share in self._shares:  # the process of a run has ended
            if not any(runner.share is share for runner in self._runners):
                return self._start_runner(share)
        return None

    def _begin(self, runner: RunnerProcess, record: SweepRun, progress: str) -> None:
        name = record["name"]
        is_resumed = self.state.run_dir(record).checkpoints.is_dir()
        title = f"{progress}{', resumed' if is_resumed else ''}: {', '.join(record['arguments'])}"
        record["status"], record["error"] = "running", None
        self.state.save()
        events = EventReader(self.state.run_dir(record).events)
        self._active[runner] = _ActiveRun(record, title, events, time.monotonic())
        runner.label = name
        overrides = self.settings.overrides(record["arguments"], name)
        runner.send(self.settings.request("run", overrides=overrides))

    def _receive(self, runner: RunnerProcess, source: RunChooser, metric: Metric) -> None:
        try:
            reply = runner.receive()
            if reply is None:
                return
        except EOFError as error:
            reply = {"exit_code": 1, "error": str(error)}
            self._remove(runner)
        active = self._active.pop(runner, None)
        if active is None:  # it was stopped before its first run
            return
        active.events.__exit__()
        self._complete(active, reply, metric)
        source.finish(active.record)
        self.state.save()
        self._print(f"{active.title}: {_ending(active.record, metric)}")

    def _print(self, text: str) -> None:
        self._line.clear()
        logger.info(text, extra=CONSOLE_ONLY)

    def _complete(self, active: _ActiveRun, reply: Any, metric: Metric) -> None:
        """Record how a run ended."""
        record, report = active.record, reply.get("report") or {}
        has_stopped = reply["exit_code"] in (EXIT_SIGINT, EXIT_SIGTERM)
        if reply["exit_code"] == EXIT_DONE:
            record["status"] = "done"
        elif active.is_pruned:
            record["status"] = "pruned"
        elif has_stopped or self.stopped_by is not None:
            record["status"] = "stopped"
        else:
            record["status"] = "failed"
            record["error"] = reply.get("error") or f"it ended with code {reply['exit_code']}"
        self.state.set_figures(record, metric, report)
        if record["wall_s"] is None:
            record["wall_s"] = round(time.monotonic() - active.started, 3)

    def _observe(self, source: RunChooser, metric: Metric) -> None:
        for runner, active in self._active.items():
            for event in active.events.read_new():
                if event["type"] == "run_start":
                    steps = finite(event["derived"]["steps"])
                    active.last_step = None if steps is None else int(steps)
                elif event["type"] == "step":
                    active.step = event["step"]
                elif event["type"] == "eval" and source.needs_values and not active.is_pruned:
                    self._observe_evaluation(runner, active, event, source, metric)

    def _observe_evaluation(
        self,
        runner: RunnerProcess,
        active: _ActiveRun,
        event: EvalEvent,
        source: RunChooser,
        metric: Metric,
    ) -> None:
        value, step = metric.of_evaluation(event), event["step"]
        if value is None or not source.observe(active.record, step, value):
            return
        if step == active.last_step:  # the run ends by itself
            return
        active.is_pruned = True
        runner.stop()


def _ending(record: SweepRun, metric: Metric) -> str:
    if record["status"] == "failed":
        return f"failed: {record['error']}"
    is_pruned = record["status"] == "pruned"
    parts: list[str] = ["pruned, worse than the median so far" if is_pruned else record["status"]]
    if record["metric"] is not None:
        parts.append(f"{metric.name} {loss(record['metric'])}")
    if record["time_to_first_step_s"] is not None:
        parts.append(f"first step after {duration(record['time_to_first_step_s'])}")
    if record["wall_s"] is not None:
        parts.append(f"{duration(record['wall_s'])} in all")
    return ", ".join(parts)


def _invalid(
    errors: dict[int, str], runs: Sequence[tuple[Sequence[str], str]], limit: int = 10
) -> ConfigError:
    """Return the error for invalid combinations; those with the same error share a line."""
    names: dict[str, list[str]] = {}
    for number, text in errors.items():
        names.setdefault(text, []).append(", ".join(runs[number][0]))
    lines = []
    for text, combinations in list(names.items())[:limit]:
        others = f" and {len(combinations) - 1} more" if len(combinations) > 1 else ""
        lines.append(f"- {combinations[0]}{others}: {text}")
    if len(names) > limit:
        lines.append(f"- and {len(names) - limit} more errors")
    listing = "\n".join(lines)
    return ConfigError(
        "{num_errors} of {num_runs:checked combination} cannot run:\n{listing}",
        code="combinations-cannot-run",
        num_errors=len(errors),
        num_runs=len(runs),
        listing=listing,
    )
