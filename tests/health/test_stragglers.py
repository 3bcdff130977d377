"""A rank that is slower is named soon, with the cause; none is on an even world, however noisy."""

import random
from collections.abc import Callable

import pytest

from paceline.health.stragglers import RankBusyTime, Straggler, StragglerDetector

EVEN = dict.fromkeys(range(4), "stage 0")


def run(
    judge: StragglerDetector,
    steps: int,
    busy: Callable[[int, int], float],
    data: Callable[[int, int], float] = lambda rank, step: 0.0,
) -> list[Straggler]:
    """``busy(rank, step)``: seconds without those for data."""
    found = []
    for step in range(1, steps + 1):
        times = {}
        for rank in judge.kinds:
            data_s = data(rank, step)
            times[rank] = RankBusyTime(busy(rank, step) + data_s, data_s, 0.01)
        found += judge.add(step, times)
    return found


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
        judge = StragglerDetector(dict.fromkeys(range(world_size), "stage 0"))
        assert run(judge, 1000, noisy(seed, base_s, spread, jump)) == []


def test_ranks_that_take_turns_in_being_slow_are_even() -> None:
    """As three ranks on two cores: some are always slower, but not one of them."""
    judge = StragglerDetector(EVEN)
    assert run(judge, 1000, lambda rank, step: 0.2 if (step // 3) % 4 == rank else 0.1) == []


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("base_s", [0.02, 0.1, 0.4])
def test_two_hundred_milliseconds_are_named_within_ten_steps(
    world_size: int, base_s: float
) -> None:
    even = noisy(3, base_s, 0.1)
    judge = StragglerDetector(dict.fromkeys(range(world_size), "stage 0"))
    found = run(
        judge, 60, lambda rank, step: even(rank, step) + (0.2 if rank == 1 and step > 30 else 0)
    )
    assert [(one.rank, one.even) for one in found] == [(1, False)]  # once
    assert found[0].step - 30 <= 5
    assert found[0].slower_by_s == pytest.approx(0.2, abs=0.05)


def test_also_in_long_steps_that_are_even() -> None:
    even = noisy(5, 1.2, 0.01)
    judge = StragglerDetector(EVEN)
    found = run(
        judge, 40, lambda rank, step: even(rank, step) + (0.2 if rank == 2 and step > 30 else 0)
    )
    assert [one.rank for one in found] == [2]
    assert found[0].step <= 40


def test_a_little_slower_for_long_is_named_as_well() -> None:
    even = noisy(9, 0.1, 0.05)
    found = run(
        StragglerDetector(EVEN),
        60,
        lambda rank, step: even(rank, step) + (0.05 if rank == 3 else 0),
    )
    assert [one.rank for one in found] == [3]


def test_the_share_tells_the_cause() -> None:
    judge = StragglerDetector(EVEN)
    (found,) = run(judge, 20, noisy(1, 0.05, 0.1), lambda rank, step: 0.3 if rank == 1 else 0.01)
    assert found.share["data_s"] == pytest.approx(0.29, abs=0.01)
    assert found.share["compute_s"] < 0.05
    assert "most of it in data" in found.text("node1")
    assert "rank 1 on node1" in found.text("node1")


def test_said_again_when_it_has_grown_and_when_it_is_over() -> None:
    judge = StragglerDetector(EVEN)
    slow = {range(11, 40): 0.2, range(40, 80): 0.9}
    found = run(
        judge,
        120,
        lambda rank, step: (
            0.05 + next((s for r, s in slow.items() if rank == 0 and step in r), 0.0)
        ),
    )
    assert [(one.rank, one.even) for one in found] == [(0, False), (0, False), (0, True)]
    assert found[1].slower_by_s == pytest.approx(0.9)
    assert 80 < found[2].step <= 90
    assert "as fast as the others again" in found[2].text("h")


def test_stages_of_a_pipeline_are_compared_within_the_stage() -> None:
    kinds = {0: "stage 0", 1: "stage 0", 2: "stage 1", 3: "stage 1"}
    stages = {0: 0.1, 1: 0.1, 2: 0.5, 3: 0.5}
    assert run(StragglerDetector(kinds), 300, lambda rank, step: stages[rank]) == []
    found = run(
        StragglerDetector(kinds),
        60,
        lambda rank, step: stages[rank] + (0.3 if rank == 1 and step > 20 else 0),
    )
    assert [one.rank for one in found] == [1]


def test_a_stage_without_an_equal_is_compared_with_its_own_first_steps() -> None:
    kinds = {0: "stage 0", 1: "stage 1"}
    stages = {0: 0.1, 1: 0.5}
    assert run(StragglerDetector(kinds), 300, lambda rank, step: stages[rank]) == []
    found = run(
        StragglerDetector(kinds),
        60,
        lambda rank, step: stages[rank] + (0.3 if rank == 0 and step > 30 else 0),
    )
    assert [one.rank for one in found] == [0]
    assert found[0].step <= 40


def test_ranks_that_do_not_train_are_left_out() -> None:
    judge = StragglerDetector({0: "stage 0", 1: "stage 0", 2: None})
    assert judge.kinds.keys() == {0, 1}
    assert [one.rank for one in run(judge, 20, lambda rank, step: 0.5 if rank == 1 else 0.1)] == [1]
