"""Sorted runs on disk: write the tables of one process, partitioned by destination, and merge them.

A run is a file of lines ``word <tab> count <newline>`` (words contain neither), in UTF-8 with lone
surrogates allowed, sorted by the words' bytes within each destination, which equals the order of
their code points. In the code a word is a *key*.
"""

import heapq
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

#: Number of runs merged at a time; each is an open file.
FAN_IN = 64
_BATCH_LINES = 4096

Row = tuple[bytes, int]


@dataclass(frozen=True)
class SortedRun:
    """A file with the start offset of each destination's part. The last edge is the file size."""

    path: Path
    edges: tuple[int, ...]

    def part_bytes(self, destination: int) -> int:
        return self.edges[destination + 1] - self.edges[destination]

    def part(self, destination: int, buffer_bytes: int) -> Iterator[Row]:
        return read_rows(
            self.path, self.edges[destination], self.edges[destination + 1], buffer_bytes
        )


def encode(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")


def decode(key: bytes) -> str:
    return key.decode("utf-8", "surrogatepass")


def read_rows(path: Path, start: int, stop: int, buffer_bytes: int) -> Iterator[Row]:
    """Yield the rows in bytes [start, stop) of a run. Both must be at line ends."""
    remaining = stop - start
    with open(path, "rb", buffering=max(buffer_bytes, 512)) as handle:
        handle.seek(start)
        while remaining > 0:
            lines = handle.readlines(min(remaining, buffer_bytes))
            if not lines:
                raise OSError(f"{path} is truncated: {remaining} bytes are missing")
            for line in lines:
                remaining -= len(line)
                key, _, count = line.partition(b"\t")
                yield key, int(count)
                if remaining <= 0:  # readlines may return lines of the next part
                    return


def merge(streams: list[Iterator[Row]]) -> Iterator[Row]:
    """Merge sorted streams into one, with the counts of equal keys added up."""
    last, total = b"", 0
    # Half the time of itertools.groupby.
    for key, count in streams[0] if len(streams) == 1 else heapq.merge(*streams):
        if key == last:
            total += count
            continue
        if total:
            yield last, total
        last, total = key, count
    if total:
        yield last, total


def merge_buffer_bytes(memory_bytes: int) -> int:
    """Return the buffer size of each merged run if all of them may take about ``memory_bytes``."""
    return max(1024, min(1 << 18, memory_bytes // (4 * FAN_IN)))


def format_rows(stream: Iterable[Row]) -> Iterator[bytes]:
    """Yield the rows as lines of a run, in batches of lines."""
    source = iter(stream)
    while batch := list(islice(source, _BATCH_LINES)):
        yield b"".join([b"%b\t%d\n" % row for row in batch])


class Spills:
    """The runs of one process.

    Args:
        folder: for the files.
        num_parts: number of destinations.
        memory_bytes: for the buffers of a merge.

    Attributes:
        size_bytes: size of the tables written so far.
    """

    def __init__(self, folder: Path, num_parts: int, memory_bytes: int) -> None:
        self.folder, self.num_parts = folder, num_parts
        self.buffer_bytes = merge_buffer_bytes(memory_bytes)
        self.size_bytes = self._num_files = 0
        self._runs: list[SortedRun] = []

    def add(self, table: dict[str, int]) -> None:
        """Write a table as a run. Does not modify the table."""
        parts: list[list[bytes]] = [[] for _ in range(self.num_parts)]
        for name in sorted(table):
            key = encode(name)
            # Unlike hash(), the checksum is the same in every process.
            parts[zlib.crc32(key) % self.num_parts].append(b"%b\t%d\n" % (key, table[name]))
        run = self._write(parts)
        self.size_bytes += run.edges[-1]
        self._runs.append(run)

    def finish(self) -> SortedRun:
        """Merge all tables into one run, in as many rounds as needed."""
        if not self._runs:
            self._runs.append(self._write([[] for _ in range(self.num_parts)]))
        while len(self._runs) > 1:
            first, self._runs = self._runs[:FAN_IN], self._runs[FAN_IN:]
            parts = [
                format_rows(merge([run.part(part, self.buffer_bytes) for run in first]))
                for part in range(self.num_parts)
            ]
            self._runs.append(self._write(parts))
            for run in first:
                run.path.unlink()
        return self._runs[0]

    def _write(self, parts: Iterable[Iterable[bytes]]) -> SortedRun:
        path = self.folder / f"run-{self._num_files:06d}"
        self._num_files += 1
        edges = [0]
        with open(path, "wb") as handle:
            for part in parts:
                handle.writelines(part)
                edges.append(handle.tell())
        return SortedRun(path, tuple(edges))
