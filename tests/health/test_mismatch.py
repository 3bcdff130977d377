"""Where ranks issue different collectives, both are shown, and who left one out."""

from typing import Any

from paceline.health.mismatch import describe, find_mismatch


def call(
    number: int | None,
    function: str = "all_reduce",
    numel: int | None = 10,
    site: str = "a.py:1 in f",
    **changes: Any,
) -> Any:
    dtype = "float32" if numel is not None else None
    return {
        "number": number,
        "function": function,
        "dtype": dtype,
        "numel": numel,
        "group": "0",
        "site": [site],
        **changes,
    }


def test_equal_calls_are_no_mismatch() -> None:
    ring = [call(3), call(4, "broadcast"), call(None, "send", 5)]
    assert find_mismatch({0: ring, 1: ring[:2], 2: []}) is None


def test_messages_between_two_ranks_are_not_compared() -> None:
    assert find_mismatch({0: [call(None, "send")], 1: [call(None, "recv")]}) is None


def test_different_functions_show_both_places() -> None:
    mismatch = find_mismatch(
        {0: [call(4), call(5)], 1: [call(4), call(5, "broadcast", 3, "b.py:9 in g")]}
    )
    assert mismatch is not None
    odd, text = mismatch
    assert odd == [0, 1]  # of two ranks nobody knows who is right
    assert "number 6 of their group" in text
    assert "rank 0: all_reduce of 10 float32 at a.py:1 in f" in text
    assert "rank 1: broadcast of 3 float32 at b.py:9 in g" in text


def test_the_one_that_differs_from_most_is_the_odd_one() -> None:
    rings = {0: [call(5)], 1: [call(5)], 2: [call(5, numel=20)]}
    mismatch = find_mismatch(rings)
    assert mismatch is not None
    assert mismatch[0] == [2]
    assert "ranks 0, 1: all_reduce of 10 float32" in mismatch[1]
    assert "rank 2: all_reduce of 20 float32" in mismatch[1]


def test_groups_are_compared_each_by_itself() -> None:
    assert (
        find_mismatch(
            {0: [call(5, group="0"), call(5, numel=7, group="1")], 1: [call(5, group="0")]}
        )
        is None
    )


SITES = ("a.py:1 in f", "a.py:2 in f", "a.py:3 in f")
NUMELS = (10, 20, 30)


def steps(count: int, without: int | None = None) -> list[Any]:
    """Three calls a step; ``without``: one of all of them is left out."""
    wanted = [number for number in range(3 * count) if number != without]
    return [
        call(place, numel=NUMELS[number % 3], site=SITES[number % 3])
        for place, number in enumerate(wanted)
    ]


def test_a_rank_that_left_one_out_is_named_with_what_it_left_out() -> None:
    mismatch = find_mismatch({0: steps(3)[:8], 1: steps(3, without=6)[:8]})
    assert mismatch is not None
    assert (
        "Rank 1 is 1 collective behind: it did not call all_reduce of 10 float32 at a.py:1 in f"
        in mismatch[1]
    )


def test_also_where_the_other_has_not_come_further() -> None:
    """It waits in the very call that was left out; what follows is known from the step before."""
    mismatch = find_mismatch({0: steps(3)[:7], 1: steps(3, without=6)[:7]})
    assert mismatch is not None
    assert (
        "Rank 1 is 1 collective behind: it did not call all_reduce of 10 float32 at a.py:1 in f"
        in mismatch[1]
    )


def test_the_omitted_call_is_found_where_alike_calls_went_together_first() -> None:
    """Two calls of one size one after the other: without the first, the second takes its place, and
    no size differs yet."""
    sites = ("a.py:1 in mean", "a.py:2 in other", "b.py:3 in send")
    calls = [
        call(number, numel=(3, 3, 32)[number % 3], site=sites[number % 3]) for number in range(9)
    ]
    remaining = [call for call in calls if call["number"] != 6]
    shifted = [{**call, "number": number} for number, call in enumerate(remaining)]
    mismatch = find_mismatch({0: calls[:8], 1: shifted[:8], 2: calls[:8]})
    assert mismatch is not None
    assert mismatch[0] == [1]
    assert (
        "Rank 1 is 1 collective behind: it did not call all_reduce of 3 float32 at a.py:1 in mean"
        in mismatch[1]
    )


def test_alike_but_from_another_place_only_where_asked() -> None:
    rings = {0: [call(5, site="a.py:1 in f")], 1: [call(5, site="a.py:2 in f")]}
    assert find_mismatch(rings) is None
    mismatch = find_mismatch(rings, sites=True)
    assert mismatch is not None
    assert "a.py:1 in f" in mismatch[1]
    assert "a.py:2 in f" in mismatch[1]


def test_a_call_without_a_size() -> None:
    assert describe(call(1, "barrier", None)) == "barrier at a.py:1 in f"
