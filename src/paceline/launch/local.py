"""Run the ranks of a job on this host, forward signals to them, and restart them after faults."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any, Protocol

from paceline.core.errors import EXIT_SIGINT, EXIT_SIGTERM
from paceline.core.failures import ExitRecord, FailureKind, first_cause
from paceline.core.log import CONSOLE_ONLY
from paceline.core.processes import hidden_main
from paceline.core.texts import UserText
from paceline.launch.ranks.processes import RankProcesses, open_store
from paceline.launch.ranks.tolerance import name_process, tolerated_ranks
from paceline.launch.ranks.worker import RunRank

logger = logging.getLogger(__name__)

SignalHandler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None
#: Called after a failed attempt. Returns (spec of the next attempt, record). If there is no further
#: attempt, the spec is None and the record is the one to report.
Follow = Callable[[Any, ExitRecord], tuple[Any, ExitRecord]]


class LocalLauncher:
    """Runs a spec on the ranks of this host.

    Args:
        run_rank: function that each rank calls with the spec; default: train a
            :class:`~paceline.train.run_spec.RunSpec`.
        follow: function that decides what follows a failed attempt; default: no further attempt.
    """

    def __init__(
        self,
        spec: Any,
        num_ranks: int,
        run_rank: RunRank | None = None,
        follow: Follow | None = None,
    ) -> None:
        self.spec = spec
        self.run_rank = run_rank
        self.num_ranks = num_ranks
        self.follow = follow
        self.on_stop = "finishing this step and saving a checkpoint"  # logged at the first signal
        self.signals = SignalForwarder(lambda: self.on_stop)

    def run(self) -> ExitRecord:
        """Run until the last attempt has ended. Leaves no processes and no temporary files."""
        with self.signals, hidden_main():
            while True:
                ended = self._run_attempt()
                if (
                    self.follow is None
                    or ended.status != "failed"
                    or self.signals.number is not None
                ):
                    return ended
                following, ended = self.follow(self.spec, ended)
                if following is None or self.signals.number is not None:
                    return ended
                self.spec, self.num_ranks = following, following.layout.num_processes

    def _run_attempt(self) -> ExitRecord:
        try:
            ranks = RankProcesses(
                self.spec, self.num_ranks, open_store(), self.run_rank, tolerated_ranks(self.spec)
            )
            with ranks:
                with self.signals.to(ranks):
                    try:
                        ranks.start()
                    except (EOFError, ConnectionError):
                        return _failed_start(self.signals.number)
                    while not ranks.wait(0.1):
                        pass
                return end_of_attempt(ranks, self.spec, self.signals.number)
        except (OSError, RuntimeError) as error:
            text = "the ranks could not be started: {reason}"
            return ExitRecord.of_run(UserText(text, code="ranks-not-started", reason=error))


class ForwardsSignals(Protocol):
    """Rank processes to which a signal can be sent."""

    def forward(self, number: int) -> None: ...

    def kill(self, wait_s: float) -> None: ...


class SignalForwarder:
    """Handles SIGINT, SIGTERM and SIGHUP of the launcher. The first signal requests all ranks to
    stop; the second kills them."""

    def __init__(self, on_stop: Callable[[], str]) -> None:
        self.number: int | None = None
        self.on_stop = on_stop
        # Called after a second signal has killed the ranks.
        self.on_second_signal: Callable[[int], None] = lambda number: None
        self._ranks: ForwardsSignals | None = None
        self._before: dict[int, SignalHandler] = {}

    def __enter__(self) -> SignalForwarder:
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM] + (
                [signal.SIGHUP] if hasattr(signal, "SIGHUP") else []
            )
            self._before = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def to(self, ranks: ForwardsSignals) -> Iterator[None]:
        """Forward signals to these ranks within the block."""
        self._ranks = ranks
        if self.number is not None:  # received between two attempts
            ranks.forward(self.number)
        try:
            yield
        finally:
            self._ranks = None

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self.number is not None:
            if number == getattr(signal, "SIGHUP", None):
                # When a terminal is closed, the kernel and the shell both send SIGHUP, so a second
                # one does not mean that the user wants to quit immediately.
                return
            if self._ranks is not None:
                self._ranks.kill(wait_s=2.0)
            with contextlib.suppress(Exception):  # best effort: the user wants to quit immediately
                self.on_second_signal(number)
            os._exit(stop_code(self.number))
        self.number = number
        name = signal.Signals(number).name
        logger.info(
            f"\n{name}: {self.on_stop()}; send it again to quit immediately", extra=CONSOLE_ONLY
        )
        if self._ranks is not None:
            self._ranks.forward(number)


def end_of_attempt(ranks: RankProcesses, spec: Any, stopped_by: int | None) -> ExitRecord:
    """Return how an attempt ended: its first failure, or the record of a rank with a report."""
    records = {
        rank: record
        for rank, record in ranks.records.ended().items()
        if rank not in ranks.tolerance.exits
    }
    failures = [
        record.named(f"rank {rank}")
        for rank, record in records.items()
        if record.status == "failed"
    ]
    lost = ranks.lost()
    if lost:
        texts = [
            f"{name_process(rank, ranks.processes[rank].pid, spec)} {ranks.exit_text(rank)}"
            for rank in lost
        ]
        reason = UserText(
            "{exits}",
            code="ranks-killed",
            exits="; ".join(texts),
            rank_numbers=", ".join(map(str, lost)),
        )
        failures.append(ExitRecord.killed(lost, (), reason))
    failed = first_cause(failures)
    if failed is not None:
        message = failed.message + ranks.tolerance.describe(spec)
        return replace(failed, message=message, report=None)
    if len(records) + len(ranks.tolerance.exits) < ranks.num_ranks:
        if stopped_by is None:
            return ExitRecord.of_run(UserText("the ranks were killed", code="all-ranks-killed"))
        return _stopped(stopped_by)
    reported = [record for _, record in sorted(records.items()) if record.report is not None]
    ended = reported[0] if reported else records[min(records)]
    if ended.status == "stopped" and stopped_by is not None:
        return replace(ended, exit_code=stop_code(stopped_by))
    return ended


def _stopped(number: int) -> ExitRecord:
    return ExitRecord("stopped", stop_code(number))


def _failed_start(stopped_by: int | None) -> ExitRecord:
    """Return the end of an attempt whose ranks could not all be started because the fork server has
    exited. multiprocessing starts a new one for the next attempt."""
    if stopped_by is not None:
        return _stopped(stopped_by)
    text = UserText("the fork server ended while it started the ranks", code="fork-server-ended")
    return ExitRecord.of_run(text, FailureKind.FAULT)


def stop_code(number: int) -> int:
    """Return the exit code of a run that was stopped by this signal."""
    return EXIT_SIGINT if number == signal.SIGINT else EXIT_SIGTERM
