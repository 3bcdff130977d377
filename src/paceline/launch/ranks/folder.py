"""The records of a host's ranks: each rank writes when it started and how it ended to a folder that
outlives it. Paceline's launcher, its elastic agent and the ranks of the next round read them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
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
        return {local_rank: int(start["pid"]) for local_rank, start in self._read_all("start")}

    def ended(self) -> dict[int, ExitRecord]:
        """Return how each local rank ended that has recorded it."""
        records = self._read_all("end")
        return {local_rank: ExitRecord.from_json(record) for local_rank, record in records}

    def _read_all(self, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
        for file in self.path.glob(f"rank-*.{name}.json"):
            with contextlib.suppress(OSError, ValueError):
                record = json.loads(file.read_text())
                yield int(file.name.split("-")[1].partition(".")[0]), record

    def _file(self, local_rank: int, name: str) -> Path:
        return self.path / f"rank-{local_rank}.{name}.json"
