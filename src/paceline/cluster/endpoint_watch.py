"""Notices that the rendezvous endpoint has gone without closing its connections: power loss, a cut
cable, a new address.

torch's store has no timeout for a request on an open connection. An agent that asks a host that has
vanished would wait until TCP gives up, about 15 minutes later. The watch closes such connections
itself, so that the agent gets an error and enters the rendezvous again.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from types import TracebackType

from paceline.cluster.endpoint import Endpoint, is_listening

_EVERY_S = 2.0
_CONNECT_S = 3.0
#: The endpoint is given up after so long without an answer. A cut that is shorter ends nothing. The
#: kernel of a host whose processes are paused still accepts connections, so a pause of any length
#: does not count.
_LOST_AFTER_S = 30.0


class EndpointWatch:
    """A context in which this process's connections to the endpoint are closed once it cannot be
    reached any more, or once its name leads to another address that answers. Does nothing on the
    endpoint's own host."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> EndpointWatch:
        if not self.endpoint.is_local:
            self._thread = threading.Thread(target=self._run, name="endpoint-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        answered_at = time.monotonic()
        while not self._ended.wait(_EVERY_S):
            if is_listening(self.endpoint.address, self.endpoint.port, _CONNECT_S):
                answered_at = time.monotonic()
            elif time.monotonic() - answered_at > _LOST_AFTER_S or self._has_moved():
                close_connections(self.endpoint.address, self.endpoint.port)
                answered_at = time.monotonic()

    def _has_moved(self) -> bool:
        """Whether the endpoint answers at another address of its name."""
        try:
            resolved = socket.getaddrinfo(
                self.endpoint.name, self.endpoint.port, type=socket.SOCK_STREAM
            )
        except OSError:
            return False
        addresses = {str(entry[4][0]) for entry in resolved} - {self.endpoint.address}
        return any(is_listening(address, self.endpoint.port, _CONNECT_S) for address in addresses)


def close_connections(address: str, port: int) -> None:
    """Shut down every TCP connection of this process to this address: whoever waits for an answer
    there gets an error now."""
    for descriptor in _own_sockets():
        with contextlib.suppress(OSError):  # not connected, or closed meanwhile
            there = descriptor.getpeername()
            if (str(there[0]).removeprefix("::ffff:"), there[1]) == (address, port):
                descriptor.shutdown(socket.SHUT_RDWR)


def _own_sockets() -> Iterator[socket.socket]:
    """A duplicate of each TCP socket of this process, closed after its turn."""
    try:
        numbers = os.listdir("/dev/fd")
    except OSError:
        return
    for number in numbers:
        with contextlib.suppress(OSError):
            # Asked before it is duplicated: a duplicate that cannot become a socket object would
            # stay open, with its locks.
            if not stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(number))) as duplicate:
                if (
                    duplicate.family in (socket.AF_INET, socket.AF_INET6)
                    and duplicate.type == socket.SOCK_STREAM
                ):
                    yield duplicate
