"""The watchdog: a thread in each rank that says where its rank is, and names who holds up the
others or is slower than they.

Ranks beat through the store (:mod:`paceline.health.heartbeats`). Each judges by itself what it
hears: who hangs (:mod:`~paceline.health.hangs`), whether the ranks have issued different
collectives (:mod:`~paceline.health.mismatch`), and, on the first rank, who is slow
(:mod:`~paceline.health.stragglers`), who was paused and whose link loses packets
(:mod:`~paceline.health.stragglers`).
"""

import contextlib
import logging
import os
import threading
import time
from pathlib import Path

import torch.distributed as dist

from paceline.config.schema.recovery import RecoveryConfig
from paceline.core.errors import FaultError, MismatchError, PacelineError
from paceline.core.event_log import EventLog
from paceline.core.events import HealthEvent
from paceline.core.log import ON_EVERY_RANK
from paceline.core.processes import host_name
from paceline.core.run_dir import RunDir
from paceline.core.stop import StopFlag
from paceline.distributed import torch_compat
from paceline.distributed.communicator import Communicator
from paceline.distributed.progress import PROGRESS, StepTimes
from paceline.health.hangs import Hang, RankStatus, find_hangs
from paceline.health.heartbeats import (
    UNKNOWN_KIND,
    HeartbeatExchange,
    HeartbeatFile,
    PeerState,
    period_s,
    reads,
)
from paceline.health.mismatch import find_mismatch
from paceline.health.stragglers import LinkJudge, Pause, RankBusyTime, Straggler, StragglerDetector
from paceline.parallel.base import Strategy
from paceline.parallel.protocols import has_data

logger = logging.getLogger(__name__)

_PERIOD_S = 0.4
#: A look that comes so much late: this process has stood still itself.
_LATE_S = 3.0
#: Phases of a step in which a blocked rank keeps the other ranks waiting.
_STEP_PHASES = frozenset({"data", "forward", "backward", "optimizer", "logging"})
#: How long a rank whose collective failed waits for the others' calls.
_ASK_S = 2.0
#: A rank is named when it was found in so many looks in a row.
_LOOKS = 2
#: Losses of the store in a row that are worth a word.
_STORE_LOSSES = 3


