"""Test how the root cause of a failed attempt is found in the records of its ranks and agents."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from paceline.cluster.failures import AgentFolder, first_failure
from paceline.core.failures import (
    ExitRecord,
    Failure,
    FailureKind,
    FailureScope,
    classify,
    first_cause,
)
from paceline.distributed.environment import RankEnv

PEER_CLOSED = (
    "RuntimeError: [/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:58555: Connection reset"
    " by peer"
)


def record(rank: int, host: str, **files: dict[str, Any]) -> dict[str, Any]:
    return {"start": {"rank": rank, "host": host, "pid": 100 + rank, "time": 1.0}, **files}


def failed(
    at: float,
    text: str,
    kind: FailureKind = FailureKind.UNKNOWN,
    scope: FailureScope = FailureScope.RANK,
    ranks: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Return the record of a failed rank, as JSON."""
    return ExitRecord.failed(Failure(kind, scope, ranks, (), text), time=at).as_json()


def closed(at: float) -> dict[str, Any]:
    return failed(at, PEER_CLOSED, FailureKind.CLOSED)


def exited(rank: int, at: float, code: int) -> dict[str, Any]:
    return {"pid": 100 + rank, "time": at, "code": code}


def test_killed_rank_precedes_errors_of_its_peers() -> None:
    records = [
        record(0, "a", end=closed(5.0)),
        record(1, "b", exit=exited(1, 4.9, -9)),
    ]
    failure = first_failure(records, ["a", "b"], ["a", "b"])
    assert failure is not None
    assert (failure.cause.ranks, failure.cause.hosts, failure.time) == ((1,), ("b",), 4.9)
    assert failure.cause.text.startswith("rank 1 on host b (process 101) was killed by SIGKILL")
    assert failure.cause.is_transient


def test_killed_rank_is_reported_without_exit_code() -> None:
    records = [
        record(0, "a", end=closed(5.0)),
        record(1, "b"),
        record(2, "b", terminated={"time": 5.1}),
    ]
    failure = first_failure(records, ["a", "b", "b"], ["a", "b", "b"])
    assert failure is not None
    assert failure.cause.ranks == (1,)


def test_exception_precedes_later_deaths() -> None:
    records = [
        record(0, "a", terminated={"time": 5.0}, exit=exited(0, 6.0, -9)),
        record(1, "b", end=failed(4.0, "ValueError: a mistake", FailureKind.PROGRAM, ranks=(1,))),
        record(2, "c", end=closed(4.5)),
    ]
    failure = first_failure(records, ["a", "b", "c"], ["a", "b", "c"])
    assert failure is not None
    assert failure.cause.ranks == (1,)
    assert failure.message == failure.cause.text
    assert failure.message.startswith("rank 1 on host b failed. ValueError")
    assert failure.cause.is_permanent


@pytest.mark.parametrize(
    ("hosts", "ending"), [(["a"], "was lost"), (["a", "b"], "was lost and has come back")]
)
def test_host_without_records_is_lost(hosts: list[str], ending: str) -> None:
    records = [record(0, "a", end=closed(5.0)), {}][: len(hosts)]
    failure = first_failure(records, hosts, ["a", "b", "b"])
    assert failure is not None
    assert failure.cause.ranks == (1, 2)
    assert failure.cause.text == f"host b with ranks 1 to 2 {ending}"


def test_collective_mismatch_takes_precedence() -> None:
    text, scope = "ranks 0 and 1 issued different collectives", FailureScope.RUN
    mismatch = failed(5.0, text, FailureKind.EXPLAINED, scope, (0, 1))
    records = [record(0, "a", end=mismatch), record(1, "b", exit=exited(1, 4.0, -9))]
    failure = first_failure(records, ["a", "b"], ["a", "b"])
    assert failure is not None
    assert failure.cause.ranks == (0, 1)


def test_ranks_stopped_for_joining_host_have_not_failed() -> None:
    stopped = ExitRecord("stopped", 143, time=5.0).as_json()
    assert first_failure([record(0, "a", end=stopped), {}], ["a", "b"], ["a"]) is None


