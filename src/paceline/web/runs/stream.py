"""Server-sent events. All viewers of a run share one reader of its log, and all viewers of the list
share one search."""

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import cast

from starlette.responses import StreamingResponse

from paceline.core.events import Event
from paceline.web.files import open_inside, stat_inside
from paceline.web.responses import encode
from paceline.web.runs.discovery import Run, RunEntry, Runs
from paceline.web.runs.log_lines import next_line, parse

# With many viewers, new events are sent less often.
_TICK_S, _CROWD_TICK_S = 0.2, 0.7
_CROWD = 10
_STATUS_S = 1.0  # minimum time between two summaries
_READ_BYTES = 1 << 20  # maximum read in one tick, and of the events before a viewer joined
_RANK_KEYS = ("ranks", "memory_bytes")
_MAX_STEPS_WITH_RANKS = 4
_CHUNK_BYTES = 1 << 20
_QUEUE_BYTES = 2 << 20  # maximum waiting for one slow viewer
_KEEPALIVE_S = 15.0
_WRITE_BYTES = 1 << 16


class SSEClient:
    """The queue of messages for one browser. If the browser is too slow, the oldest events are
    dropped and counted."""

    def __init__(self) -> None:
        self._queue: deque[tuple[str, bytes, int, int]] = deque()
        self._bytes = 0
        self._dropped = 0
        self._has_news = asyncio.Event()
        self._ended = False

    def put(self, name: str, body: bytes, num_events: int = 0, end: int = 0) -> None:
        """Queue a message.

        Args:
            name: name of the server-sent event.
            body: JSON. For an ``append``, the list of its events.
            num_events: the number of events in an ``append``.
            end: the byte of the log at which the events of an ``append`` end.
        """
        if name == "status":  # only the newest matters
            for message in [queued for queued in self._queue if queued[0] == name]:
                self._queue.remove(message)
                self._bytes -= len(message[1])
        self._queue.append((name, body, num_events, end))
        self._bytes += len(body)
        while self._bytes > _QUEUE_BYTES and len(self._queue) > 1:
            _, body, count, _ = self._queue.popleft()
            self._bytes -= len(body)
            self._dropped += count
        self._has_news.set()

    def drop(self, count: int) -> None:
        """Count events that were left out before they were queued."""
        self._dropped += count

    def end(self) -> None:
        """End the response after the queued messages."""
        self._ended = True
        self._has_news.set()

    def take(self) -> bytes:
        """Return the queued messages up to a maximum size, to be sent with one write."""
        messages: list[bytes] = []
        size = 0
        while self._queue and size < _WRITE_BYTES:
            name, body, _, end = self._queue.popleft()
            self._bytes -= len(body)
            if name == "append":
                body = b'{"events":%s,"bytes":%d,"dropped":%d}' % (body, end, self._dropped)
                self._dropped = 0
            messages.append(b"event: %s\ndata: %s\n\n" % (name.encode(), body))
            size += len(body)
        return b"".join(messages)

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield what to send; after a while without messages a comment, which keeps the connection
        open."""
        while self._queue or not self._ended:
            if not self._queue:
                self._has_news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._has_news.wait(), _KEEPALIVE_S)
            yield self.take() or b": keepalive\n\n"


class EventStream(StreamingResponse):
    """A response that sends a viewer's messages until the viewer leaves or they end.

    Args:
        subscribe: adds a viewer to a source for the duration of the block.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        subscribe: Callable[[SSEClient], AbstractAsyncContextManager[None]],
    ) -> None:
        async def send() -> AsyncIterator[bytes]:
            yield b"retry: 1000\n\n"
            viewer = SSEClient()
            async with subscribe(viewer):
                async for message in viewer.messages():
                    yield message

        super().__init__(send(), headers={"x-accel-buffering": "no"})


