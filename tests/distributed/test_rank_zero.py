"""While rank 0 works alone, the other ranks wait for it outside of collectives, as long as it makes
progress."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ranks import run_ranks

from paceline.config.schema.recovery import RecoveryConfig
from paceline.core.errors import RunError, first_line
from paceline.core.event_log import EventLog, read_events
from paceline.core.stop import StopFlag
from paceline.distributed.communicator import init_communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.rank_zero import rank_zero_phase
from paceline.distributed.timing.progress import PROGRESS
from paceline.health.watchdog import Watchdog

#: Time limits of a collective, and of rank 0 without progress.
COLLECTIVE_TIMEOUT_S, RANK0_TIMEOUT_S = 2.0, 3.0


def run_phase(env: RankEnv, work: str, folder: str) -> tuple[str, list[dict[str, Any]]]:
    """Let rank 0 work alone for longer than a collective may take. Return the error of this rank,
    and the events that rank 0 wrote."""
    PROGRESS.start()
    comm = init_communicator(env, "cpu", COLLECTIVE_TIMEOUT_S, rank0_timeout_s=RANK0_TIMEOUT_S)
    log = EventLog(Path(folder) / "events.jsonl" if comm.is_rank_zero else None)
    watchdog = Watchdog(RecoveryConfig(hang_warning_s=1.0), 60.0, comm, StopFlag())
    watchdog.start()
    watchdog.watch(SimpleNamespace(world=comm, has_data=True), log)  # type: ignore[arg-type]
    PROGRESS.enter("forward")
    error = ""
    try:
        with rank_zero_phase(comm, "counting", Path(folder) / "growing"):
            if comm.is_rank_zero:
                WORK[work](Path(folder) / "growing")
        comm.barrier()
    except RuntimeError as caught:  # of the barrier, because the other rank has given up
        error = first_line(caught)
    except RunError as caught:
        error = str(caught)
    watchdog.close()
    log.close()
    return error, [] if log.path is None else read_events(log.path)


def make_progress(_folder: Path) -> None:
    for _ in range(10):
        time.sleep(0.6)
        PROGRESS.tick()


def write_files(folder: Path) -> None:
    (folder / "inner").mkdir(parents=True)
    for number in range(10):
        time.sleep(0.6)
        (folder / "inner" / str(number)).write_text("some bytes")


def sleep_for_long(_folder: Path) -> None:
    time.sleep(2.5)


def be_stuck(_folder: Path) -> None:
    time.sleep(9.0)


def fail(_folder: Path) -> None:
    raise RunError("rank 0 failed")


WORK = {
    function.__name__: function
    for function in (make_progress, write_files, sleep_for_long, be_stuck, fail)
}


def run(work: str, tmp_path: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    return run_ranks(run_phase, 2, work, str(tmp_path), init_process_group=False)


@pytest.mark.slow
@pytest.mark.parametrize("work", ["make_progress", "write_files", "sleep_for_long"])
def test_ranks_wait_for_longer_than_a_collective_may_take(work: str, tmp_path: Path) -> None:
    (error, events), (other, _) = run(work, tmp_path)
    assert (error, other) == ("", "")
    assert [event for event in events if event["type"] in ("hang", "straggler")] == []


@pytest.mark.slow
def test_error_names_rank_phase_and_key_if_there_is_no_progress(tmp_path: Path) -> None:
    _, (error, _) = run("be_stuck", tmp_path)
    assert "rank 0 has made no progress for 3 s while it was counting" in error
    assert "`recovery.rank0_timeout_s`" in error


def test_others_do_not_wait_for_a_rank_that_failed(tmp_path: Path) -> None:
    (error, _), (other, _) = run_ranks(
        leave_phase_with_error, 2, str(tmp_path), init_process_group=False
    )
    assert (error, other) == ("rank 0 failed.", "")


def leave_phase_with_error(env: RankEnv, folder: str) -> tuple[str, float]:
    comm = init_communicator(env, "cpu", 60.0)
    error, start = "", time.monotonic()
    try:
        with rank_zero_phase(comm, "failing"):
            if comm.is_rank_zero:
                fail(Path(folder))
    except RunError as caught:
        error = str(caught)
    waited_s = time.monotonic() - start
    comm.barrier()
    return error, waited_s
