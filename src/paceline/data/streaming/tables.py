"""Local files whose rows are read by their number."""

from __future__ import annotations

import codecs
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from paceline.core.errors import ConfigError, RunError
from paceline.data.sources.csv_rows import (
    NOT_CSV,
    csv_delimiter,
    header_names,
    make_row,
    read_fields,
    stated_delimiter,
)
from paceline.data.sources.json_rows import is_head_of_lines
from paceline.data.sources.opening import (
    HEAD_BYTES,
    check_head,
    compression_of,
    data_suffix,
    encoding_of,
    ends_with_returns,
    not_text,
)
from paceline.data.sources.readers import (
    DOCUMENT,
    TEXT_SUFFIXES,
    LineBlock,
    arrow_errors,
    arrow_rows,
    check_schema,
)
from paceline.data.sources.rows import BrokenRow
from paceline.data.streaming.line_index import LINE_FEED, RETURN, open_index
from paceline.data.streaming.order import StreamShuffle

#: A row that is not parsed yet, or the place and the content of one.
RawRow = LineBlock | tuple[str, Any]

#: Number of rows of a text file that are one block of the order.
_BLOCK_ROWS = 4096
#: Largest number of positions whose rows are found at once.
_RUN_POSITIONS = 1024
#: Size of a row of a file of plain text.
_DOCUMENT_BYTES = 256 << 10
#: Limit of the decoded row groups that a process keeps.
_CACHE_BYTES = 512 << 20


class RowTable(Protocol):
    """A file whose rows are read by their number. Picklable; files are opened on first use.

    Attributes:
        num_rows: number of rows.
        block_sizes: numbers of consecutive rows that are read together: int64 [num_blocks].
        has_fast_rows: whether reading rows one by one, in any order, is fast.
    """

    num_rows: int
    block_sizes: np.ndarray
    has_fast_rows: bool

    def row(self, number: int) -> RawRow:
        """Return the row with this number, counted from 0."""


class LineTable:
    """A file of JSON lines.

    Args:
        line_end: the last byte of a line.
    """

    has_fast_rows = True

    def __init__(self, path: Path, line_end: int, *, quoted: bool = False) -> None:
        self.path, self.line_end = path, line_end
        self.index = open_index(path, quoted=quoted, line_end=line_end)
        self._handle: int | None = None
        self._start_at(0)

    def _start_at(self, first: int) -> None:
        """Set the index of the first row after the header."""
        self._first = first
        self.num_rows = max(0, self.index.num_rows - first)
        self.block_sizes = _equal_blocks(self.num_rows)

    def __getstate__(self) -> object:
        return {**self.__dict__, "_handle": None}

    def row(self, number: int) -> RawRow:
        return self._line(number + self._first)

    def _line(self, number: int) -> LineBlock:
        start, end = self.index.span(number)
        line = self._read(start, end)
        if start == 0:
            line = line.removeprefix(codecs.BOM_UTF8)
        return LineBlock([line], self.index.line_number(number), self.path)

    def _read(self, start: int, end: int) -> bytes:
        """Return the bytes of a row.

        Raises:
            RunError: they do not begin and end at line ends, so the file has changed.
        """
        if self._handle is None:
            self._handle = os.open(self.path, os.O_RDONLY)
        before = 1 if start else 0
        text = os.pread(self._handle, end - start + before, start - before)
        is_whole = len(text) == end - start + before and (not before or text[0] == self.line_end)
        if not is_whole or (text[-1] != self.line_end and end != self.index.size):
            raise RunError(
                "`{path}` has changed since it was indexed: bytes {start} to {end} are not a row",
                code="data-changed",
                fix="do not change the data of a run; restore the file, and run the command again"
                " to resume",
                path=self.path,
                start=f"{start:,}",
                end=f"{end:,}",
            )
        return text[before:]


class CsvTable(LineTable):
    """A file of CSV.

    Raises:
        ConfigError: the header is not text or not CSV, or a name occurs twice.
    """

    def __init__(self, path: Path, line_end: int, suffix: str) -> None:
        super().__init__(path, line_end, quoted=True)
        lines = [self._line(number) for number in range(min(2, self.index.num_rows))]
        first = lines[0].lines[0].decode("utf-8", errors="replace") if lines else ""
        self.delimiter = csv_delimiter(first, suffix)
        self._start_at(2 if stated_delimiter(first) else 1)
        names = self._fields(lines[self._first - 1]) if len(lines) >= self._first else []
        self.names = header_names(names, path)

    def row(self, number: int) -> RawRow:
        line = self._line(number + self._first)
        place = f"line {line.first_number} of {self.path}"
        try:
            return place, make_row(self.names, self._fields(line))
        except ConfigError:
            return place, BrokenRow(NOT_CSV)

    def _fields(self, line: LineBlock) -> list[str]:
        return read_fields(line.lines[0], line.first_number, self.path, self.delimiter)


