"""Collectives that outlive a worker: every rank sends what it has to say to the first server, which
answers all of them when each living rank has spoken. A gloo group breaks when one of its processes
ends; here the dead are left out, and the answer says who they are, so that all ranks learn of a
loss in the same collective.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import rpc

from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import LOST_KEY, MEETING_KEY
from paceline.parallel.parameter_server.client import rank_name

T = TypeVar("T")


_POLL_S = 0.05
_LEAVE_S = 10.0


@dataclass(frozen=True)
class WorkerExit:
    """A rank that is gone.

    Args:
        reason: for a person, as in ``was killed by SIGKILL``.
        clock: steps of this worker that the first server had applied by then, where servers keep
            clocks.
    """

    rank: int
    pid: int
    reason: str
    clock: int = 0


class CollectiveServer:
    """On the first server: who lives, and what each rank has said in the collectives that are going
    on, by their number."""

    def __init__(self, size: int) -> None:
        self.living = set(range(size))
        self.lost: dict[int, WorkerExit] = {}
        self._lock = threading.Condition()
        self._gone: set[int] = set()
        self._said: dict[int, dict[int, Any]] = {}
        self._answers: dict[int, dict[int, torch.futures.Future[Any]]] = {}

    def attend(self, rank: int, number: int, said: Any) -> torch.futures.Future[Any]:
        """Gives, when all living ranks have spoken: (what each of them said, by rank; the losses so
        far, by rank)."""
        answer: torch.futures.Future[Any] = torch.futures.Future()
        with self._lock:
            self._said.setdefault(number, {})[rank] = said
            self._answers.setdefault(number, {})[rank] = answer
            ended = self._ended()
        _answer(ended)
        return answer

    def lose(self, loss: WorkerExit) -> None:
        """What the rank has said in a collective that is not over no longer counts."""
        with self._lock:
            self.living.discard(loss.rank)
            self.lost[loss.rank] = loss
            ended = self._ended()
            self._lock.notify_all()
        _answer(ended)

    def leave(self, rank: int) -> None:
        """A rank has got its last answer."""
        with self._lock:
            self._gone.add(rank)
            self._lock.notify_all()

    def wait_until_left(self, timeout_s: float) -> None:
        """Until all living ranks have left."""
        with self._lock:
            self._lock.wait_for(lambda: self.living <= self._gone, timeout_s)

    def _ended(self) -> list[tuple[list[torch.futures.Future[Any]], Any]]:
        found = []
        for number in sorted(self._said):
            if not self.living or not self.living <= self._said[number].keys():
                continue
            said, answers = self._said.pop(number), self._answers.pop(number)
            words = {rank: said[rank] for rank in sorted(self.living)}
            found.append(([answers[rank] for rank in words], (words, dict(self.lost))))
        return found


def _answer(ended: Iterable[tuple[list[torch.futures.Future[Any]], Any]]) -> None:
    for answers, result in ended:
        for one in answers:
            one.set_result(result)


_MEETING: CollectiveServer | None = None


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def attend(rank: int, number: int, said: Any) -> torch.futures.Future[Any]:
    """As :meth:`CollectiveServer.attend`, on the first server."""
    assert _MEETING is not None
    return _MEETING.attend(rank, number, said)


def leave(rank: int) -> None:
    """As :meth:`CollectiveServer.leave`, on the first server."""
    assert _MEETING is not None
    _MEETING.leave(rank)


class ServerCommunicator(Communicator):
    """All ranks, with collectives through the first server. Ranks keep their numbers when others
    are lost: a sum is over the living, and of who is lost this knows what the collectives that it
    has waited for have told."""

    def __init__(self, world: Communicator, host: int) -> None:
        super().__init__(world.env, world.device, world.axes, world.group, world.ranks, world.waits)
        self.host = host
        self.losses: dict[int, WorkerExit] = {}
        self._number = 0
        if self.rank == host:
            global _MEETING
            _MEETING = CollectiveServer(self.size)

    @property
    def lost(self) -> frozenset[int]:
        return frozenset(self.losses)

    @property
    def first(self) -> int:
        return min(set(range(self.size)) - self.losses.keys())

    def watch(self, clock_of: Callable[[int], int]) -> None:
        """From here on a worker may go. ``clock_of``: called on the first server with a rank that
        is lost; gives the number of its steps that were applied."""
        if self.rank == self.host:
            threading.Thread(
                target=_watch, args=(_MEETING, clock_of), name="losses", daemon=True
            ).start()

    def leave(self) -> None:
        """The end: the first server stays until the others have its last answers."""
        if self.rank == self.host:
            assert _MEETING is not None
            _MEETING.leave(self.rank)
            _MEETING.wait_until_left(_LEAVE_S)
            return
        with contextlib.suppress(RuntimeError):  # it may end before its answer to this is sent
            rpc.rpc_sync(rank_name(self.host), leave, args=(self.rank,), timeout=_LEAVE_S)

    def attend(self, said: Any) -> _Attendance:
        self._number += 1
        if self.rank == self.host:
            assert _MEETING is not None
            return _Attendance(self, _MEETING.attend(self.rank, self._number, said))
        return _Attendance(
            self, rpc.rpc_async(rank_name(self.host), attend, args=(self.rank, self._number, said))
        )

    def _words(self, said: Any) -> dict[int, Any]:
        start = time.perf_counter()
        words = self.attend(said).words()
        self.waits.seconds += time.perf_counter() - start
        return words

    def all_reduce(
        self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Any:
        return _Reduction(tensor, op, self.attend(tensor.detach().clone()))

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Any:
        """Where a rank is lost its part of ``output`` is zero."""
        words = self._words(tensor.detach().clone())
        for rank, part in enumerate(output.view(self.size, -1)):
            part.copy_(words[rank].reshape(-1)) if rank in words else part.zero_()
        return None

    def _broadcast_group(self, tensors: list[torch.Tensor]) -> None:
        words = self._words(
            [one.detach().clone() for one in tensors] if self.is_rank_zero else None
        )
        values = next(one for _, one in sorted(words.items()) if one is not None)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)

    def broadcast_object(self, value: T) -> Any:
        words = self._words(value)
        return words[min(words)]

    def gather_objects(self, value: T) -> list[Any]:
        """None for a rank that is lost."""
        words = self._words(value)
        return [words.get(rank) for rank in range(self.size)]


class _Attendance:
    """A collective that this rank takes part in."""

    def __init__(self, world: ServerCommunicator, answer: Any) -> None:
        self.world = world
        self.answer = answer

    def words(self) -> dict[int, Any]:
        words, losses = self.answer.wait()
        self.world.losses.update(losses)
        return dict(words)


class _Reduction:
    """A sum (or another reduction) that is on its way, in order of rank: the same bits on every
    rank."""

    def __init__(
        self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, attendance: _Attendance
    ) -> None:
        self.tensor = tensor
        self.op = op
        self.attendance = attendance

    def wait(self) -> None:
        values = torch.stack(list(self.attendance.words().values()))
        if self.op == dist.ReduceOp.SUM:
            self.tensor.copy_(values.sum(dim=0))
        elif self.op == dist.ReduceOp.MAX:
            self.tensor.copy_(values.amax(dim=0))
        else:
            raise NotImplementedError(f"a reduction by {self.op} through the first server")


def _watch(meeting: CollectiveServer, clock_of: Callable[[int], int]) -> None:
    """Hear from the launcher, through its store, which workers have ended."""
    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(30),
        )
        store.set(MEETING_KEY, "open")
        while True:
            told = json.loads(store.get(LOST_KEY)) if store.check([LOST_KEY]) else {}
            for rank, one in sorted((int(rank), one) for rank, one in told.items()):
                if rank not in meeting.lost:
                    meeting.lose(
                        WorkerExit(rank, int(one["pid"]), str(one["reason"]), clock_of(rank))
                    )
            time.sleep(_POLL_S)
    except (RuntimeError, OSError):
        return  # the launcher has gone, and this process with it
