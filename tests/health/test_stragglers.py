"""Straggler detection: a slow rank is reported early and with the cause, and none is reported if
all ranks are equally fast, however noisy their steps are."""

import random
from collections.abc import Callable

import pytest

from paceline.health.stragglers import RankBusyTime, Straggler, StragglerDetector

SAME_STAGE = dict.fromkeys(range(4), "stage 0")


def find_stragglers(
    detector: StragglerDetector,
    steps: int,
    busy: Callable[[int, int], float],
    data: Callable[[int, int], float] = lambda rank, step: 0.0,
) -> list[Straggler]:
    """Return the stragglers reported if a rank takes ``busy(rank, step)`` seconds for a step, and
    ``data(rank, step)`` seconds more for its data."""
    stragglers = []
    for step in range(1, steps + 1):
        times = {}
        for rank in detector.kinds:
            data_s = data(rank, step)
            times[rank] = RankBusyTime(busy(rank, step) + data_s, data_s, 0.01)
        stragglers += detector.add(step, times)
    return stragglers


def make_noisy_times(
    seed: int, base_s: float, spread: float, outlier_probability: float = 0.0
) -> Callable[[int, int], float]:
    rng = random.Random(seed)
    return lambda rank, step: (
        base_s
        * (
            1
            + spread * abs(rng.gauss(0, 1))
            + (4 * rng.random() if rng.random() < outlier_probability else 0)
        )
    )


@pytest.mark.parametrize(
    "world_size",
    [2, pytest.param(3, marks=pytest.mark.soak), 4, pytest.param(8, marks=pytest.mark.soak)],
)
@pytest.mark.parametrize(
    ("base_s", "spread", "outlier_probability"),
    [(0.01, 1.0, 0.1), (0.1, 0.3, 0.1), (0.5, 0.2, 0.05), (2.0, 0.1, 0.02)],
)
def test_no_straggler_in_1000_even_steps(
    world_size: int, base_s: float, spread: float, outlier_probability: float
) -> None:
    for seed in range(2):
        detector = StragglerDetector(dict.fromkeys(range(world_size), "stage 0"))
        assert (
            find_stragglers(
                detector, 1000, make_noisy_times(seed, base_s, spread, outlier_probability)
            )
            == []
        )


@pytest.mark.soak
def test_ranks_that_are_slow_in_turns_are_not_stragglers() -> None:
    """With three ranks on two cores, some ranks are always slower, but never the same ones."""
    detector = StragglerDetector(SAME_STAGE)
    assert (
        find_stragglers(detector, 1000, lambda rank, step: 0.2 if (step // 3) % 4 == rank else 0.1)
        == []
    )


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "base_s",
    [0.1, pytest.param(0.02, marks=pytest.mark.soak), pytest.param(0.4, marks=pytest.mark.soak)],
)
def test_rank_slower_by_200_ms_is_reported_within_ten_steps(world_size: int, base_s: float) -> None:
    regular_times = make_noisy_times(3, base_s, 0.1)
    detector = StragglerDetector(dict.fromkeys(range(world_size), "stage 0"))
    stragglers = find_stragglers(
        detector,
        60,
        lambda rank, step: regular_times(rank, step) + (0.2 if rank == 1 and step > 30 else 0),
    )
    assert [(straggler.rank, straggler.is_even) for straggler in stragglers] == [(1, False)]  # once
    assert stragglers[0].step - 30 <= 5
    assert stragglers[0].slower_by_s == pytest.approx(0.2, abs=0.05)


def test_rank_slower_by_200_ms_is_reported_in_long_steps() -> None:
    regular_times = make_noisy_times(5, 1.2, 0.01)
    detector = StragglerDetector(SAME_STAGE)
    stragglers = find_stragglers(
        detector,
        40,
        lambda rank, step: regular_times(rank, step) + (0.2 if rank == 2 and step > 30 else 0),
    )
    assert [straggler.rank for straggler in stragglers] == [2]
    assert stragglers[0].step <= 40


def test_slightly_slower_rank_is_reported_over_time() -> None:
    regular_times = make_noisy_times(9, 0.1, 0.05)
    stragglers = find_stragglers(
        StragglerDetector(SAME_STAGE),
        60,
        lambda rank, step: regular_times(rank, step) + (0.05 if rank == 3 else 0),
    )
    assert [straggler.rank for straggler in stragglers] == [3]


def test_share_of_time_has_the_cause() -> None:
    detector = StragglerDetector(SAME_STAGE)
    (straggler,) = find_stragglers(
        detector, 20, make_noisy_times(1, 0.05, 0.1), lambda rank, step: 0.3 if rank == 1 else 0.01
    )
    assert straggler.share["data_s"] == pytest.approx(0.29, abs=0.01)
    assert straggler.share["compute_s"] < 0.05
    assert "mostly in data" in straggler.text("node1")
    assert "rank 1 on node1" in straggler.text("node1")


def test_straggler_is_reported_again_when_slower_and_when_recovered() -> None:
    detector = StragglerDetector(SAME_STAGE)
    slow = {range(11, 40): 0.2, range(40, 80): 0.9}
    stragglers = find_stragglers(
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


def test_pipeline_ranks_are_compared_within_their_stage() -> None:
    kinds = {0: "stage 0", 1: "stage 0", 2: "stage 1", 3: "stage 1"}
    stages = {0: 0.1, 1: 0.1, 2: 0.5, 3: 0.5}
    assert find_stragglers(StragglerDetector(kinds), 300, lambda rank, step: stages[rank]) == []
    stragglers = find_stragglers(
        StragglerDetector(kinds),
        60,
        lambda rank, step: stages[rank] + (0.3 if rank == 1 and step > 20 else 0),
    )
    assert [straggler.rank for straggler in stragglers] == [1]


def test_single_rank_of_a_stage_is_compared_with_its_first_steps() -> None:
    kinds = {0: "stage 0", 1: "stage 1"}
    stages = {0: 0.1, 1: 0.5}
    assert find_stragglers(StragglerDetector(kinds), 300, lambda rank, step: stages[rank]) == []
    stragglers = find_stragglers(
        StragglerDetector(kinds),
        60,
        lambda rank, step: stages[rank] + (0.3 if rank == 0 and step > 30 else 0),
    )
    assert [straggler.rank for straggler in stragglers] == [0]
    assert stragglers[0].step <= 40


def test_ranks_that_do_not_train_are_ignored() -> None:
    detector = StragglerDetector({0: "stage 0", 1: "stage 0", 2: None})
    assert detector.kinds.keys() == {0, 1}
    assert [
        straggler.rank
        for straggler in find_stragglers(detector, 20, lambda rank, step: 0.5 if rank == 1 else 0.1)
    ] == [1]
