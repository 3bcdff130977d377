"""Count words or tokens by several processes in three phases: map on shards, shuffle by hash,
reduce. Exact, in bounded memory.

1. Map: each process counts its share of the bytes into a table. A table that is full is written to
  disk as a sorted run, cut by the process that its words' hashes name.
2. Shuffle: each process merges its runs into one.
3. Reduce: each process adds up its part of every run, one row of each in memory at a time.

(J. Dean and S. Ghemawat, MapReduce: Simplified Data Processing on Large Clusters, OSDI 2004, with
their combiner in the map.)
"""

import errno
import heapq
import os
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from paceline.core.errors import RunError
from paceline.core.files import Scratch
from paceline.data.count.runs import (
    Row,
    Run,
    Spills,
    decoded,
    lines,
    merge_buffer_bytes,
    merged,
    rows,
)
from paceline.data.count.shards import Errors, ReadOptions, ScanStats, TextShard, plan_shards, texts
from paceline.data.worker_pool import worker_pool
from paceline.distributed.devices import cpu_cores

#: below this a chunk of text does not fit beside the table
LEAST_MEMORY_BYTES = 1 << 20
_COUNT_BYTES = 32  # of an int that is a table's value
_MOST_CHUNK_BYTES = 1 << 20
_PIECE_CHARS = 1 << 18
_SCRATCH_PREFIX = "paceline-count-"  # of the folder for what does not fit into memory


