"""Progress tracking of a process: phases, step times, collectives with number and call site, and
waiting time."""

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import ParallelDims
from paceline.distributed.timing.progress import PROGRESS, ProgressTracker, stack_of
from paceline.strategies.reducers.all_reduce.run import all_reduce

FILE = __file__


def recorded_calls(function: str | None = None) -> list[dict[str, Any]]:
    return [
        call
        for call in (recorded.record() for recorded in PROGRESS.ring)
        if function is None or call["function"] == function
    ]


def test_data_time_excludes_waits() -> None:
    tracker = ProgressTracker()
    tracker.start()
    tracker.begin_step(7)
    with tracker.waiting("others"):
        time.sleep(0.05)
    tracker.enter("forward")
    assert tracker.phase == "forward"
    tracker.end_step(disturbed=True)
    (times,) = tracker.steps
    assert (times.step, times.disturbed) == (7, True)
    assert times.wait_s >= 0.05
    assert times.data_s < times.wait_s
    assert times.wall_s >= times.data_s + times.wait_s


def test_phases_and_waits_add_up_to_the_step_time() -> None:
    tracker = ProgressTracker()
    tracker.start()
    tracker.enter("evaluation")  # outside of any step
    for number in (1, 2):
        tracker.begin_step(number)
        for phase in ("forward", "backward", "forward", "backward"):
            tracker.enter(phase)
            time.sleep(0.005)
            with tracker.waiting("others"):
                time.sleep(0.02 * (phase == "backward"))
        tracker.enter("optimizer")
        tracker.end_step()
    assert set(tracker.spent_s) == {"data", "forward", "backward", "optimizer"}
    assert tracker.spent_s["forward"] >= 0.01
    assert tracker.spent_s["backward"] >= 0.01
    assert tracker.step_wait_s >= 0.04  # of the second step only; it does not accumulate over steps
    assert sum(tracker.spent_s.values()) + tracker.step_wait_s == pytest.approx(
        tracker.steps[-1].wall_s, abs=1e-9
    )


def test_phases_add_up_with_several_threads() -> None:
    tracker = ProgressTracker()
    tracker.start()
    tracker.begin_step(1)

    def micro_batches(phase: str) -> None:
        for _ in range(2000):
            tracker.enter(phase)

    threads = [
        threading.Thread(target=micro_batches, args=(phase,))
        for phase in ("forward", "backward", "forward")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tracker.end_step()
    assert set(tracker.spent_s) == {"data", "forward", "backward"}
    assert min(tracker.spent_s.values()) >= 0
    assert sum(tracker.spent_s.values()) == pytest.approx(tracker.steps[-1].wall_s, abs=1e-9)


def test_nested_phase_and_progress_marks() -> None:
    tracker = ProgressTracker()
    tracker.start()
    tracker.enter("logging")
    marks = tracker.marks
    with tracker.during("evaluation"):
        assert tracker.phase == "evaluation"
        tracker.tick()
    assert tracker.phase == "logging"
    assert tracker.marks == marks + 3


def test_waits_of_other_threads_are_ignored() -> None:
    tracker = ProgressTracker()
    tracker.start()

    def wait() -> None:
        with tracker.waiting("others"):
            assert tracker.waits_for is None
            time.sleep(0.02)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert tracker.waited_s == 0.0
    with tracker.waiting("first"), tracker.waiting("second"):
        assert tracker.waits_for == "first"


def test_stack_contains_the_current_function() -> None:
    assert any(
        "test_stack_contains_the_current_function" in line and FILE in line
        for line in stack_of(threading.get_ident())
    )


def _record_collectives(world: Communicator) -> dict[str, Any]:
    PROGRESS.start()
    mesh = Communicator(world.env, world.device, ParallelDims(data=2, shard=2))
    group = mesh.subgroup("shard")
    world.sum(1.0, 2.0)
    group.wait(group.all_reduce(torch.ones(10)))
    dist.broadcast(torch.ones(3, dtype=torch.float64), src=0)
    world.gather_objects("x")
    all_reduce(world, torch.ones(5), "ring")
    if world.rank < 2:
        dist.send(torch.ones(1), 1) if world.rank == 0 else dist.recv(torch.ones(1), 0)
    return {"calls": recorded_calls(), "issued": PROGRESS.issued, "groups": PROGRESS.groups}


def test_collectives_have_a_number_in_their_group_and_a_call_site() -> None:
    ranks = run_ranks(_record_collectives, 4)
    kinds = [
        [
            (call["number"], call["function"], call["dtype"], call["numel"])
            for call in rank["calls"]
            if call["number"] is not None
        ]
        for rank in ranks
    ]
    assert kinds[0] == [
        (0, "all_reduce", "float64", 2),
        (0, "all_reduce", "float32", 10),
        (1, "broadcast", "float64", 3),
        (2, "all_gather_object", None, None),
        (3, "ring all-reduce", "float32", 5),
    ]
    assert kinds[1] == kinds[2] == kinds[3] == kinds[0]
    group = ranks[0]["calls"][0]["group"]
    assert ranks[2]["issued"][group] == 4
    assert sorted(ranks[3]["groups"].values()) == [[0, 1, 2, 3], [2, 3]]
    assert all(
        "_record_collectives" in call["site"][0] and FILE in call["site"][0]
        for rank in ranks
        for call in rank["calls"]
    )
    assert [call["function"] for call in ranks[1]["calls"] if call["number"] is None] == ["recv"]


def _wait_for_slow_rank(world: Communicator, mode: str) -> float:
    PROGRESS.start()
    world.barrier()
    before = PROGRESS.waited_s
    if world.rank == 1:
        time.sleep(0.5)
    tensor = torch.ones(4)
    if mode == "async":
        dist.all_reduce(tensor, async_op=True).wait()
    elif mode == "sync":
        dist.all_reduce(tensor)
    else:
        world.sum(1.0)
    return PROGRESS.waited_s - before


@pytest.mark.parametrize("mode", ["async", "sync", "world"])
def test_wait_for_a_slow_rank_is_measured(mode: str) -> None:
    first, slow = run_ranks(_wait_for_slow_rank, 2, mode)
    assert first > 0.4 > slow


def _record_without_tracking(world: Communicator) -> tuple[int, float]:
    PROGRESS.start(active=False)
    world.sum(1.0)
    return len(PROGRESS.ring), PROGRESS.waited_s


def test_inactive_tracker_records_nothing() -> None:
    assert [calls for calls, _ in run_ranks(_record_without_tracking, 2)] == [0, 0]
