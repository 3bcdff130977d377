"""What a run's event log says, read once from its beginning on: its steps as columns, and every
rarer event.

A log is read a megabyte at a time, at once where little is left, or else by a background thread of
low priority.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.event_text import event_text
from paceline.core.events import Event
from paceline.core.formatting import finite
from paceline.web.files import open_inside, stat_inside
from paceline.web.runs.columns import ROW, Columns, step_row
from paceline.web.runs.log_lines import is_step, parse, parse_without_ranks, sample_lines

_CHUNK_BYTES = 1 << 20
_LONGEST_BYTES = 1 << 25  # a line longer than this is passed over
_AT_ONCE_BYTES = 8 << 20  # so much is read while a request waits
_MEMORY_BYTES = 128 << 20  # of all the runs' columns together
_KEPT = 20_000  # rare events of a kind
_SAMPLED = 1200  # lines, for the overview


@dataclass(frozen=True)
class TimelineEvent:
    """A rarer event, for the log and the time axis. ``step``: its own, or the last one before
    it."""

    time: float | None
    step: int | None
    type: str
    level: str
    text: str


class RunIndex:
    """One run's log. :meth:`advance` is called by one thread at a time; what it has found may be
    read at any moment under :attr:`lock`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.RLock()
        self.columns = Columns()
        self._overview: tuple[tuple[int, int], SampledRun] | None = None
        self._overview_lock = threading.Lock()
        self._inode = 0
        self._reset()

    def _reset(self) -> None:
        self.position = 0
        self.size = 0
        self.num_starts = 0
        self.unreadable = 0  # whole lines that are no event
        self._clear()

    def _clear(self) -> None:
        """Forget what counts no longer: a run has begun from the start."""
        self.columns.clear()
        self.start: Event | None = None
        self.memory: Event | None = None
        self.marks: deque[TimelineEvent] = deque(maxlen=_KEPT)
        self.marks_left_out = 0
        self.evals: deque[Event] = deque(maxlen=_KEPT)
        self.checkpoints: deque[Event] = deque(maxlen=_KEPT)
        self.samples: deque[Event] = deque(maxlen=200)
        self._last: tuple[int, float] | None = None  # step and tokens of the newest row
        self._pending: list[tuple[Any, ...]] = []

    @property
    def behind_bytes(self) -> int:
        """How much there is that was not read."""
        found = stat_inside(self.path)
        if found is None:
            return 0
        if found.st_ino != self._inode or found.st_size < self.position:
            return found.st_size
        return found.st_size - self.position

    def catch_up(self) -> bool:
        """Read what is new, where that is little; True where all has been read."""
        if self.behind_bytes > _AT_ONCE_BYTES:
            return False
        with self.lock:
            while self.advance():
                pass
        return True

    def overview(self) -> SampledRun:
        """What a part of the lines says, while :meth:`catch_up` says no; the same until the log has
        grown by some megabytes."""
        found = stat_inside(self.path)
        key = (0, 0) if found is None else (found.st_ino, found.st_size >> 22)
        with self._overview_lock:
            if self._overview is None or self._overview[0] != key:
                self._overview = key, sample_overview(self.path)
            return self._overview[1]

    def advance(self) -> bool:
        """Read the next megabyte; False where there is no whole line left."""
        with self.lock:
            handle = open_inside(self.path)
            if handle is None:
                self._reset()
                return False
            with handle:
                found = os.fstat(handle.fileno())
                if found.st_ino != self._inode or found.st_size < self.position:
                    self._inode = found.st_ino
                    self._reset()
                self.size = found.st_size
                chunk = os.pread(handle.fileno(), _CHUNK_BYTES, self.position)
                end = chunk.rfind(b"\n") + 1
                if not end:
                    return self._pass_over(handle.fileno(), len(chunk))
            self._take(chunk[:end])
            return True

    def _pass_over(self, file: int, read: int) -> bool:
        """A line longer than a chunk: it is taken whole where it is not too long; False where its
        end is not there yet."""
        if read < _CHUNK_BYTES:
            return False
        longer = os.pread(file, _LONGEST_BYTES, self.position)
        end = longer.find(b"\n") + 1
        if end:
            self._take(longer[:end])
        elif len(longer) == _LONGEST_BYTES:
            self.unreadable += 1
            self.position += len(longer)
        return bool(end) or len(longer) == _LONGEST_BYTES

    def _take(self, whole: bytes) -> None:
        offset = self.position
        for line in whole.split(b"\n")[:-1]:
            if is_step(line):
                self._step(parse_without_ranks(line), offset)
            elif line:
                self._rare(parse(line), offset)
            offset += len(line) + 1
        self._flush()
        self.position = offset

    def _flush(self) -> None:
        if self._pending:
            self.columns.append(self._pending)
            self._pending = []

    def _step(self, event: Event | None, offset: int) -> None:
        row = None if event is None else step_row(event, offset, self._last)
        if row is None:
            self.unreadable += 1
            return
        # said anew, without a `resume`: the later line counts
        if self._last is not None and row[1] <= self._last[0]:
            self._cut(row[1] - 1)
            row = step_row(event or {}, offset, self._last)
            assert row is not None
        self._pending.append(row)
        self._last = (row[1], row[3])

    def _cut(self, step: int) -> None:
        self._flush()
        self.columns.cut_after(step)
        last = self.columns.slice(max(0, self.columns.rows - 1), self.columns.rows)
        self._last = (int(last["step"][0]), float(last["tokens"][0])) if len(last) else None

    def _rare(self, event: Event | None, offset: int) -> None:
        if event is None:
            self.unreadable += 1
            return
        kind, step = event["type"], event.get("step")
        if kind == "step":
            self._step(event, offset)
            return
        if kind == "run_start":
            self.num_starts += 1
            if not event.get("resumed_from_step"):
                self._clear()
            self.start = event
        elif kind == "resume" and type(step) is int:
            self._cut(step)
            for kept in (self.evals, self.checkpoints, self.samples):
                counting = [event for event in kept if (finite(event.get("step")) or 0) <= step]
                kept.clear()
                kept.extend(counting)
        self._keep(kind, event)
        self._mark(event)

    def _keep(self, kind: Any, event: Event) -> None:
        if kind == "memory":
            self.memory = event
        kept = {"eval": self.evals, "checkpoint": self.checkpoints, "sample": self.samples}
        if isinstance(kind, str) and kind in kept:
            kept[kind].append(event)

    def _mark(self, event: Event) -> None:
        self.marks_left_out += len(self.marks) == self.marks.maxlen
        self.marks.append(mark_of(event, self._last[0] if self._last else None))