class _GroupTable:
    """A file of groups of rows. Each group is decoded as a whole.

    The last decoded groups are kept, because the order shuffles rows among neighboring groups.
    """

    has_fast_rows = False

    def __init__(self, path: Path, sizes: list[int]) -> None:
        self.path = path
        self.block_sizes = np.array(sizes, dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self.block_sizes)])
        self.num_rows = int(self._starts[-1])
        self._file: Any = None
        self._groups: OrderedDict[int, Any] = OrderedDict()

    def __getstate__(self) -> object:
        return {**self.__dict__, "_file": None, "_groups": OrderedDict()}

    def _open(self) -> Any:
        raise NotImplementedError

    def _read(self, group: int) -> Any:
        """Return a pyarrow table or record batch with the rows of a group."""
        raise NotImplementedError

    def row(self, number: int) -> RawRow:
        group = int(np.searchsorted(self._starts, number, side="right")) - 1
        rows = self._group(group).slice(number - int(self._starts[group]), 1)
        return f"row {number + 1} of {self.path}", next(arrow_rows(rows))

    def _group(self, group: int) -> Any:
        if group in self._groups:
            self._groups.move_to_end(group)
            return self._groups[group]
        with arrow_errors(self.path):
            if self._file is None:
                self._file = self._open()
            self._groups[group] = self._read(group)
        while (
            len(self._groups) > 2
            and sum(rows.nbytes for rows in self._groups.values()) > _CACHE_BYTES
        ):
            self._groups.popitem(last=False)
        return self._groups[group]


class ParquetTable(_GroupTable):
    """A Parquet file; its groups are the row groups."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet as pq

        with arrow_errors(path):
            metadata = pq.read_metadata(path)
        check_schema(metadata.schema.to_arrow_schema(), path)
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        super().__init__(path, sizes)

    def _open(self) -> Any:
        import pyarrow.parquet as pq

        return pq.ParquetFile(self.path)

    def _read(self, group: int) -> Any:
        return self._file.read_row_group(group)


class ArrowTable(_GroupTable):
    """An Arrow file (also one of Hugging Face datasets); its groups are the record batches, which
    are mapped into memory and not copied."""

    has_fast_rows = True

    def __init__(self, path: Path) -> None:
        self.path = path
        with arrow_errors(path):
            batches = self._open()
            if batches:
                check_schema(batches[0].schema, path)
            sizes = [batch.num_rows for batch in batches]
        super().__init__(path, sizes)

    def _open(self) -> Any:
        import pyarrow as pa

        source = pa.memory_map(str(self.path))
        try:
            return pa.ipc.open_stream(source).read_all().to_batches()
        except pa.ArrowInvalid:
            file = pa.ipc.open_file(source)
            return [file.get_batch(number) for number in range(file.num_record_batches)]

    def _read(self, group: int) -> Any:
        return self._file[group]


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


class TableRows:
    """The rows of several tables, counted through all of them.

    Args:
        tables: those with rows, in the order of the config.
        sources: index of the source of each table.
    """

    def __init__(
        self, tables: Sequence[RowTable], sources: Sequence[int], shuffle: StreamShuffle
    ) -> None:
        self.tables, self.sources, self.shuffle = list(tables), list(sources), shuffle
        self.has_fast_rows = all(table.has_fast_rows for table in tables)
        self._ends = np.cumsum([table.num_rows for table in tables])
        num_rows = int(self._ends[-1])
        self.num_rows: int | None = num_rows
        self._block_sizes = None
        if not self.has_fast_rows:
            self._block_sizes = np.concatenate([table.block_sizes for table in tables])
        self._run_positions = min(_RUN_POSITIONS, num_rows)
        self._runs: OrderedDict[int, np.ndarray] = OrderedDict()

    def indices(self, positions: np.ndarray) -> np.ndarray:
        """Return the indices of the rows at positions that are counted over all epochs."""
        runs, offsets = np.divmod(positions, self._run_positions)
        indices = np.empty(len(positions), dtype=np.int64)
        for run in np.unique(runs).tolist():
            is_inside = runs == run
            indices[is_inside] = self._run(run)[offsets[is_inside]]
        return indices

    def _run(self, number: int) -> np.ndarray:
        """Return the rows at a run of positions. The last two runs are kept, because permuting the
        few positions of a micro-batch takes almost as long."""
        if number not in self._runs:
            positions = number * self._run_positions + np.arange(self._run_positions)
            num_rows, blocks = int(self._ends[-1]), self._block_sizes
            epochs, numbers = np.divmod(positions, num_rows)
            indices = np.empty(len(positions), dtype=np.int64)
            for epoch in np.unique(epochs).tolist():
                is_inside = epochs == epoch
                indices[is_inside] = self.shuffle.rows(epoch, num_rows, numbers[is_inside], blocks)
            self._runs[number] = indices
            if len(self._runs) > 2:
                self._runs.popitem(last=False)
        return self._runs[number]

    def row(self, index: int) -> tuple[int, RawRow]:
        """Return the index of the row's source, and the row."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        table = self.tables[number]
        return self.sources[number], table.row(index - int(self._ends[number]) + table.num_rows)

    def checked_rows(self, num_rows: int) -> list[int]:
        """Return rows to check before the start: ``num_rows`` of each source, evenly
        distributed."""
        rows: list[int] = []
        for source in dict.fromkeys(self.sources):
            owned = np.flatnonzero(np.array(self.sources) == source)
            first = int(self._ends[owned[0]]) - self.tables[owned[0]].num_rows
            last = int(self._ends[owned[-1]]) - 1
            rows += np.unique(np.linspace(first, last, num_rows).astype(int)).tolist()
        return rows


