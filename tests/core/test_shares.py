"""Even shares of an integer, in a fixed order."""

import pytest

from paceline.core.formatting import edges, shares, shares_text


@pytest.mark.parametrize("total", [0, 1, 7, 8, 64, 101])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("each", [1, 2, 3, 4])
def test_shares_of_shares(total: int, parts: int, each: int) -> None:
    sizes = shares(total, parts * each)
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1
    sums = [sum(sizes[part * each : (part + 1) * each]) for part in range(parts)]
    assert sums == shares(total, parts)
    assert edges(total, parts)[0] == 0
    assert edges(total, parts)[-1] == total


def test_as_text() -> None:
    assert shares(8, 3) == [3, 3, 2]
    assert shares_text(8, 3) == "3+3+2"
    assert shares_text(150, 64) == "22 × 3 + 42 × 2"
    assert shares_text(20, 10) == "10 × 2"
