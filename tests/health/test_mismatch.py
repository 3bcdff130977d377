"""Reports of ranks that issue different collectives, or leave one out."""

from typing import Any

from paceline.health.mismatch import describe, find_mismatch


def make_call(
    number: int | None,
    function: str = "all_reduce",
    numel: int | None = 10,
    site: str = "a.py:1 in f",
    **overrides: Any,
) -> Any:
    dtype = "float32" if numel is not None else None
    return {
        "number": number,
        "function": function,
        "dtype": dtype,
        "numel": numel,
        "group": "0",
        "site": [site],
        **overrides,
    }


def test_equal_calls_match() -> None:
    calls = [make_call(3), make_call(4, "broadcast"), make_call(None, "send", 5)]
    assert find_mismatch({0: calls, 1: calls[:2], 2: []}) is None


def test_point_to_point_calls_are_not_compared() -> None:
    assert find_mismatch({0: [make_call(None, "send")], 1: [make_call(None, "recv")]}) is None


def test_different_functions_are_reported_with_both_call_sites() -> None:
    mismatch = find_mismatch(
        {
            0: [make_call(4), make_call(5)],
            1: [make_call(4), make_call(5, "broadcast", 3, "b.py:9 in g")],
        }
    )
    assert mismatch is not None
    ranks, text = mismatch
    assert ranks == [0, 1]  # with two ranks, either may be wrong
    assert "number 6 of their group" in text
    assert "rank 0: all_reduce of 10 float32 at a.py:1 in f" in text
    assert "rank 1: broadcast of 3 float32 at b.py:9 in g" in text


def test_rank_that_differs_from_the_majority_is_reported() -> None:
    calls_by_rank = {0: [make_call(5)], 1: [make_call(5)], 2: [make_call(5, numel=20)]}
    mismatch = find_mismatch(calls_by_rank)
    assert mismatch is not None
    assert mismatch[0] == [2]
    assert "ranks 0, 1: all_reduce of 10 float32" in mismatch[1]
    assert "rank 2: all_reduce of 20 float32" in mismatch[1]


def test_groups_are_compared_separately() -> None:
    assert (
        find_mismatch(
            {
                0: [make_call(5, group="0"), make_call(5, numel=7, group="1")],
                1: [make_call(5, group="0")],
            }
        )
        is None
    )


SITES = ("a.py:1 in f", "a.py:2 in f", "a.py:3 in f")
NUMELS = (10, 20, 30)


def make_steps(count: int, without: int | None = None) -> list[Any]:
    """Return the calls of ``count`` steps, three in each step, without the call ``without``."""
    issued = [number for number in range(3 * count) if number != without]
    return [
        make_call(position, numel=NUMELS[number % 3], site=SITES[number % 3])
        for position, number in enumerate(issued)
    ]


def test_omitted_call_is_reported() -> None:
    mismatch = find_mismatch({0: make_steps(3)[:8], 1: make_steps(3, without=6)[:8]})
    assert mismatch is not None
    assert (
        "Rank 1 is 1 collective behind: it did not call all_reduce of 10 float32 at a.py:1 in f"
        in mismatch[1]
    )


def test_omitted_call_is_reported_while_other_ranks_wait_in_it() -> None:
    """Rank 0 is blocked in the call that rank 1 left out, so the calls after it are known only from
    the previous step."""
    mismatch = find_mismatch({0: make_steps(3)[:7], 1: make_steps(3, without=6)[:7]})
    assert mismatch is not None
    assert (
        "Rank 1 is 1 collective behind: it did not call all_reduce of 10 float32 at a.py:1 in f"
        in mismatch[1]
    )


def test_omitted_call_is_found_among_calls_of_equal_size() -> None:
    """If the first of two consecutive calls of equal size is left out, the second is matched with
    it, and no sizes differ until later."""
    sites = ("a.py:1 in mean", "a.py:2 in other", "b.py:3 in send")
    calls = [
        make_call(number, numel=(3, 3, 32)[number % 3], site=sites[number % 3])
        for number in range(9)
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


def test_call_sites_are_compared_only_on_request() -> None:
    calls_by_rank = {0: [make_call(5, site="a.py:1 in f")], 1: [make_call(5, site="a.py:2 in f")]}
    assert find_mismatch(calls_by_rank) is None
    mismatch = find_mismatch(calls_by_rank, sites=True)
    assert mismatch is not None
    assert "a.py:1 in f" in mismatch[1]
    assert "a.py:2 in f" in mismatch[1]


def test_description_of_a_call_without_a_size() -> None:
    assert describe(make_call(1, "barrier", None)) == "barrier at a.py:1 in f"