@dataclass(frozen=True)
class CountSpec:
    """What is counted. Picklable: it is sent to every process.

    Args:
        files: path and size in bytes.
        by: words as ``str.split()`` gives them, or the tokens of each line (of each row, with
            ``field``).
        tokenizer: the folder of a tokenizer, with ``by="tokens"``.
        field: the files are JSON lines, and this key of each is the text.
        errors: as for ``bytes.decode``.
        memory_bytes: what the tables and buffers of a process may take.
        top: most frequent words to name.
    """

    files: tuple[tuple[Path, int], ...]
    by: Literal["words", "tokens"] = "words"
    tokenizer: Path | None = None
    field: str | None = None
    errors: Errors = "strict"
    memory_bytes: int = 256_000_000
    top: int = 10

    @property
    def reading(self) -> ReadOptions:
        # The words of a chunk are up to 25 times its bytes as Python objects: the chunk is small
        # beside the table.
        chunk = min(_MOST_CHUNK_BYTES, self.memory_bytes // 64)
        return ReadOptions(
            self.by == "tokens", self.field, self.errors, chunk, self.memory_bytes // 8
        )

    @property
    def table_bytes(self) -> int:
        """Of a table when it is written to disk. A growing dict is there twice for a moment, and is
        sorted on its way out."""
        return self.memory_bytes // 3


@dataclass
class CountResult:
    """What one process, or one engine, has counted. ``top``: (word, count), most frequent first,
    then by word. ``seconds``: of each phase, the slowest process's."""

    total: int = 0
    distinct: int = 0
    top: list[tuple[str, int]] = field(default_factory=list)
    spills: int = 0
    spilled_bytes: int = 0
    shuffled_bytes: int = 0
    replaced: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MapResult:
    """The counts of one process's shards: a run with a part for each process."""

    run: Run
    stats: ScanStats
    spilled_bytes: int
    map_s: float
    merge_s: float


def count_locally(spec: CountSpec, num_processes: int, output: Path | None) -> CountResult:
    """Count in ``num_processes`` processes of this machine. The table goes to ``output``, where one
    is given.

    Raises:
        ConfigError: text that is not as it must be.
        RunError: the disk is full, a word is too long, or a process was killed.
    """
    # The processes end before the folder is removed: what they still write has nowhere to go
    # otherwise.
    with (
        Scratch(_SCRATCH_PREFIX) as folder,
        worker_pool(
            num_processes, partial(_share_cores, num_processes), kill_on_error=True
        ) as pool,
    ):
        try:
            maps = _results(
                pool.submit(count_shards, shards, spec, folder / f"rank-{rank:03d}", num_processes)
                for rank, shards in enumerate(plan_shards(list(spec.files), num_processes))
            )
            runs = [mapped.run for mapped in maps]
            tables = [
                None if output is None else folder / f"table-{rank:03d}"
                for rank in range(num_processes)
            ]
            sums = _results(
                pool.submit(reduce, runs, rank, spec, table) for rank, table in enumerate(tables)
            )
        except BrokenProcessPool as error:
            raise RunError(
                "a process that counts ended without a message (often: out of memory)",
                fix="give fewer --ranks, or less --memory-per-rank to each",
            ) from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise RunError(
                    f"the disk filled up while counts were written to {folder}",
                    fix=(
                        "make room, set TMPDIR to a folder on another disk, or give more with"
                        " --memory-per-rank"
                    ),
                ) from error
            raise
        if output is not None:
            sorted_rows = [rows(path, 0, path.stat().st_size, 1 << 18) for path in tables if path]
            write_table(output, merged(sorted_rows))
    return combined(maps, sums, spec.top)


def _share_cores(num_processes: int) -> None:
    os.environ.setdefault("RAYON_NUM_THREADS", str(max(1, cpu_cores() // num_processes)))


def _results(futures: Iterable[Future[Any]]) -> list[Any]:
    """The results in order; the first failure ends the wait for the others."""
    submitted = list(futures)
    done = wait(submitted, return_when=FIRST_EXCEPTION).done
    return [future.result() for future in sorted(done, key=submitted.index)]


def count_shards(
    shards: list[TextShard], spec: CountSpec, folder: Path, num_parts: int
) -> MapResult:
    """The map of one process, and the merging of its runs, which are written into ``folder``.

    Raises:
        ConfigError, RunError: as :func:`~paceline.data.count.shards.texts` does.
    """
    folder.mkdir(parents=True)
    stats = ScanStats()
    spills = Spills(folder, num_parts, spec.memory_bytes)
    started = time.perf_counter()
    for table in tables(shards, spec, stats):
        spills.add(table)
        table.clear()
    mapped = time.perf_counter()
    run = spills.finish()
    return MapResult(
        run,
        stats,
        spilled_bytes=spills.size_bytes if stats.full_tables else 0,
        map_s=mapped - started,
        merge_s=time.perf_counter() - mapped,
    )


def tables(shards: list[TextShard], spec: CountSpec, stats: ScanStats) -> Iterator[dict[str, int]]:
    """The map: counts of the shards' words, a new table each time ``spec.table_bytes`` are full. A
    word may be in several."""
    split = (
        _Tokens(spec.tokenizer) if spec.by == "tokens" and spec.tokenizer is not None else _Words()
    )
    table: Counter[Any] = Counter()
    size = 0
    for text in chain.from_iterable(texts(shard, spec.reading, stats) for shard in shards):
        before = len(table)
        table.update(split(text, whole=spec.field is not None))
        # the newest keys are the last
        size += sum(map(sys.getsizeof, islice(reversed(table), len(table) - before)))
        if size + _COUNT_BYTES * len(table) + sys.getsizeof(table) > spec.table_bytes:
            stats.full_tables += 1
            yield split.named(table)
            table, size = Counter(), 0
    if table:
        yield split.named(table)


class _Words:
    def __call__(self, text: str, whole: bool) -> Iterable[str]:
        return text.split()

    def named(self, table: Counter[Any]) -> dict[str, int]:
        return table


class _Tokens:
    """Ids of the tokens of a text: of each of its lines (``whole``: of all of it), of long ones by
    pieces of 2¹⁸ characters. So a count does not depend on where the text was cut into shards."""

    def __init__(self, folder: Path) -> None:
        from paceline.data.text.tokenizer import load_tokenizer

        self.tokenizer = load_tokenizer(folder)

    def __call__(self, text: str, whole: bool) -> Iterable[int]:
        units = [text] if whole else re.split(r"(?<=\n)", text)
        pieces = [
            unit[start : start + _PIECE_CHARS]
            for unit in units
            for start in range(0, len(unit), _PIECE_CHARS)
        ]
        return chain.from_iterable(self.tokenizer.encode_batch(pieces, add_special_tokens=False))

    def named(self, table: Counter[Any]) -> dict[str, int]:
        return {self._name(token_id): count for token_id, count in table.items()}

    def _name(self, token_id: int) -> str:
        """The token as the vocabulary writes it. White space in it, which would break the table's
        lines, is escaped."""
        token = self.tokenizer.token(token_id)
        if token is None:
            return f"#{token_id}"
        if not any(char.isspace() for char in token):
            return token
        escaped = (
            char.encode("unicode_escape").decode() if char.isspace() else char for char in token
        )
        return f"{''.join(escaped)}#{token_id}"


def reduce(runs: list[Run], part: int, spec: CountSpec, table: Path | None) -> CountResult:
    """Add up one part of all ``runs``: the figures, and the counts themselves as a run at
    ``table``, where one is given."""
    result = CountResult()
    started = time.perf_counter()
    buffer_bytes = merge_buffer_bytes(spec.memory_bytes)
    stream = tally(merged([run.part(part, buffer_bytes) for run in runs]), result, spec.top)
    if table is None:
        deque(stream, maxlen=0)
    else:
        with open(table, "wb") as handle:
            handle.writelines(lines(stream))
    result.shuffled_bytes = sum(
        run.part_bytes(part) for number, run in enumerate(runs) if number != part
    )
    result.seconds["reduce"] = time.perf_counter() - started
    return result


def tally(stream: Iterable[Row], result: CountResult, top: int) -> Iterator[Row]:
    """The rows of ``stream``, each word once; ``result`` gets their figures on the way."""
    heap: list[tuple[int, _Later]] = []
    for word, count in stream:
        result.total += count
        result.distinct += 1
        if len(heap) < top:
            heapq.heappush(heap, (count, _Later(word)))
        elif heap and count >= heap[0][0]:
            heapq.heappushpop(heap, (count, _Later(word)))
        yield word, count
    result.top = [(decoded(word), count) for count, word in sorted(heap, reverse=True)]


class _Later(bytes):
    """A word that is the smaller the later it comes in the order of words: of equal counts the
    first word is the best."""

    def __lt__(self, other: bytes) -> bool:
        return bytes.__gt__(self, other)

    def __gt__(self, other: bytes) -> bool:
        return bytes.__lt__(self, other)


def combined(maps: list[MapResult], sums: list[CountResult], top: int) -> CountResult:
    """The figures of all processes as one: their words are disjoint."""
    best = (entry for part in sums for entry in part.top)
    return CountResult(
        total=sum(part.total for part in sums),
        distinct=sum(part.distinct for part in sums),
        top=sorted(best, key=lambda entry: (-entry[1], entry[0]))[:top],
        spills=sum(mapped.stats.full_tables for mapped in maps),
        spilled_bytes=sum(mapped.spilled_bytes for mapped in maps),
        shuffled_bytes=sum(part.shuffled_bytes for part in sums),
        replaced=sum(mapped.stats.replaced for mapped in maps),
        seconds={
            "map": max(mapped.map_s for mapped in maps),
            "shuffle": max(mapped.merge_s for mapped in maps),
            "reduce": max(part.seconds["reduce"] for part in sums),
        },
    )


def write_table(output: Path, stream: Iterable[Row]) -> None:
    """The whole table as UTF-8 lines ``word <tab> count``, whole or not at all. Lone surrogates,
    which JSON can hold and UTF-8 cannot, are written as ``\\udXXX``."""
    aside = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as handle:
            for batch in lines(stream):
                handle.write(decoded(batch).encode("utf-8", "backslashreplace"))
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(aside, output)
    finally:
        aside.unlink(missing_ok=True)
