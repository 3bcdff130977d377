"""The ranks of this host in one attempt of a run: from their start until the last of them has
ended.

They are plain processes of the fork server and meet at a store that belongs to the launcher, not to
a rank. On one host this launcher is used instead of torch's elastic agent, because it restarts the
ranks in about 3 s and because some ranks may be lost without ending the others. Several hosts run
on elastic: :mod:`paceline.cluster.elastic`.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import time
from typing import Any, TypedDict

from paceline.core.errors import Outcome
from paceline.core.files import Scratch, write_atomic
from paceline.distributed.environment import LOST_KEY, MEETING_KEY
from paceline.launch.worker import STOP_FILE, RunRank, outcome_file, pid_file, worker_main

# How long the other ranks may take to end by themselves after one has failed: they leave a message,
# and end what they are saving.
_GRACE_S = 4.0


class LostRank(TypedDict):
    """A rank that the others continue without."""

    pid: int | None
    reason: str


class RankProcesses:
    """Starts the ranks, watches them, and reports what became of them. Use it in a ``with``: it
    leaves no process and no file.

    Args:
        spec: sent to each rank.
        store: where the ranks meet; served by this process.
        run_rank: what a rank does with ``spec``; default: see
            :func:`~paceline.launch.worker.worker_main`.
        expendable: ranks that may end without ending the others.
    """

    def __init__(
        self,
        spec: Any,
        num_ranks: int,
        store: Any,
        run_rank: RunRank | None = None,
        expendable: frozenset[int] = frozenset(),
    ) -> None:
        self.num_ranks = num_ranks
        self.expendable = expendable
        self.store = store
        self._scratch = Scratch()
        self.folder = self._scratch.path
        # rank that the others go on without → pid, reason
        self.lost_ranks: dict[int, LostRank] = {}
        self._failed_at: float | None = None
        self._gone: list[int] = []  # without a message, when the first failure was seen
        self._killed: set[int] = set()  # by this launcher
        context = multiprocessing.get_context("forkserver")
        self.processes: dict[int, Any] = {
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
        """Look after the ranks for so long, or until the last has ended. True where it has."""
        living = [process.sentinel for process in self.processes.values() if process.is_alive()]
        if living:
            multiprocessing.connection.wait(living, timeout=seconds)
        self._end_stuck_ranks()
        return not any(process.is_alive() for process in self.processes.values())

    def forward(self, number: int) -> None:
        """Ask all ranks to stop, also those that are only starting."""
        write_atomic(self.folder / STOP_FILE, str(number))
        for pid in self.pids().values():
            _send(pid, signal.SIGTERM)

    def kill(self, wait_s: float = 0.0) -> None:
        """``wait_s``: for so long at most, until they are gone."""
        living = {
            rank: process
            for rank, process in self.processes.items()
            if process.pid is not None and process.is_alive()
        }
        for rank, process in living.items():
            self._killed.add(rank)
            _send(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + wait_s
        left = [process.sentinel for process in living.values()]
        while left and (seconds := deadline - time.monotonic()) > 0:
            gone = multiprocessing.connection.wait(left, timeout=seconds)
            left = [sentinel for sentinel in left if sentinel not in gone]

    def pids(self) -> dict[int, int]:
        """Process of each rank that has recorded it."""
        pids = {}
        for rank in range(self.num_ranks):
            with contextlib.suppress(OSError, ValueError):
                pids[rank] = int(pid_file(self.folder, rank).read_text())
        return pids

    def outcomes(self) -> dict[int, Outcome]:
        """What each rank that has ended left behind."""
        outcomes = {}
        for rank in range(self.num_ranks):
            with contextlib.suppress(OSError, ValueError):
                outcomes[rank] = json.loads(outcome_file(self.folder, rank).read_text())
        return outcomes

    def lost(self) -> list[int]:
        """Ranks whose process is gone without a message, and that this launcher has not killed."""
        if self._failed_at is not None:  # who was gone then, not those that were ended after them
            return self._gone
        return self._lost_by_now()

    def _lost_by_now(self) -> list[int]:
        ended = [
            rank
            for rank, process in self.processes.items()
            if process.exitcode is not None and rank not in self._killed
        ]
        outcomes = self.outcomes()  # read now: a rank leaves its word before it ends
        return [rank for rank in ended if rank not in outcomes and rank not in self.lost_ranks]

    def how_it_ended(self, rank: int) -> str:
        """For a person, of a process that left no word: ``was killed by SIGKILL``."""
        code = self.processes[rank].exitcode
        if code is None or code >= 0:
            return (
                "ended without a message"
                if not code
                else f"ended without a message, with exit code {code}"
            )
        why = " (often: out of memory; see `dmesg`)" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{why}"

    def _end_stuck_ranks(self) -> None:
        # A rank may wait for a dead one inside a collective that never ends.
        if self._failed_at is None:
            lost, outcomes = self._lost_by_now(), self.outcomes()
            ended = {
                *lost,
                *(rank for rank, outcome in outcomes.items() if outcome["status"] == "failed"),
            } - self.lost_ranks.keys()
            if ended and not self._do_without(sorted(ended), outcomes):
                self._failed_at = time.monotonic()
                self._gone = lost
        elif time.monotonic() - self._failed_at > _GRACE_S:
            self.kill()

    def _do_without(self, ended: list[int], outcomes: dict[int, Outcome]) -> bool:
        """Tell the other ranks to go on without these. False where they cannot."""
        gone = {*ended, *self.lost_ranks}
        if not (
            gone <= self.expendable and gone != self.expendable and self.store.check([MEETING_KEY])
        ):
            return False
        for rank in ended:
            outcome = outcomes.get(rank)
            failed = None if outcome is None else outcome["text"].split(" To fix:")[0].rstrip(".")
            reason = self.how_it_ended(rank) if failed is None else f"failed: {failed}"
            self.lost_ranks[rank] = {"pid": self.processes[rank].pid, "reason": reason}
        self.store.set(LOST_KEY, json.dumps(self.lost_ranks))
        return True


def open_store() -> Any:
    """Serve a store for ranks of this host to meet at, on a free port of the loopback interface."""
    from torch.distributed import TCPStore

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1024)
        port = listening.getsockname()[1]
        # Left to itself, the store would listen on every address of this host.
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
    # The launcher serves the store: no rank opens one.
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
    if run_rank is None:
        worker_main(spec, folder)
    else:
        worker_main(spec, folder, run_rank)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
