"""Collectives that survive the loss of a worker. Every rank sends its value to the first server,
which answers all of them when it has the values of all live ranks. A gloo group breaks when one of
its processes ends; here the answer names the lost ranks, so that all ranks learn of a loss in the
same collective.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import rpc

from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import CONTINUE_KEY, LOST_KEY
from paceline.strategies.parameter_server.client import rank_name

T = TypeVar("T")

_POLL_S = 0.05
_LEAVE_S = 10.0


@dataclass(frozen=True)
class WorkerExit:
    """A rank whose process has ended.

    Args:
        reason: why, such as ``was killed by SIGKILL``.
        clock: number of this worker's steps that the first server had applied by then, if servers
            count them.
    """

    rank: int
    pid: int
    reason: str
    clock: int = 0


class Answer(NamedTuple, Generic[T]):
    """By rank: the values of a collective, and the lost workers."""

    values: dict[int, T]
    lost: dict[int, WorkerExit]


class _Collective(Generic[T]):
    """An incomplete collective: the values received, and the answers to give, by rank."""

    def __init__(self) -> None:
        self.values: dict[int, T] = {}
        self.answers: dict[int, torch.futures.Future[Answer[T]]] = {}

    def complete(self, ranks: Iterable[int], lost: dict[int, WorkerExit]) -> None:
        answer = Answer({rank: self.values[rank] for rank in ranks}, lost)
        for rank in answer.values:
            self.answers[rank].set_result(answer)


class CollectiveServer:
    """On the first server: the live ranks, and the incomplete collectives by their number."""

    def __init__(self, size: int) -> None:
        self.live = set(range(size))
        self.lost: dict[int, WorkerExit] = {}
        self._changed = threading.Condition()
        self._left: set[int] = set()
        self._collectives: dict[int, _Collective[Any]] = {}

    def join(self, rank: int, number: int, value: T) -> torch.futures.Future[Answer[T]]:
        """Take part in a collective. The future completes when all live ranks have joined."""
        answer: torch.futures.Future[Answer[T]] = torch.futures.Future()
        with self._changed:
            collective = self._collectives.setdefault(number, _Collective())
            collective.values[rank] = value
            collective.answers[rank] = answer
        self._complete()
        return answer

    def lose(self, loss: WorkerExit) -> None:
        """Remove a rank, also from incomplete collectives that it has joined."""
        with self._changed:
            self.live.discard(loss.rank)
            self.lost[loss.rank] = loss
            self._changed.notify_all()
        self._complete()

    def leave(self, rank: int) -> None:
        """Record that a rank has received its last answer."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def wait_until_left(self, timeout_s: float) -> None:
        """Wait until all live ranks have left."""
        with self._changed:
            self._changed.wait_for(lambda: self.live <= self._left, timeout_s)

    def _complete(self) -> None:
        """Answer the collectives that all live ranks have joined. This releases the lock before it
        sets results, because callbacks run in this thread."""
        with self._changed:
            ranks, lost = sorted(self.live), dict(self.lost)
            ready = [
                self._collectives.pop(number)
                for number in sorted(self._collectives)
                if ranks and self.live <= self._collectives[number].values.keys()
            ]
        for collective in ready:
            collective.complete(ranks, lost)


_SERVER: CollectiveServer | None = None


def _server() -> CollectiveServer:
    assert _SERVER is not None
    return _SERVER


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def join(rank: int, number: int, value: T) -> torch.futures.Future[Answer[T]]:
    """As :meth:`CollectiveServer.join`, on the first server."""
    return _server().join(rank, number, value)


def leave(rank: int) -> None:
    """As :meth:`CollectiveServer.leave`, on the first server."""
    _server().leave(rank)


