"""Transfer files between rank 0 and the ranks that cannot access the run's folder.

The transfers use point-to-point messages on a separate Gloo group, so they may run in a background
thread while collectives of the training run on other groups. A transfer is a sequence of chunks of
fixed size followed by a frame (JSON) that reports how it ended. Both ends know the size beforehand.
A sender that fails fills the rest with zeros and reports the failure in the frame, so that both
ends stay synchronized.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from paceline.core.errors import RunError, first_line
from paceline.core.failures import FailureKind, classify
from paceline.core.processes import host_name
from paceline.distributed.communicator import Communicator, new_group
from paceline.distributed.traffic import uncounted

#: Size of a staging buffer in bytes. Sender and receiver have ``_WINDOW`` of them per transfer.
CHUNK_BYTES = 2 << 20
_WINDOW = 3
#: Size in bytes of a frame's first message: the length and the beginning of the JSON.
_FRAME_BYTES = 4096
_MAX_FRAME_BYTES = 1 << 30
#: A transfer in progress fails if nothing arrives for this long.
STALL_TIMEOUT_S = 900.0
#: How long a rank waits for its turn. The death of a peer is detected immediately.
_TURN_TIMEOUT = timedelta(days=7)
_PROBE_BYTES, _LARGE_PROBE_BYTES = 1 << 18, 1 << 24
_SHORT_PROBE_S = 0.1

Consume = Callable[[memoryview], None]


class TransferError(Exception):
    """Raised if the connection to a peer was closed, or if nothing arrived in time."""


class SideGroup:
    """The group of rank 0 (``root``) and the ranks that cannot access the run's folder.

    Attributes:
        remote_ranks: ranks that cannot access the folder, in ascending order.
        is_remote: whether this rank is one of them.
        is_broken: whether a transfer of this rank has failed since the group was opened; see
            :meth:`reopen`.
        num_moved: number of messages that this rank has sent or received.
    """

    root = 0

    def __init__(self, world: Communicator, remote_ranks: list[int]) -> None:
        self.world = world
        self.remote_ranks = remote_ranks
        self.members = [self.root, *remote_ranks]
        self.is_root = world.rank == self.root
        self.is_remote = world.rank in remote_ranks
        self.is_broken = False
        self.num_moved = 0
        self.reopen()

    @classmethod
    def open(cls, world: Communicator, sees_run_folder: bool) -> SideGroup | None:
        """Open the group, or return None if every rank can access the run's folder. A
        collective."""
        if world.size == 1:
            return None
        with uncounted():
            flags = world.gather_numbers(float(sees_run_folder))
        if not flags[cls.root]:
            raise RunError(
                "rank {root} cannot access the run's folder, which it writes",
                code="run-folder-inaccessible",
                root=cls.root,
            )
        remote_ranks = [rank for rank, flag in enumerate(flags) if not flag]
        return cls(world, remote_ranks) if remote_ranks else None

    def reopen(self) -> None:
        """Open new connections. A collective of all ranks."""
        ranks = [self.world.ranks[rank] for rank in self.members]
        # Gloo keeps the threads of the old group until the process exits. That is acceptable,
        # because a group is reopened only after a failed transfer.
        self._group = new_group(ranks, _TURN_TIMEOUT, "gloo")
        self.is_broken = False

    # -- frames
    def send_frame(self, peer: int, value: Any) -> None:
        """Send a JSON value to rank ``peer``, and wait without a time limit until it has been
        received."""
        raw = json.dumps(value).encode()
        first = np.zeros(_FRAME_BYTES, np.uint8)
        first[:8] = np.frombuffer(len(raw).to_bytes(8, "little"), np.uint8)
        inline = raw[: _FRAME_BYTES - 8]
        first[8 : 8 + len(inline)] = np.frombuffer(inline, np.uint8)
        self._wait(self._send(peer, first), _TURN_TIMEOUT)
        rest = np.frombuffer(bytearray(raw[len(inline) :]), np.uint8)
        for start in range(0, len(rest), CHUNK_BYTES):
            self._wait(self._send(peer, rest[start : start + CHUNK_BYTES]))

    def receive_frame(self, peer: int, any_time: bool = False) -> Any:
        """Receive a JSON value from rank ``peer``.

        Args:
            any_time: whether to wait without a time limit, until the peer exits.
        """
        first = np.empty(_FRAME_BYTES, np.uint8)
        self._wait(self._receive(peer, first), _TURN_TIMEOUT if any_time else None)
        return self._rest_of_frame(peer, first)

    def _rest_of_frame(self, peer: int, first: np.ndarray[Any, Any]) -> Any:
        length = int.from_bytes(first[:8].tobytes(), "little")
        if length > _MAX_FRAME_BYTES:
            raise TransferError(f"rank {peer} sent a frame of {length:,} bytes")
        raw = np.empty(length, np.uint8)
        num_inline = min(length, _FRAME_BYTES - 8)
        raw[:num_inline] = first[8 : 8 + num_inline]
        for start in range(num_inline, length, CHUNK_BYTES):
            self._wait(self._receive(peer, raw[start : start + CHUNK_BYTES]))
        return json.loads(raw.tobytes())

    # -- transfers
    def outgoing(
        self, peer: int, size_bytes: int, tick: Callable[[], None] = lambda: None
    ) -> Outgoing:
        """Start a transfer of ``size_bytes`` to rank ``peer``."""
        return Outgoing(self, peer, size_bytes, tick)

    def receive(self, peer: int, size_bytes: int, consume: Consume) -> Any:
        """Receive a transfer and return the frame that ends it.

        Args:
            consume: called with each chunk, whose memory is reused afterwards.
        """
        staging = _make_staging(size_bytes)
        buffers = (
            staging[start // CHUNK_BYTES % _WINDOW][: size_bytes - start]
            for start in range(0, size_bytes, CHUNK_BYTES)
        )
        return self._receive_all(peer, buffers, consume)

    def receive_into(self, peer: int, memory: np.ndarray[Any, Any], consume: Consume) -> Any:
        """Receive a transfer directly into ``memory`` (contiguous uint8); see :meth:`receive`."""
        buffers = (
            memory[start : start + CHUNK_BYTES] for start in range(0, len(memory), CHUNK_BYTES)
        )
        return self._receive_all(peer, buffers, consume)

    def _receive_all(
        self, peer: int, buffers: Iterator[np.ndarray[Any, Any]], consume: Consume
    ) -> Any:
        # Post the receive of the final frame together with the receive of the data, so that a
        # short transfer takes only one round trip.
        ending = np.empty(_FRAME_BYTES, np.uint8)
        pending: deque[tuple[dist.Work, np.ndarray[Any, Any]]] = deque()
        for buffer in itertools.chain(buffers, [ending]):
            pending.append((self._receive(peer, buffer), buffer))
            if len(pending) == _WINDOW:
                self._consume_next(pending, ending, consume)
        while pending:
            self._consume_next(pending, ending, consume)
        return self._rest_of_frame(peer, ending)

    def _consume_next(
        self, pending: deque[Any], ending: np.ndarray[Any, Any], consume: Consume
    ) -> None:
        work, buffer = pending.popleft()
        self._wait(work)
        if buffer is not ending:
            consume(buffer.data)

    # -- messages
    # These call methods of the group instead of functions of torch.distributed, which would count
    # the bytes as traffic of the training and add the calls to the collectives that the watchdog
    # compares between ranks.
    def _send(self, peer: int, data: np.ndarray[Any, Any]) -> dist.Work:
        with self._converting_errors():
            work = self._group.send([torch.from_numpy(data)], self.members.index(peer), 0)
        return cast(dist.Work, work)

    def _receive(self, peer: int, data: np.ndarray[Any, Any]) -> dist.Work:
        with self._converting_errors():
            work = self._group.recv([torch.from_numpy(data)], self.members.index(peer), 0)
        return cast(dist.Work, work)

    def _wait(self, work: dist.Work, timeout: timedelta | None = None) -> None:
        with self._converting_errors():
            work.wait(timeout or timedelta(seconds=STALL_TIMEOUT_S))
        self.num_moved += 1

    @contextmanager
    def _converting_errors(self) -> Iterator[None]:
        """Convert errors of the group to TransferError."""
        try:
            yield
        except RuntimeError as error:
            self.is_broken = True
            text, kind = first_line(error), classify(error).kind
            if kind is FailureKind.CLOSED:
                text = "the connection was closed"
            elif kind is FailureKind.TIMEOUT:
                text = f"nothing arrived for {STALL_TIMEOUT_S:.0f} s"
            raise TransferError(text) from error

    # -- measurement
    def measure_bytes_per_s(self) -> float | None:
        """Measure the bandwidth in bytes per second from the slowest host that cannot access the
        folder to rank 0. A collective of the members. Return None on other ranks."""
        if not (self.is_root or self.is_remote):
            return None
        if self.is_remote:
            self.send_frame(self.root, host_name())
            while size_bytes := self.receive_frame(self.root, any_time=True):
                with self.outgoing(self.root, int(size_bytes)):
                    pass
            return None
        hosts: dict[str, float] = {}
        for peer in self.remote_ranks:
            name = self.receive_frame(peer)
            if name not in hosts:
                hosts[name] = self._measure(peer)
            self.send_frame(peer, 0)
        return min(hosts.values())

    def _measure(self, peer: int) -> float:
        def probe(size_bytes: int) -> float:
            start = time.perf_counter()
            self.send_frame(peer, size_bytes)
            self.receive(peer, size_bytes, lambda _: None)
            return max(time.perf_counter() - start, 1e-6)

        wall_s = probe(_PROBE_BYTES)
        if wall_s > _SHORT_PROBE_S:
            return _PROBE_BYTES / wall_s
        return _LARGE_PROBE_BYTES / probe(_LARGE_PROBE_BYTES)


class Outgoing:
    """The sending end of a transfer, with the interface of an unbuffered file.

    Use it as a context manager: on exit, bytes that were not written are sent as zeros. Call
    :meth:`finish` with the frame that ends the transfer.
    """

    def __init__(
        self, side: SideGroup, peer: int, size_bytes: int, tick: Callable[[], None]
    ) -> None:
        self.side, self.peer, self.tick = side, peer, tick
        self.left_bytes = size_bytes
        self.ending: Any = {}
        self._staging = _make_staging(size_bytes)
        self._number = self._used = 0
        self._pending: deque[dist.Work] = deque()

    def __enter__(self) -> Outgoing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if isinstance(error, TransferError):
            return
        if error is not None:
            self.ending = {"problem": str(error) or type(error).__name__}
        zeros = memoryview(bytes(CHUNK_BYTES))
        while self.left_bytes:
            self.write(zeros[: min(CHUNK_BYTES, self.left_bytes)])
        while self._pending:
            self.side._wait(self._pending.popleft())
        self.side.send_frame(self.peer, self.ending)

    def finish(self, ending: Any) -> None:
        self.ending = ending

    def write(self, data: memoryview, /) -> int:
        """Write the beginning of ``data`` and return the number of bytes written."""
        if len(data) > self.left_bytes:
            raise ValueError(
                f"{len(data):,} bytes exceed the {self.left_bytes:,} that are left of the transfer"
            )
        staging = self._staging[self._number % _WINDOW]
        count = min(len(data), len(staging) - self._used)
        staging[self._used : self._used + count] = np.frombuffer(data[:count], np.uint8)
        self._used += count
        self.left_bytes -= count
        if self._used == len(staging) or not self.left_bytes:
            self._pending.append(self.side._send(self.peer, staging[: self._used]))
            self._number, self._used = self._number + 1, 0
            if len(self._pending) == _WINDOW:
                self.side._wait(self._pending.popleft())
            self.tick()
        return count


def _make_staging(size_bytes: int) -> list[np.ndarray[Any, Any]]:
    """Return the staging buffers of a transfer."""
    return [np.empty(min(CHUNK_BYTES, max(1, size_bytes)), np.uint8) for _ in range(_WINDOW)]
