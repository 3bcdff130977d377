"""Work that rank 0 does alone while the other ranks wait for it, such as writing the trained model.

The other ranks do not wait in a collective, which would fail after
``parallel.collective_timeout_s``, but through the store of the process group. They wait as long as
rank 0 makes progress, and for ``recovery.rank0_timeout_s`` without progress.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.core.errors import RunError
from paceline.distributed import torch_compat
from paceline.distributed.communicator import Communicator
from paceline.distributed.timing.progress import PROGRESS

#: Seconds between two publications of rank 0's progress, if there was any.
_PUBLISH_EVERY_S = 1.0
#: The pause between two requests of a waiting rank is this share of the time that it has waited, up
#: to a limit that keeps the requests of all ranks per second few.
_PAUSE_SHARE, _MIN_PAUSE_S, _MAX_PAUSE_S, _REQUESTS_PER_S = 0.1, 0.001, 0.25, 500
#: A rank stops waiting if the store has not answered for this long.
_STORE_TIMEOUT_S = 60.0
#: Time limit for one answer of the store.
_ANSWER_TIMEOUT = timedelta(seconds=10)
#: The watchdog reports rank 0 as hung this much later than the other ranks stop waiting for it.
_REPORT_LATER_S = 60.0

_numbers = itertools.count()  # of the phases, the same on all ranks


@contextmanager
def rank_zero_phase(comm: Communicator, doing: str, folder: Path | None = None) -> Iterator[None]:
    """Let rank 0 work alone within the block. At the end of the block, the other ranks wait until
    rank 0 has left it, with or without an exception; rank 0 does not wait for them. All ranks must
    enter the block, and no rank may issue a collective in it.

    Progress is what :class:`~paceline.distributed.timing.progress.ProgressTracker` records on
    rank 0, such as a batch that was evaluated or bytes that were sent, and the size of the files in
    ``folder``. The watchdog reports a rank that is in the block only if it sends no heartbeats.

    Args:
        comm: all ranks of the run.
        doing: what rank 0 does, for messages: "writing the trained model".
        folder: folder whose files grow while rank 0 makes progress.

    Raises:
        RunError: on a waiting rank, if rank 0 made no progress for too long.
    """
    if comm.size == 1 or not comm.has_peers:
        yield
        return
    store, key = _StoreConnection(), f"paceline/rank0/{next(_numbers)}"
    leader = comm.first
    with PROGRESS.patient(comm.rank0_timeout_s + _REPORT_LATER_S):
        if comm.rank == leader:
            publisher = _ProgressPublisher(store, key, folder)
            try:
                yield
            finally:
                publisher.close()
                store.set(f"{key}/done", "yes")
            return
        yield
    with PROGRESS.waiting(f"rank {leader}, which is {doing}"):
        _wait(comm, store, key, leader, doing)


def _wait(comm: Communicator, store: _StoreConnection, key: str, leader: int, doing: str) -> None:
    """Wait until rank ``leader`` has left the phase or has ended.

    Raises:
        RunError: it made no progress for ``comm.rank0_timeout_s``.
    """
    limit_s, max_pause_s = comm.rank0_timeout_s, max(_MAX_PAUSE_S, comm.size / _REQUESTS_PER_S)
    progress: bytes | None = None
    began = since = time.monotonic()
    while not store.has(f"{key}/done"):
        waited_s = time.monotonic() - began
        time.sleep(min(max(_PAUSE_SHARE * waited_s, _MIN_PAUSE_S), max_pause_s))
        if waited_s < _PUBLISH_EVERY_S:
            continue
        if comm.has_ended(leader):
            return
        seen = store.read(f"{key}/progress")
        if seen is not None and seen != progress:
            progress, since = seen, time.monotonic()
        elif time.monotonic() - since > limit_s:
            raise RunError(
                "rank {leader} has made no progress for {limit_s} s while it was {doing}, and rank"
                " {rank} waited for it",
                code="rank-zero-stuck",
                fix="if this work takes longer on your machine, raise `recovery.rank0_timeout_s`;"
                " otherwise check the disk, the network and the code that rank 0 runs",
                leader=leader,
                limit_s=f"{limit_s:.0f}",
                doing=doing,
                rank=comm.rank,
            )


class _ProgressPublisher:
    """Publishes the progress of rank 0 from a thread: a number that changes only if rank 0 has made
    progress."""

    def __init__(self, store: _StoreConnection, key: str, folder: Path | None) -> None:
        self._store, self._key, self._folder = store, f"{key}/progress", folder
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-0-progress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        size_bytes, marks = 0, PROGRESS.marks
        while not self._ended.wait(_PUBLISH_EVERY_S):
            before, size_bytes = size_bytes, _folder_bytes(self._folder)
            if size_bytes != before:
                PROGRESS.tick()
            if PROGRESS.marks != marks:
                marks = PROGRESS.marks
                with suppress(RuntimeError, OSError):  # the next change is published
                    self._store.set(self._key, str(marks))


def _folder_bytes(folder: Path | None) -> int:
    """Return the size of the files in a folder and its subfolders."""
    if folder is None:
        return 0
    size_bytes = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size_bytes += os.stat(os.path.join(root, name)).st_size
    return size_bytes


class _StoreConnection:
    """A connection of its own to the store of the process group, so that requests of other threads
    do not delay it."""

    #: The store of the process group, and the connection to it that all phases share.
    _open: tuple[Any, Any] | None = None

    def __init__(self) -> None:
        store = torch_compat.default_store()
        opened = _StoreConnection._open
        if opened is None or opened[0] is not store:
            self._connect()
        self._answered_at = time.monotonic()

    def _connect(self) -> None:
        store: Any = torch_compat.default_store()
        connection = store.clone()
        connection.set_timeout(_ANSWER_TIMEOUT)
        _StoreConnection._open = store, connection

    @property
    def _connection(self) -> Any:
        assert self._open is not None
        return self._open[1]

    def set(self, key: str, value: str) -> None:
        self._connection.set(key, value)

    def has(self, key: str) -> bool:
        """Return whether ``key`` exists; no, if the store does not answer."""
        return bool(self._ask(lambda connection: connection.check([key])))

    def read(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None if there is none or the store does not answer."""
        value: bytes | None = self._ask(
            lambda connection: connection.get(key) if connection.check([key]) else None
        )
        return value

    def _ask(self, request: Callable[[Any], Any]) -> Any:
        """Return the answer to a request, or None and connect again if there is none.

        Raises:
            DistNetworkError: the store has not answered for a minute.
        """
        try:
            answer = request(self._connection)
        except (RuntimeError, OSError) as error:
            if time.monotonic() - self._answered_at > _STORE_TIMEOUT_S:
                raise dist.DistNetworkError(
                    f"the rendezvous store has not answered for {_STORE_TIMEOUT_S:.0f} s"
                ) from error
            with suppress(RuntimeError, OSError):
                self._connect()
            return None
        self._answered_at = time.monotonic()
        return answer
