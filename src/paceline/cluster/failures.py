"""Determine why the previous round ended.

Each rank writes records to a folder of its host's agent, which outlives the rank: that it started,
how it ended, and that it was terminated. The agent adds the exit codes of its workers if it can
read them. At the next rendezvous the ranks exchange these records and report the earliest failure
that is not a consequence of another one. A rank without a record of how it ended was killed, and a
host that is missing was lost.
"""

import contextlib
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, cast

from paceline.core.failures import ExitRecord, first_cause
from paceline.core.files import write_json_atomic
from paceline.core.processes import exit_text, pid_alive
from paceline.core.texts import UserText
from paceline.launch.ranks.folder import RankFolder, StartRecord
from paceline.launch.restart import PolicyState
from paceline.planner.search.trials import Setting


class ExitCode(TypedDict):
    """Written by the agent when a rank exits. ``code`` is None if it could not be read."""

    pid: int
    code: int | None
    time: float


class TerminatedRecord(TypedDict):
    """Written when a rank receives SIGTERM."""

    time: float


class Record(TypedDict, total=False):
    """The records of a rank in the previous round. ``end``: an
    :class:`~paceline.core.failures.ExitRecord` as JSON."""

    start: StartRecord
    end: dict[str, Any]
    terminated: TerminatedRecord
    exit: ExitCode


class MemoryRecord(TypedDict):
    """The memory settings of a round, and what they were chosen for.

    Args:
        settings: values of the settings that the config leaves open, by dotted key.
    """

    settings: dict[str, Setting]
    strategy: str
    axes: dict[str, int]
    num_processes: int
    device_type: str


class AgentState(TypedDict, total=False):
    """The state of the previous round that an agent stores."""

    node_rank: int
    hosts: list[str]
    recovery: PolicyState
    entered_at: float
    global_batch_size: int
    resume_from: str | None
    memory: MemoryRecord
    not_joined: int


class AgentFolder(RankFolder):
    """The folder to which the ranks of one agent write records for the next round."""

    def take(self, local_rank: int) -> Record:
        """Return and remove the records of the rank with this local rank in the previous round."""
        record = {}
        for name in ("start", "end", "terminated", "exit"):
            file = self._file(local_rank, name)
            with contextlib.suppress(OSError, ValueError):
                record[name] = json.loads(file.read_text())
            file.unlink(missing_ok=True)
        return cast(Record, record)

    def read_state(self) -> AgentState:
        """Return the state that :meth:`write_state` has written in earlier rounds."""
        try:
            return cast(AgentState, dict(json.loads((self.path / "state.json").read_text())))
        except (OSError, ValueError, TypeError):
            return {}

    def write_state(self, entries: AgentState) -> None:
        """Add ``entries`` to the state."""
        with contextlib.suppress(OSError):
            write_json_atomic(self.path / "state.json", {**self.read_state(), **entries})


def folder_of_agent(call: int = 0) -> AgentFolder:
    """Return the folder for the torchrun agent that started this process, readable only by this
    user. Remove the folders of agents that have ended.

    Args:
        call: number of the call of ``paceline.train()`` in this process.
    """
    agent = os.getppid()
    try:
        started_at = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started_at = "0"
    root = Path(tempfile.gettempdir()) / f"paceline-agents-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():  # created by another user: continue without records
        root = Path(tempfile.mkdtemp(prefix="paceline-agent-"))
    for folder in root.iterdir():
        pid = folder.name.partition("-")[0]
        if pid.isdigit() and not pid_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
    name = f"{agent}-{started_at}"
    return AgentFolder(root / (f"{name}-{call}" if call else name))


def watch_termination(folder: AgentFolder, local_rank: int) -> None:
    """Record the time at which SIGTERM arrives, even while the main thread waits in a collective.
    After a failure, an agent sends SIGTERM to the ranks that did not fail themselves."""
    if threading.current_thread() is not threading.main_thread():
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def read() -> None:
        while data := os.read(reading, 64):
            if signal.SIGTERM in data:
                folder.write(local_rank, "terminated", {"time": time.time()})

    threading.Thread(target=read, name="termination-record", daemon=True).start()


def first_failure(
    records: Sequence[Record], hosts: Sequence[str], previous_hosts: Sequence[str]
) -> ExitRecord | None:
    """Return the failure that ended the previous round, or None if it ended because a host joined
    or if this is the first round.

    Args:
        records: records that each rank of this round has read from its agent's folder.
        hosts: names of the hosts of this round.
        previous_hosts: name of each rank's host in the previous round, as recorded by rank 0.
    """
    recorded = [record for record in records if "start" in record]
    failures = [failure for record in recorded if (failure := failure_of(record)) is not None]
    known_ranks = {record["start"]["rank"] for record in recorded}
    for host in dict.fromkeys(previous_hosts):
        ranks = [rank for rank, name in enumerate(previous_hosts) if name == host]
        if not known_ranks.intersection(ranks):
            failures.append(_lost_host(host, ranks, came_back=host in hosts))
    return first_cause(failures)


def failure_of(record: Record) -> ExitRecord | None:
    """Return how the rank that wrote a record failed, or None if the rank did not fail."""
    start, exit_ = record["start"], record.get("exit")
    if exit_ is not None and exit_["pid"] != start["pid"]:
        exit_ = None
    rank, host = int(start["rank"]), str(start["host"])
    if "end" in record:
        ended = ExitRecord.from_json(record["end"]).named(f"rank {rank} on host {host}")
        if ended.status != "failed":
            return None
        return replace(ended, failure=replace(ended.cause, hosts=(host,)))
    ended_at = None if exit_ is None else float(exit_["time"])
    terminated = record.get("terminated")
    if terminated is not None and (ended_at is None or ended_at > float(terminated["time"])):
        return None  # its agent terminated it after another failure
    code = None if exit_ is None else exit_["code"]
    text = exit_text(code) if code else "was killed: it left no message"
    reason = UserText(
        "rank {rank_numbers} on host {host} (process {pid}) {exits}",
        code="rank-on-host-killed",
        rank_numbers=rank,
        host=host,
        pid=start["pid"],
        exits=text,
    )
    return ExitRecord.killed([rank], [host], reason, ended_at)


def _lost_host(host: str, ranks: Sequence[int], came_back: bool) -> ExitRecord:
    name = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    reason = UserText(
        "host {host} with {name} was lost{and_back}",
        code="host-lost",
        host=host,
        name=name,
        rank_numbers=", ".join(map(str, ranks)),
        and_back=" and has come back" if came_back else "",
    )
    return ExitRecord.killed(ranks, [host], reason)