class _Source:
    """A task that polls for news while it has viewers."""

    def __init__(self) -> None:
        self.viewers: set[SSEClient] = set()
        self.joining: set[SSEClient] = set()  # viewers that still get earlier events
        self._task: asyncio.Task[None] | None = None

    def join(self, viewer: SSEClient) -> None:
        self.joining.discard(viewer)
        self.viewers.add(viewer)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def leave(self, viewer: SSEClient) -> None:
        self.joining.discard(viewer)
        self.viewers.discard(viewer)

    def send(self, name: str, body: bytes, num_events: int = 0, end: int = 0) -> None:
        for viewer in self.viewers:
            viewer.put(name, body, num_events, end)

    def send_state(self, viewer: SSEClient) -> None:
        """Send a new viewer the state that the others have received."""
        raise NotImplementedError

    async def _run(self) -> None:
        while self.viewers:
            await self._tick()
            # Writing to a hundred browsers takes milliseconds of a core that may be training.
            await asyncio.sleep(_TICK_S if len(self.viewers) <= _CROWD else _CROWD_TICK_S)

    async def _tick(self) -> None:
        raise NotImplementedError


class RunEventSource(_Source):
    """One run: its new events and its summary. ``position``: the byte up to which the events were
    sent."""

    def __init__(self, run: Run, position: int) -> None:
        super().__init__()
        self.run = run
        self.position = position
        self._inode = 0
        self._status: bytes | None = None
        self._status_at = -float("inf")

    async def _tick(self) -> None:
        events, end, skipped, status = await asyncio.to_thread(self._poll)
        for viewer in self.viewers:
            viewer.drop(skipped)
        if events or skipped:
            self.send("append", encode(without_ranks(events)), len(events), end)
        self.position = end
        if status is None:
            self.send("gone", b"{}")
            for viewer in list(self.viewers):
                viewer.end()
        elif status != self._status:
            self._status = status
            self.send("status", status)

    def _poll(self) -> tuple[list[Event], int, int, bytes | None]:
        """Return the new events, the byte at which they end, the number of events left out, and the
        summary; None instead of a summary if the run was deleted."""
        events: list[Event] = []
        end = skipped = 0
        log = stat_inside(self.run.run_dir.events)
        if log is not None:
            if log.st_size < self.position or (self._inode and log.st_ino != self._inode):
                self.position = 0
            self._inode = log.st_ino
            events, end, skipped = read_events(self.run, self.position, log.st_size)
        status = self._status
        has_turned = any(event["type"] in ("run_end", "run_start") for event in events)
        if status is None or has_turned or time.monotonic() - self._status_at > _STATUS_S:
            self._status_at = time.monotonic()
            status = encode(self.run.entry()) if os.path.isdir(self.run.root) else None
        return events, end, skipped, status

    def send_state(self, viewer: SSEClient) -> None:
        if self._status is not None:
            viewer.put("status", self._status)


def read_events(run: Run, begin: int, end: int) -> tuple[list[Event], int, int]:
    """Read the events of the complete lines between two bytes of a run's log.

    Returns:
        The events, the byte at which they end, and the number of earlier lines that were left out
        because of the size limit.
    """
    handle = open_inside(run.run_dir.events) if end > begin else None
    if handle is None:
        return [], begin, 0
    with handle:
        file, num_skipped = handle.fileno(), 0
        if end - begin > _READ_BYTES:
            num_skipped, begin = _count_lines(file, begin, end - _READ_BYTES)
        block = os.pread(file, max(0, end - begin), begin)
    size = block.rfind(b"\n") + 1
    events = [parse(line) for line in block[:size].split(b"\n") if line]
    return [event for event in events if event is not None], begin + size, num_skipped


_counting = threading.Lock()  # one long log at a time


def _count_lines(file: int, begin: int, end: int) -> tuple[int, int]:
    """Return the number of lines that begin in ``[begin, end)``, and where the next line begins."""
    count = 0
    with _counting:
        for offset in range(begin, end, _CHUNK_BYTES):
            count += os.pread(file, min(_CHUNK_BYTES, end - offset), offset).count(b"\n")
    next_begin = next_line(file, end)
    return (count, end) if next_begin is None else (count + 1, next_begin)


