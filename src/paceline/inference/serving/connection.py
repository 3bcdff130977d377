"""Connections of clients. One without a request is closed: it would take the place of others."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedConnection(H11Protocol):
    """uvicorn's connection, with a limit to the time in which the headers of a request arrive.
    uvicorn itself limits only the time without any byte after an answer."""

    header_limit_s = 30.0
    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        super().connection_lost(exc)
        self._forget()

    @property
    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        if self._has_request:
            self._forget()
        elif self._limit is None:
            self._limit = self.loop.call_later(self.header_limit_s, self._close)

    def _forget(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _close(self) -> None:
        self._limit = None
        if not self._has_request:
            self.transport.close()
