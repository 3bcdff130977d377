"""The event log of a run. Rank 0 appends one JSON line per event; all other code only reads it."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from paceline.core.events import Event, NoticeEvent, RunStartEvent, StepEvent
from paceline.core.formatting import finite
from paceline.core.texts import UserText


class EventLog:
    """Appends events to a file and passes each one to the listeners, such as the console. Listeners
    must not raise. :meth:`emit` is thread-safe.

    A failed write, for example on a full disk, never stops the training: it is counted in ``lost``
    and reported to the listeners once.
    """

    def __init__(
        self, path: Path | None, listeners: list[Callable[[Event], None]] | None = None
    ) -> None:
        self.listeners = listeners or []
        self.lost = 0
        self.path: Path | None = None
        self._cut = False
        self._lock = threading.RLock()
        self._handle: IO[bytes] | None = None
        if path is not None:
            self.open(path, self.listeners)

    def open(self, path: Path, listeners: list[Callable[[Event], None]]) -> None:
        """Start writing to ``path``, which another process may have written before."""
        self.path, self.listeners = path, listeners
        _end_cut_line(path)
        self._handle = open(path, "ab", buffering=0)  # noqa: SIM115  (kept open until the end of the run)

    def emit(self, event: Event, file_only: bool = False) -> None:
        """Append an event with the current time. With ``file_only`` the listeners do not receive
        it, because the console has already printed it."""
        logged = cast(Event, {"time": time.time(), **event})
        with self._lock:
            if not file_only:
                self._inform(logged)
            if self._handle is None:
                return
            try:
                self._append(json.dumps(_finite(logged), ensure_ascii=False).encode() + b"\n")
            except OSError as error:
                self.lost += 1
                if self.lost == 1:
                    text = (
                        f"{self.path} cannot be written ({error.strerror}); training continues,"
                        " but events are lost"
                    )
                    self._inform(
                        {"time": time.time(), "type": "notice", "level": "warning", "text": text}
                    )

    def _inform(self, event: Event) -> None:
        for listener in self.listeners:
            listener(event)

    def _append(self, line: bytes) -> None:
        # A full disk may accept only part of a line; the next line must not be appended to it.
        assert self._handle is not None
        data = b"\n" + line if self._cut else line
        written = self._handle.write(data) or 0
        self._cut = written < len(data) and (self._cut or written > 0)
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def notice(self, text: str, level: str = "info", file_only: bool = False) -> None:
        event: NoticeEvent = {"type": "notice", "level": level, "text": text}
        if isinstance(text, UserText):
            event |= {"code": text.code, "values": text.values}
        self.emit(event, file_only)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close()
            self._handle = None


def _end_cut_line(path: Path) -> None:
    # A run that was killed during a write leaves a partial line; the next line must not be appended
    # to it.
    if not path.exists() or path.stat().st_size == 0:
        return
    with open(path, "rb+") as handle:
        handle.seek(-1, os.SEEK_END)
        if handle.read(1) != b"\n":
            handle.write(b"\n")


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON cannot represent, by "nan", "inf" and "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def read_events(path: Path) -> list[Event]:
    """Return the events of a log in order. Lines that a crash truncated are skipped."""
    if not path.exists():
        return []
    with open(path, "rb") as handle:
        return [event for line in handle if (event := parse_event(line)) is not None]


def tail_events(path: Path, size_bytes: int = 1 << 18) -> list[Event]:
    """Return the events in the last ``size_bytes`` of a log."""
    if not path.exists():
        return []
    with open(path, "rb") as handle:
        handle.seek(0, os.SEEK_END)
        start = max(0, handle.tell() - size_bytes)
        handle.seek(start)
        lines = handle.read().split(b"\n")[1 if start else 0 :]
    return [event for line in lines if (event := parse_event(line)) is not None]


def follow_events(
    path: Path, poll_s: float = 0.3, stop: Callable[[], bool] | None = None
) -> Iterator[Event]:
    """Yield the existing events, then each new one, until ``stop()`` is true."""
    with EventReader(path) as reader:
        while True:
            events = reader.read_new()
            yield from events
            if events:
                continue
            if stop is not None and stop():
                return
            time.sleep(poll_s)


class EventReader:
    """Reads a log that is still being written. A context manager, which closes the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: BinaryIO | None = None
        self._rest = b""

    def __enter__(self) -> EventReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.close()

    def read_new(self) -> list[Event]:
        """Return the events since the last call; none while the log does not exist."""
        if self._handle is None:
            try:
                self._handle = open(self.path, "rb")  # noqa: SIM115  (closed in __exit__)
            except FileNotFoundError:
                return []
        *lines, self._rest = (self._rest + self._handle.read()).split(b"\n")
        return [event for line in lines if (event := parse_event(line)) is not None]


