"""Test the launcher of one host: a rank fails because another was killed; the fork server dies."""

import multiprocessing.forkserver
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.launch.local import LocalLauncher

JOB = SimpleNamespace(
    layout=SimpleNamespace(num_processes=2, strategy="ddp", axes=None), config=None
)


def report_rank(job: Any, env: Any, stop: Any) -> dict[str, Any]:
    return {"status": "done", "report": {"world_size": env.world_size} if env.rank == 0 else None}


def fail_before_the_killed_rank_ends(job: Any, env: Any, stop: Any) -> dict[str, Any]:
    if env.rank == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("connection closed by peer")


@pytest.mark.slow
def test_killed_rank_is_blamed_although_another_reports_a_failure_first() -> None:
    outcome = LocalLauncher(
        JOB, 2, fail_before_the_killed_rank_ends, lambda job, outcome: (None, outcome)
    ).run()
    assert (outcome["status"], outcome["ranks"], outcome["fault"]) == ("failed", [0], True)
    assert "was killed by SIGKILL" in outcome["reason"]


@pytest.mark.soak
@pytest.mark.slow
def test_fork_server_killed_at_startup_is_a_fault() -> None:
    attempts = []

    def follow(job: Any, outcome: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        attempts.append(outcome)
        return job, outcome

    multiprocessing.forkserver.ensure_running()
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGSTOP)  # it receives the request but never answers
    killer = threading.Timer(1.0, os.kill, (server, signal.SIGKILL))
    killer.start()
    outcome = LocalLauncher(JOB, 2, report_rank, follow).run()
    killer.join()
    assert (outcome["status"], outcome["report"]) == ("done", {"world_size": 2})
    assert [(attempt["fault"], attempt["exit_code"]) for attempt in attempts] == [(True, 1)]
    assert "ended while it started the ranks" in attempts[0]["reason"]
