"""Server-sent events: one reader of a run's log for all who watch it, another of the list."""

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
from paceline.web.runs.log_lines import parse

# at most five times a second; with more than so many viewers less often:
_TICK_S, _CROWD_TICK_S = 0.2, 0.7
_CROWD = 10
_STATUS_S = 1.0  # a summary at most once a second
_READ_BYTES = 1 << 20  # of new lines in one tick, and of what was before a viewer came
_OF_RANKS = ("ranks", "memory_bytes")
_MANY = 4  # so many step events in one message come without their ranks
_CHUNK_BYTES = 1 << 20
_QUEUE_BYTES = 2 << 20  # waiting for one slow viewer
_HEARTBEAT_S = 15.0
_PIECE_BYTES = 1 << 16


class SSEClient:
    """Messages on their way to one browser. If it is too slow, the oldest events are left out, and
    counted."""

    def __init__(self) -> None:
        self._queue: deque[tuple[str, bytes, int, int]] = deque()
        self._bytes = 0
        self._dropped = 0
        self._has_news = asyncio.Event()
        self._ended = False

    def put(self, name: str, body: bytes, num_events: int = 0, end: int = 0) -> None:
        """Queue a message. ``body``: JSON; of an ``append`` the list of its events, which end at
        byte ``end`` of the log."""
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
        """Count events that were left out before they reached the queue."""
        self._dropped += count

    def end(self) -> None:
        """End the answer once everything that waits is sent."""
        self._ended = True
        self._has_news.set()

    def take(self) -> bytes:
        """Return what waits, in one piece, up to a size: a write costs more than its bytes."""
        messages: list[bytes] = []
        size = 0
        while self._queue and size < _PIECE_BYTES:
            name, body, _, end = self._queue.popleft()
            self._bytes -= len(body)
            if name == "append":
                body = b'{"events":%s,"bytes":%d,"dropped":%d}' % (body, end, self._dropped)
                self._dropped = 0
            messages.append(b"event: %s\ndata: %s\n\n" % (name.encode(), body))
            size += len(body)
        return b"".join(messages)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield what is to be written, and a comment now and then so that the link stays open."""
        while self._queue or not self._ended:
            if not self._queue:
                self._has_news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._has_news.wait(), _HEARTBEAT_S)
            yield self.take() or b": still there\n\n"


class EventStream(StreamingResponse):
    """The answer that carries a viewer's messages until it leaves, or they end.

    Args:
        listen: adds a viewer to a source for as long as the block lasts.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        listen: Callable[[SSEClient], AbstractAsyncContextManager[None]],
        status_code: int = 200,
    ) -> None:
        super().__init__(_send(listen), status_code, headers={"x-accel-buffering": "no"})


async def _send(
    listen: Callable[[SSEClient], AbstractAsyncContextManager[None]],
) -> AsyncIterator[bytes]:
    yield b"retry: 1000\n\n"
    viewer = SSEClient()
    async with listen(viewer):
        async for piece in viewer.pieces():
            yield piece


class _Source:
    """A task that looks for news while anybody listens."""

    def __init__(self) -> None:
        self.viewers: set[SSEClient] = set()
        self.coming: set[SSEClient] = set()  # who are told what was before they came
        self._task: asyncio.Task[None] | None = None

    def join(self, viewer: SSEClient) -> None:
        self.coming.discard(viewer)
        self.viewers.add(viewer)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def leave(self, viewer: SSEClient) -> None:
        self.coming.discard(viewer)
        self.viewers.discard(viewer)

    def tell(self, name: str, body: bytes, num_events: int = 0, end: int = 0) -> None:
        for viewer in self.viewers:
            viewer.put(name, body, num_events, end)

    def hello(self, viewer: SSEClient) -> None:
        """Tell one who comes later what was told before, of the state."""

    async def _run(self) -> None:
        while self.viewers:
            await self._tick()
            # Writing to a hundred browsers costs a core some milliseconds, which may be one that
            # trains.
            await asyncio.sleep(_TICK_S if len(self.viewers) <= _CROWD else _CROWD_TICK_S)

    async def _tick(self) -> None:
        raise NotImplementedError


class RunSource(_Source):
    """One run: its new events, and where it stands."""

    def __init__(self, run: Run, position: int) -> None:
        super().__init__()
        self.run = run
        self.position = position  # up to which events were told
        self._inode = 0
        self._said: bytes | None = None
        self._status_at = -float("inf")

    async def _tick(self) -> None:
        events, end, skipped, status = await asyncio.to_thread(self._look)
        if skipped:
            for viewer in self.viewers:
                viewer.drop(skipped)
        if events or skipped:
            self.tell("append", encode(without_ranks(events)), len(events), end)
        self.position = end
        if status is None:
            self.tell("gone", b"{}")
            for viewer in list(self.viewers):
                viewer.end()
        elif status != self._said:
            self._said = status
            self.tell("status", status)

    def _look(self) -> tuple[list[Event], int, int, bytes | None]:
        """What there is that is new, and where the run stands; None where it was deleted."""
        events, end, skipped = self._read()
        status = self._said
        turned = any(event["type"] in ("run_end", "run_start") for event in events)
        if status is None or turned or time.monotonic() - self._status_at > _STATUS_S:
            self._status_at = time.monotonic()
            status = encode(self.run.summary()) if os.path.isdir(self.run.root) else None
        return events, end, skipped, status

    def hello(self, viewer: SSEClient) -> None:
        if self._said is not None:
            viewer.put("status", self._said)

    def _read(self) -> tuple[list[Event], int, int]:
        found = stat_inside(self.run.events)
        if found is None:
            return [], 0, 0
        if found.st_size < self.position or (self._inode and found.st_ino != self._inode):
            self.position = 0
        self._inode = found.st_ino
        return read_events(self.run, self.position, found.st_size)


