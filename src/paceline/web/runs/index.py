"""Index of a run's event log: its steps as columns, and every other event.

A log is read once, a megabyte at a time: at once if little is left, otherwise in a background
thread of low priority.
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

from paceline.core.events import Event
from paceline.core.formatting import finite
from paceline.core.texts import TextCode, Values, translatable
from paceline.messages.event_text import event_text, text_of_event
from paceline.web.files import open_inside, stat_inside
from paceline.web.runs.columns import ROW, Columns, step_row
from paceline.web.runs.log_lines import (
    is_restart,
    is_step,
    parse,
    parse_without_ranks,
    sample_lines,
)

_CHUNK_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 25  # longer lines are skipped
_MAX_WAIT_BYTES = 8 << 20  # read while a request waits; more is read in the background
_MAX_MEMORY_BYTES = 128 << 20  # of the columns of all runs together
_MAX_EVENTS = 20_000  # of each kind, without steps
_SAMPLED_LINES = 1200


@dataclass(frozen=True)
class TimelineEvent:
    """An event other than a step, for the log and the time axis.

    Args:
        step: its own step, or the last step before it.
        code: the kind of text; None if it has none. ``values`` are what the text contains.
        reason: code and values of the value ``reason``, which is a text itself.
    """

    time: float | None
    step: int | None
    type: str
    level: str
    text: str
    code: str | None = None
    values: Values | None = None
    reason: TextCode | None = None


class RunIndex:
    """The index of one log. :meth:`advance` may be called by one thread at a time; the results may
    be read at any time while :attr:`lock` is held."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.RLock()
        self.columns = Columns()
        self._overview: tuple[tuple[int, int], SampledRun] | None = None
        self._overview_lock = threading.Lock()
        self._inode = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything, and read the log again from its beginning."""
        self.position = 0
        self.num_restarts = 0
        self.unreadable = 0  # complete lines that are not events
        self._clear()

    def _clear(self) -> None:
        self.columns.clear()
        self.start: Event | None = None
        self.memory: Event | None = None
        self.marks: deque[TimelineEvent] = deque(maxlen=_MAX_EVENTS)
        self.marks_left_out = 0
        self.evals: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self.checkpoints: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self.samples: deque[Event] = deque(maxlen=200)
        self._last: tuple[int, float] | None = None  # step and tokens of the newest row
        self._pending: list[tuple[Any, ...]] = []

    @property
    def behind_bytes(self) -> int:
        """The number of bytes that have not been read."""
        status = stat_inside(self.path)
        if status is None:
            return 0
        return status.st_size if self._is_other_file(status) else status.st_size - self.position

    def _is_other_file(self, status: os.stat_result) -> bool:
        """Return whether the log was replaced or truncated since it was read."""
        return status.st_ino != self._inode or status.st_size < self.position

    def catch_up(self) -> bool:
        """Read what is new, unless that is much. Return whether everything has been read."""
        if self.behind_bytes > _MAX_WAIT_BYTES:
            return False
        with self.lock:
            while self.advance():
                pass
        return True

    def overview(self) -> SampledRun:
        """Return a sample of the log, for as long as :meth:`catch_up` returns False. It is taken
        again when the log has grown by 4 MiB."""
        status = stat_inside(self.path)
        key = (0, 0) if status is None else (status.st_ino, status.st_size >> 22)
        with self._overview_lock:
            if self._overview is None or self._overview[0] != key:
                self._overview = key, sample_overview(self.path)
            return self._overview[1]

    def advance(self) -> bool:
        """Read the next megabyte. Return False if there is no complete line left."""
        with self.lock:
            handle = open_inside(self.path)
            if handle is None:
                self.reset()
                return False
            with handle:
                file = handle.fileno()
                status = os.fstat(file)
                if self._is_other_file(status):
                    self._inode = status.st_ino
                    self.reset()
                chunk = os.pread(file, _CHUNK_BYTES, self.position)
                end = chunk.rfind(b"\n") + 1
                if not end and len(chunk) == _CHUNK_BYTES:  # a long line
                    chunk = os.pread(file, _MAX_LINE_BYTES, self.position)
                    end = chunk.find(b"\n") + 1
            if end:
                self._add_lines(chunk[:end])
            elif len(chunk) == _MAX_LINE_BYTES:
                self.unreadable += 1
                self.position += len(chunk)
            return end > 0 or len(chunk) == _MAX_LINE_BYTES

    def _add_lines(self, lines: bytes) -> None:
        offset = self.position
        for line in lines.split(b"\n")[:-1]:
            if is_step(line):
                self._add_step(parse_without_ranks(line), offset)
            elif line:
                self._add_event(parse(line), offset)
            offset += len(line) + 1
        self._flush()
        self.position = offset

    def _flush(self) -> None:
        if self._pending:
            self.columns.append(self._pending)
            self._pending = []

    def _add_step(self, event: Event | None, offset: int) -> None:
        row = None if event is None else step_row(event, offset, self._last)
        if event is None or row is None:
            self.unreadable += 1
            return
        # The step was logged before, without a `resume` in between: the later line counts.
        if self._last is not None and row[1] <= self._last[0]:
            self._cut_after(row[1] - 1)
            row = step_row(event, offset, self._last) or row
        self._pending.append(row)
        self._last = (row[1], row[3])

    def _cut_after(self, step: int) -> None:
        self._flush()
        self.columns.cut_after(step)
        last = self.columns.slice(max(0, self.columns.rows - 1), self.columns.rows)
        self._last = (int(last["step"][0]), float(last["tokens"][0])) if len(last) else None

    def _add_event(self, event: Event | None, offset: int) -> None:
        if event is None:
            self.unreadable += 1
            return
        kind, step = event["type"], event.get("step")
        if kind == "step":
            self._add_step(event, offset)
            return
        by_kind = {"eval": self.evals, "checkpoint": self.checkpoints, "sample": self.samples}
        if kind == "run_start":
            self.num_restarts += is_restart(self.start, event)
            if not event.get("resumed_from_step"):
                self._clear()
            self.start = event
        elif kind == "resume" and type(step) is int:
            self._cut_after(step)
            for events in by_kind.values():
                valid = [event for event in events if (finite(event.get("step")) or 0) <= step]
                events.clear()
                events.extend(valid)
        elif kind == "memory":
            self.memory = event
        elif isinstance(kind, str) and kind in by_kind:
            by_kind[kind].append(event)
        self.marks_left_out += len(self.marks) == self.marks.maxlen
        self.marks.append(mark_of(event, self._last[0] if self._last else None))


def mark_of(event: Event, last_step: int | None) -> TimelineEvent:
    """Return an event for the time axis. ``last_step``: the last step before it, for an event that
    has no step of its own."""
    step = event.get("step")
    level, text = event_text(event)
    reason = None if "text" in event else translatable(text_of_event(event, "reason"))
    return TimelineEvent(
        finite(event.get("time")),
        step if type(step) is int else last_step,
        str(event["type"])[:100],
        level,
        text,
        **translatable(text),
        reason=reason or None,
    )


@dataclass(frozen=True)
class SampledRun:
    """Lines spread over a log that is too long to be read at once. ``rows`` has the columns
    :data:`~paceline.web.runs.columns.ROW`."""

    rows: np.ndarray
    marks: list[TimelineEvent]
    evals: list[Event]
    size: int


def sample_overview(path: Path, num_lines: int = _SAMPLED_LINES) -> SampledRun:
    """Read about ``num_lines`` lines. If a run was rolled back, later lines replace earlier ones of
    the same steps."""
    rows: list[tuple[Any, ...]] = []
    others: list[tuple[Event, int | None]] = []
    handle = open_inside(path)
    size = 0
    if handle is not None:
        with handle:
            size = os.fstat(handle.fileno()).st_size
            for offset, line in sample_lines(handle, 0, size, num_lines):
                event = parse_without_ranks(line) if is_step(line) else parse(line)
                if event is None:
                    continue
                if event["type"] != "step":
                    others.append((event, rows[-1][1] if rows else None))
                    continue
                row = step_row(event, offset, None)
                while row is not None and rows and rows[-1][1] >= row[1]:
                    rows.pop()
                if row is not None:
                    # The tokens of the steps in between are not known, so the tokens of this step
                    # are taken for each of them.
                    previous = (rows[-1][1], rows[-1][3]) if rows else None
                    rows.append(step_row(event, offset, previous) or row)
    return SampledRun(
        np.array(rows, dtype=ROW),
        [mark_of(event, step) for event, step in others],
        [event for event, _ in others if event["type"] == "eval"],
        size,
    )


class IndexWorker:
    """The thread that reads long logs, and the memory limit of all indexes together."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "panel-index", _lower_priority)
        self._waiting: set[int] = set()
        self._used: dict[int, RunIndex] = {}  # in the order of their last use
        self._lock = threading.Lock()
        self._closed = False

    def ready(self, index: RunIndex) -> bool:
        """Return whether all of a log has been read. A small rest is read at once, a large one in
        the background."""
        with self._lock:
            self._used.pop(id(index), None)
            self._used[id(index)] = index
        self._limit_memory()
        if index.catch_up():
            return True
        with self._lock:
            if id(index) not in self._waiting and not self._closed:
                self._waiting.add(id(index))
                self._executor.submit(self._read, index)
        return False

    def finish(self, index: RunIndex) -> None:
        """Read a log to its end, however long it is."""
        self.ready(index)
        while not self._closed and index.advance():
            pass

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._executor.shutdown(cancel_futures=True)

    def _limit_memory(self) -> None:
        """Reset the least recently used indexes until the limit is met."""
        with self._lock:
            size_bytes = sum(index.columns.size_bytes for index in self._used.values())
            while size_bytes > _MAX_MEMORY_BYTES and len(self._used) > 1:
                oldest = self._used.pop(next(iter(self._used)))
                size_bytes -= oldest.columns.size_bytes
                with oldest.lock:
                    oldest.reset()

    def _read(self, index: RunIndex) -> None:
        while not self._closed and index.advance():
            # Requests that wait for the lock or the interpreter go first.
            time.sleep(0.002)
        with self._lock:
            self._waiting.discard(id(index))
        self._limit_memory()


def _lower_priority() -> None:
    """Lower the priority of this thread (on Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
