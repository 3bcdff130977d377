"""What ranks tell one another of where they are: a beat each through the store of the process
group.

Written and read over a connection of its own, so that neither a blocked collective nor a wait in
the store holds it up. Each rank writes three keys: its beat, the times of its last steps, and its
details (stack and calls), which few ever read.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from paceline.distributed import torch_compat
from paceline.distributed.call_log import CallLogReader, CallRecord
from paceline.distributed.progress import COLLECTIVE, PROGRESS, StepTimes, stack_of
from paceline.distributed.segments import SegmentCounter, Segments
from paceline.health.hangs import RankStatus
from paceline.health.stragglers import Pause

#: How long the store may take to answer.
_STORE_S = 10.0
#: A rank that has stood still for so long tells its last calls.
_CALLS_AFTER_S = 1.0
#: Silence from which on the state of a process on this host is looked at.
_LOOK_S = 0.8
#: Up to so many ranks each one reads the beats of all. In larger worlds the first of each host
#: does, and all beat more seldom: the store's work grows with readers times ranks.
_ALL_READ = 64
#: Between two readings of the counts of the sockets.
_SEGMENTS_S = 2.0
#: Not yet known which ranks this one is like.
UNKNOWN_KIND = "?"


def period_s(world_size: int, shortest_s: float) -> float:
    """Seconds between two beats of a rank."""
    return shortest_s * max(1.0, world_size / _ALL_READ)


def reads(world_size: int, local_rank: int) -> bool:
    """Whether a rank listens to the others."""
    return world_size <= _ALL_READ or local_rank == 0


@dataclass(frozen=True)
class Beat:
    """What a rank tells of itself.

    Args:
        number: of beats so far; 0 before the first.
        marks: signs of progress so far.
        usual_s: its usual step.
        kind: which ranks it is like, see :class:`~paceline.health.stragglers.StragglerDetector`.
        told_step: the last step whose times it has published.
        box: the file of its :class:`~paceline.distributed.call_log.CallLog`.
        pause: the last one of its process.
    """

    number: int = 0
    marks: int = -1
    still_s: float = 0.0
    phase: str = "starting"
    step: int | None = None
    waits_for: str | None = None
    usual_s: float | None = None
    issued: dict[str, int] = field(default_factory=dict)
    host: str = ""
    pid: int = 0
    kind: str | None = UNKNOWN_KIND
    asks: bool = False
    told_step: int | None = None
    box: int | None = None
    pause: Pause | None = None
    segments: Segments = field(default_factory=Segments)


_BEAT_ADAPTER = TypeAdapter(Beat)


@dataclass
class Details:
    """What few ever read of a rank: ``stack`` (lines, innermost first), and its last calls if it
    has published them."""

    stack: list[str]
    calls: list[CallRecord] | None = None


class HeartbeatExchange:
    """This rank's beats, written (:meth:`publish`); those of all ranks, read (:meth:`read`). For
    one thread.

    Args:
        kind: which ranks this one is like in its work (None: it does not train); see
            :class:`~paceline.health.stragglers.StragglerDetector`.
        asks: the others shall tell their last calls.
    """

    def __init__(self, rank: int, size: int, host: str, pid: int) -> None:
        self.rank, self.size, self.host, self.pid = rank, size, host, pid
        self.kind: str | None = UNKNOWN_KIND
        self.asks = False
        self.asked = False  # by another rank
        self.ended = False
        self.pause: Pause | None = None  # the last one of this process
        self._segments, self._sent, self._sent_at = SegmentCounter(), Segments(), -math.inf
        self._store = _connect()
        self._number = 0
        self._told_steps: StepTimes | None = None
        self._told_before = 0
        self._steps: dict[int, tuple[int | None, list[StepTimes]]] = {}
        self._peers = {one: PeerState(one) for one in range(size)}

    def reconnect(self) -> None:
        """After an error the connection may hold answers to what was asked before."""
        self._store = _connect()

    # -- writing
    def publish(self) -> None:
        """Say where this rank is."""
        self._number += 1
        still_s = time.perf_counter() - PROGRESS.marked_at
        steps = list(PROGRESS.steps)
        if time.perf_counter() - self._sent_at > _SEGMENTS_S:
            self._sent, self._sent_at = self._segments.read(), time.perf_counter()
        beat = Beat(
            number=self._number,
            marks=PROGRESS.marks,
            still_s=round(still_s, 3),
            phase="ended" if self.ended else PROGRESS.phase,
            step=PROGRESS.step,
            waits_for=_waits_for(),
            usual_s=(
                statistics.median(step.wall_s for step in steps[-16:]) if len(steps) > 1 else None
            ),
            issued=PROGRESS.issued,
            host=self.host,
            pid=self.pid,
            kind=self.kind,
            asks=self.asks,
            told_step=steps[-1].step if steps else None,
            box=PROGRESS.box.file if PROGRESS.box is not None else None,
            pause=self.pause,
            segments=self._sent,
        )
        details = Details(stack_of(PROGRESS.thread))
        if still_s > _CALLS_AFTER_S or self.asked or self.asks:
            details.calls = [call.record() for call in list(PROGRESS.ring)]
        written = {
            self._key(self.rank): _BEAT_ADAPTER.dump_json(beat),
            self._key(self.rank, "details"): json.dumps(asdict(details)),
        }
        if steps and steps[-1] is not self._told_steps:
            # A reader that beats at the same pace may miss one of two.
            since, self._told_before = (
                self._told_before,
                self._told_steps.step if self._told_steps is not None else 0,
            )
            self._told_steps = steps[-1]
            told = [_rounded(times) for times in steps if times.step > since]
            written[self._key(self.rank, "steps")] = json.dumps(told)
        self._store.multi_set(list(written), list(written.values()))

    # -- reading
    def read(self) -> list[PeerState]:
        """All ranks that have given a beat so far, as this one knows them now, itself among
        them."""
        met = [
            one
            for one in self._peers.values()
            if one.beat.number > 0 or self._store.check([self._key(one.rank)])
        ]
        now = time.perf_counter()
        for peer, text in zip(
            met, self._store.multi_get([self._key(one.rank) for one in met]), strict=True
        ):
            peer.hear(_BEAT_ADAPTER.validate_json(text), now)
            peer.look(self.host, now)
        self.asked = any(peer.beat.asks for peer in met if peer.rank != self.rank)
        return met

    def forgive(self) -> None:
        """This process has stood still itself: what it has not heard meanwhile says nothing."""
        now = time.perf_counter()
        for one in self._peers.values():
            one.heard_at = one.moved_at = now

    def steps(self, ranks: Iterable[int]) -> dict[int, list[StepTimes]]:
        """rank → the times of its last steps, as of its last beat."""
        told = {rank: self._peers[rank].beat.told_step for rank in ranks}
        new = [
            rank
            for rank, step in told.items()
            if step is not None and self._steps.get(rank, (None,))[0] != step
        ]
        for rank, text in zip(
            new,
            self._store.multi_get([self._key(one, "steps") for one in new]) if new else (),
            strict=True,
        ):
            self._steps[rank] = (told[rank], [StepTimes(*one) for one in json.loads(text)])
        return {rank: self._steps[rank][1] if rank in self._steps else [] for rank in told}

    def details(self, ranks: Iterable[int]) -> dict[int, Details]:
        """The details by rank, where they can be had."""
        keys = {rank: self._key(rank, "details") for rank in ranks}
        return {
            rank: Details(**json.loads(self._store.get(key)))
            for rank, key in keys.items()
            if self._store.check([key])
        }

    def calls(self, ranks: Iterable[int]) -> dict[int, list[CallRecord]]:
        """rank → its last calls, where they can be had: from its memory on this host, or as it has
        told them."""
        near = self.calls_near()
        told = self.details(rank for rank in ranks if rank not in near)
        return near | {rank: one.calls for rank, one in told.items() if one.calls is not None}

    def calls_near(self) -> dict[int, list[CallRecord]]:
        """Of the ranks of this host, without the store."""
        return {rank: one.box.calls() for rank, one in self._peers.items() if one.box is not None}

    def _key(self, rank: int, what: str = "beat") -> str:
        return f"paceline/{what}/{rank}"


@dataclass
class PeerState:
    """A rank by its last beat. Times are of this process's clock: when it was heard, when it last
    made progress."""

    rank: int
    heard_at: float = field(default_factory=time.perf_counter)
    moved_at: float = field(default_factory=time.perf_counter)
    beat: Beat = field(default_factory=Beat)
    state: str | None = None
    box: CallLogReader | None = None

    def hear(self, beat: Beat, now: float) -> None:
        if beat.number == self.beat.number:
            return
        if beat.marks != self.beat.marks:
            self.moved_at = now - beat.still_s
        self.beat, self.heard_at, self.state = beat, now, None

    @property
    def is_gone(self) -> bool:
        """Its process has ended without a report."""
        return self.state in ("gone", "Z", "X")

    def look(self, host: str, now: float) -> None:
        """On this host: the state of a process that is silent, and its black box while it lives."""
        beat = self.beat
        if beat.host != host or beat.phase == "ended":
            self.state = None
            return
        self.state = state_of(beat.pid) if now - self.heard_at > _LOOK_S else None
        if self.box is None and self.state is None and beat.box is not None:
            with contextlib.suppress(OSError):
                self.box = CallLogReader(beat.pid, beat.box)

    def seen(self, now: float) -> RankStatus:
        beat = self.beat
        return RankStatus(
            rank=self.rank,
            host=beat.host,
            pid=beat.pid,
            phase=beat.phase,
            step=beat.step,
            still_s=now - self.moved_at,
            silent_s=now - self.heard_at,
            waits_for=beat.waits_for,
            usual_s=beat.usual_s,
            issued=beat.issued,
            state=self.state,
        )


def state_of(pid: int) -> str | None:
    """The state of a process on this host: a letter as in `proc(5)`, ``gone``, or None where this
    system does not say."""
    if not Path("/proc/self/stat").exists():
        return None
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def _connect() -> Any:
    store: Any = torch_compat.default_store()
    store = store.clone()
    store.set_timeout(timedelta(seconds=_STORE_S))
    return store


def _waits_for() -> str | None:
    what, call = PROGRESS.waits_for, PROGRESS.last
    if what != COLLECTIVE or call is None:
        return what
    number = f" number {call.number + 1:,}" if call.number is not None else ""
    return f"{call.function}{number} of {len(PROGRESS.groups.get(call.group, ()))} ranks"


def _rounded(value: StepTimes) -> list[Any]:
    return [round(one, 5) if isinstance(one, float) else one for one in value]


#: Between two writes.
_EVERY_S = 2.0


class HeartbeatFile:
    """The file of one life of a run, written over in place: a new name every two seconds would make
    work for the disk of a run that saves.

    Args:
        path: of the file; nothing is made before the first :meth:`tell`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._size = 0
        self._told_at = -float("inf")

    def tell(self, ranks: Sequence[RankStatus]) -> None:
        """What one rank knows of all; too soon after the last time nothing is written. A disk that
        is full is no matter."""
        if time.monotonic() - self._told_at < _EVERY_S:
            return
        self._told_at, now = time.monotonic(), time.time()
        with contextlib.suppress(OSError):
            if self._file is None:
                self._file = os.open(
                    self.path,
                    os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC,
                    0o644,
                )
            text = json.dumps(
                {
                    "time": round(now, 3),
                    "every_s": _EVERY_S,
                    "ranks": [
                        {
                            "rank": status.rank,
                            "host": status.host,
                            "pid": status.pid,
                            "phase": status.phase,
                            "step": status.step,
                            "waits_for": status.waits_for,
                            # its last beat and last sign of progress, by one clock for all
                            "heard_at": round(now - status.silent_s, 2),
                            "moved_at": round(now - status.still_s, 2),
                            "state": status.state,
                        }
                        for status in ranks
                    ],
                }
            )
            # it never grows shorter, so that none reads a torn end
            self._size = max(self._size, len(text))
            os.pwrite(self._file, text.ljust(self._size).encode() + b"\n", 0)

    def close(self) -> None:
        """The run's end is in its log: the file goes."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            with contextlib.suppress(OSError):
                self.path.unlink()