def read_events(run: Run, begin: int, end: int) -> tuple[list[Event], int, int]:
    """The events of whole lines between two bytes of a run's log, the place after them, and how
    many lines before them were left out because there is more than may be sent at once."""
    handle = open_inside(run.events) if end > begin else None
    if handle is None:
        return [], begin, 0
    with handle:
        file, left_out = handle.fileno(), 0
        if end - begin > _READ_BYTES:
            left_out, begin = _count_lines(file, begin, end - _READ_BYTES)
        block = os.pread(file, end - begin, begin)
        whole = block[: block.rfind(b"\n") + 1]
    events = [event for line in whole.split(b"\n") if line and (event := parse(line)) is not None]
    return events, begin + len(whole), left_out


_counting = threading.Lock()  # of a long log one at a time


def _count_lines(file: int, begin: int, end: int) -> tuple[int, int]:
    """How many lines end in ``[begin, end)`` and the one that is cut by ``end``, and where the next
    begins."""
    count = 0
    with _counting:
        for at in range(begin, end, _CHUNK_BYTES):
            count += os.pread(file, min(_CHUNK_BYTES, end - at), at).count(b"\n")
    place = end
    while block := os.pread(file, _CHUNK_BYTES, place):
        if (cut := block.find(b"\n")) >= 0:
            return count + 1, place + cut + 1
        place += len(block)
    return count, place


def without_ranks(events: list[Event]) -> list[Event]:
    """As they are sent: where there are many steps, without what is said of each rank, but of the
    last."""
    steps = [at for at, event in enumerate(events) if event["type"] == "step"]
    if len(steps) <= _MANY:
        return events
    bare = set(steps[:-1])
    return [
        (
            cast(Event, {name: value for name, value in event.items() if name not in _OF_RANKS})
            if at in bare
            else event
        )
        for at, event in enumerate(events)
    ]


class ListSource(_Source):
    """The list of runs: the entries that changed."""

    def __init__(self, runs: Runs) -> None:
        super().__init__()
        self.runs = runs
        self._sent: dict[str, RunEntry] = {}
        self._looked_at = -float("inf")

    def hello(self, viewer: SSEClient) -> None:
        if self._sent:
            viewer.put("runs", encode({"changed": list(self._sent.values()), "removed": []}))

    async def _tick(self) -> None:
        if time.monotonic() - self._looked_at < _STATUS_S:
            return
        self._looked_at = time.monotonic()
        now = {one["id"]: one for one in await asyncio.to_thread(self.runs.summaries)}
        changed = [one for id, one in now.items() if self._sent.get(id) != one]
        removed = [id for id in self._sent if id not in now]
        self._sent = now
        if changed or removed:
            self.tell("runs", encode({"changed": changed, "removed": removed}))


class Streams:
    """Every source that somebody listens to."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self._of_runs: dict[str, RunSource] = {}
        self._list: ListSource | None = None
        self._viewers: set[SSEClient] = set()
        self._finding = asyncio.Lock()
        self._closed = False

    @asynccontextmanager
    async def of_list(self, viewer: SSEClient) -> AsyncIterator[None]:
        """Messages ``runs``."""
        if self._list is None:
            self._list = ListSource(self.runs)
        async with self._serve(self._list, viewer):
            yield

    @asynccontextmanager
    async def of_run(self, run: Run, after: int | None, viewer: SSEClient) -> AsyncIterator[None]:
        """Messages ``append``, ``status`` and ``gone``. ``after``: a byte of the log, from which on
        events are wanted."""
        source = await self._source(run, viewer)
        begin = source.position if after is None else after
        try:
            while begin < source.position:  # and what came while the past was read
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

    async def _source(self, run: Run, viewer: SSEClient) -> RunSource:
        """The one that all who watch a run share, also those who come at once."""
        async with self._finding:
            source = self._of_runs.get(run.id)
            if source is None or source.run is not run or not (source.viewers or source.coming):
                found = stat_inside(run.events)
                size = found.st_size if found is not None else 0
                size = min(size, await asyncio.to_thread(_line_end, run, size))
                source = self._of_runs[run.id] = RunSource(run, size)
            source.coming.add(viewer)
            return source

    @asynccontextmanager
    async def _serve(self, source: _Source, viewer: SSEClient) -> AsyncIterator[None]:
        source.hello(viewer)
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
        """End every stream, so that the server can."""
        self._closed = True
        for viewer in list(self._viewers):
            viewer.end()


def _line_end(run: Run, size: int) -> int:
    """Where the last whole line of a log ends."""
    handle = open_inside(run.events)
    if handle is None:
        return 0
    with handle:
        begin = max(0, size - _READ_BYTES)
        return begin + os.pread(handle.fileno(), size - begin, begin).rfind(b"\n") + 1
