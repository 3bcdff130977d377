"""One browser that listens: what is on its way to it, and the answer that carries it."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

_QUEUE_BYTES = 2 << 20  # of a viewer that is slow
_BEAT_S = 15.0
_PIECE_BYTES = 1 << 16
_LINK = "link"  # of a request's state: the connection it came by


class SSEClient:
    """Messages on their way to one browser. Where it is too slow the oldest events are left out,
    and counted."""

    def __init__(self) -> None:
        self._queue: deque[tuple[str, bytes, int, int]] = deque()
        self._bytes = 0
        self._dropped = 0
        self._link: asyncio.Transport | None = None
        self._is_chunked = True
        self._written_at = time.monotonic()
        self.ended = asyncio.Event()

    def open(self, link: asyncio.Transport, is_chunked: bool) -> None:
        """From now on :meth:`flush` writes to ``link``, in chunks as HTTP/1.1 frames them, or
        plainly."""
        self._link, self._is_chunked = link, is_chunked

    def put(self, name: str, body: bytes, num_events: int = 0, end: int = 0) -> None:
        """``body``: JSON; of an ``append`` the list of its events, which end at byte ``end`` of the
        log."""
        if name == "status":  # only the newest matters
            for one in [one for one in self._queue if one[0] == name]:
                self._queue.remove(one)
                self._bytes -= len(one[1])
        self._queue.append((name, body, num_events, end))
        self._bytes += len(body)
        while self._bytes > _QUEUE_BYTES and len(self._queue) > 1:
            name, body, count, _ = self._queue.popleft()
            self._bytes -= len(body)
            self._dropped += count

    def drop(self, count: int) -> None:
        """So many events were left out on their way here."""
        self._dropped += count

    def end(self) -> None:
        self.flush()
        self.ended.set()

    def take(self) -> bytes:
        """What waits, in one piece, up to a size: a write costs more than what is written."""
        said: list[bytes] = []
        size = 0
        while self._queue and size < _PIECE_BYTES:
            name, body, _, end = self._queue.popleft()
            self._bytes -= len(body)
            if name == "append":
                body = b'{"events":%s,"bytes":%d,"dropped":%d}' % (body, end, self._dropped)
                self._dropped = 0
            said.append(b"event: %s\ndata: %s\n\n" % (name.encode(), body))
            size += len(body)
        return b"".join(said)

    def flush(self) -> None:
        """Write what waits, unless what was written before has not left yet.

        It goes to the connection at once: a task, its timers and three layers of the server for
        each message and viewer took a quarter of a core for a hundred of them, which is taken from
        the run.
        """
        link = self._link
        while link is not None and not link.is_closing() and not link.get_write_buffer_size():
            piece = self.take()
            now = time.monotonic()
            if not piece:
                if now - self._written_at < _BEAT_S:
                    return
                piece = b": still there\n\n"
            self._written_at = now
            link.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._is_chunked else piece)


class EventStream(Response):
    """The answer that carries a viewer's messages until it goes, or they end.

    Args:
        listen: makes a viewer hear, as long as the block lasts.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        listen: Callable[[SSEClient], AbstractAsyncContextManager[Any]],
        status_code: int = 200,
    ) -> None:
        self.status_code, self.background = status_code, None
        self.init_headers({"x-accel-buffering": "no"})
        self._listen = listen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        await send({"type": "http.response.body", "body": b"retry: 1000\n\n", "more_body": True})
        viewer = SSEClient()
        viewer.open(scope["state"][_LINK], scope["http_version"] == "1.1")
        async with self._listen(viewer):
            waits = [asyncio.create_task(one) for one in (viewer.ended.wait(), _hung_up(receive))]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in waits:
                    one.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class LinkedProtocol(H11Protocol):
    """HTTP whose requests know the connection they came by, which a :class:`SSEClient` writes
    to."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, _LINK: transport}