class Watchdog:
    """To be started when the process group is there, and closed at the end of the rank, however it
    ends. With one rank, or where ``recovery.watchdog`` is off, it does nothing.

    Args:
        timeout_s: after so long a hang ends the rank, where ``recovery.hang_timeout_s`` says
            nothing else.
        folder: of the run; flight records go there.
    """

    def __init__(
        self,
        settings: RecoveryConfig,
        timeout_s: float,
        world: Communicator,
        stop: StopFlag,
        folder: Path | None = None,
    ) -> None:
        self.settings, self.world, self.stop, self.folder = settings, world, stop, folder
        self.heartbeats: HeartbeatFile | None = None
        self.timeout_s = settings.hang_timeout_s or timeout_s
        self.events: EventLog | None = None
        self.host = host_name()
        self.active = settings.watchdog and world.size > 1
        self.listens = reads(world.size, world.env.local_rank)
        self.named: dict[int | None, Hang] = {}
        self._found: dict[int | None, int] = {}  # in so many looks in a row
        self._mismatch: str | None = None
        self._number = 0  # of looks
        self._steps = _Steps()
        self._links = LinkJudge()
        self._pauses: dict[int, Pause] = {}  # the last one of each rank that was reported
        self._ended = threading.Event()
        self._lock = threading.Lock()  # of the connection
        self._beats: HeartbeatExchange | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self.active:
            self._beats = HeartbeatExchange(
                self.world.rank, self.world.size, self.host, os.getpid()
            )
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None and self._beats is not None:
            self._thread.join(_PERIOD_S)
            self._beats.ended = True
            if self._lock.acquire(timeout=_PERIOD_S):
                try:
                    # the store has gone, and with it whoever would read it
                    with contextlib.suppress(RuntimeError, OSError):
                        self._beats.publish()
                    if self.heartbeats is not None:
                        self.heartbeats.close()
                finally:
                    self._lock.release()

    def watch(self, strategy: Strategy, events: EventLog) -> None:
        """From here on the rank trains. ``events``: written by the rank that speaks."""
        self.world, self.events = strategy.world, events
        if self.folder is not None and events.path is not None:
            self.heartbeats = HeartbeatFile(RunDir(self.folder).heartbeats)
        if self._beats is not None:
            # Stages of a pipeline have different work; all other ranks that train have the same.
            stage = self.world.coordinates.get("pipeline", 0) if has_data(strategy) else None
            self._beats.kind = None if stage is None else f"stage {stage}"

    # -- the thread
    def _run(self) -> None:
        each_s, losses = period_s(self.world.size, _PERIOD_S), 0
        last = waits_since = time.perf_counter()
        while not self._ended.wait(each_s):
            # for a while: the next look is a late one, which forgives the silence
            if not PROGRESS.active:
                waits_since = time.perf_counter()
                continue
            try:
                with self._lock:
                    self._note_pause(time.perf_counter() - waits_since - each_s)
                    self._look(late=time.perf_counter() - last > each_s + _LATE_S)
                if losses >= _STORE_LOSSES:
                    self._log("the store by which the ranks meet answers again")
                losses = 0
            except (RuntimeError, OSError) as error:
                losses += 1
                self._lose_store(error, said=losses != _STORE_LOSSES)
            last = waits_since = time.perf_counter()

    def _note_pause(self, late_s: float) -> None:
        """A wait that lasted longer than asked for: for so long, no thread of this process ran."""
        if (
            late_s > _LATE_S
            and PROGRESS.step is not None
            and PROGRESS.phase in _STEP_PHASES
            and self._beats is not None
        ):
            self._beats.pause = Pause(PROGRESS.step, late_s)

    def _lose_store(self, error: Exception, said: bool) -> None:
        assert self._beats is not None
        if not said and not self._ended.is_set():
            what = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            self._log(
                f"the store by which the ranks meet does not answer ({what}): nobody who hangs is"
                " named meanwhile"
            )
        with contextlib.suppress(RuntimeError, OSError):  # tried again at the next look
            self._beats.reconnect()

    def _look(self, late: bool = False) -> None:
        assert self._beats is not None
        self._beats.publish()
        self._number += 1
        # One rank judges each step; for the others it is enough to listen every other time.
        if not self.listens or not (late or self.world.is_rank_zero or self._number % 2):
            return
        if late:
            self._beats.forgive()
        lost = self.world.lost
        peers = [one for one in self._beats.read() if one.rank not in lost]
        if self.world.is_rank_zero:
            self._judge_pauses(peers)
        if late:
            return
        if any(one.is_gone for one in peers):
            self._judge_gone([one.rank for one in peers])
        now = time.perf_counter()
        seen = [one.seen(now) for one in peers]
        if self.heartbeats is not None:
            self.heartbeats.tell(seen)
        self._judge_hangs(seen)
        if self.world.is_rank_zero:
            self._judge_stragglers(peers)
            self._judge_links(peers)

    def _judge_gone(self, ranks: list[int]) -> None:
        """A rank has ended without a report: gloo ends the process where a message has another size
        than it waits for."""
        assert self._beats is not None
        found = find_mismatch(self._beats.calls(ranks))
        if found is not None:
            self.stop.fail(found[1], found[0])

    # -- hangs
    def _judge_hangs(self, ranks: list[RankStatus]) -> None:
        found = {one.rank: one for one in find_hangs(ranks, self.settings.hang_after_s)}
        self._found = {rank: self._found.get(rank, 0) + 1 for rank in found}
        sure = {rank: one for rank, one in found.items() if self._found[rank] >= _LOOKS}
        # tells more than the others
        first = min((one.rank for one in ranks if one.rank not in sure), default=self.world.rank)
        for rank, one in sure.items():
            if rank not in self.named and rank != self.world.rank:
                self._name(one, [seen.rank for seen in ranks], tells_more=self.world.rank == first)
            self.named[rank] = one
        after_s = self.settings.hang_after_s
        moved = {one.rank for one in ranks if max(one.still_s, one.silent_s) < after_s} | {None}
        for rank in (self.named.keys() - found.keys()) & moved:
            one = self.named.pop(rank)
            if self.world.rank == first:
                self._take_back(one)
        self._end_hang(list(sure.values()))

    def _name(self, hang: Hang, ranks: list[int], tells_more: bool) -> None:
        assert self._beats is not None
        details, seen = self._beats.details(ranks), hang.seen
        found = find_mismatch(self._beats.calls(ranks), sites=hang.all_wait)
        self._mismatch = found[1] if found is not None else None
        stack = details[seen.rank].stack if seen is not None and seen.rank in details else []
        lines = [hang.text()]
        if self._mismatch:
            lines.append(self._mismatch)
        if tells_more and stack:
            lines += ["its stack, as far as known:", *(f"  {line}" for line in stack)]
        record = self._write_flight_record()
        if record is not None:
            lines.append(
                f"torch's record of the last collectives of rank {self.world.rank}: {record}"
            )
        self._emit(
            {
                "type": "hang",
                "text": "\n".join(lines),
                "rank": hang.rank,
                "host": seen.host if seen is not None else None,
                "phase": seen.phase if seen is not None else None,
                "step": seen.step if seen is not None else None,
                "since_s": round(hang.since_s, 1),
                "why": hang.why,
                "stack": stack,
                "mismatch": self._mismatch,
            }
        )

    def _take_back(self, hang: Hang) -> None:
        self._mismatch = None
        who = f"rank {hang.rank} goes" if hang.rank is not None else "the ranks go"
        text = f"{who} on again, after about {hang.since_s:.0f} s"
        since_s = round(hang.since_s, 1)
        self._emit({"type": "hang_end", "text": text, "rank": hang.rank, "since_s": since_s})

    def _end_hang(self, hangs: list[Hang]) -> None:
        """End this rank where a hang has lasted too long; not where it is this rank that hangs."""
        late = [one for one in hangs if one.since_s > self.timeout_s]
        if not late or any(one.rank == self.world.rank and not one.all_wait for one in hangs):
            return
        text = "; ".join(one.text() for one in late) + (
            f". {self._mismatch}" if self._mismatch else ""
        )
        blamed = [one.rank for one in late if one.rank is not None]
        self.stop.fail(f"{text}. After {self.timeout_s:.0f} s of it the ranks end", blamed)

    def _write_flight_record(self) -> Path | None:
        """What torch's flight recorder holds, where it is on (see
        :func:`paceline.distributed.communicator.init_communicator`)."""
        text = flight_record()
        if text is None or self.folder is None or not self.folder.is_dir():
            return None
        path = self.folder / f"flight-rank-{self.world.rank}.json"
        try:
            path.write_bytes(text)
        except OSError:
            return None
        return path

    # -- stragglers
    def _judge_stragglers(self, peers: list[PeerState]) -> None:
        assert self._beats is not None
        kinds = {one.rank: one.beat.kind for one in peers}
        if len(peers) + len(self.world.lost) < self.world.size or UNKNOWN_KIND in kinds.values():
            return
        told = self._beats.steps(rank for rank, kind in kinds.items() if kind is not None)
        for one in self._steps.add(kinds, told):
            host = next(peer.beat.host for peer in peers if peer.rank == one.rank)
            if one.even:
                self._emit(
                    {
                        "type": "straggler_end",
                        "text": one.text(host),
                        "rank": one.rank,
                        "host": host,
                        "step": one.step,
                    }
                )
                continue
            self._emit(
                {
                    "type": "straggler",
                    "text": one.text(host),
                    "rank": one.rank,
                    "host": host,
                    "step": one.step,
                    "slower_by_s": round(one.slower_by_s, 4),
                    "share": {
                        "data_s": round(one.share["data_s"], 4),
                        "compute_s": round(one.share["compute_s"], 4),
                        "communication_s": round(one.share["communication_s"], 4),
                    },
                    "steps": one.steps,
                }
            )

    def _judge_pauses(self, peers: list[PeerState]) -> None:
        for one in peers:
            pause = one.beat.pause
            if pause is not None and pause != self._pauses.get(one.rank):
                self._pauses[one.rank] = pause
                paused_s = round(pause.seconds, 3)
                self._emit(
                    {
                        "type": "straggler",
                        "text": pause.text(one.rank, one.beat.host),
                        "rank": one.rank,
                        "host": one.beat.host,
                        "step": pause.step,
                        "slower_by_s": paused_s,
                        "share": {
                            "data_s": 0.0,
                            "compute_s": paused_s,
                            "communication_s": 0.0,
                        },
                        "steps": 1,
                    }
                )

    def _judge_links(self, peers: list[PeerState]) -> None:
        now_s = time.perf_counter()
        for one in peers:
            found = self._links.add(
                one.rank, now_s, one.beat.segments.sent, one.beat.segments.resent
            )
            if found is not None:
                self._emit(
                    {
                        "type": "link_end" if found.is_sound else "link",
                        "text": found.text(one.beat.host),
                        "rank": one.rank,
                        "host": one.beat.host,
                        "step": one.beat.step,
                        "resent_share": round(found.share, 5),
                        "segments": found.sent,
                        "seconds": round(found.seconds, 1),
                    }
                )

    # -- what failed
    def explain(self, error: BaseException) -> BaseException:
        """``error``, or one that says more: where a collective failed because the ranks have issued
        different ones, or while a rank stood still. Takes some seconds at most."""
        if (
            self._beats is None
            or isinstance(error, PacelineError)
            or not isinstance(error, RuntimeError | dist.DistError)
        ):
            return error
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        found = self._ask()
        if found is not None:
            fix = (
                "let all ranks of a group call the same collectives, in one order, with tensors of"
                " one size and dtype"
            )
            return MismatchError(f"{found}. (torch: {first})", fix=fix)
        if self.named:
            text = "; ".join(one.text() for one in self.named.values()) + f". (torch: {first})"
            return FaultError(
                text, ranks=[one.rank for one in self.named.values() if one.rank is not None]
            )
        return error

    def _ask(self) -> str | None:
        """Compare the last calls of all ranks, as they come in."""
        assert self._beats is not None
        self._beats.asks = True
        deadline = time.perf_counter() + _ASK_S
        while time.perf_counter() < deadline:
            try:
                with self._lock:
                    self._beats.publish()
                    peers = self._beats.read()
                    calls = self._beats.calls(one.rank for one in peers)
            except (RuntimeError, OSError):  # the store has gone as well
                peers, calls = [], self._beats.calls_near()
            found = find_mismatch(calls)
            if found is not None or not peers:
                return found[1] if found is not None else None
            if len(peers) == self.world.size and all(
                one.rank in calls or one.is_gone or one.beat.phase == "ended" for one in peers
            ):
                return None
            time.sleep(_PERIOD_S / 3)
        return None

    # -- speaking
    def _emit(self, event: HealthEvent) -> None:
        """Write the event if this rank writes the log; otherwise print its text."""
        if self.events is not None and self.events.path is not None:
            self.events.emit(event)
        else:
            level = logging.INFO if event["type"] == "hang_end" else logging.WARNING
            self._log(event["text"], level)

    def _log(self, text: str, level: int = logging.INFO) -> None:
        """Log with this rank before the text; every rank prints it."""
        logger.log(level, f"[rank {self.world.rank}] {text}", extra=ON_EVERY_RANK)


