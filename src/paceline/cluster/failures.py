"""What became of the ranks of the round before, and which failure was the first.

Each rank leaves records in a folder of its host's agent, which outlives the rank: that it runs, how
it ended, that it was asked to end. The agent adds the exit code of its workers where it can see it.
At the next rendezvous the ranks exchange the records, and the earliest failure that is not a
consequence of another one is named. A rank without a record of its end was killed. A host that is
missing was lost.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, cast

from paceline.core.errors import EXIT_FAILED, Outcome
from paceline.core.files import write_json_atomic
from paceline.core.processes import pid_alive
from paceline.launch.restart import PolicyState

#: How Gloo, NCCL and torch's stores report that a peer has gone.
_PEER_GONE = re.compile(
    r"connection (closed|reset|refused|was likely closed)|broken pipe|timed? ?out|remote process"
    r" exited|DistNetworkError|"
    r"failed to recv|store.*(closed|unreachable)|NCCL communicator was aborted|recvValue"
    r" failed|sendBytes failed",
    re.IGNORECASE,
)


class StartRecord(TypedDict):
    """Written when a rank starts. ``time``: seconds since the epoch."""

    rank: int
    host: str
    pid: int
    time: float


class ExitRecord(TypedDict):
    """Written by the agent. ``code``: None if it could not be seen."""

    pid: int
    code: int | None
    time: float


class TerminatedRecord(TypedDict):
    time: float


class Record(TypedDict, total=False):
    """What a rank of the round before has left."""

    start: StartRecord
    end: Outcome
    terminated: TerminatedRecord
    exit: ExitRecord


class AgentState(TypedDict, total=False):
    """What an agent knows of the round before."""

    node_rank: int
    hosts: list[str]
    recovery: PolicyState
    entered_at: float
    global_batch_size: int
    resume_from: str | None
    not_joined: int


RecordPart = StartRecord | Outcome | TerminatedRecord | ExitRecord


class AgentFolder:
    """The folder in which the ranks of one agent leave records for the next round."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def take(self, local_rank: int) -> Record:
        """What the rank before this one in the same place has left, and remove it. Empty:
        nothing."""
        record = {}
        for name in ("start", "end", "terminated", "exit"):
            file = self._file(local_rank, name)
            with contextlib.suppress(OSError, ValueError):
                record[name] = json.loads(file.read_text())
            file.unlink(missing_ok=True)
        return cast(Record, record)

    def write(self, local_rank: int, name: str, content: RecordPart) -> None:
        """``name``: start, end, terminated or exit. A full disk does not end the rank."""
        with contextlib.suppress(OSError):
            write_json_atomic(self._file(local_rank, name), content)

    def pids(self) -> dict[int, int]:
        """The process of each local rank that runs, or has run last."""
        pids = {}
        for file in self.path.glob("rank-*.start.json"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                pids[int(file.name.split("-")[1].partition(".")[0])] = int(
                    json.loads(file.read_text())["pid"]
                )
        return pids

    def read_state(self) -> AgentState:
        """What :meth:`write_state` has written in an earlier round, or an empty mapping."""
        try:
            return cast(AgentState, dict(json.loads((self.path / "state.json").read_text())))
        except (OSError, ValueError, TypeError):
            return {}

    def write_state(self, entries: AgentState) -> None:
        with contextlib.suppress(OSError):
            write_json_atomic(self.path / "state.json", {**self.read_state(), **entries})

    def _file(self, local_rank: int, name: str) -> Path:
        return self.path / f"rank-{local_rank}.{name}.json"


def folder_of_agent(call: int = 0) -> AgentFolder:
    """The folder for the agent of torchrun that has started this process, of this user alone.

    Args:
        call: which call of ``paceline.train()`` in this process it is for.
    """
    agent = os.getppid()
    try:
        born = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        born = "0"
    root = Path(tempfile.gettempdir()) / f"paceline-agents-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():  # another user's: then without records
        root = Path(tempfile.mkdtemp(prefix="paceline-agent-"))
    for folder in root.iterdir():  # agents that have ended
        pid = folder.name.partition("-")[0]
        if pid.isdigit() and not pid_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
    return AgentFolder(root / (f"{agent}-{born}-{call}" if call else f"{agent}-{born}"))


def watch_termination(folder: AgentFolder, local_rank: int) -> None:
    """Record SIGTERM at the moment it arrives, also while the main thread waits inside a
    collective: an agent that ends the others after a failure sends it, and such a rank has not
    failed by itself."""
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


def is_secondary(outcome: Outcome) -> bool:
    """Return whether an outcome only reports that a peer has gone."""
    return outcome.get("of_all") is not True and bool(
        _PEER_GONE.search(str(outcome.get("text", "")))
    )


@dataclass(frozen=True)
class Failure:
    """A failure of the round before. ``outcome``: as of :func:`paceline.launch.local.outcome_of`,
    for the restart policy."""

    ranks: list[int]
    host: str
    time: float | None
    outcome: Outcome


def first_failure(
    records: Sequence[Record], hosts: Sequence[str], previous_hosts: Sequence[str]
) -> Failure | None:
    """The failure that ended the round before; None where there was none (a host joined, or this is
    the first round).

    Args:
        records: what each rank of this round has taken from its agent's folder.
        hosts: the hosts of this round.
        previous_hosts: name of each rank's host in the round before, as rank 0 recorded it.
    """
    recorded = [record for record in records if "start" in record]
    failures = [failure for record in recorded if (failure := _failure_of(record)) is not None]
    primary = [failure for failure in failures if not failure.outcome.get("secondary")]
    known_ranks = {record["start"]["rank"] for record in recorded}
    for host in dict.fromkeys(previous_hosts):
        ranks = [rank for rank, name in enumerate(previous_hosts) if name == host]
        if not known_ranks.intersection(ranks):
            primary.append(_lost_host(host, ranks, came_back=host in hosts))
    candidates = primary or failures
    return min(candidates, key=_precedence) if candidates else None


def _precedence(failure: Failure) -> tuple[bool, bool, float]:
    # What a rank reports about all of them first; then by time, and those whose time is not known
    # before the others: a killed process cannot write when it ended.
    return not failure.outcome.get("of_all"), failure.time is not None, failure.time or 0.0


def _failure_of(record: Record) -> Failure | None:
    start, end, exit_ = record["start"], record.get("end"), record.get("exit")
    if exit_ is not None and exit_["pid"] != start["pid"]:
        exit_ = None
    rank, host = int(start["rank"]), str(start["host"])
    if end is not None:
        if end["status"] != "failed":
            return None
        named = end.get("blamed") or [rank]
        says_all = end["exit_code"] == 2 or end.get("of_all") or end.get("every_rank")
        text = end["text"] if says_all else f"rank {rank} on host {host} failed. {end['text']}"
        outcome: Outcome = {
            **end,
            "text": text,
            "ranks": named,
            "hosts": [host],
            "secondary": is_secondary(end),
        }
        return Failure(named, host, float(end["time"]), outcome)
    ended_at = None if exit_ is None else float(exit_["time"])
    terminated = record.get("terminated")
    if terminated is not None and (ended_at is None or ended_at > float(terminated["time"])):
        return None  # its agent ended it, after another failure
    return _killed(start, None if exit_ is None else exit_["code"], ended_at)


def _killed(start: StartRecord, code: int | None, ended_at: float | None) -> Failure:
    rank, host = int(start["rank"]), str(start["host"])
    if code is not None and code < 0:
        often = " (often: out of memory; see `dmesg`)" if code == -signal.SIGKILL else ""
        how = f"was killed by {signal.Signals(-code).name}{often}"
    elif code:
        how = f"ended without a message, with exit code {code}"
    else:
        how = "was killed: it left no message"
    reason = f"rank {rank} on host {host} (process {start['pid']}) {how}"
    return Failure([rank], host, ended_at, _fault(reason, [rank], host))


def _lost_host(host: str, ranks: list[int], came_back: bool) -> Failure:
    plural = "s" if len(ranks) > 1 else ""
    span = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    what = "was lost and has come back" if came_back else "was lost"
    return Failure(
        ranks, host, None, _fault(f"host {host} with rank{plural} {span} {what}", ranks, host)
    )


def _fault(reason: str, ranks: list[int], host: str) -> Outcome:
    return {
        "status": "failed", "exit_code": EXIT_FAILED,
        "text": f"{reason}. The other ranks were stopped.", "traceback": "", "report": None,
        "fault": True, "ranks": ranks, "hosts": [host], "reason": reason, "gone": True,
    }  # fmt: skip