def open_table(path: Path) -> RowTable | None:
    """Return the rows of a local file, or None if they cannot be read by their number.

    Raises:
        ConfigError: the file is not text, or it is damaged.
    """
    suffix = data_suffix(path)
    if suffix == ".parquet":
        return ParquetTable(path)
    if suffix == ".arrow":
        return ArrowTable(path)
    text_suffixes = (".jsonl", ".ndjson", ".csv", ".tsv", *TEXT_SUFFIXES)
    if suffix not in text_suffixes or compression_of(path) is not None:
        return None
    with open(path, "rb") as handle:
        head = handle.read(HEAD_BYTES)
    if not encoding_of(head, path).startswith("utf-8"):
        return None
    check_head(head, path)
    if suffix in TEXT_SUFFIXES:
        return DocumentTable(path)
    line_end = RETURN if ends_with_returns(head, path) else LINE_FEED
    if suffix in (".jsonl", ".ndjson"):
        if not is_head_of_lines(head, path):
            return None
        return LineTable(path, line_end)
    return CsvTable(path, line_end, suffix)


class DocumentTable:
    """A file of plain text, whose rows are pieces of about a quarter of a mebibyte that begin and
    end at line ends. Each piece is a document."""

    has_fast_rows = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = path.stat().st_size
        self.num_rows = -(-self._size // _DOCUMENT_BYTES)
        self.block_sizes = _equal_blocks(self.num_rows)

    def row(self, number: int) -> RawRow:
        with open(self.path, "rb") as file:
            start = self._line_start(file, number * _DOCUMENT_BYTES)
            end = self._line_start(file, (number + 1) * _DOCUMENT_BYTES)
            file.seek(start)
            text = file.read(end - start)
        place = f"bytes {start:,} to {end:,} of {self.path}"
        try:
            content = text.removeprefix(codecs.BOM_UTF8).decode("utf-8")
        except UnicodeDecodeError as error:
            raise not_text(self.path, place, error) from error
        return place, {DOCUMENT: content}

    def _line_start(self, file: IO[bytes], offset: int) -> int:
        """Return the offset of the first line that begins at ``offset`` or later."""
        if offset == 0 or offset >= self._size:
            return min(offset, self._size)
        file.seek(offset - 1)
        file.readline()
        return file.tell()


def _equal_blocks(num_rows: int) -> np.ndarray:
    sizes = np.full(-(-num_rows // _BLOCK_ROWS), _BLOCK_ROWS, dtype=np.int64)
    if len(sizes):
        sizes[-1] = num_rows - _BLOCK_ROWS * (len(sizes) - 1)
    return sizes
