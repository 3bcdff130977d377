"""A whole number of things shared among so many: as evenly as it can be, in one fixed order."""

from __future__ import annotations

from collections.abc import Sequence
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


def weighted_shares(total: int, weights: Sequence[float]) -> list[int]:
    """Split ``total`` in proportion to ``weights`` by the largest-remainder method, at least 1 each.

    ``4, [3, 1]`` → ``[3, 1]``. Ties go to the lower index, so the result is the same on every rank.

    Args:
        total: number of items, at least ``len(weights)``.
        weights: positive numbers.
    """
    sum_of_weights = sum(weights)
    quotas = [total * weight / sum_of_weights for weight in weights]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda index: (counts[index] - quotas[index], index))
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    while 0 in counts:
        largest = max(range(len(counts)), key=lambda index: (counts[index], -index))
        counts[largest] -= 1
        counts[counts.index(0)] += 1
    return counts


def counts_text(counts: Sequence[int]) -> str:
    """Return ``3+1``, in the order of the ranks; runs of equal numbers are shortened if there are more than eight:
    ``8 × 3 + 8 × 1``."""
    if len(counts) <= 8:
        return "+".join(map(str, counts))
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][1] == count:
            runs[-1][0] += 1
        else:
            runs.append([1, count])
    return " + ".join(f"{length} × {count}" for length, count in runs)
