"""What a step line says of each rank: the parts of its step, and what was sent by collective."""

import time
from typing import Any

import pytest
import torch
from ranks import run_ranks

from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.progress import PROGRESS
from paceline.distributed.traffic import uncounted
from paceline.observe.metrics import StepMetrics

PARTS = ("data_s", "forward_s", "backward_s", "communication_s", "optimizer_s", "other_s")
STEPS = 3


def _steps(world: Communicator) -> dict[str, Any]:
    """Rank 1 is slow in its forward, so rank 0 waits in backward; and only rank 0 broadcasts more
    than the others know."""
    PROGRESS.start()
    metrics = StepMetrics(world, time.time(), has_tokens=False)
    lengths = []
    for step in range(1, STEPS + 1):
        PROGRESS.begin_step(step)
        metrics.begin()
        metrics.data_ready()
        PROGRESS.enter("forward")
        time.sleep(0.15 if world.rank == 1 else 0.0)
        PROGRESS.enter("backward")
        time.sleep(0.01)
        world.wait(world.all_reduce(torch.ones(1000)))
        with uncounted():
            world.sum(1.0)
        PROGRESS.enter("optimizer")
        if world.rank == 0:
            world.traffic.add("push", 123)
        PROGRESS.end_step()
        metrics.end(torch.zeros(()), 1.0)
        lengths.append(metrics.last_step_s)
    before = world.traffic.total
    figures = metrics.gather(0.5, (float(world.rank),))
    assert world.traffic.total == before  # the line's own collective is no traffic of the training
    return {"figures": figures, "step_s": sum(lengths) / STEPS, "extra": metrics.extra_by_rank}


def test_the_parts_of_a_step_of_every_rank_add_up() -> None:
    ranks = run_ranks(_steps, 2)
    for result in ranks:
        assert result["extra"] == [[0.0], [1.0]]
        # the same table on every rank
        assert result["figures"]["ranks"] == ranks[0]["figures"]["ranks"]
    rows = ranks[0]["figures"]["ranks"]
    for rank, row in enumerate(rows):
        assert row["rank"] == rank
        assert sum(row[part] for part in PARTS) == pytest.approx(ranks[rank]["step_s"], abs=1e-6)
        assert min(row[part] for part in PARTS) >= 0
        assert row["backward_s"] >= 0.01
        assert row["memory_bytes"] == ranks[0]["figures"]["memory_bytes"][rank] > 0
    assert rows[1]["forward_s"] >= 0.15 > rows[0]["forward_s"]
    # taken out of the backward in which rank 0 waited
    assert rows[0]["communication_s"] > rows[1]["communication_s"]
    assert rows[0]["communication_s"] > rows[0]["backward_s"]


def test_traffic_is_that_of_the_rank_that_sends_most() -> None:
    figures = run_ranks(_steps, 2)[0]["figures"]
    assert figures["traffic"] == {"all_reduce": 4000, "push": 123}
    assert "devices" not in figures  # on a CPU there is nothing to be told


def _single_rank(**options: Any) -> tuple[Communicator, StepMetrics]:
    world = Communicator(RankEnv(), torch.device("cpu"))
    return world, StepMetrics(world, time.time(), has_tokens=False, **options)


def _send(
    world: Communicator,
    metrics: StepMetrics,
    within: int = 0,
    after: int = 0,
    name: str = "all_reduce",
) -> None:
    metrics.begin()
    if within:
        world.traffic.add(name, within)
    metrics.end(torch.zeros(()), 1.0)
    if after:
        world.traffic.add(name, after)


def test_traffic_of_a_period_is_the_mean_over_a_whole_one() -> None:
    world, metrics = _single_rank(traffic_period=3)
    seen = []
    for within in (0, 0, 900, 0, 0, 900):
        _send(world, metrics, within)
        seen.append(metrics.gather(0.0)["traffic"])
    # not 0, 0, 900: whatever step a line is of
    assert seen == [None, None, *[{"all_reduce": 300}] * 4]


def test_traffic_is_the_mean_since_the_last_line() -> None:
    world, metrics = _single_rank()
    _send(world, metrics, 100)
    _send(world, metrics, 300, after=5000)  # outside the steps: an evaluation, say
    assert metrics.gather(0.0)["traffic"] == {"all_reduce": 200}
    _send(world, metrics, 50, name="by a strategy of one's own")
    assert metrics.gather(0.0)["traffic"] == {"other": 50}
    _send(world, metrics)
    assert metrics.gather(0.0)["traffic"] == {}


def test_a_rank_that_only_serves_is_counted_from_line_to_line() -> None:
    world, metrics = _single_rank(serves=True)
    for _ in range(2):
        _send(world, metrics, within=10, after=90, name="pull")
    assert metrics.gather(0.0)["traffic"] == {"pull": 100}
    _send(world, metrics)
    assert metrics.gather(0.0)["traffic"] == {}
