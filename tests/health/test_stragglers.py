"""A slow rank is reported soon, with the cause; none is if all ranks are equally fast, however
noisy their steps are."""

import random
from collections.abc import Callable

import pytest

from paceline.health.stragglers import RankBusyTime, Straggler, StragglerDetector

EVEN = dict.fromkeys(range(4), "stage 0")


def run(
    detector: StragglerDetector,
    steps: int,
    busy: Callable[[int, int], float],
    data: Callable[[int, int], float] = lambda rank, step: 0.0,
) -> list[Straggler]:
    """``busy(rank, step)``: seconds without those for data."""
    stragglers = []
    for step in range(1, steps + 1):
        times = {}
        for rank in detector.kinds:
            data_s = data(rank, step)
            times[rank] = RankBusyTime(busy(rank, step) + data_s, data_s, 0.01)
        stragglers += detector.add(step, times)
    return stragglers


def noisy(
    seed: int, base_s: float, spread: float, jump: float = 0.0
) -> Callable[[int, int], float]:
    chance = random.Random(seed)
    return lambda rank, step: (
        base_s
        * (
            1
            + spread * abs(chance.gauss(0, 1))
            + (4 * chance.random() if chance.random() < jump else 0)
        )
    )


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("base_s", "spread", "jump"),
    [(0.01, 1.0, 0.1), (0.1, 0.3, 0.1), (0.5, 0.2, 0.05), (2.0, 0.1, 0.02)],
)
def test_none_in_a_thousand_even_steps(
    world_size: int, base_s: float, spread: float, jump: float
) -> None:
    for seed in range(2):
        detector = StragglerDetector(dict.fromkeys(range(world_size), "stage 0"))
        assert run(detector, 1000, noisy(seed, base_s, spread, jump)) == []


@pytest.mark.soak
def test_ranks_that_take_turns_in_being_slow_are_even() -> None:
    """As three ranks on two cores: some are always slower, but not one of them."""
    detector = StragglerDetector(EVEN)
    assert run(detector, 1000, lambda rank, step: 0.2 if (step // 3) % 4 == rank else 0.1) == []


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "base_s",
    [0.1, pytest.param(0.02, marks=pytest.mark.soak), pytest.param(0.4, marks=pytest.mark.soak)],
)
def test_two_hundred_milliseconds_are_named_within_ten_steps(
    world_size: int, base_s: float
) -> None:
    even = noisy(3, base_s, 0.1)
    detector = StragglerDetector(dict.fromkeys(range(world_size), "stage 0"))
    stragglers = run(
        detector, 60, lambda rank, step: even(rank, step) + (0.2 if rank == 1 and step > 30 else 0)
    )
    assert [(straggler.rank, straggler.is_even) for straggler in stragglers] == [(1, False)]  # once
    assert stragglers[0].step - 30 <= 5
    assert stragglers[0].slower_by_s == pytest.approx(0.2, abs=0.05)


def test_also_in_long_steps_that_are_even() -> None:
    even = noisy(5, 1.2, 0.01)
    detector = StragglerDetector(EVEN)
    stragglers = run(
        detector, 40, lambda rank, step: even(rank, step) + (0.2 if rank == 2 and step > 30 else 0)
    )
    assert [straggler.rank for straggler in stragglers] == [2]
    assert stragglers[0].step <= 40


def test_a_little_slower_for_long_is_named_as_well() -> None:
    even = noisy(9, 0.1, 0.05)
    stragglers = run(
        StragglerDetector(EVEN),
        60,
        lambda rank, step: even(rank, step) + (0.05 if rank == 3 else 0),
    )
    assert [straggler.rank for straggler in stragglers] == [3]


def test_the_share_tells_the_cause() -> None:
    detector = StragglerDetector(EVEN)
    (straggler,) = run(
        detector, 20, noisy(1, 0.05, 0.1), lambda rank, step: 0.3 if rank == 1 else 0.01
    )
    assert straggler.share["data_s"] == pytest.approx(0.29, abs=0.01)
    assert straggler.share["compute_s"] < 0.05
    assert "mostly in data" in straggler.text("node1")
    assert "rank 1 on node1" in straggler.text("node1")


def test_reported_again_when_it_has_grown_and_when_it_is_over() -> None:
    detector = StragglerDetector(EVEN)
    slow = {range(11, 40): 0.2, range(40, 80): 0.9}
    stragglers = run(
        detector,
        120,
        lambda rank, step: (
            0.05 + next((s for r, s in slow.items() if rank == 0 and step in r), 0.0)
        ),
    )
    assert [(straggler.rank, straggler.is_even) for straggler in stragglers] == [
        (0, False),
        (0, False),
        (0, True),
    ]
    assert stragglers[1].slower_by_s == pytest.approx(0.9)
    assert 80 < stragglers[2].step <= 90
    assert "as fast as the other ranks again" in stragglers[2].text("h")


def test_stages_of_a_pipeline_are_compared_within_the_stage() -> None:
    kinds = {0: "stage 0", 1: "stage 0", 2: "stage 1", 3: "stage 1"}
    stages = {0: 0.1, 1: 0.1, 2: 0.5, 3: 0.5}
    assert run(StragglerDetector(kinds), 300, lambda rank, step: stages[rank]) == []
    stragglers = run(
        StragglerDetector(kinds),
        60,
        lambda rank, step: stages[rank] + (0.3 if rank == 1 and step > 20 else 0),
    )
    assert [straggler.rank for straggler in stragglers] == [1]


def test_a_stage_without_an_equal_is_compared_with_its_own_first_steps() -> None:
    kinds = {0: "stage 0", 1: "stage 1"}
    stages = {0: 0.1, 1: 0.5}
    assert run(StragglerDetector(kinds), 300, lambda rank, step: stages[rank]) == []
    stragglers = run(
        StragglerDetector(kinds),
        60,
        lambda rank, step: stages[rank] + (0.3 if rank == 0 and step > 30 else 0),
    )
    assert [straggler.rank for straggler in stragglers] == [0]
    assert stragglers[0].step <= 40


def test_ranks_that_do_not_train_are_left_out() -> None:
    detector = StragglerDetector({0: "stage 0", 1: "stage 0", 2: None})
    assert detector.kinds.keys() == {0, 1}
    assert [
        straggler.rank
        for straggler in run(detector, 20, lambda rank, step: 0.5 if rank == 1 else 0.1)
    ] == [1]
