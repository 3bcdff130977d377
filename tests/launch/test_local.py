"""Test the launcher of one host: a rank fails because another was killed; the fork server dies."""

import multiprocessing.forkserver
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.failures import ExitRecord, FailureKind
from paceline.launch.local import LocalLauncher

JOB = SimpleNamespace(
    layout=SimpleNamespace(num_processes=2, strategy="ddp", axes=None), config=None
)


def report_rank(job: Any, env: Any, stop: Any) -> ExitRecord:
    return ExitRecord("done", report={"world_size": env.world_size} if env.rank == 0 else None)


def fail_before_the_killed_rank_ends(job: Any, env: Any, stop: Any) -> ExitRecord:
    if env.rank == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("connection closed by peer")


@pytest.mark.slow
def test_killed_rank_is_blamed_although_another_reports_a_failure_first() -> None:
    failed = LocalLauncher(
        JOB, 2, fail_before_the_killed_rank_ends, lambda job, failed: (None, failed)
    ).run()
    assert (failed.status, failed.exit_code) == ("failed", 1)
    assert (failed.cause.kind, failed.cause.ranks) == (FailureKind.KILLED, (0,))
    assert "was killed by SIGKILL" in failed.cause.text
    assert failed.message == f"{failed.cause.text}. The other ranks were stopped."


@pytest.mark.soak
@pytest.mark.slow
def test_fork_server_killed_at_startup_is_a_fault() -> None:
    attempts = []

    def follow(job: Any, failed: ExitRecord) -> tuple[Any, ExitRecord]:
        attempts.append(failed)
        return job, failed

    multiprocessing.forkserver.ensure_running()
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGSTOP)  # it receives the request but never answers
    killer = threading.Timer(1.0, os.kill, (server, signal.SIGKILL))
    killer.start()
    ended = LocalLauncher(JOB, 2, report_rank, follow).run()
    killer.join()
    assert (ended.status, ended.report) == ("done", {"world_size": 2})
    assert [(failed.cause.is_transient, failed.exit_code) for failed in attempts] == [(True, 1)]
    assert "ended while it started the ranks" in attempts[0].cause.text
