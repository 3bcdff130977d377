"""Sharing a whole number evenly, in one fixed order."""

import pytest

from paceline.core.formatting import edges, shares, shares_text


@pytest.mark.parametrize("total", [0, 1, 7, 8, 64, 101])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("each", [1, 2, 3, 4])
def test_shares_of_shares(total: int, parts: int, each: int) -> None:
    found = shares(total, parts * each)
    assert sum(found) == total
    assert max(found) - min(found) <= 1
    assert [sum(found[one * each : (one + 1) * each]) for one in range(parts)] == shares(
        total, parts
    )
    assert edges(total, parts)[0] == 0
    assert edges(total, parts)[-1] == total


def test_for_a_person() -> None:
    assert shares(8, 3) == [3, 3, 2]
    assert shares_text(8, 3) == "3+3+2"
    assert shares_text(150, 64) == "22 × 3 + 42 × 2"
    assert shares_text(20, 10) == "10 × 2"
