"""The state that the driver of a Ray run and its workers share: a small Ray actor on the driver's
node.

After a failure, Ray Train starts new workers, possibly on other nodes, without any state of the old
ones. The actor records which workers an attempt had, how they ended, and whether the run can be
retried.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.core.events import Fault
from paceline.core.failures import ExitRecord, FailureScope, first_cause

if TYPE_CHECKING:  # the actor needs it only if memory was lacking
    from paceline.cluster.failures import AgentState


@dataclass(frozen=True)
class WorkerPlace:
    """Where a worker runs.

    Args:
        node_id: Ray's identifier of the node; a node that restarts gets another one.
        address: the node's IP address.
        host: the node's host name.
        pid: the worker's process.
    """

    node_id: str
    address: str
    host: str
    pid: int


@dataclass(frozen=True)
class AttemptStart:
    """How an attempt begins.

    Args:
        order: Ray's rank of each worker, in the order in which Paceline numbers them.
        fault: the content of the `fault` event if an attempt failed before this one.
        lost_folder_of: the host with the run's folder, if rank 0 of this attempt runs on another
            one.
        out_of_memory: the failure before this attempt, if memory was lacking.
    """

    order: list[int]
    fault: Fault | None
    lost_folder_of: str | None
    out_of_memory: OutOfMemoryFailure | None = None


@dataclass(frozen=True)
class OutOfMemoryFailure:
    """A failure after which an attempt with smaller memory settings follows.

    Args:
        state: state of the round, for the workers of the next attempt.
    """

    failure: ExitRecord
    state: AgentState


_ENDED_BY_RAY = ExitRecord.of_run(
    "Ray ended the workers without an error of theirs (a drained node or a preemption)"
)


class RayRunRecord:
    """State of one `fit()`; runs as a Ray actor. Times are seconds since the epoch, by the clock of
    the driver's node.

    Args:
        driver_node: Ray's identifier of the driver's node.
        max_failures: number of failures after which Ray starts the workers again; -1 for any.
    """

    def __init__(self, driver_node: str, max_failures: int) -> None:
        self._first_place = WorkerPlace(driver_node, "", "", 0)
        self._num_attempts, self._max_failures = 0, max_failures
        self._out_of_memory: OutOfMemoryFailure | None = None
        self._places: list[WorkerPlace] = []  # by Ray's rank, as are the next three
        self._numbers: dict[int, int] = {}  # Paceline's rank
        self._failed: dict[int, ExitRecord] = {}
        self._lost: set[int] = set()
        self._failed_at: float | None = None
        self._final_failure: ExitRecord | None = None
        self._final_ranks: set[int] = set()
        self._results: dict[int, ExitRecord] = {}
        self._has_run_folder = False
        self._stop_signal: int | None = None

    # -- workers
    def final_failure(self) -> ExitRecord | None:
        """Return the failure after which no further attempt is made (:meth:`fail_finally`). Its
        failure's text names the worker, its message does not."""
        return self._final_failure

    def begin_attempt(self, places: list[WorkerPlace]) -> AttemptStart:
        """Begin an attempt; called by one worker for all. ``places``: of the workers, by Ray's
        rank.

        Rank 0 stays on its node, because without shared storage the run's folder is there. The
        first attempt prefers the driver's node, where the user expects the folder. Nodes with the
        same address count as one host, as for Ray, which numbers local ranks per address.
        """
        fault = self.last_fault()
        previous = self._first_place
        first = next(
            (place for place in places if place.node_id == previous.node_id),
            next((place for place in places if place.address == previous.address), places[0]),
        )
        order = sorted(
            range(len(places)), key=lambda rank: (places[rank].address != first.address, rank)
        )
        has_moved = self._has_run_folder and first.host != previous.host
        if not has_moved:
            self._first_place = first
        self._num_attempts += 1
        self._places = places
        self._numbers = {ray_rank: rank for rank, ray_rank in enumerate(order)}
        self._failed, self._lost, self._failed_at = {}, set(), None
        out_of_memory, self._out_of_memory = self._out_of_memory, None
        return AttemptStart(order, fault, previous.host if has_moved else None, out_of_memory)

    def poll(self, has_run_folder: bool) -> int | None:
        """Record that rank 0 is running. Return the number of the signal that the driver received,
        or None."""
        self._has_run_folder = self._has_run_folder or has_run_folder
        return self._stop_signal

    def fail(self, ray_rank: int, failed: ExitRecord) -> None:
        """Record how a worker fails."""
        self._failed.setdefault(ray_rank, replace(failed, time=time.time()))
        self._failed_at = self._failed_at or time.time()

    def fail_finally(self, ray_rank: int, failed: ExitRecord) -> int:
        """Record a failure that every further attempt would repeat. Return how many workers have
        reported one."""
        if self._final_failure is None:
            text = f"{self._place(ray_rank)}: {failed.message}"
            failure = replace(failed.cause, text=text)
            self._final_failure = replace(failed, failure=failure, is_final=True)
        self._final_ranks.add(ray_rank)
        return len(self._final_ranks)

    def run_out_of_memory(self, failure: OutOfMemoryFailure) -> bool:
        """Record that a worker ran out of memory, unless another one did before. Return whether
        Ray makes another attempt."""
        if 0 <= self._max_failures < self._num_attempts:
            return False
        self._out_of_memory = self._out_of_memory or failure
        return True

    def finish(self, rank: int, ended: ExitRecord) -> None:
        """Record how a rank ended that did not fail."""
        self._results[rank] = ended

    # -- the driver
    def lose_workers(self, ray_ranks: list[int]) -> None:
        """Record that Ray lost these workers without an exception of their program."""
        self._lost.update(ray_ranks)
        self._failed_at = self._failed_at or time.time()

    def request_stop(self, number: int) -> None:
        self._stop_signal = number

    def results(self) -> dict[int, ExitRecord]:
        return self._results

    def places(self) -> list[WorkerPlace]:
        """Return the workers of the current attempt, in the order of Paceline's ranks."""
        ranks = sorted(self._numbers, key=lambda ray_rank: self._numbers[ray_rank])
        return [self._places[ray_rank] for ray_rank in ranks]

    def last_fault(self) -> Fault | None:
        """Return the content of a `fault` event about the workers that failed first; None before
        the first attempt.

        A worker that Ray lost and that reported nothing was killed. Otherwise the failure counts
        that caused the others.
        """
        if not self._places:
            return None
        failures = [self._failure_of(ray_rank) for ray_rank in self._failed]
        killed = sorted(self._lost - self._failed.keys())
        if killed:
            texts = [f"{self._place(rank)} was killed, or its node was lost" for rank in killed]
            failures.append(self._located(ExitRecord.killed((), (), "; ".join(texts)), killed))
        first = first_cause(failures)
        cause = (first or _ENDED_BY_RAY).cause
        return {
            "ranks": list(cause.ranks),
            "hosts": list(cause.hosts),
            "reason": cause.reason,
            "step": None,
            "restart": self._num_attempts,
            "seen_at": self._failed_at or time.time(),
        }

    def _failure_of(self, ray_rank: int) -> ExitRecord:
        """Return how a worker failed, with its place in the failure."""
        failed, ray_ranks = self._failed[ray_rank], [ray_rank]
        if failed.cause.scope is FailureScope.RUN:  # it may blame other ranks
            blamed = [other for other, rank in self._numbers.items() if rank in failed.cause.ranks]
            ray_ranks = blamed or ray_ranks
        text = f"{self._place(ray_rank)}: {failed.message}"
        named = replace(failed, failure=replace(failed.cause, text=text))
        return self._located(named, ray_ranks)

    def _located(self, failed: ExitRecord, ray_ranks: list[int]) -> ExitRecord:
        """Return the record with the ranks and hosts of these workers in the failure."""
        ranks = tuple(self._numbers[ray_rank] for ray_rank in ray_ranks)
        hosts = tuple(sorted({self._places[ray_rank].host for ray_rank in ray_ranks}))
        return replace(failed, failure=replace(failed.cause, ranks=ranks, hosts=hosts))

    def _place(self, ray_rank: int) -> str:
        if ray_rank >= len(self._places):
            return f"the worker with Ray's rank {ray_rank}"
        place = self._places[ray_rank]
        return (
            f"rank {self._numbers[ray_rank]} on {place.host} ({place.address}, process {place.pid})"
        )
