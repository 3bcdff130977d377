"""Heartbeats: the status that each rank publishes through the store of the process group.

Heartbeats use a separate connection, so that neither a blocked collective nor a pending store
request delays them. Each rank writes three keys: its heartbeat, the times of its last steps, and
its details (stack and calls), which are rarely read.
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

from paceline.core.processes import host_name
from paceline.distributed import torch_compat
from paceline.distributed.call_log import CallLogReader, CallRecord
from paceline.distributed.segments import SegmentCounter, Segments
from paceline.distributed.timing.progress import COLLECTIVE, PROGRESS, StepTimes, stack_of
from paceline.health.hangs import RankStatus
from paceline.health.stragglers import Pause

#: Time limit for a response of the store.
_STORE_TIMEOUT_S = 10.0
#: A rank that has made no progress for this long publishes its last calls.
_CALLS_AFTER_S = 1.0
#: A process on this host that has sent no heartbeat for this long is looked up in `/proc`.
_LOOK_UP_AFTER_S = 0.8
#: Seconds between two readings of the TCP segment counters.
_SEGMENTS_EVERY_S = 2.0
#: The typical step time is the median of this many steps.
_TYPICAL_STEPS = 16
#: Seconds between two writes of `heartbeats.json`.
_EVERY_S = 2.0
#: Value of :attr:`Heartbeat.kind` before it is known which ranks this one is compared with.
UNKNOWN_KIND = "?"


@dataclass(frozen=True)
class Heartbeat:
    """The status that a rank publishes.

    Args:
        number: number of heartbeats so far; 0 before the first.
        marks: number of signs of progress so far.
        stalled_s: seconds since the last sign of progress.
        typical_step_s: duration of a typical step.
        kind: which ranks this one is compared with; see
            :class:`~paceline.health.stragglers.StragglerDetector`.
        requests_calls: whether the other ranks are to publish their last calls.
        timed_step: the last step whose times were published.
        call_log: the file of the rank's :class:`~paceline.distributed.call_log.CallLog`.
        pause: the last pause of the process.
        patience_s: see :attr:`~paceline.health.hangs.RankStatus.patience_s`.
    """

    number: int = 0
    marks: int = -1
    stalled_s: float = 0.0
    phase: str = "starting"
    step: int | None = None
    waits_for: str | None = None
    typical_step_s: float | None = None
    issued: dict[str, int] = field(default_factory=dict)
    host: str = ""
    pid: int = 0
    kind: str | None = UNKNOWN_KIND
    requests_calls: bool = False
    timed_step: int | None = None
    call_log: int | None = None
    pause: Pause | None = None
    patience_s: float | None = None
    segments: Segments = field(default_factory=Segments)


_HEARTBEAT_ADAPTER = TypeAdapter(Heartbeat)


@dataclass
class Details:
    """Details of a rank that are rarely read: the lines of its stack, innermost first, and its last
    calls if it has published them."""

    stack: list[str]
    calls: list[CallRecord] | None = None


class HeartbeatExchange:
    """Writes this rank's heartbeats (:meth:`publish`) and reads the heartbeats of all ranks
    (:meth:`read`). Not thread-safe.

    Attributes:
        kind: see :attr:`Heartbeat.kind`; None if this rank does not train.
        requests_calls: whether the other ranks are to publish their last calls.
        pause: the last pause of this process.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.host = rank, host_name()
        self.kind: str | None = UNKNOWN_KIND
        self.requests_calls = self._calls_requested = False
        self.ended = False
        self.pause: Pause | None = None
        self._segment_counter, self._segments = SegmentCounter(), Segments()
        self._segments_read_at = -math.inf
        self._number = 0
        self._last_step: StepTimes | None = None  # the last one published
        self._previous_step = 0  # the last one of the time before
        self._steps: dict[int, tuple[int | None, list[StepTimes]]] = {}
        self._peers = {peer: PeerState(peer) for peer in range(size)}
        self.reconnect()

    def reconnect(self) -> None:
        """Open a new connection. After an error, the old one may still deliver responses to earlier
        requests."""
        store: Any = torch_compat.default_store()
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))

    # -- writing
    def publish(self) -> None:
        """Publish the status of this rank."""
        self._number += 1
        stalled_s = time.perf_counter() - PROGRESS.marked_at
        steps = list(PROGRESS.steps)
        if time.perf_counter() - self._segments_read_at > _SEGMENTS_EVERY_S:
            self._segments = self._segment_counter.read()
            self._segments_read_at = time.perf_counter()
        recent_s = [step.wall_s for step in steps[-_TYPICAL_STEPS:]]
        heartbeat = Heartbeat(
            number=self._number,
            marks=PROGRESS.marks,
            stalled_s=round(stalled_s, 3),
            phase="ended" if self.ended else PROGRESS.phase,
            step=PROGRESS.step,
            waits_for=_waits_for(),
            typical_step_s=statistics.median(recent_s) if len(steps) > 1 else None,
            issued=PROGRESS.issued,
            host=self.host,
            pid=os.getpid(),
            kind=self.kind,
            requests_calls=self.requests_calls,
            timed_step=steps[-1].step if steps else None,
            call_log=PROGRESS.box.file if PROGRESS.box is not None else None,
            pause=self.pause,
            patience_s=PROGRESS.patience_s,
            segments=self._segments,
        )
        details = Details(stack_of(PROGRESS.thread))
        if stalled_s > _CALLS_AFTER_S or self._calls_requested or self.requests_calls:
            details.calls = [call.record() for call in list(PROGRESS.ring)]
        values = {
            self._key(self.rank): _HEARTBEAT_ADAPTER.dump_json(heartbeat),
            self._key(self.rank, "details"): json.dumps(asdict(details)),
        }
        if steps and steps[-1] is not self._last_step:
            # Publish each step twice, because a reader with the same period may miss a heartbeat.
            since = self._previous_step
            self._previous_step = self._last_step.step if self._last_step is not None else 0
            self._last_step = steps[-1]
            values[self._key(self.rank, "steps")] = json.dumps(
                [
                    [round(value, 5) if isinstance(value, float) else value for value in times]
                    for times in steps
                    if times.step > since
                ]
            )
        self._store.multi_set(list(values), list(values.values()))

    # -- reading
    def read(self) -> list[PeerState]:
        """Return all ranks that have sent a heartbeat so far, including this one."""
        peers = [
            peer
            for peer in self._peers.values()
            if peer.heartbeat.number > 0 or self._store.check([self._key(peer.rank)])
        ]
        now = time.perf_counter()
        texts = self._store.multi_get([self._key(peer.rank) for peer in peers])
        for peer, text in zip(peers, texts, strict=True):
            peer.receive(_HEARTBEAT_ADAPTER.validate_json(text), now)
            peer.look_up(self.host, now)
        self._calls_requested = any(
            peer.heartbeat.requests_calls for peer in peers if peer.rank != self.rank
        )
        return peers

    def forgive(self) -> None:
        """Restart the clocks of all ranks, because this process was paused and received no
        heartbeats during that time."""
        now = time.perf_counter()
        for peer in self._peers.values():
            peer.received_at = peer.moved_at = now

    def steps(self, ranks: Iterable[int]) -> dict[int, list[StepTimes]]:
        """Return the times of the last steps of each rank, as of its last heartbeat."""
        timed = {rank: self._peers[rank].heartbeat.timed_step for rank in ranks}
        outdated = [
            rank
            for rank, step in timed.items()
            if step is not None and self._steps.get(rank, (None,))[0] != step
        ]
        keys = [self._key(rank, "steps") for rank in outdated]
        texts = self._store.multi_get(keys) if keys else []
        for rank, text in zip(outdated, texts, strict=True):
            self._steps[rank] = (timed[rank], [StepTimes(*times) for times in json.loads(text)])
        return {rank: self._steps[rank][1] if rank in self._steps else [] for rank in timed}

    def details(self, ranks: Iterable[int]) -> dict[int, Details]:
        """Return the details of the ranks that have published them, by rank."""
        keys = {rank: self._key(rank, "details") for rank in ranks}
        return {
            rank: Details(**json.loads(self._store.get(key)))
            for rank, key in keys.items()
            if self._store.check([key])
        }

    def calls(self, ranks: Iterable[int]) -> dict[int, list[CallRecord]]:
        """Return the last calls of the ranks, as far as they are known: from shared memory for
        ranks on this host, otherwise as published."""
        calls = self.calls_on_host()
        for rank, details in self.details(rank for rank in ranks if rank not in calls).items():
            if details.calls is not None:
                calls[rank] = details.calls
        return calls

    def calls_on_host(self) -> dict[int, list[CallRecord]]:
        """Return the last calls of the ranks of this host, without the store."""
        return {
            rank: peer.call_log.calls()
            for rank, peer in self._peers.items()
            if peer.call_log is not None
        }

    def _key(self, rank: int, kind: str = "heartbeat") -> str:
        return f"paceline/{kind}/{rank}"


