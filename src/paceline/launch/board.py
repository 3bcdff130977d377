"""The board at which the launchers of several hosts meet: a store at the head, with one answer or a clear end to each question.

Everything that the launchers say to each other is a key of that store with a JSON value:

- ``born``: by which one head is known from the next.
- ``joins``, ``join/ID``: a host that wants to take part, and what it has; ``beat/ID``: counted up each second.
- ``round``: the number of the present round; ``round/R``: who is in it, with which ranks.
- ``said/R/ID/WHAT``: a host's answer: ``shared``, ``planned``, ``ended``; ``fetched``, beside it.
- ``word/R/WHAT``: the head's: ``share``, ``depot``, ``from``, ``layout``, ``go``, ``stop``, ``over``; ``refused/ID``; ``end``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

#: A question to the head that gets no answer for so long means that this host is cut off; a host that says nothing for so long
#: is held for gone.
PATIENCE_S = 10.0
_BEAT_S = 1.0
DEFAULT_PORT = 29500


class CutOff(Exception):
    """The head does not answer."""


class Board:
    """A client of the head's store. Its calls may be made by one thread at a time."""

    def __init__(self, address: str, port: int) -> None:
        from torch.distributed import TCPStore

        self.address, self.port = address, port
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="board")
        self._store: Any = self._ask(
            lambda: TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE_S))
        )

    def get(self, key: str) -> Any:
        """What is written there, or None."""
        found = self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if found is None else json.loads(found)

    def put(self, key: str, value: Any) -> None:
        self._ask(lambda: self._store.set(key, json.dumps(value)))

    def count(self, key: str, step: int = 1) -> int:
        """Count a number up, and read it."""
        return int(self._ask(lambda: self._store.add(key, step)))

    def close(self) -> None:
        self._asking.shutdown(wait=False)

    def _ask(self, question: Callable[[], Any]) -> Any:
        # A store's own time limit does not cover a link that is cut in the middle of an answer.
        try:
            return self._asking.submit(question).result(PATIENCE_S + 2.0)
        except (TimeoutError, RuntimeError) as error:  # torch's DistError is a RuntimeError
            raise CutOff(str(error).splitlines()[0] if str(error) else "no answer") from error


class Beats(threading.Thread):
    """Says once a second that this host lives, by a connection of its own, whatever the launcher is doing meanwhile."""

    def __init__(self, address: str, port: int, number: int) -> None:
        super().__init__(name="beats", daemon=True)
        self._where = (address, port)
        self._key = f"beat/{number}"
        self._ended = threading.Event()
        self._heard_at = time.monotonic()

    @property
    def heard(self) -> bool:
        """False where the head has not answered for too long."""
        return time.monotonic() - self._heard_at < PATIENCE_S

    def run(self) -> None:
        with contextlib.suppress(CutOff):
            board = Board(*self._where)
            while not self._ended.wait(_BEAT_S):
                board.count(self._key)
                self._heard_at = time.monotonic()

    def end(self) -> None:
        self._ended.set()


def own_address(head: str, port: int) -> str:
    """The address of this host from which the way to ``head`` begins.

    Raises:
        OSError: ``head`` does not resolve, or no way leads there.
    """
    kind, _, _, _, where = socket.getaddrinfo(head, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # sends nothing
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface that has this address."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.split("%")[0] == address for one in addresses):
            return name
    return None


def is_own(address: str) -> bool:
    """Whether the address is one of this host's."""
    return ipaddress.ip_address(address).is_loopback or interface_of(address) is not None


def answers(address: str, port: int, within_s: float) -> bool:
    """Whether something listens there."""
    try:
        with socket.create_connection((address, port), timeout=within_s):
            return True
    except OSError:
        return False
