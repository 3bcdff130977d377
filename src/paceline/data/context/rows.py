"""How context parallelism divides the tokens of a packed row among ranks. Imports no torch.

The row is cut into twice as many chunks of equal length as there are ranks, and rank r has chunk r
from the front and chunk r from the back. In causal attention, a token at the front of a document
attends to few tokens and one at the back to many, so each rank computes equally many (query, key)
pairs of one long document (Brandon et al., "Striped Attention", 2023, describe the imbalance;
Dubey et al., "The Llama 3 Herd of Models", 2024, section 3.3.2, this division).

The cuts don't depend on where samples begin, so samples may cross them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class Piece(NamedTuple):
    """Adjacent tokens of one sample that one rank has.

    Args:
        segment: position in the row at which the sample begins.
        start, stop: positions of the piece in the row.
        offset: index of the first of these tokens among the rank's tokens.
    """

    segment: int
    start: int
    stop: int
    offset: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class RowDivision:
    """The division of one packed row.

    Args:
        lengths: number of tokens of each sample, in order.
        size: number of ranks.
    """

    lengths: tuple[int, ...]
    size: int

    @cached_property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """The pieces of each rank, in ascending order of positions."""
        ends = list(accumulate(self.lengths))
        return tuple(self._pieces(rank, ends) for rank in range(self.size))

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Return the ranges of positions that a rank has, in ascending order."""
        count = 2 * self.size
        cuts = [self.num_tokens * cut // count for cut in range(count + 1)]
        ranges: list[tuple[int, int]] = []
        for chunk in (rank, count - 1 - rank):
            start, stop = cuts[chunk], cuts[chunk + 1]
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        return [(start, stop) for start, stop in ranges if start < stop]

    def num_local(self, rank: int) -> int:
        """Return the number of tokens of a rank, which may be zero."""
        return sum(stop - start for start, stop in self.ranges(rank))

    def positions(self, rank: int) -> np.ndarray:
        """Return the positions of a rank's tokens in the row, int64 [tokens of the rank]."""
        import numpy as np  # commands that only describe themselves need none

        ranges = [np.arange(start, stop, dtype=np.int64) for start, stop in self.ranges(rank)]
        return np.concatenate(ranges) if ranges else np.empty(0, dtype=np.int64)

    def num_pairs(self, rank: int, window: int | None = None) -> int:
        """Return the number of (query, key) pairs of a rank's queries.

        Args:
            window: number of tokens that a token attends to, including itself; None: all before it
                in its sample.
        """
        total = 0
        for piece in self.pieces[rank]:
            first, last = piece.start - piece.segment + 1, piece.stop - piece.segment
            if window is not None and last > window:
                full = max(first, window + 1)
                total += (last - full + 1) * window
                last = full - 1
            total += (first + last) * (last - first + 1) // 2
        return total

    def _pieces(self, rank: int, ends: Sequence[int]) -> tuple[Piece, ...]:
        pieces = []
        offset = 0
        for start, stop in self.ranges(rank):
            number = bisect_right(ends, start)
            while start < stop:
                end = min(ends[number], stop)
                pieces.append(Piece(ends[number] - self.lengths[number], start, end, offset))
                offset += end - start
                start, number = end, number + 1
        return tuple(pieces)


@lru_cache(maxsize=64)
def divide_row(lengths: tuple[int, ...], size: int) -> RowDivision:
    """Return the division of a row of samples of these lengths among ``size`` ranks."""
    return RowDivision(lengths, size)
