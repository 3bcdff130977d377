"""Start and watch the rank processes of this host in one attempt of a run.

They are forked from the fork server, and the launcher, not a rank, serves the store for their
rendezvous. On a single host this launcher is used instead of torch's elastic agent, because it
restarts the ranks in about 3 s and lets a run continue after the loss of some ranks. Runs on
several hosts use torch's elastic agent, see :mod:`paceline.cluster.elastic`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import time
from multiprocessing.process import BaseProcess
from typing import Any

from paceline.core.files import Scratch, write_atomic
from paceline.core.processes import exit_text
from paceline.launch.ranks.folder import STOP_FILE, RankFolder
from paceline.launch.ranks.tolerance import ExitTolerance, ToleratedExit, reason_of_exit
from paceline.launch.ranks.worker import RunRank, worker_main

#: How long the other ranks may take to report an error, finish a save and exit after a rank has
#: failed.
_GRACE_S = 4.0


class RankProcesses:
    """Starts the ranks, watches them, and reports how they ended. A context manager, which leaves
    no processes and no temporary files.

    Args:
        spec: spec that is sent to each rank.
        store: store for the rendezvous of the ranks, served by this process.
        run_rank: function that each rank calls with ``spec``; default: train.
        tolerated: ranks that may exit without ending the others.
    """

    def __init__(
        self,
        spec: Any,
        num_ranks: int,
        store: Any,
        run_rank: RunRank | None = None,
        tolerated: frozenset[int] = frozenset(),
    ) -> None:
        self.num_ranks = num_ranks
        self.tolerance = ExitTolerance(tolerated, store)
        self.store = store
        self._scratch = Scratch()
        self.folder = self._scratch.path
        self.records = RankFolder(self.folder)
        self._failed_at: float | None = None
        self._lost: list[int] = []  # had exited without a record when the first failure was seen
        self._killed: set[int] = set()  # by this launcher
        context = multiprocessing.get_context("forkserver")
        self.processes: dict[int, BaseProcess] = {
            rank: context.Process(
                target=_rank, args=(rank, num_ranks, store.port, spec, str(self.folder), run_rank)
            )
            for rank in range(num_ranks)
        }

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for process in self.processes.values():
            if process.pid is not None:
                process.join(5.0)
        self._scratch.close()

    def start(self) -> None:
        for process in self.processes.values():
            process.start()

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for a rank to exit, and kill ranks that are stuck. Return whether
        all have exited."""
        sentinels = [process.sentinel for process in self.processes.values() if process.is_alive()]
        if sentinels:
            multiprocessing.connection.wait(sentinels, timeout=seconds)
        self._end_stuck_ranks()
        return not any(process.is_alive() for process in self.processes.values())

    def forward(self, number: int) -> None:
        """Request all ranks to stop, including those that are still starting."""
        write_atomic(self.folder / STOP_FILE, str(number))
        for pid in self.records.pids().values():
            _send(pid, signal.SIGTERM)

    def kill(self, wait_s: float = 0.0) -> None:
        """Kill all ranks, and wait up to ``wait_s`` seconds for them to end."""
        alive = {
            rank: process
            for rank, process in self.processes.items()
            if process.pid is not None and process.is_alive()
        }
        for rank, process in alive.items():
            assert process.pid is not None
            self._killed.add(rank)
            _send(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + wait_s
        sentinels = {process.sentinel for process in alive.values()}
        while sentinels and (left_s := deadline - time.monotonic()) > 0:
            sentinels -= set(multiprocessing.connection.wait(sentinels, timeout=left_s))

    def lost(self) -> list[int]:
        """Return the ranks that exited without a record and were not killed by this launcher.
        After a failure, return only those that had exited when it was detected; if there were
        none, those that SIGKILL has ended since. They are the cause: another rank can report the
        lost connection before the end of the killed process is known."""
        if self._failed_at is None:
            return self._lost_by_now()
        return self._lost or [
            rank for rank in self._lost_by_now() if self.processes[rank].exitcode == -signal.SIGKILL
        ]

    def _lost_by_now(self) -> list[int]:
        ended = [
            rank
            for rank, process in self.processes.items()
            if process.exitcode is not None and rank not in self._killed
        ]
        recorded = self.records.ended()  # read now: a rank writes its record before it ends
        return [rank for rank in ended if rank not in recorded and rank not in self.tolerance.exits]

    def exit_text(self, rank: int) -> str:
        """Describe how a rank without a record ended, such as ``was killed by SIGKILL``."""
        return exit_text(self.processes[rank].exitcode)

    def _end_stuck_ranks(self) -> None:
        """Kill ranks that may be waiting for a dead rank inside a collective."""
        if self._failed_at is None:
            lost, records = self._lost_by_now(), self.records.ended()
            failed = [rank for rank, record in records.items() if record.status == "failed"]
            ended = {*lost, *failed} - self.tolerance.exits.keys()
            exits = {
                rank: ToleratedExit(
                    self.processes[rank].pid,
                    reason_of_exit(self.exit_text(rank), records.get(rank)),
                )
                for rank in sorted(ended)
            }
            if exits and not self.tolerance.tolerate(exits):
                self._failed_at = time.monotonic()
                self._lost = lost
        elif time.monotonic() - self._failed_at > _GRACE_S:
            self.kill()


def open_store() -> Any:
    """Serve a store for the rendezvous of the ranks on this host, on a free port of the loopback
    interface."""
    from torch.distributed import TCPStore

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1024)
        port = listening.getsockname()[1]
        # By default the store listens on every address of this host.
        return TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


def _rank(
    rank: int, num_ranks: int, port: int, spec: Any, folder: str, run_rank: RunRank | None
) -> None:
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in numbers.items()})
    # The launcher serves the store, so rank 0 must not open one.
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
    worker_main(spec, folder, run_rank)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
