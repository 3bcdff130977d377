"""A run on this host: its ranks, the signals of the person who started it, and its lives, where a
fault ends one."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from paceline.core.errors import EXIT_FAILED, EXIT_SIGINT, EXIT_SIGTERM
from paceline.core.processes import hidden_main
from paceline.launch.rank_processes import Place, RankProcesses, open_store
from paceline.launch.worker import RunRank

#: What follows a life that a fault has ended: the spec of the next one; None where there is none,
#: with the outcome as it shall be told.
Follow = Callable[[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]


class LocalRun:
    """Runs a spec on ``num_ranks`` ranks of this host and says what became of them."""

    def __init__(
        self,
        spec: Any,
        num_ranks: int,
        run_rank: RunRank | None = None,
        follow: Follow | None = None,
    ) -> None:
        """``run_rank``: what a rank does with the spec; default: the training of a
        :class:`~paceline.train.run_spec.RunSpec`. ``follow``: default: no life follows."""
        self.spec = spec
        self.more = () if run_rank is None else (run_rank,)
        self.num_ranks = num_ranks
        self.follow = follow
        self.on_stop = "finishing this step and saving a checkpoint"  # what a person is told then
        self.signals = Signals(lambda: self.on_stop)

    def run(self) -> dict[str, Any]:
        """Returns {"status", "exit_code", "report", and for a failure "text", "traceback"}. Leaves
        no process and no file."""
        with self.signals, hidden_main():
            while True:
                outcome = self._live()
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

    def _live(self) -> dict[str, Any]:
        try:
            store = open_store()
            place = Place(0, self.num_ranks, self.num_ranks, "127.0.0.1", store.port)
            ranks = RankProcesses(
                self.spec, place, *self.more, expendable=expendable(self.spec), store=store
            )
            with ranks:
                return live(ranks, self.spec, self.signals)
        except (OSError, RuntimeError) as error:
            text = f"the ranks could not be started: {error}"
            return {
                "status": "failed",
                "exit_code": EXIT_FAILED,
                "text": text,
                "traceback": "",
                "report": None,
            }


def live(
    ranks: RankProcesses, spec: Any, signals: Signals, tick: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Start the ranks, wait until the last has ended, and say what became of them. ``tick`` is
    called now and then."""
    with signals.to(ranks):
        try:
            ranks.start()
        except (EOFError, ConnectionError):
            return _cut_start(signals.number)
        while not ranks.wait(0.1):
            tick()
    return outcome_of(ranks, spec, signals.number)


class Signals:
    """SIGINT, SIGTERM and SIGHUP to the launcher: the first asks all ranks to stop, a second ends
    everything at once."""

    def __init__(self, on_stop: Callable[[], str]) -> None:
        self.number: int | None = None
        self.on_stop = on_stop
        self.on_haste: Callable[[int], None] = lambda number: None  # told once the ranks are gone
        self._ranks: RankProcesses | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
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
    def to(self, ranks: RankProcesses) -> Any:
        """For the while, these ranks are asked to stop."""
        self._ranks = ranks
        if self.number is not None:  # it came between two lives
            ranks.pass_on(self.number)
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
                self.on_haste(number)
            os._exit(stop_code(self.number))
        self.number = number
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):
            print(
                f"\n{name}: {self.on_stop()}; once more ends at once", file=sys.stderr, flush=True
            )
        if self._ranks is not None:
            self._ranks.pass_on(number)


def expendable(spec: Any) -> frozenset[int]:
    """Ranks of a spec that may end without ending the run."""
    layout = getattr(spec, "layout", None)
    if layout is None:
        return frozenset()
    from paceline.parallel.registry import strategy_class

    return strategy_class(layout.strategy).expendable_ranks(spec.config, layout.axes)


def _role(spec: Any, rank: int) -> str:
    """What a rank was, where ranks differ: ``, a server of the tables``."""
    layout = getattr(spec, "layout", None)
    if layout is None:
        return ""
    from paceline.parallel.registry import strategy_class

    role = strategy_class(layout.strategy).rank_role(spec.config, layout.axes, rank)
    return f", {role}" if role else ""


def outcome_of(ranks: RankProcesses, spec: Any, stopped_by: int | None) -> dict[str, Any]:
    """What became of the ranks of this host. For a failure ``fault`` says whether going back to a
    checkpoint may mend it: True, False, or None where it is not known."""
    outcomes = {rank: one for rank, one in ranks.outcomes().items() if rank not in ranks.told}
    failures = sorted(
        (one for one in outcomes.values() if one["status"] == "failed"), key=lambda one: one["time"]
    )
    lost = ranks.lost()
    # what tells of more than the rank that says it
    failures.sort(key=lambda one: not one.get("of_all"))
    if lost and not (failures and failures[0].get("of_all")):
        return _failed_by(lost, ranks, spec)
    if failures:
        first = failures[0]
        of_the_run = first["exit_code"] == 2 or first.get("of_all") or first.get("every_rank")
        said = first["text"] if of_the_run else f"rank {first['rank']} failed. {first['text']}"
        return {
            **first,
            "text": said + _lost_earlier(ranks, spec),
            "report": None,
            "ranks": first.get("blamed") or [first["rank"]],
        }
    if len(outcomes) + len(ranks.told) < ranks.place.num_ranks:
        if stopped_by is not None:
            return {"status": "stopped", "exit_code": stop_code(stopped_by), "report": None}
        return {
            "status": "failed",
            "exit_code": EXIT_FAILED,
            "text": "the ranks were ended",
            "traceback": "",
            "report": None,
        }
    first = next(
        (one for _, one in sorted(outcomes.items()) if one["report"] is not None),
        outcomes[min(outcomes)],
    )
    if first["status"] == "stopped" and stopped_by is not None:
        first["exit_code"] = stop_code(stopped_by)
    return first


def _cut_start(stopped_by: int | None) -> dict[str, Any]:
    """The outcome of a life that ended before all its ranks were there: multiprocessing starts the
    fork server anew."""
    if stopped_by is not None:
        return {"status": "stopped", "exit_code": stop_code(stopped_by), "report": None}
    text = "the process from which the ranks are forked ended while it started them"
    return {
        "status": "failed", "exit_code": EXIT_FAILED, "text": text, "traceback": "", "report": None,
        "fault": True, "ranks": [], "reason": text,
    }  # fmt: skip


def _failed_by(lost: list[int], ranks: RankProcesses, spec: Any) -> dict[str, Any]:
    """The outcome of a life that ended because these ranks were gone without a word."""
    names = "; ".join(
        f"rank {rank}{_role(spec, rank)} (process {ranks.processes[rank].pid})"
        f" {ranks.how_it_ended(rank)}"
        for rank in lost
    )
    text = f"{names}. The other ranks were stopped.{_lost_earlier(ranks, spec)}"
    return {
        "status": "failed", "exit_code": EXIT_FAILED, "text": text, "traceback": "", "report": None,
        "fault": True, "ranks": lost, "reason": names, "gone": True,
    }  # fmt: skip


def _lost_earlier(ranks: RankProcesses, spec: Any) -> str:
    """The ranks that the run had gone on without, for a person."""
    told = [
        f"rank {rank}{_role(spec, rank)} (process {one['pid']}), {one['reason']}"
        for rank, one in ranks.told.items()
    ]
    return f" Lost earlier: {'; '.join(told)}." if told else ""


def stop_code(number: int) -> int:
    """The exit code of a run that this signal stopped."""
    return EXIT_SIGINT if number == signal.SIGINT else EXIT_SIGTERM
