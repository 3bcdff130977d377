"""Tables of counts on disk: sorted runs, cut by the process that will add them up, and their
merging.

A run is a file of lines ``word <tab> count <newline>`` (words hold neither), in UTF-8 with lone
surrogates let through, sorted by the words' bytes within each destination; that is the order of
their code points too.
"""

import heapq
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

#: runs merged at a time; each is an open file
FAN_IN = 64
_BATCH_LINES = 4096

Row = tuple[bytes, int]


@dataclass(frozen=True)
class Run:
    """``path`` and where each destination's part begins; the last edge is the size of the file."""

    path: Path
    edges: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return self.edges[-1]

    def part_bytes(self, destination: int) -> int:
        return self.edges[destination + 1] - self.edges[destination]

    def part(self, destination: int, buffer_bytes: int) -> Iterator[Row]:
        return rows(self.path, self.edges[destination], self.edges[destination + 1], buffer_bytes)


def encoded(word: str) -> bytes:
    return word.encode("utf-8", "surrogatepass")


def decoded(word: bytes) -> str:
    return word.decode("utf-8", "surrogatepass")


def destination(word: bytes, num_parts: int) -> int:
    """The number of the process that adds up this word: the same in every process, unlike
    ``hash()``."""
    return zlib.crc32(word) % num_parts


def rows(path: Path, start: int, stop: int, buffer_bytes: int) -> Iterator[Row]:
    """The rows in bytes [start, stop) of a run, which both lie at line ends."""
    left = stop - start
    with open(path, "rb", buffering=max(buffer_bytes, 512)) as handle:
        handle.seek(start)
        while left > 0:
            lines = handle.readlines(min(left, buffer_bytes))
            if not lines:
                raise OSError(f"{path} ends {left} bytes too early")
            for line in lines:
                left -= len(line)
                word, _, count = line.partition(b"\t")
                yield word, int(count)
                if left <= 0:  # a hint is no limit: a line of the next part may have been read
                    return


def merged(streams: list[Iterator[Row]]) -> Iterator[Row]:
    """One sorted stream from several, the counts of equal words added up."""
    last, total = b"", 0
    for word, count in streams[0] if len(streams) == 1 else heapq.merge(*streams):
        if word == last:
            total += count
            continue
        if total:
            yield last, total
        last, total = word, count
    if total:
        yield last, total


def merge_buffer_bytes(memory_bytes: int) -> int:
    """Of each run that is merged, where all of them may take about ``memory_bytes``."""
    return max(1024, min(1 << 18, memory_bytes // (4 * FAN_IN)))


def lines(stream: Iterable[Row]) -> Iterator[bytes]:
    """The rows as lines of a run, many lines at a time."""
    source = iter(stream)
    while batch := list(islice(source, _BATCH_LINES)):
        yield b"".join([b"%b\t%d\n" % row for row in batch])


class Spills:
    """The runs of one process.

    Args:
        folder: where they are written.
        num_parts: destinations.
        memory_bytes: for the buffers of a merge.

    Attributes:
        written: tables written so far.
        size_bytes: their size.
    """

    def __init__(self, folder: Path, num_parts: int, memory_bytes: int) -> None:
        self.folder, self.num_parts = folder, num_parts
        self.buffer_bytes = merge_buffer_bytes(memory_bytes)
        self.written = self.size_bytes = self._names = 0
        self._runs: list[Run] = []

    def add(self, table: dict[str, int]) -> None:
        """Write a table as a run. The table itself stays as it is."""
        parts: list[list[bytes]] = [[] for _ in range(self.num_parts)]
        for word in sorted(table):
            raw = encoded(word)
            parts[destination(raw, self.num_parts)].append(b"%b\t%d\n" % (raw, table[word]))
        run = self._write(parts)
        self.written += 1
        self.size_bytes += run.size_bytes
        self._runs.append(run)

    def finish(self) -> Run:
        """All of them as one run: merged in as many rounds as their number takes."""
        if not self._runs:
            self._runs.append(self._write([[] for _ in range(self.num_parts)]))
        while len(self._runs) > 1:
            first, self._runs = self._runs[:FAN_IN], self._runs[FAN_IN:]
            parts = [
                lines(merged([run.part(part, self.buffer_bytes) for run in first]))
                for part in range(self.num_parts)
            ]
            self._runs.append(self._write(parts))
            for run in first:
                run.path.unlink()
        return self._runs[0]

    def _write(self, parts: Iterable[Iterable[bytes]]) -> Run:
        path = self.folder / f"run-{self._names:06d}"
        self._names += 1
        edges = [0]
        with open(path, "wb") as handle:
            for part in parts:
                handle.writelines(part)
                edges.append(handle.tell())
        return Run(path, tuple(edges))
