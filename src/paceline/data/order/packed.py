"""Rows of at most a number of tokens that several samples share.

`bfd` packs whole samples by best-fit decreasing; `wrapped` cuts the documents, one after the other
in the order of the epoch, into rows of exactly that size.
"""

from bisect import bisect_left, insort

import numpy as np

from paceline.data.order.base import Keys, keys_of
from paceline.data.order.rows import Shuffle

#: Distinguish the orders of an epoch: of the samples and of the rows.
_SAMPLES, _ROWS = 1, 2


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Assign samples to rows: each to the fullest row that has space for it, else to a new row.

    Samples of the same length are placed together: all of them that fit into the fullest row, then
    into the next one. So the time depends on the number of distinct lengths, not on the number of
    samples.

    Args:
        lengths: number of tokens of each sample, decreasing, each from 1 to ``capacity``: int64
            [samples].

    Returns:
        The row of each sample: int64 [samples].
    """
    row_of = np.empty(len(lengths), dtype=np.int64)
    rows_by_space: dict[int, list[np.ndarray]] = {}
    spaces: list[int] = []  # the keys of rows_by_space, increasing
    num_rows = placed = 0

    def add(space: int, rows: np.ndarray) -> None:
        if not len(rows):
            return
        if space not in rows_by_space:
            rows_by_space[space] = []
            insort(spaces, space)
        rows_by_space[space].append(rows)

    def fill(space: int, rows: np.ndarray, length: int, end: int) -> None:
        """Place samples of this length into rows with this space, up to the sample ``end``."""
        nonlocal placed
        per_row = space // length
        num_full, rest = divmod(min(end - placed, per_row * len(rows)), per_row)
        row_of[placed : placed + num_full * per_row] = np.repeat(rows[:num_full], per_row)
        placed += num_full * per_row
        add(space - per_row * length, rows[:num_full])
        if rest:
            row_of[placed : placed + rest] = rows[num_full]
            placed += rest
            add(space - rest * length, rows[num_full : num_full + 1])
        add(space, rows[num_full + bool(rest) :])

    distinct, counts = np.unique(-lengths, return_counts=True)
    for length, count in zip((-distinct).tolist(), counts.tolist(), strict=True):
        end = placed + count
        while placed < end and (number := bisect_left(spaces, length)) < len(spaces):
            space = spaces.pop(number)
            fill(space, np.concatenate(rows_by_space.pop(space)), length, end)
        num_new = -(-(end - placed) // (capacity // length))
        rows = np.arange(num_rows, num_rows + num_new)
        num_rows += num_new
        if num_new:
            fill(capacity, rows, length, end)
    return row_of


class PackedRows:
    """Rows of whole samples, packed by best-fit decreasing.

    The number of samples of each length in each row is the same in every epoch. Which samples of
    that length they are, and the order of the rows, depends on the epoch.

    Args:
        lengths: number of tokens of each sample of the source, int64 [samples].
        capacity: largest number of tokens of a row.
        first: index of the first sample of the source.
    """

    def __init__(
        self, lengths: np.ndarray, capacity: int, first: int, seed: int, shuffle: bool
    ) -> None:
        self.lengths = lengths
        self.first = first
        row_of = best_fit_decreasing(np.sort(lengths)[::-1], capacity)
        self.num_rows = int(row_of.max(initial=-1)) + 1
        # The places of a row, in the order of decreasing lengths.
        self._places = np.argsort(row_of, kind="stable")
        self._ends = np.cumsum(np.bincount(row_of, minlength=self.num_rows))
        self._row_of = row_of
        self._shuffle_samples = Shuffle(len(lengths), seed, (first, _SAMPLES), shuffle)
        self._shuffle_rows = Shuffle(self.num_rows, seed, (first, _ROWS), shuffle)
        self._epoch: tuple[int, np.ndarray] | None = None

    def _samples(self, epoch: int) -> np.ndarray:
        """Return the sample at each place: int64 [samples]."""
        if self._epoch is None or self._epoch[0] != epoch:
            order = self._shuffle_samples.order(epoch)
            self._epoch = epoch, order[np.argsort(-self.lengths[order], kind="stable")]
        return self._epoch[1]

    def _rows(self, epoch: int) -> np.ndarray:
        """Return the order of the rows. Without shuffling, it follows their first samples."""
        if self._shuffle_rows.enabled:
            return self._shuffle_rows.order(epoch)
        starts = self._ends - np.bincount(self._row_of, minlength=self.num_rows)
        return np.argsort(np.minimum.reduceat(self._samples(epoch)[self._places], starts))

    def keys(self, epoch: int, positions: np.ndarray) -> list[Keys]:
        samples, result = self._samples(epoch), []
        for row in self._rows(epoch)[positions].tolist():
            start = self._ends[row - 1] if row else 0
            places = self._places[start : self._ends[row]]
            result.append(keys_of(epoch, self.first + samples[places]))
        return result

    def add_times(self, times: np.ndarray, epoch: int, position: int) -> None:
        part = times[self.first : self.first + len(self.lengths)]
        part += epoch
        is_read = np.zeros(self.num_rows, dtype=bool)
        is_read[self._rows(epoch)[:position]] = True
        part[self._samples(epoch)[is_read[self._row_of]]] += 1


class WrappedRows:
    """Rows of exactly ``capacity`` tokens, cut from the documents in the order of the epoch; the
    last row of an epoch may be shorter. The keys are int64 [pieces, 4]: the epoch, the index of the
    document, and the first token and the end of the piece. Arguments as in :class:`PackedRows`.
    """

    def __init__(
        self, lengths: np.ndarray, capacity: int, first: int, seed: int, shuffle: bool
    ) -> None:
        self.lengths = lengths
        self.capacity = capacity
        self.first = first
        self.num_rows = -(-int(lengths.sum()) // capacity)
        self._shuffle = Shuffle(len(lengths), seed, (first,), shuffle)
        self._epoch: tuple[int, np.ndarray] | None = None

    def _ends_of(self, epoch: int) -> np.ndarray:
        """Return the end of each document in the epoch's sequence of tokens: int64 [documents]."""
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, np.cumsum(self.lengths[self._shuffle.order(epoch)])
        return self._epoch[1]

    def keys(self, epoch: int, positions: np.ndarray) -> list[Keys]:
        return [self._pieces(epoch, position) for position in positions.tolist()]

    def _pieces(self, epoch: int, position: int) -> Keys:
        order, ends = self._shuffle.order(epoch), self._ends_of(epoch)
        start = position * self.capacity
        stop = min(start + self.capacity, int(ends[-1]))
        number = np.arange(
            np.searchsorted(ends, start, "right"), np.searchsorted(ends, stop, "left") + 1
        )
        documents = order[number]
        begins = ends[number] - self.lengths[documents]
        columns = [
            np.full_like(documents, epoch),
            self.first + documents,
            np.maximum(start - begins, 0),
            np.minimum(stop, ends[number]) - begins,
        ]
        return np.stack(columns, axis=1)

    def add_times(self, times: np.ndarray, epoch: int, position: int) -> None:
        """Add the parts of documents as fractions."""
        part = times[self.first : self.first + len(self.lengths)]
        part += epoch
        order, ends = self._shuffle.order(epoch), self._ends_of(epoch)
        begins = ends - self.lengths[order]
        tokens = np.clip(position * self.capacity - begins, 0, self.lengths[order])
        part[order] += tokens / self.lengths[order]
