"""The process of the server: uvicorn, and how signals end it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from paceline.core.errors import EXIT_DONE
from paceline.inference.serving.connection import TimedConnection

#: Time that running requests have after the first signal.
_GRACE_S = 30
#: Of connections: fewer than the files that a process may open.
_MAX_CONNECTIONS = 500
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ApiServer(uvicorn.Server):
    """Ends after the running requests at the first signal, and at once at the second one."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app, http=TimedConnection, ws="none", log_level="critical", access_log=False,
                server_header=False, timeout_graceful_shutdown=_GRACE_S, lifespan="off",
                limit_concurrency=_MAX_CONNECTIONS,
            )
        )  # fmt: skip
        self._first_signal: int | None = None

    def serve_until_signal(self, listener: socket.socket) -> int:
        """Answer requests until a signal. Return the exit code."""
        self.run(sockets=[listener])
        return EXIT_DONE if self._first_signal is None else 128 + self._first_signal

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals within the block. uvicorn's own method raises them again at the end."""
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Act on a signal."""
        if self._first_signal is not None:
            os._exit(128 + sig)
        self._first_signal = sig
        self.should_exit = True


def end_at_signals() -> None:
    """End this process at a signal with the exit code of the signal, until a server handles it."""

    def end(number: int, _: FrameType | None) -> None:
        os._exit(128 + number)

    for number in _SIGNALS:
        signal.signal(number, end)
