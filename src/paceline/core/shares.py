"""A whole number of things shared among so many: as evenly as it can be, in one fixed order."""

from __future__ import annotations

from itertools import pairwise


def edges(total: int, parts: int) -> list[int]:
    """Where each of ``parts`` consecutive shares of ``range(total)`` begins, and the end: ``8, 3`` → ``[0, 3, 6, 8]``.

    Sizes differ by at most one, and the larger ones are spread: any ``k`` shares in a row that begin at a multiple of ``k``
    come, where ``k`` divides ``parts``, to what ``edges(total, parts // k)`` says.
    """
    return [-(-total * part // parts) for part in range(parts + 1)]


def shares(total: int, parts: int) -> list[int]:
    """The sizes: ``8, 3`` → ``[3, 3, 2]``."""
    return [end - start for start, end in pairwise(edges(total, parts))]


def shares_text(total: int, parts: int) -> str:
    """For a person: ``3+3+2``; of many parts ``2 × 3 + 62 × 2``."""
    sizes = sorted(shares(total, parts), reverse=True)
    if parts <= 8:
        return "+".join(map(str, sizes))
    return " + ".join(f"{sizes.count(size)} × {size}" for size in sorted(set(sizes), reverse=True))
