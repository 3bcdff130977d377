"""Test the launcher of one host when its fork server dies."""

import multiprocessing.forkserver
import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.launch.local import LocalLauncher


def report_rank(job: Any, env: Any, stop: Any) -> dict[str, Any]:
    return {"status": "done", "report": {"world_size": env.world_size} if env.rank == 0 else None}


@pytest.mark.soak
@pytest.mark.slow
def test_fork_server_killed_at_startup_is_a_fault() -> None:
    attempts = []
    job = SimpleNamespace(
        layout=SimpleNamespace(num_processes=2, strategy="ddp", axes=None), config=None
    )

    def follow(job: Any, outcome: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        attempts.append(outcome)
        return job, outcome

    multiprocessing.forkserver.ensure_running()
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGSTOP)  # it receives the request but never answers
    killer = threading.Timer(1.0, os.kill, (server, signal.SIGKILL))
    killer.start()
    outcome = LocalLauncher(job, 2, report_rank, follow).run()
    killer.join()
    assert (outcome["status"], outcome["report"]) == ("done", {"world_size": 2})
    assert [(attempt["fault"], attempt["exit_code"]) for attempt in attempts] == [(True, 1)]
    assert "ended while it started the ranks" in attempts[0]["reason"]
