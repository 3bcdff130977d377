"""The ranks that hold up the others, from the last status of each."""

from typing import Any

import pytest

from paceline.health.hangs import RankStatus, find_hangs

AFTER_S = 5.0


def rank(number: int, **changes: Any) -> RankStatus:
    fields = {
        "rank": number,
        "host": "a",
        "pid": 100 + number,
        "phase": "backward",
        "step": 9,
        "typical_step_s": 0.1,
        "stalled_s": 0.01,
    }
    return RankStatus(**{**fields, **changes})


def waiting(number: int, stalled_s: float = 8.0, **changes: Any) -> RankStatus:
    return rank(number, stalled_s=stalled_s, waits_for="all_reduce number 7 of 3 ranks", **changes)


def named(*ranks: RankStatus) -> list[int | None]:
    return [hang.rank for hang in find_hangs(ranks, AFTER_S)]


def test_all_go_on() -> None:
    assert named(rank(0), rank(1), waiting(2, 0.5)) == []


def test_the_one_that_waits_for_nobody() -> None:
    (hang,) = find_hangs([waiting(0), rank(1, phase="data", stalled_s=8.5), waiting(2)], AFTER_S)
    assert hang.rank == 1
    assert "rank 1 on a (process 101) has made no progress for 8 s, in data, step 9" in hang.text()


def test_the_one_whose_process_is_stopped_also_in_a_collective() -> None:
    (hang,) = find_hangs(
        [waiting(0), waiting(1, 8.0, since_heartbeat_s=7.9, state="T"), waiting(2)], AFTER_S
    )
    assert hang.rank == 1
    assert "its process is stopped" in hang.why


def test_a_host_that_sends_no_heartbeats() -> None:
    hangs = find_hangs(
        [waiting(0), rank(1, host="b", stalled_s=7.0, since_heartbeat_s=7.0)], AFTER_S
    )
    assert [hang.rank for hang in hangs] == [1]
    assert "no heartbeat from it for 7 s" in hangs[0].text()
    assert "on b" in hangs[0].text()


def test_while_others_train_on_by_themselves() -> None:
    assert named(rank(0), rank(1, stalled_s=9.0)) == [1]


@pytest.mark.parametrize(
    "changes",
    [
        {"typical_step_s": 2.0},  # ten typical steps have not passed
        {"typical_step_s": None},  # the first step
        {"phase": "saving"},
        {"phase": "evaluation"},
        {"phase": "starting"},
        {"phase": "loading"},
    ],
)
def test_what_may_take_long_has_its_time_unless_the_process_is_stopped(
    changes: dict[str, Any],
) -> None:
    assert named(waiting(0, 12.0), rank(1, stalled_s=12.0, **changes)) == []
    assert named(
        waiting(0, 12.0), rank(1, stalled_s=12.0, since_heartbeat_s=12.0, state="T", **changes)
    ) == [1]
    assert named(waiting(0, 200.0), rank(1, stalled_s=200.0, **changes)) == [1]


def test_the_one_that_is_a_collective_behind() -> None:
    hangs = find_hangs(
        [waiting(0, issued={"0": 8}), waiting(1, issued={"0": 7}), waiting(2, issued={"0": 8})],
        AFTER_S,
    )
    assert [hang.rank for hang in hangs] == [1]
    assert "it is 1 collective behind" in hangs[0].text()


def test_the_one_that_has_ended_with_fewer_collectives() -> None:
    hangs = find_hangs(
        [waiting(0, issued={"0": 8}), rank(1, phase="ended", stalled_s=9.0, issued={"0": 7})],
        AFTER_S,
    )
    assert [hang.rank for hang in hangs] == [1]
    assert "it has ended" in hangs[0].text()


def test_all_wait_for_the_same() -> None:
    (hang,) = find_hangs([waiting(0, issued={"0": 8}), waiting(1, 7.0, issued={"0": 8})], AFTER_S)
    assert hang.rank is None
    assert hang.since_s == 7.0
    assert "all ranks have made no progress for 7 s" in hang.text()


def test_nobody_is_blamed_for_a_step_that_is_long_for_all() -> None:
    assert named(rank(0, stalled_s=9.0), rank(1, stalled_s=9.0)) == []


def test_nobody_is_blamed_while_one_makes_progress() -> None:
    assert named(waiting(0), waiting(1), rank(2, phase="evaluation", stalled_s=0.2)) == []


def test_a_rank_that_only_waits_beside_the_slow_one_is_not_blamed() -> None:
    """On an accelerator a host may stand still without a mark: the one that is behind is meant."""
    stuck = [
        waiting(0, issued={"0": 8}),
        rank(1, stalled_s=8, issued={"0": 8}),
        rank(2, stalled_s=8, issued={"0": 7}),
    ]
    assert named(*stuck) == [2]
