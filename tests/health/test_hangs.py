"""Finding the ranks that block the others, from the last status of each rank."""

from dataclasses import replace
from typing import Any

import pytest

from paceline.health.hangs import RankStatus, find_hangs

HANG_WARNING_S = 5.0


def make_rank(number: int, **overrides: Any) -> RankStatus:
    fields = {
        "rank": number,
        "host": "a",
        "pid": 100 + number,
        "phase": "backward",
        "step": 9,
        "typical_step_s": 0.1,
        "stalled_s": 0.01,
    }
    return RankStatus(**{**fields, **overrides})


def make_waiting_rank(number: int, stalled_s: float = 8.0, **overrides: Any) -> RankStatus:
    return make_rank(
        number, stalled_s=stalled_s, waits_for="all_reduce number 7 of 3 ranks", **overrides
    )


def find_hung_ranks(*ranks: RankStatus) -> list[int | None]:
    return [hang.rank for hang in find_hangs(ranks, HANG_WARNING_S)]


def test_no_hang_while_all_ranks_make_progress() -> None:
    assert find_hung_ranks(make_rank(0), make_rank(1), make_waiting_rank(2, 0.5)) == []


def test_rank_outside_a_collective_is_reported() -> None:
    (hang,) = find_hangs(
        [make_waiting_rank(0), make_rank(1, phase="data", stalled_s=8.5), make_waiting_rank(2)],
        HANG_WARNING_S,
    )
    assert hang.rank == 1
    assert "rank 1 on a (process 101) has made no progress for 8 s, in data, step 9" in hang.text()


def test_long_compilation_is_not_a_hang() -> None:
    compiling = make_rank(1, phase="compilation", step=1, typical_step_s=None, stalled_s=300.0)
    waiting = make_waiting_rank(0, 290.0, step=1, typical_step_s=None)
    assert find_hung_ranks(waiting, compiling) == []
    assert find_hung_ranks(waiting, replace(compiling, stalled_s=1000.0)) == [1]


def test_rank_for_which_the_others_wait_with_a_limit_of_their_own_is_not_reported() -> None:
    waiting = make_waiting_rank(1, 100.0, phase="saving")
    alone = make_rank(0, phase="saving", stalled_s=100.0)
    assert find_hung_ranks(alone, waiting) == [0]
    patient = replace(alone, patience_s=3660.0)
    assert find_hung_ranks(patient, waiting) == []
    assert find_hung_ranks(replace(patient, stalled_s=4000.0), waiting) == [0]
    stopped = replace(patient, stalled_s=8.0, since_heartbeat_s=7.9, state="T")
    assert find_hung_ranks(stopped, waiting) == [0]
    cut_off = replace(patient, since_heartbeat_s=70.0)
    assert find_hung_ranks(cut_off, waiting) == [0]


def test_stopped_process_is_reported_even_in_a_collective() -> None:
    (hang,) = find_hangs(
        [
            make_waiting_rank(0),
            make_waiting_rank(1, 8.0, since_heartbeat_s=7.9, state="T"),
            make_waiting_rank(2),
        ],
        HANG_WARNING_S,
    )
    assert hang.rank == 1
    assert "its process is stopped" in hang.why


def test_rank_without_heartbeats_is_reported() -> None:
    hangs = find_hangs(
        [make_waiting_rank(0), make_rank(1, host="b", stalled_s=7.0, since_heartbeat_s=7.0)],
        HANG_WARNING_S,
    )
    assert [hang.rank for hang in hangs] == [1]
    assert "no heartbeat from it for 7 s" in hangs[0].text()
    assert "on b" in hangs[0].text()


def test_hang_is_reported_while_other_ranks_make_progress() -> None:
    assert find_hung_ranks(make_rank(0), make_rank(1, stalled_s=9.0)) == [1]


@pytest.mark.parametrize(
    "overrides",
    [
        {"typical_step_s": 2.0},  # ten typical steps have not passed
        {"typical_step_s": None},  # the first step
        {"phase": "saving"},
        {"phase": "evaluation"},
        {"phase": "starting"},
        {"phase": "loading"},
    ],
)
def test_long_phases_are_not_hangs_unless_the_process_is_stopped(
    overrides: dict[str, Any],
) -> None:
    assert (
        find_hung_ranks(make_waiting_rank(0, 12.0), make_rank(1, stalled_s=12.0, **overrides)) == []
    )
    assert find_hung_ranks(
        make_waiting_rank(0, 12.0),
        make_rank(1, stalled_s=12.0, since_heartbeat_s=12.0, state="T", **overrides),
    ) == [1]
    assert find_hung_ranks(
        make_waiting_rank(0, 200.0), make_rank(1, stalled_s=200.0, **overrides)
    ) == [1]


def test_rank_that_is_a_collective_behind_is_reported() -> None:
    hangs = find_hangs(
        [
            make_waiting_rank(0, issued={"0": 8}),
            make_waiting_rank(1, issued={"0": 7}),
            make_waiting_rank(2, issued={"0": 8}),
        ],
        HANG_WARNING_S,
    )
    assert [hang.rank for hang in hangs] == [1]
    assert "it is 1 collective behind" in hangs[0].text()


def test_finished_rank_with_fewer_collectives_is_reported() -> None:
    hangs = find_hangs(
        [
            make_waiting_rank(0, issued={"0": 8}),
            make_rank(1, phase="ended", stalled_s=9.0, issued={"0": 7}),
        ],
        HANG_WARNING_S,
    )
    assert [hang.rank for hang in hangs] == [1]
    assert "it has ended" in hangs[0].text()


def test_no_rank_is_reported_if_all_wait_for_the_same_collective() -> None:
    (hang,) = find_hangs(
        [make_waiting_rank(0, issued={"0": 8}), make_waiting_rank(1, 7.0, issued={"0": 8})],
        HANG_WARNING_S,
    )
    assert hang.rank is None
    assert hang.since_s == 7.0
    assert "all ranks have made no progress for 7 s" in hang.text()


def test_no_hang_if_the_step_takes_long_on_all_ranks() -> None:
    assert find_hung_ranks(make_rank(0, stalled_s=9.0), make_rank(1, stalled_s=9.0)) == []


def test_no_hang_while_the_awaited_rank_makes_progress() -> None:
    assert (
        find_hung_ranks(
            make_waiting_rank(0),
            make_waiting_rank(1),
            make_rank(2, phase="evaluation", stalled_s=0.2),
        )
        == []
    )


def test_blocked_rank_with_as_many_collectives_is_not_reported() -> None:
    """On an accelerator, the CPU thread of a rank may be blocked outside of a collective, so only
    the rank with fewer collectives is reported."""
    statuses = [
        make_waiting_rank(0, issued={"0": 8}),
        make_rank(1, stalled_s=8, issued={"0": 8}),
        make_rank(2, stalled_s=8, issued={"0": 7}),
    ]
    assert find_hung_ranks(*statuses) == [2]