class _Steps:
    """The steps of which all ranks have told their times, each once and in order."""

    def __init__(self) -> None:
        self.judge: StragglerDetector | None = None
        self._kinds: dict[int, str | None] = {}
        self._last = 0

    def add(
        self, kinds: dict[int, str | None], told: dict[int, list[StepTimes]]
    ) -> list[Straggler]:
        if self.judge is None or kinds != self._kinds:
            self.judge, self._kinds = StragglerDetector(kinds), kinds
            # a first step is no measure
            self._last = min((steps[0].step for steps in told.values() if steps), default=0)
        if len(told) < 2:
            return []
        by_rank = {rank: {one.step: one for one in steps} for rank, steps in told.items()}
        common = set.intersection(*({*steps} for steps in by_rank.values()))
        found = []
        for step in sorted(one for one in common if one > self._last):
            self._last = step
            times = {rank: steps[step] for rank, steps in by_rank.items()}
            if not any(one.disturbed for one in times.values()):
                found += self.judge.add(step, {rank: _busy(one) for rank, one in times.items()})
        return found


def _busy(one: StepTimes) -> RankBusyTime:
    return RankBusyTime(max(0.0, one.wall_s - one.wait_s), one.data_s, one.wait_s, one.held_s)


def flight_record() -> bytes | None:
    """What torch's flight recorder holds, as JSON; None where it is off or there is none."""
    text = torch_compat.dump_flight_recorder()
    return text if b'"profiling_name"' in text else None
