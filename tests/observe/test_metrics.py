"""Metrics of step events: the time of each phase by rank, and the traffic by collective."""

import time
from typing import Any

import pytest
import torch
from ranks import run_ranks

from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.timing.progress import PROGRESS
from paceline.distributed.traffic import uncounted
from paceline.observe.metrics import StepMetrics

PARTS = ("data_s", "forward_s", "backward_s", "communication_s", "optimizer_s", "other_s")
STEPS = 3


def _train_steps(world: Communicator) -> dict[str, Any]:
    """Rank 1 has a slow forward pass, so rank 0 waits in the backward pass. Only rank 0 sends
    additional traffic."""
    PROGRESS.start()
    metrics = StepMetrics(world, time.time(), has_tokens=False)
    step_times_s = []
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
        step_times_s.append(metrics.last_step_s)
    traffic_before = world.traffic.total
    figures = metrics.gather(0.5, (float(world.rank),))
    assert world.traffic.total == traffic_before  # gathering metrics is not counted
    return {"figures": figures, "step_s": sum(step_times_s) / STEPS, "extra": metrics.extra_by_rank}


def test_phases_add_up_to_step_time_on_every_rank() -> None:
    ranks = run_ranks(_train_steps, 2)
    for result in ranks:
        assert result["extra"] == [[0.0], [1.0]]
        # Every rank has the same table.
        assert result["figures"]["ranks"] == ranks[0]["figures"]["ranks"]
    rows = ranks[0]["figures"]["ranks"]
    for rank, row in enumerate(rows):
        assert row["rank"] == rank
        assert sum(row[part] for part in PARTS) == pytest.approx(ranks[rank]["step_s"], abs=1e-6)
        assert min(row[part] for part in PARTS) >= 0
        assert row["backward_s"] >= 0.01
        assert row["memory_bytes"] == ranks[0]["figures"]["memory_bytes"][rank] > 0
    assert rows[1]["forward_s"] >= 0.15 > rows[0]["forward_s"]
    # Waiting in the backward pass counts as communication.
    assert rows[0]["communication_s"] > rows[1]["communication_s"]
    assert rows[0]["communication_s"] > rows[0]["backward_s"]


def test_traffic_is_maximum_over_ranks() -> None:
    figures = run_ranks(_train_steps, 2)[0]["figures"]
    assert figures["traffic"] == {"all_reduce": 4000, "push": 123}
    assert "devices" not in figures  # a CPU has no device statistics


def _single_rank(**options: Any) -> tuple[Communicator, StepMetrics]:
    world = Communicator(RankEnv(), torch.device("cpu"))
    return world, StepMetrics(world, time.time(), has_tokens=False, **options)


def _send(
    world: Communicator,
    metrics: StepMetrics,
    during_step: int = 0,
    after_step: int = 0,
    name: str = "all_reduce",
) -> None:
    metrics.begin()
    if during_step:
        world.traffic.add(name, during_step)
    metrics.end(torch.zeros(()), 1.0)
    if after_step:
        world.traffic.add(name, after_step)


def test_periodic_traffic_is_mean_over_complete_period() -> None:
    world, metrics = _single_rank(traffic_period=3)
    traffic = []
    for size_bytes in (0, 0, 900, 0, 0, 900):
        _send(world, metrics, size_bytes)
        traffic.append(metrics.gather(0.0)["traffic"])
    # the mean instead of 0, 0, 900, whichever step is logged
    assert traffic == [None, None, *[{"all_reduce": 300}] * 4]


def test_step_time_includes_the_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host only launches the work of an accelerator, which takes 0.2 s longer here."""
    world, metrics = _single_rank()
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: time.sleep(0.2))
    metrics.begin()
    metrics.end(torch.zeros(()), 1.0)
    assert metrics.last_step_s < 0.2
    world.device = torch.device("cuda", 0)
    for drains in (False, True):
        metrics.begin()
        metrics.end(torch.zeros(()), 1.0, drains=drains)
        assert (metrics.last_step_s >= 0.2) == drains
    metrics.drain()  # before an evaluation
    world.device = torch.device("cpu")
    assert metrics.gather(0.0)["step_time_s"] >= 0.4 / 3


def test_traffic_is_mean_since_last_step_event() -> None:
    world, metrics = _single_rank()
    _send(world, metrics, 100)
    _send(world, metrics, 300, after_step=5000)  # outside of a step, as in an evaluation
    assert metrics.gather(0.0)["traffic"] == {"all_reduce": 200}
    _send(world, metrics, 50, name="custom collective")
    assert metrics.gather(0.0)["traffic"] == {"other": 50}
    _send(world, metrics)
    assert metrics.gather(0.0)["traffic"] == {}


def test_traffic_of_parameter_server_is_counted_between_events() -> None:
    world, metrics = _single_rank(sends_between_steps=True)
    for _ in range(2):
        _send(world, metrics, during_step=10, after_step=90, name="pull")
    assert metrics.gather(0.0)["traffic"] == {"pull": 100}
    _send(world, metrics)
    assert metrics.gather(0.0)["traffic"] == {}
