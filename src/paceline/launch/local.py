"""Run the ranks of a job on this host, forward signals to them, and restart them after faults."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from paceline.core.errors import EXIT_SIGINT, EXIT_SIGTERM, Outcome, failed_outcome
from paceline.core.log import CONSOLE_ONLY
from paceline.core.processes import hidden_main
from paceline.launch.rank_processes import RankProcesses, open_store
from paceline.launch.worker import RunRank

if TYPE_CHECKING:
    from paceline.parallel.spec import StrategySpec

logger = logging.getLogger(__name__)

SignalHandler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None
#: Called after a failed attempt. Returns (spec of the next attempt, outcome). If there is no
#: further attempt, the spec is None and the outcome is the one to report.
Follow = Callable[[Any, Outcome], tuple[Any, Outcome]]


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

    def run(self) -> Outcome:
        """Run until the last attempt has ended. Leaves no processes and no temporary files."""
        with self.signals, hidden_main():
            while True:
                outcome = self._run_attempt()
                if (
                    self.follow is None
                    or outcome["status"] != "failed"
                    or self.signals.number is not None
                ):
                    return outcome
                following, outcome = self.follow(self.spec, outcome)
                if following is None or self.signals.number is not None:
                    return outcome
                self.spec, self.num_ranks = following, following.layout.num_processes

    def _run_attempt(self) -> Outcome:
        try:
            ranks = RankProcesses(
                self.spec, self.num_ranks, open_store(), self.run_rank, expendable(self.spec)
            )
            with ranks:
                with self.signals.to(ranks):
                    try:
                        ranks.start()
                    except (EOFError, ConnectionError):
                        return _failed_start(self.signals.number)
                    while not ranks.wait(0.1):
                        pass
                return outcome_of(ranks, self.spec, self.signals.number)
        except (OSError, RuntimeError) as error:
            return failed_outcome(f"the ranks could not be started: {error}")


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


def _strategy_of(spec: Any) -> StrategySpec | None:
    layout = getattr(spec, "layout", None)
    if layout is None:
        return None
    from paceline.parallel.registry import get_spec

    return get_spec(layout.strategy)


def expendable(spec: Any) -> frozenset[int]:
    """Return the ranks of a spec that may exit without ending the run."""
    strategy = _strategy_of(spec)
    if strategy is None:
        return frozenset()
    return strategy.expendable_ranks(spec.config, spec.layout.axes)


def outcome_of(ranks: RankProcesses, spec: Any, stopped_by: int | None) -> Outcome:
    """Return the outcome of an attempt. If it failed, the field ``fault`` is True if resuming from
    a checkpoint may succeed, False if it would fail again, and None if that is unknown."""
    outcomes = {
        rank: outcome for rank, outcome in ranks.outcomes().items() if rank not in ranks.lost_ranks
    }
    failures = [outcome for outcome in outcomes.values() if outcome["status"] == "failed"]
    # Prefer a failure that describes several ranks.
    failures.sort(key=lambda outcome: (not outcome.get("of_all"), outcome["time"]))
    lost = ranks.lost()
    if lost and not (failures and failures[0].get("of_all")):
        return _failed_by(lost, ranks, spec)
    if failures:
        return _failed_with(failures[0], ranks, spec)
    if len(outcomes) + len(ranks.lost_ranks) < ranks.num_ranks:
        if stopped_by is not None:
            return _stopped(stopped_by)
        return failed_outcome("the ranks were killed")
    reported = [outcome for _, outcome in sorted(outcomes.items()) if outcome["report"] is not None]
    outcome = reported[0] if reported else outcomes[min(outcomes)]
    if outcome["status"] == "stopped" and stopped_by is not None:
        outcome["exit_code"] = stop_code(stopped_by)
    return outcome


def _stopped(number: int) -> Outcome:
    return {"status": "stopped", "exit_code": stop_code(number), "report": None}


def _failed_with(failure: Outcome, ranks: RankProcesses, spec: Any) -> Outcome:
    """Return the outcome of an attempt in which a rank reported ``failure``."""
    is_of_run = failure["exit_code"] == 2 or failure.get("of_all") or failure.get("every_rank")
    text = failure["text"] if is_of_run else f"rank {failure['rank']} failed. {failure['text']}"
    return {
        **failure,
        "text": text + _lost_earlier(ranks, spec),
        "report": None,
        "ranks": failure.get("blamed") or [failure["rank"]],
    }


def _failed_start(stopped_by: int | None) -> Outcome:
    """Return the outcome of an attempt whose ranks could not all be started because the fork server
    has exited. multiprocessing starts a new one for the next attempt."""
    if stopped_by is not None:
        return _stopped(stopped_by)
    text = "the fork server ended while it started the ranks"
    return {**failed_outcome(text), "fault": True, "ranks": [], "reason": text}


def _failed_by(lost: list[int], ranks: RankProcesses, spec: Any) -> Outcome:
    """Return the outcome of an attempt in which these ranks exited without reporting an error."""
    reason = "; ".join(
        f"{_rank_text(rank, ranks.processes[rank].pid, spec)} {ranks.exit_text(rank)}"
        for rank in lost
    )
    text = f"{reason}. The other ranks were stopped.{_lost_earlier(ranks, spec)}"
    return {**failed_outcome(text), "fault": True, "ranks": lost, "reason": reason, "gone": True}


def _lost_earlier(ranks: RankProcesses, spec: Any) -> str:
    """Describe the ranks that were lost earlier, without which the run had continued."""
    texts = [
        f"{_rank_text(rank, lost['pid'], spec)}, {lost['reason']}"
        for rank, lost in ranks.lost_ranks.items()
    ]
    return f" Lost earlier: {'; '.join(texts)}." if texts else ""


def _rank_text(rank: int, pid: int | None, spec: Any) -> str:
    """Return text that names a rank, its role (if ranks have different roles) and its process."""
    strategy = _strategy_of(spec)
    role = "" if strategy is None else strategy.rank_role(spec.config, spec.layout.axes, rank)
    return f"rank {rank}{f', {role}' if role else ''} (process {pid})"


def stop_code(number: int) -> int:
    """Return the exit code of a run that was stopped by this signal."""
    return EXIT_SIGINT if number == signal.SIGINT else EXIT_SIGTERM