def parse_event(line: bytes) -> Event | None:
    """Return the event of a line, or None if the line is truncated or is not an event."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast(Event, event) if isinstance(event, dict) and "type" in event else None


class CommandTimes:
    """When the commands that worked on a run were given: a run that is resumed has several. All
    attempts after failures belong to their command.

    Attributes:
        first: the ``run_start`` that began the run; None before it.
        count: number of commands.
        earlier_s: how long all commands but the latest took.
        started_at: when the latest command was given.
    """

    def __init__(self) -> None:
        self.first: RunStartEvent | None = None
        self.count = 0
        self.earlier_s = 0.0
        self.started_at: float | None = None
        self._launcher: int | None = None

    def add(self, start: RunStartEvent, ended_at: float | None) -> None:
        """Add a start. ``ended_at``: the time of the event before it."""
        launcher = start.get("launcher")
        is_same_command = launcher is not None and launcher == self._launcher
        self._launcher = launcher
        # An attempt of the same command may start from step 0 after a failure.
        if is_same_command:
            return
        if self.first is None or not start.get("resumed_from_step"):
            self.first, self.count, self.earlier_s = start, 0, 0.0
        elif ended_at is not None:
            self.earlier_s += max(0.0, ended_at - (self.started_at or ended_at))
        self.count += 1
        self.started_at = command_start(start)


def command_start(start: RunStartEvent) -> float | None:
    """Return when the command of a start was given; of an older run, when the start was logged."""
    return finite(start.get("command_started_at")) or finite(start.get("time"))


def command_times(events: Iterable[Event]) -> CommandTimes:
    """Return the times of the commands in a log."""
    times, ended_at = CommandTimes(), None
    for event in events:
        if event["type"] == "run_start":
            times.add(event, ended_at)
        ended_at = finite(event.get("time")) or ended_at
    return times


def effective_steps(events: Sequence[Event]) -> list[StepEvent]:
    """Return the ``step`` events among :func:`effective_events`."""
    return [event for event in effective_events(events) if event["type"] == "step"]


def throughput(step: StepEvent, global_batch_size: Any = None) -> tuple[float | None, str]:
    """Return the throughput of a ``step`` event and its unit: tokens per second, or samples per
    second if the task has no tokens."""
    count, unit = finite(step.get("tokens")), "tokens/s"
    if count is None:
        count, unit = finite(step.get("samples")), "samples/s"
    if count is None:
        count = finite(global_batch_size)
    seconds = finite(step.get("step_time_s"))
    return (count / seconds if count is not None and seconds else None), unit


def effective_events(events: Sequence[Event]) -> list[Event]:
    """Return the events without those that a later attempt has replaced: after a run resumes from a
    checkpoint, the events that were logged after that checkpoint no longer count."""
    counted: list[Event] = []
    for event in events:
        if event["type"] == "resume":
            counted = [earlier for earlier in counted if _step_of(earlier) <= event["step"]]
        elif event["type"] == "run_start" and not event.get("resumed_from_step"):
            counted = []
        counted.append(event)
    return counted


def _step_of(event: Event) -> int:
    step = event.get("step")
    return step if isinstance(step, int) else 0