@dataclass
class PeerState:
    """The state of a rank as of its last heartbeat. ``received_at`` (of that heartbeat) and
    ``moved_at`` (last progress of the rank) are on the clock of this process."""

    rank: int
    received_at: float = field(default_factory=time.perf_counter)
    moved_at: float = field(default_factory=time.perf_counter)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    state: str | None = None
    call_log: CallLogReader | None = None

    def receive(self, heartbeat: Heartbeat, now: float) -> None:
        if heartbeat.number == self.heartbeat.number:
            return
        if heartbeat.marks != self.heartbeat.marks:
            self.moved_at = now - heartbeat.stalled_s
        self.heartbeat, self.received_at, self.state = heartbeat, now, None

    @property
    def died(self) -> bool:
        """Whether the process has ended without a report."""
        return self.state in ("gone", "Z", "X")

    def look_up(self, host: str, now: float) -> None:
        """Inspect the process if it is on this host: read its state if it sends no heartbeats, and
        open its call log while it is alive."""
        heartbeat = self.heartbeat
        if heartbeat.host != host or heartbeat.phase == "ended":
            self.state = None
            return
        is_silent = now - self.received_at > _LOOK_UP_AFTER_S
        self.state = state_of(heartbeat.pid) if is_silent else None
        if self.call_log is None and self.state is None and heartbeat.call_log is not None:
            with contextlib.suppress(OSError):
                self.call_log = CallLogReader(heartbeat.pid, heartbeat.call_log)

    def status(self, now: float) -> RankStatus:
        heartbeat = self.heartbeat
        return RankStatus(
            rank=self.rank,
            host=heartbeat.host,
            pid=heartbeat.pid,
            phase=heartbeat.phase,
            step=heartbeat.step,
            stalled_s=now - self.moved_at,
            since_heartbeat_s=now - self.received_at,
            waits_for=heartbeat.waits_for,
            typical_step_s=heartbeat.typical_step_s,
            patience_s=heartbeat.patience_s,
            issued=heartbeat.issued,
            state=self.state,
        )