class ServerCommunicator(Communicator):
    """All ranks, with collectives through the first server. Ranks keep their numbers when others
    are lost; a sum is over the live ranks. ``losses`` are the lost workers reported by the
    collectives that this rank has waited for."""

    def __init__(self, world: Communicator, host: int) -> None:
        super().__init__(world.env, world.device, world.axes, world.group, world.ranks, world.waits)
        self.device_types = world.device_types
        self.host = host
        self.losses: dict[int, WorkerExit] = {}
        self._number = 0
        self._launcher_store: dist.Store | None = None
        if self.rank == host:
            global _SERVER
            _SERVER = CollectiveServer(self.size)

    @property
    def lost(self) -> frozenset[int]:
        return frozenset(self.losses)

    def has_ended(self, rank: int) -> bool:
        """Return whether the launcher has reported that a rank has ended, which this rank learns
        in :attr:`lost` only with its next collective."""
        with contextlib.suppress(RuntimeError, OSError):
            self._launcher_store = self._launcher_store or _open_launcher_store()
            return rank in _read_lost(self._launcher_store)
        return False

    @property
    def first(self) -> int:
        return min(set(range(self.size)) - self.losses.keys())

    def watch(self, clock_of: Callable[[int], int]) -> None:
        """Start to watch for lost workers.

        Args:
            clock_of: called on the first server with a lost rank; returns the number of its steps
                that were applied.
        """
        if self.rank == self.host:
            threading.Thread(
                target=_watch, args=(_server(), clock_of), name="losses", daemon=True
            ).start()

    def leave(self) -> None:
        """Leave at the end of the run. The first server waits until the others have its last
        answers."""
        if self.rank == self.host:
            _server().leave(self.rank)
            _server().wait_until_left(_LEAVE_S)
            return
        with contextlib.suppress(RuntimeError):  # the server may exit before it has answered
            rpc.rpc_sync(rank_name(self.host), leave, args=(self.rank,), timeout=_LEAVE_S)

    def join(self, value: T) -> Callable[[], dict[int, T]]:
        """Take part in the next collective. Returns a function that waits for the live ranks'
        values, by rank."""
        self._number += 1
        args = (self.rank, self._number, value)
        if self.rank == self.host:
            answer = _server().join(*args)
        else:
            answer = rpc.rpc_async(rank_name(self.host), join, args=args)

        def wait() -> dict[int, T]:
            values, lost = answer.wait()
            self.losses.update(lost)
            return values

        return wait

    def _gather(self, value: T) -> dict[int, T]:
        start_s = time.perf_counter()
        values = self.join(value)()
        self.waits.seconds += time.perf_counter() - start_s
        return values

    def all_reduce(
        self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Any:
        return _Reduction(tensor, op, self.join(_to_host(tensor)))

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Any:
        """Gather each rank's ``tensor``. The part of a lost rank is zero."""
        values = self._gather(_to_host(tensor))
        for rank, part in enumerate(output.view(self.size, -1)):
            part.copy_(values[rank].reshape(-1)) if rank in values else part.zero_()
        return None

    def _broadcast_group(self, tensors: list[torch.Tensor]) -> None:
        sent = [_to_host(tensor) for tensor in tensors] if self.is_rank_zero else None
        values = next(value for value in self._gather(sent).values() if value is not None)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)

    def broadcast_object(self, value: T) -> Any:
        return next(iter(self._gather(value).values()))

    def gather_objects(self, value: T) -> list[Any]:
        """Gather each rank's ``value``; None for a lost rank."""
        values = self._gather(value)
        return [values.get(rank) for rank in range(self.size)]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU, which `torch.distributed.rpc` can send to any rank."""
    return tensor.detach().to("cpu", copy=True)


class _Reduction:
    """A pending sum or maximum, computed in order of rank: the same bits on every rank."""

    def __init__(
        self,
        tensor: torch.Tensor,
        op: dist.ReduceOp.RedOpType,
        values: Callable[[], dict[int, torch.Tensor]],
    ) -> None:
        self.tensor = tensor
        self.op = op
        self.values = values

    def wait(self) -> None:
        values = torch.stack(list(self.values().values()))
        if self.op == dist.ReduceOp.SUM:
            self.tensor.copy_(values.sum(dim=0))
        elif self.op == dist.ReduceOp.MAX:
            self.tensor.copy_(values.amax(dim=0))
        else:
            raise NotImplementedError(f"reduction {self.op} through the first server")


def _open_launcher_store() -> dist.Store:
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(30),
    )


def _read_lost(store: dist.Store) -> dict[int, Any]:
    """Return the processes that the launcher reports as ended, by rank."""
    lost = json.loads(store.get(LOST_KEY)) if store.check([LOST_KEY]) else {}
    return {rank: lost[str(rank)] for rank in sorted(map(int, lost))}


def _watch(server: CollectiveServer, clock_of: Callable[[int], int]) -> None:
    """Poll the launcher's store for workers that have ended."""
    try:
        store = _open_launcher_store()
        store.set(CONTINUE_KEY, "open")
        while True:
            for rank, process in _read_lost(store).items():
                if rank not in server.lost:
                    server.lose(WorkerExit(rank, process["pid"], process["reason"], clock_of(rank)))
            time.sleep(_POLL_S)
    except (RuntimeError, OSError):
        return  # the launcher has ended, and will end this process
