"""Test how the root cause of a failed attempt is found in the records of its ranks and agents."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.failures import AgentFolder, first_failure, is_secondary

PEER_CLOSED = (
    "RuntimeError: [/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:58555: Connection reset"
    " by peer"
)


def record(rank: int, host: str, **files: dict[str, Any]) -> dict[str, Any]:
    return {"start": {"rank": rank, "host": host, "pid": 100 + rank, "time": 1.0}, **files}


def failed(at: float, text: str, **fields: Any) -> dict[str, Any]:
    return {"status": "failed", "exit_code": 1, "text": text, "fault": None, "time": at, **fields}


def exited(rank: int, at: float, code: int) -> dict[str, Any]:
    return {"pid": 100 + rank, "time": at, "code": code}


def test_killed_rank_precedes_errors_of_its_peers() -> None:
    records = [
        record(0, "a", end=failed(5.0, PEER_CLOSED)),
        record(1, "b", exit=exited(1, 4.9, -9)),
    ]
    failure = first_failure(records, ["a", "b"], ["a", "b"])
    assert failure is not None
    assert (failure.ranks, failure.host, failure.time) == ([1], "b", 4.9)
    assert "rank 1 on host b (process 101) was killed by SIGKILL" in failure.outcome["reason"]
    assert failure.outcome["fault"] is True


def test_killed_rank_is_reported_without_exit_code() -> None:
    records = [
        record(0, "a", end=failed(5.0, PEER_CLOSED)),
        record(1, "b"),
        record(2, "b", terminated={"time": 5.1}),
    ]
    failure = first_failure(records, ["a", "b", "b"], ["a", "b", "b"])
    assert failure is not None
    assert failure.ranks == [1]


def test_exception_precedes_later_deaths() -> None:
    records = [
        record(0, "a", terminated={"time": 5.0}, exit=exited(0, 6.0, -9)),
        record(1, "b", end=failed(4.0, "ValueError: a mistake", fault=False)),
        record(2, "c", end=failed(4.5, PEER_CLOSED)),
    ]
    failure = first_failure(records, ["a", "b", "c"], ["a", "b", "c"])
    assert failure is not None
    assert failure.ranks == [1]
    assert failure.outcome["text"].startswith("rank 1 on host b failed. ValueError")
    assert failure.outcome["fault"] is False


@pytest.mark.parametrize(
    ("hosts", "ending"), [(["a"], "was lost"), (["a", "b"], "was lost and has come back")]
)
def test_host_without_records_is_lost(hosts: list[str], ending: str) -> None:
    records = [record(0, "a", end=failed(5.0, PEER_CLOSED)), {}][: len(hosts)]
    failure = first_failure(records, hosts, ["a", "b", "b"])
    assert failure is not None
    assert failure.ranks == [1, 2]
    assert failure.outcome["reason"] == f"host b with ranks 1 to 2 {ending}"


def test_collective_mismatch_takes_precedence() -> None:
    mismatch = failed(5.0, "ranks 0 and 1 issued different collectives", of_all=True, blamed=[0, 1])
    records = [record(0, "a", end=mismatch), record(1, "b", exit=exited(1, 4.0, -9))]
    failure = first_failure(records, ["a", "b"], ["a", "b"])
    assert failure is not None
    assert failure.ranks == [0, 1]


def test_ranks_stopped_for_joining_host_have_not_failed() -> None:
    stopped = {"status": "stopped", "exit_code": 143, "time": 5.0}
    assert first_failure([record(0, "a", end=stopped), {}], ["a", "b"], ["a"]) is None


def test_earliest_of_secondary_errors_is_reported() -> None:
    records = [
        record(0, "a", end=failed(5.0, PEER_CLOSED)),
        record(1, "b", end=failed(4.0, PEER_CLOSED)),
    ]
    failure = first_failure(records, ["a", "b"], ["a", "b"])
    assert failure is not None
    assert failure.ranks == [1]


def test_ignores_exit_code_of_earlier_process() -> None:
    failure = first_failure(
        [record(0, "a", exit={"pid": 7, "time": 1.0, "code": -11})], ["a"], ["a"]
    )
    assert failure is not None
    assert "SIGSEGV" not in failure.outcome["reason"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PEER_CLOSED, True),
        ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", True),
        ("KeyError: 'x'", False),
    ],
)
def test_is_secondary_for_lost_connections(text: str, expected: bool) -> None:
    assert is_secondary({"text": text}) is expected


def test_take_removes_records_and_keeps_state(tmp_path: Path) -> None:
    folder = AgentFolder(tmp_path / "agent")
    folder.write(0, "start", {"rank": 3, "pid": 17})
    folder.write(0, "end", {"status": "failed"})
    folder.write_state({"node_rank": 1})
    folder.write_state({"hosts": ["a"]})
    assert folder.pids() == {0: 17}
    assert folder.take(0) == {"start": {"rank": 3, "pid": 17}, "end": {"status": "failed"}}
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