def state_of(pid: int) -> str | None:
    """Return the state of a process on this host: a letter as in `proc(5)`, ``gone``, or None if
    this system has no `/proc`."""
    if not Path("/proc/self/stat").exists():
        return None
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def _waits_for() -> str | None:
    waits_for, call = PROGRESS.waits_for, PROGRESS.waited_call or PROGRESS.last
    if waits_for != COLLECTIVE or call is None:
        return waits_for
    number = f" number {call.number + 1:,}" if call.number is not None else ""
    return f"{call.function}{number} of {len(PROGRESS.groups.get(call.group, ()))} ranks"


class HeartbeatFile:
    """The `heartbeats.json` of one attempt of a run. It is overwritten in place, because creating a
    new file every two seconds would load a disk to which checkpoints are written.

    Args:
        path: path of the file, which the first :meth:`write` creates.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._size = 0
        self._written_at = -math.inf

    def write(self, ranks: Sequence[RankStatus]) -> None:
        """Write the status of all ranks, at most every two seconds. A full disk is ignored."""
        if time.monotonic() - self._written_at < _EVERY_S:
            return
        self._written_at, now = time.monotonic(), time.time()
        with contextlib.suppress(OSError):
            if self._file is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
                self._file = os.open(self.path, flags, 0o644)
            rows = [
                {
                    "rank": status.rank,
                    "host": status.host,
                    "pid": status.pid,
                    "phase": status.phase,
                    "step": status.step,
                    "waits_for": status.waits_for,
                    # times of the last heartbeat and of the last progress, on the same clock for
                    # all ranks
                    "heard_at": round(now - status.since_heartbeat_s, 2),
                    "moved_at": round(now - status.stalled_s, 2),
                    "state": status.state,
                }
                for status in ranks
            ]
            text = json.dumps({"time": round(now, 3), "every_s": _EVERY_S, "ranks": rows})
            # The file never becomes shorter, so that no reader gets a truncated one.
            self._size = max(self._size, len(text))
            os.pwrite(self._file, text.ljust(self._size).encode() + b"\n", 0)

    def close(self) -> None:
        """Remove the file: the end of the run is in its event log."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            with contextlib.suppress(OSError):
                self.path.unlink()
