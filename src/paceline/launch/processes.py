"""Ranks of this host of which some may end before the others. torch's elastic agent ends all of them when one ends, so here
they are plain processes of the fork server, which meet at a store in this process."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.launch.worker import worker_main
from paceline.world.losses import LOST_KEY, MEETING_KEY


class RankProcesses:
    """Starts ``num_ranks`` ranks on a job and waits for them (:meth:`run`, in a thread); meanwhile tells them of losses."""

    def __init__(self, num_ranks: int) -> None:
        from torch.distributed import TCPStore

        self.num_ranks = num_ranks
        self.store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: list[Any] = []

    def run(self, job: Any, folder: Path, *more: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        self.processes = [
            context.Process(target=_rank, args=(rank, self.num_ranks, self.store.port, job, str(folder), *more))
            for rank in range(self.num_ranks)
        ]
        for one in self.processes:
            one.start()
        for one in self.processes:
            one.join()

    @property
    def can_lose(self) -> bool:
        """Whether the ranks have come to where they can go on without one."""
        return bool(self.store.check([MEETING_KEY]))

    def tell(self, lost: Mapping[int, Mapping[str, Any]]) -> None:
        """Let the ranks know who has ended so far: rank → {"pid", "reason"}."""
        self.store.set(LOST_KEY, json.dumps(lost))

    def how_it_ended(self, rank: int) -> str:
        """For a person, of a process that left no word: ``was killed by SIGKILL``."""
        code = self.processes[rank].exitcode if rank < len(self.processes) else None
        if code is None or code >= 0:
            return "ended without a word"
        why = " (often: out of memory; see `dmesg`)" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{why}"


def _rank(rank: int, num_ranks: int, port: int, job: Any, folder: str, *more: Any) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    # The store is the launcher's: no rank opens one.
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
    worker_main(job, folder, *more)
