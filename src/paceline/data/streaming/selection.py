"""Parts of a table: rows that are selected, or all rows but some."""

from __future__ import annotations

import numpy as np

from paceline.data.streaming.tables import RawRow, RowTable


class _SelectedRows:
    """Some of the rows of a table, in its order."""

    def __init__(self, table: RowTable, rows_per_block: np.ndarray) -> None:
        self.table = table
        self.block_sizes = rows_per_block
        self.num_rows = int(rows_per_block.sum())
        self.has_fast_rows = table.has_fast_rows


class SelectedTable(_SelectedRows):
    """The rows of a table with these numbers.

    Args:
        numbers: increasing, int64 [rows].
    """

    def __init__(self, table: RowTable, numbers: np.ndarray) -> None:
        super().__init__(table, _rows_per_block(table, numbers))
        self._numbers = numbers

    def row(self, number: int) -> RawRow:
        return self.table.row(int(self._numbers[number]))


class RemainingTable(_SelectedRows):
    """The rows of a table without those with these numbers. Takes memory for the latter only.

    Args:
        excluded: increasing, int64 [rows].
    """

    def __init__(self, table: RowTable, excluded: np.ndarray) -> None:
        super().__init__(table, table.block_sizes - _rows_per_block(table, excluded))
        # The number of rows that remain before each excluded row.
        self._remaining_before = excluded - np.arange(len(excluded))

    def row(self, number: int) -> RawRow:
        num_excluded = int(np.searchsorted(self._remaining_before, number, side="right"))
        return self.table.row(number + num_excluded)


def _rows_per_block(table: RowTable, numbers: np.ndarray) -> np.ndarray:
    """Return how many of the rows are in each block of the table."""
    ends = np.cumsum(table.block_sizes)
    blocks = np.searchsorted(ends, numbers, side="right")
    counts: np.ndarray = np.bincount(blocks, minlength=len(ends)).astype(np.int64)
    return counts


def split_by_table(numbers: np.ndarray, tables: list[RowTable]) -> list[np.ndarray]:
    """Split increasing numbers of rows, counted through all tables, into the numbers of each
    table's rows, counted in that table."""
    ends = np.cumsum([table.num_rows for table in tables])
    parts = np.split(numbers, np.searchsorted(numbers, ends[:-1]))
    starts = [0, *ends[:-1].tolist()]
    return [part - start for part, start in zip(parts, starts, strict=True)]