def mark_of(event: Event, last_step: int | None) -> TimelineEvent:
    """``last_step``: the one logged before it, for an event that has none of its own."""
    own = event.get("step")
    level, text = event_text(event)
    step = own if type(own) is int else last_step
    return TimelineEvent(finite(event.get("time")), step, str(event["type"])[:100], level, text)


@dataclass(frozen=True)
class SampledRun:
    """A log too long to be read at once, by lines spread over it. ``rows``: of
    :data:`~paceline.web.runs.columns.ROW`."""

    rows: np.ndarray
    marks: list[TimelineEvent]
    evals: list[Event]
    size: int


def sample_overview(path: Path) -> SampledRun:
    """Look at about ``_SAMPLED`` lines. Where a run went back, later lines replace earlier ones of
    the same steps."""
    rows: list[tuple[Any, ...]] = []
    rare: list[tuple[Event, int | None]] = []
    handle = open_inside(path)
    size = 0
    if handle is not None:
        with handle:
            size = os.fstat(handle.fileno()).st_size
            for offset, line in sample_lines(handle, 0, size, _SAMPLED):
                event = parse_without_ranks(line) if is_step(line) else parse(line)
                if event is None:
                    continue
                if event["type"] != "step":
                    rare.append((event, rows[-1][1] if rows else None))
                    continue
                row = step_row(event, offset, None)
                while row is not None and rows and rows[-1][1] >= row[1]:
                    rows.pop()
                if row is not None:
                    # How many tokens came before is not known without the lines between: as many a
                    # step as here.
                    before = (rows[-1][1], rows[-1][3]) if rows else None
                    rows.append(step_row(event, offset, before) or row)
    marks = [mark_of(event, step) for event, step in rare]
    return SampledRun(
        np.array(rows, dtype=ROW),
        marks,
        [event for event, _ in rare if event["type"] == "eval"],
        size,
    )


class IndexWorker:
    """The thread that reads long logs, and the bound on what all indexes hold together."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "panel-index", _lower_priority)
        self._waiting: set[int] = set()
        self._used: dict[int, RunIndex] = {}  # in the order of their last use
        self._lock = threading.Lock()
        self._closed = False

    def ready(self, index: RunIndex) -> bool:
        """Whether all of a log has been read; what is missing is read now if it is little, or else
        in the background."""
        with self._lock:
            self._used.pop(id(index), None)
            self._used[id(index)] = index
        self._forget()
        if index.catch_up():
            return True
        with self._lock:
            if id(index) not in self._waiting and not self._closed:
                self._waiting.add(id(index))
                self._executor.submit(self._read, index)
        return False

    def finish(self, index: RunIndex) -> None:
        """Read a log to its end now, however long it is."""
        self.ready(index)
        while not self._closed and index.advance():
            pass

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._executor.shutdown(cancel_futures=True)

    def _forget(self) -> None:
        """The columns of the runs that nobody has looked at for longest go first."""
        with self._lock:
            held = sum(index.columns.size_bytes for index in self._used.values())
            while held > _MEMORY_BYTES and len(self._used) > 1:
                oldest = self._used.pop(next(iter(self._used)))
                held -= oldest.columns.size_bytes
                with oldest.lock:
                    oldest._reset()

    def _read(self, index: RunIndex) -> None:
        while not self._closed and index.advance():
            # a request that waits for the lock, or for the interpreter, goes first
            time.sleep(0.002)
        with self._lock:
            self._waiting.discard(id(index))
        self._forget()


def _lower_priority() -> None:
    """Of this thread alone, on Linux."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