def without_ranks(events: list[Event]) -> list[Event]:
    """Remove the figures of the ranks from all steps but the last, if there are many steps."""
    steps = [index for index, event in enumerate(events) if event["type"] == "step"]
    if len(steps) <= _MAX_STEPS_WITH_RANKS:
        return events
    reduced = list(events)
    for index in steps[:-1]:
        step = {name: value for name, value in events[index].items() if name not in _RANK_KEYS}
        reduced[index] = cast(Event, step)
    return reduced


class ListSource(_Source):
    """The list of runs: the entries that changed."""

    def __init__(self, runs: Runs) -> None:
        super().__init__()
        self.runs = runs
        self._sent: dict[str, RunEntry] = {}
        self._polled_at = -float("inf")

    def send_state(self, viewer: SSEClient) -> None:
        if self._sent:
            viewer.put("runs", encode({"changed": list(self._sent.values()), "removed": []}))

    def poll_soon(self) -> None:
        """Look for changes at the next tick."""
        self._polled_at = -float("inf")

    async def _tick(self) -> None:
        if time.monotonic() - self._polled_at < _STATUS_S:
            return
        self._polled_at = time.monotonic()
        entries = {entry["id"]: entry for entry in await asyncio.to_thread(self.runs.entries)}
        changed = [entry for id, entry in entries.items() if self._sent.get(id) != entry]
        removed = [id for id in self._sent if id not in entries]
        self._sent = entries
        if changed or removed:
            self.send("runs", encode({"changed": changed, "removed": removed}))


class Streams:
    """All sources that have viewers."""

    def __init__(self, runs: Runs) -> None:
        self._of_runs: dict[str, RunEventSource] = {}
        self._list = ListSource(runs)
        self._viewers: set[SSEClient] = set()
        self._lookup = asyncio.Lock()
        self._closed = False

    def list_changed(self) -> None:
        """Send the list again soon, because a user has changed it."""
        self._list.poll_soon()

    def of_list(self, viewer: SSEClient) -> AbstractAsyncContextManager[None]:
        """Send ``runs`` messages."""
        return self._serve(self._list, viewer)

    @asynccontextmanager
    async def of_run(self, run: Run, after: int | None, viewer: SSEClient) -> AsyncIterator[None]:
        """Send ``append``, ``status`` and ``gone`` messages. ``after``: the byte of the log after
        which events are sent; None for new events only."""
        source = await self._source(run, viewer)
        begin = source.position if after is None else after
        try:
            # The source may advance while the earlier events are read.
            while begin < source.position:
                events, end, skipped = await asyncio.to_thread(
                    read_events, run, begin, source.position
                )
                viewer.drop(skipped)
                viewer.put("append", encode(without_ranks(events)), len(events), end)
                if end <= begin:
                    break
                begin = end
            async with self._serve(source, viewer):
                yield
        finally:
            source.leave(viewer)

    async def _source(self, run: Run, viewer: SSEClient) -> RunEventSource:
        """Return the source that all viewers of a run share."""
        async with self._lookup:
            source = self._of_runs.get(run.id)
            if source is None or source.run is not run or not (source.viewers or source.joining):
                position = await asyncio.to_thread(_last_line_end, run)
                source = self._of_runs[run.id] = RunEventSource(run, position)
            source.joining.add(viewer)
            return source

    @asynccontextmanager
    async def _serve(self, source: _Source, viewer: SSEClient) -> AsyncIterator[None]:
        source.send_state(viewer)
        source.join(viewer)
        self._viewers.add(viewer)
        if self._closed:
            viewer.end()
        try:
            yield
        finally:
            source.leave(viewer)
            self._viewers.discard(viewer)

    def close(self) -> None:
        """End all streams, so that the server can shut down."""
        self._closed = True
        for viewer in list(self._viewers):
            viewer.end()


def _last_line_end(run: Run) -> int:
    """Return the byte at which the last complete line of a log ends."""
    handle = open_inside(run.run_dir.events)
    if handle is None:
        return 0
    with handle:
        size = os.fstat(handle.fileno()).st_size
        begin = max(0, size - _READ_BYTES)
        return begin + os.pread(handle.fileno(), size - begin, begin).rfind(b"\n") + 1
