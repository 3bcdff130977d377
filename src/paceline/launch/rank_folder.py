"""The records of a host's ranks: each rank writes when it started and how it ended to a folder that
outlives it. Paceline's launcher, its elastic agent and the ranks of the next round read them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from paceline.core.failures import ExitRecord
from paceline.core.files import write_json_atomic
from paceline.core.processes import host_name
from paceline.distributed.environment import RankEnv

#: File that exists once the ranks were requested to stop.
STOP_FILE = "stop"


class StartRecord(TypedDict):
    """Written when a rank starts. ``time`` is in seconds since the epoch."""

    rank: int
    host: str
    pid: int
    time: float


class RankFolder:
    """The folder with the records of one host's ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def write_start(self, env: RankEnv) -> None:
        """Record that this rank has started."""
        start: StartRecord = {
            "rank": env.rank,
            "host": host_name(),
            "pid": os.getpid(),
            "time": time.time(),
        }
        self.write(env.local_rank, "start", start)

    def write_end(self, env: RankEnv, ended: ExitRecord) -> None:
        """Record how this rank ended."""
        self.write(env.local_rank, "end", replace(ended, time=time.time()).as_json())

    def write(self, local_rank: int, name: str, content: Mapping[str, Any]) -> None:
        """Write the record ``name`` of a rank. A full disk is ignored: without a record the rank
        counts as killed."""
        with contextlib.suppress(OSError):
            write_json_atomic(self._file(local_rank, name), content)

    def pids(self) -> dict[int, int]:
        """Return the latest process ID of each local rank that has started."""
        pids = {}
        for file in self.path.glob("rank-*.start.json"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                local_rank = int(file.name.split("-")[1].partition(".")[0])
                pids[local_rank] = int(json.loads(file.read_text())["pid"])
        return pids

    def ended(self) -> dict[int, ExitRecord]:
        """Return how each local rank ended that has recorded it."""
        ended = {}
        for file in self.path.glob("rank-*.end.json"):
            with contextlib.suppress(OSError, ValueError):
                local_rank = int(file.name.split("-")[1].partition(".")[0])
                ended[local_rank] = ExitRecord.from_json(json.loads(file.read_text()))
        return ended

    def _file(self, local_rank: int, name: str) -> Path:
        return self.path / f"rank-{local_rank}.{name}.json"