def test_earliest_of_secondary_errors_is_reported() -> None:
    records = [
        record(0, "a", end=closed(5.0)),
        record(1, "b", end=closed(4.0)),
    ]
    failure = first_failure(records, ["a", "b"], ["a", "b"])
    assert failure is not None
    assert (failure.cause.hosts, failure.time) == (("b",), 4.0)


def test_ignores_exit_code_of_earlier_process() -> None:
    failure = first_failure(
        [record(0, "a", exit={"pid": 7, "time": 1.0, "code": -11})], ["a"], ["a"]
    )
    assert failure is not None
    assert "SIGSEGV" not in failure.cause.text


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError(PEER_CLOSED), FailureKind.CLOSED),
        (distributed.DistNetworkError("failed to recv, got 0 bytes"), FailureKind.CLOSED),
        (RuntimeError("Timed out waiting 60000ms for recv operation"), FailureKind.TIMEOUT),
        (RuntimeError("NCCL error: unhandled system error"), FailureKind.FAULT),
        (KeyError("x"), FailureKind.PROGRAM),
    ],
)
def test_lost_connections_are_consequences(error: Exception, kind: FailureKind) -> None:
    failure = classify(error, rank=3)
    assert (failure.kind, failure.ranks) == (kind, (3,))
    assert failure.is_consequence == (kind in (FailureKind.CLOSED, FailureKind.TIMEOUT))


def test_first_cause_prefers_causes_then_whole_runs_then_killed_ranks() -> None:
    def make(kind: FailureKind, scope: FailureScope, at: float | None) -> ExitRecord:
        return ExitRecord.failed(Failure(kind, scope, (), (), ""), time=at)

    ordered = [
        make(FailureKind.EXPLAINED, FailureScope.RUN, 9.0),
        make(FailureKind.KILLED, FailureScope.PROCESSES, None),
        make(FailureKind.PROGRAM, FailureScope.RANK, 2.0),
        make(FailureKind.UNKNOWN, FailureScope.RANK, 3.0),
        make(FailureKind.CLOSED, FailureScope.RANK, 1.0),
    ]
    for start in range(len(ordered)):
        assert first_cause(reversed(ordered[start:])) is ordered[start]
    assert first_cause([]) is None


def test_take_removes_records_and_keeps_state(tmp_path: Path) -> None:
    folder = AgentFolder(tmp_path / "agent")
    ended = ExitRecord.failed(classify(RuntimeError(PEER_CLOSED), 3), traceback="trace")
    folder.write_start(RankEnv(3, 4, 0, 1))
    folder.write_end(RankEnv(3, 4, 0, 1), ended)
    folder.write_state({"node_rank": 1})
    folder.write_state({"hosts": ["a"]})
    assert folder.pids() == {0: os.getpid()}
    restored = folder.ended()[0]
    assert restored.time is not None
    assert replace(restored, time=None) == ended
    taken = folder.take(0)
    assert (taken["start"]["rank"], taken["start"]["pid"]) == (3, os.getpid())
    assert ExitRecord.from_json(taken["end"]) == restored
    assert folder.take(0) == {}
    assert folder.read_state() == {"node_rank": 1, "hosts": ["a"]}


def test_records_sigterm_while_main_thread_is_blocked(tmp_path: Path) -> None:
    code = (
        "import signal, sys, threading; from pathlib import Path; from torch.distributed import"
        " HashStore\n"
        "from datetime import timedelta\n"
        "from paceline.cluster.failures import AgentFolder, watch_termination\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "watch_termination(AgentFolder(Path(sys.argv[1])), 0); print('ready', flush=True)\n"
        # blocks inside C++, where no Python signal handler runs
        "store = HashStore(); store.wait(['never'], timedelta(seconds=60))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=os.environ.copy()
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 20.0
    try:
        while not (tmp_path / "rank-0.terminated.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
