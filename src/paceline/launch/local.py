"""A run on this host: its ranks, the signals of the person who started it, and the next attempt
where a fault ends one."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from paceline.core.errors import EXIT_SIGINT, EXIT_SIGTERM, Outcome
from paceline.core.log import CONSOLE_ONLY
from paceline.core.processes import hidden_main
from paceline.launch.rank_processes import RankProcesses, open_store
from paceline.launch.worker import RunRank, failed_outcome

logger = logging.getLogger(__name__)

#: What follows an attempt that a fault has ended: the spec of the next one; None where there is
#: none, with the outcome as it shall be reported.
Follow = Callable[[Any, Outcome], tuple[Any, Outcome]]


class LocalLauncher:
    """Runs a spec on ``num_ranks`` ranks of this host and says what became of them."""

    def __init__(
        self,
        spec: Any,
        num_ranks: int,
        run_rank: RunRank | None = None,
        follow: Follow | None = None,
    ) -> None:
        """``run_rank``: what a rank does with the spec; default: the training of a
        :class:`~paceline.train.run_spec.RunSpec`. ``follow``: default: no further attempt."""
        self.spec = spec
        self.run_rank = run_rank
        self.num_ranks = num_ranks
        self.follow = follow
        self.on_stop = "finishing this step and saving a checkpoint"  # what a person is told then
        self.signals = SignalForwarder(lambda: self.on_stop)

    def run(self) -> Outcome:
        """Returns {"status", "exit_code", "report", and for a failure "text", "traceback"}. Leaves
        no process and no file."""
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
            store = open_store()
            ranks = RankProcesses(
                self.spec, self.num_ranks, store, self.run_rank, expendable(self.spec)
            )
            with ranks:
                return _run_ranks(ranks, self.spec, self.signals)
        except (OSError, RuntimeError) as error:
            return failed_outcome(f"the ranks could not be started: {error}")


def _run_ranks(ranks: RankProcesses, spec: Any, signals: SignalForwarder) -> Outcome:
    """Start the ranks, wait until the last has ended, and return what became of them."""
    with signals.to(ranks):
        try:
            ranks.start()
        except (EOFError, ConnectionError):
            return _cut_start(signals.number)
        while not ranks.wait(0.1):
            pass
    return outcome_of(ranks, spec, signals.number)


class ForwardsSignals(Protocol):
    """Processes of ranks to which a signal can be sent."""

    def forward(self, number: int) -> None: ...

    def kill(self, wait_s: float) -> None: ...


class SignalForwarder:
    """SIGINT, SIGTERM and SIGHUP to the launcher: the first asks all ranks to stop, a second ends
    everything at once."""

    def __init__(self, on_stop: Callable[[], str]) -> None:
        self.number: int | None = None
        self.on_stop = on_stop
        self.on_second_signal: Callable[[int], None] = lambda number: (
            None
        )  # called once the ranks are gone
        self._ranks: ForwardsSignals | None = None
        self._before: dict[int, Any] = {}

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
        """For the while, these ranks are asked to stop."""
        self._ranks = ranks
        if self.number is not None:  # it came between two attempts
            ranks.forward(self.number)
        try:
            yield
        finally:
            self._ranks = None

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self.number is not None:
            if number == getattr(signal, "SIGHUP", None):
                # a closed terminal sends it twice, by the kernel and by the shell; nobody asks for
                # haste
                return
            if self._ranks is not None:
                self._ranks.kill(wait_s=2.0)
            with contextlib.suppress(Exception):  # nothing holds up who is in haste
                self.on_second_signal(number)
            os._exit(stop_code(self.number))
        self.number = number
        name = signal.Signals(number).name
        logger.info("\n%s: %s; once more ends at once", name, self.on_stop(), extra=CONSOLE_ONLY)
        if self._ranks is not None:
            self._ranks.forward(number)


def expendable(spec: Any) -> frozenset[int]:
    """Ranks of a spec that may end without ending the run."""
    layout = getattr(spec, "layout", None)
    if layout is None:
        return frozenset()
    from paceline.parallel.registry import get_spec

    return get_spec(layout.strategy).expendable_ranks(spec.config, layout.axes)


def _role(spec: Any, rank: int) -> str:
    """What a rank was, where ranks differ: ``, a server of the tables``."""
    layout = getattr(spec, "layout", None)
    if layout is None:
        return ""
    from paceline.parallel.registry import get_spec

    role = get_spec(layout.strategy).rank_role(spec.config, layout.axes, rank)
    return f", {role}" if role else ""


def outcome_of(ranks: RankProcesses, spec: Any, stopped_by: int | None) -> Outcome:
    """What became of the ranks of this host. For a failure ``fault`` says whether going back to a
    checkpoint may mend it: True, False, or None where it is not known."""
    outcomes = {rank: o for rank, o in ranks.outcomes().items() if rank not in ranks.lost_ranks}
    failures = [outcome for outcome in outcomes.values() if outcome["status"] == "failed"]
    # What tells of more than the rank that reports it comes first.
    failures.sort(key=lambda outcome: (not outcome.get("of_all"), outcome["time"]))
    lost = ranks.lost()
    if lost and not (failures and failures[0].get("of_all")):
        return _failed_by(lost, ranks, spec)
    if failures:
        return _failed_with(failures[0], ranks, spec)
    if len(outcomes) + len(ranks.lost_ranks) < ranks.num_ranks:
        if stopped_by is not None:
            return {"status": "stopped", "exit_code": stop_code(stopped_by), "report": None}
        return failed_outcome("the ranks were ended")
    reported = [outcome for _, outcome in sorted(outcomes.items()) if outcome["report"] is not None]
    outcome = reported[0] if reported else outcomes[min(outcomes)]
    if outcome["status"] == "stopped" and stopped_by is not None:
        outcome["exit_code"] = stop_code(stopped_by)
    return outcome


def _failed_with(failure: Outcome, ranks: RankProcesses, spec: Any) -> Outcome:
    """The outcome of an attempt that ended because a rank reported this failure."""
    is_of_run = failure["exit_code"] == 2 or failure.get("of_all") or failure.get("every_rank")
    text = failure["text"] if is_of_run else f"rank {failure['rank']} failed. {failure['text']}"
    return {
        **failure,
        "text": text + _lost_earlier(ranks, spec),
        "report": None,
        "ranks": failure.get("blamed") or [failure["rank"]],
    }


def _cut_start(stopped_by: int | None) -> Outcome:
    """The outcome of an attempt that ended before all its ranks were there: multiprocessing starts
    the fork server anew."""
    if stopped_by is not None:
        return {"status": "stopped", "exit_code": stop_code(stopped_by), "report": None}
    text = "the process from which the ranks are forked ended while it started them"
    return {**failed_outcome(text), "fault": True, "ranks": [], "reason": text}


def _failed_by(lost: list[int], ranks: RankProcesses, spec: Any) -> Outcome:
    """The outcome of an attempt that ended because these ranks were gone without a message."""
    names = "; ".join(
        f"rank {rank}{_role(spec, rank)} (process {ranks.processes[rank].pid})"
        f" {ranks.how_it_ended(rank)}"
        for rank in lost
    )
    text = f"{names}. The other ranks were stopped.{_lost_earlier(ranks, spec)}"
    return {
        **failed_outcome(text),
        "fault": True,
        "ranks": lost,
        "reason": names,
        "gone": True,
    }


def _lost_earlier(ranks: RankProcesses, spec: Any) -> str:
    """The ranks that the run had gone on without, for a person."""
    texts = [
        f"rank {rank}{_role(spec, rank)} (process {lost['pid']}), {lost['reason']}"
        for rank, lost in ranks.lost_ranks.items()
    ]
    return f" Lost earlier: {'; '.join(texts)}." if texts else ""


def stop_code(number: int) -> int:
    """The exit code of a run that this signal stopped."""
    return EXIT_SIGINT if number == signal.SIGINT else EXIT_SIGTERM
