"""Test the division of an integer into even shares."""

import pytest

from paceline.core.formatting import edges, shares, shares_text


@pytest.mark.parametrize("total", [0, 1, 7, 8, 64, 101])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shares_per_part", [1, 2, 3, 4])
def test_nested_shares_are_consistent(total: int, parts: int, shares_per_part: int) -> None:
    sizes = shares(total, parts * shares_per_part)
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1
    sums = [
        sum(sizes[part * shares_per_part : (part + 1) * shares_per_part]) for part in range(parts)
    ]
    assert sums == shares(total, parts)
    assert edges(total, parts)[0] == 0
    assert edges(total, parts)[-1] == total


def test_shares_text_groups_equal_shares() -> None:
    assert shares(8, 3) == [3, 3, 2]
    assert shares_text(8, 3) == "3+3+2"
    assert shares_text(150, 64) == "22 × 3 + 42 × 2"
    assert shares_text(20, 10) == "10 × 2"
