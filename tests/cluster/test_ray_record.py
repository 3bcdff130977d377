"""Test which worker a Ray run blames for a failed attempt."""

from paceline.cluster.ray.record import RayRunRecord, WorkerPlace
from paceline.core.errors import ConfigError, FaultError
from paceline.core.failures import ExitRecord, classify


def begin_attempt(num_workers: int = 3) -> RayRunRecord:
    """Return the record of an attempt whose driver is on the node of the last worker, so that this
    worker gets rank 0."""
    record = RayRunRecord(f"node{num_workers - 1}", max_failures=3)
    places = [
        WorkerPlace(f"node{number}", f"10.0.0.{number}", f"host{number}", 100 + number)
        for number in range(num_workers)
    ]
    assert record.begin_attempt(places).order == [2, 0, 1]
    return record


def failed(error: Exception) -> ExitRecord:
    return ExitRecord.failed(classify(error), str(error))


def test_cause_precedes_closed_connection_that_was_reported_first() -> None:
    record = begin_attempt()
    record.fail(0, failed(RuntimeError("Connection reset by peer")))
    record.fail(1, failed(KeyError("x")))
    fault = record.last_fault()
    assert fault is not None
    assert (fault["ranks"], fault["hosts"]) == ([2], ["host1"])
    assert fault["reason"] == "rank 2 on host1 (10.0.0.1, process 101): 'x'"


def test_killed_worker_precedes_failures_and_all_killed_workers_are_named() -> None:
    record = begin_attempt()
    record.fail(0, failed(KeyError("x")))
    record.lose_workers([0, 1, 2])
    fault = record.last_fault()
    assert fault is not None
    assert (fault["ranks"], fault["hosts"]) == ([2, 0], ["host1", "host2"])
    assert fault["reason"].count("was killed, or its node was lost") == 2


def test_hang_is_blamed_on_the_ranks_that_the_watchdog_names() -> None:
    record = begin_attempt()
    record.fail(0, failed(FaultError("rank 2 hangs", ranks=[2])))
    record.fail(2, failed(KeyError("x")))
    fault = record.last_fault()
    assert fault is not None
    assert (fault["ranks"], fault["hosts"]) == ([2], ["host1"])
    assert fault["reason"] == "rank 1 on host0 (10.0.0.0, process 100): rank 2 hangs"


def test_attempt_without_failures_was_ended_by_ray() -> None:
    fault = begin_attempt().last_fault()
    assert fault is not None
    assert (fault["ranks"], fault["hosts"]) == ([], [])
    assert fault["reason"].startswith("Ray ended the workers without an error of theirs")


def test_final_failure_names_its_worker() -> None:
    record = begin_attempt()
    error = ConfigError("`seed: -1` is not allowed")
    assert record.fail_finally(1, failed(error)) == 1
    assert record.fail_finally(2, failed(ConfigError("other"))) == 2
    final = record.final_failure()
    assert final is not None
    assert (final.exit_code, final.message, final.is_final) == (2, str(error), True)
    assert final.cause.text == f"rank 2 on host1 (10.0.0.1, process 101): {error}"
