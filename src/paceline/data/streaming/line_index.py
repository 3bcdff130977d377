"""The index of a text file's rows: the offset of each row, found by scanning for line ends."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from paceline.core.files import cache_dir
from paceline.data.cache import build_once, fingerprint, key_of

_OFFSETS, _BLANKS, _META = "offsets.bin", "blanks.npy", "meta.json"
_SCAN_BYTES = 32 << 20
LINE_FEED, RETURN = 10, 13
_QUOTE = 34
#: Smaller files are identified by a hash of their content.
HASHED_BYTES = 16 << 20


@dataclass
class LineIndex:
    """The offsets of the rows of a file, in a file of int64 values.

    Values are read when they are needed, so that the size of the index takes no memory.

    Args:
        folder: the entry of the cache.
        num_rows: number of rows, without blank lines.
        size: size of the file in bytes.
    """

    folder: Path
    num_rows: int
    size: int
    _handle: int | None = field(default=None, repr=False)
    _blanks: np.ndarray | None = field(default=None, repr=False)

    def __getstate__(self) -> object:
        return {**self.__dict__, "_handle": None, "_blanks": None}

    def span(self, row: int) -> tuple[int, int]:
        """Return the offsets of the first byte of a row and of the next row."""
        if self._handle is None:
            self._handle = os.open(self.folder / _OFFSETS, os.O_RDONLY)
        start, end = np.frombuffer(os.pread(self._handle, 16, 8 * row), dtype=np.int64)
        return int(start), int(end)

    def line_number(self, row: int) -> int:
        """Return the number of a row's line, from 1 and with blank lines. (A quoted field of a CSV
        file that has several lines counts as one.)"""
        if self._blanks is None:
            self._blanks = np.load(self.folder / _BLANKS)
        return row + 1 + int(np.searchsorted(self._blanks, row, side="right"))


def open_index(path: Path, *, quoted: bool = False, line_end: int = LINE_FEED) -> LineIndex:
    """Return the index of a file, built if it is not in the cache.

    Args:
        quoted: whether a line end between double quotes belongs to its row, as in CSV.
        line_end: the last byte of a line.
    """
    settings = [quoted] if line_end == LINE_FEED else [quoted, line_end]
    key = key_of(["rows", *fingerprint(path, HASHED_BYTES), *settings])
    folder = cache_dir() / "rows" / key

    def build(staging: Path) -> None:
        num_rows = _write_index(path, staging, quoted, line_end)
        (staging / _META).write_text(json.dumps({"rows": num_rows, "file": str(path)}))

    build_once(folder, _META, build)
    num_rows = int(json.loads((folder / _META).read_text())["rows"])
    return LineIndex(folder, num_rows, path.stat().st_size)


def _write_index(path: Path, folder: Path, quoted: bool, line_end: int) -> int:
    """Write the offset of each row that is not blank, and the size of the file."""
    num_rows, blanks = 0, []
    with open(path, "rb", buffering=0) as file, open(folder / _OFFSETS, "wb") as offsets:
        size = os.fstat(file.fileno()).st_size
        row_start, position, num_quotes, last_byte = 0, 0, 0, line_end
        while chunk := file.read(_SCAN_BYTES):
            data = np.frombuffer(chunk, dtype=np.uint8)
            ends = np.flatnonzero(data == line_end)
            if quoted:
                quotes = np.flatnonzero(data == _QUOTE)
                before = num_quotes + np.searchsorted(quotes, ends)
                ends, num_quotes = ends[before % 2 == 0], num_quotes + len(quotes)
            if len(ends):
                starts = np.concatenate([[row_start - position], ends[:-1] + 1])
                # Blank: nothing, or a carriage return, before the line end.
                before_end = np.where(ends > 0, data[ends - 1], last_byte)
                length = ends - starts
                is_blank = (length == 0) | ((length == 1) & (before_end == RETURN))
                blanks.append(num_rows + np.cumsum(~is_blank)[is_blank])
                kept = starts[~is_blank] + position
                offsets.write(kept.astype(np.int64).tobytes())
                num_rows += len(kept)
                row_start = position + int(ends[-1]) + 1
            position += len(chunk)
            last_byte = int(data[-1])
        if row_start < size:
            offsets.write(np.int64(row_start).tobytes())
            num_rows += 1
        offsets.write(np.int64(size).tobytes())
    np.save(folder / _BLANKS, np.concatenate(blanks) if blanks else np.zeros(0, dtype=np.int64))
    return num_rows
