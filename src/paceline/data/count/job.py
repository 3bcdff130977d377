"""Count words or tokens with several processes in three phases: map over shards, shuffle by hash,
reduce. The result is exact, and memory is bounded.

1. Map: each process counts its share of the bytes in a table. A full table is written to disk as a
  sorted run, partitioned by the hashes of the words.
2. Shuffle: each process merges its runs into one.
3. Reduce: each process adds up its part of every run, with one row of each in memory at a time.

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
from paceline.data.count.limits import DEFAULT_MEMORY_BYTES
from paceline.data.count.runs import (
    Row,
    SortedRun,
    Spills,
    decode,
    format_rows,
    merge,
    merge_buffer_bytes,
    read_rows,
)
from paceline.data.count.shards import (
    Errors,
    ReadOptions,
    ScanStats,
    TextShard,
    plan_shards,
    read_texts,
)
from paceline.data.worker_pool import worker_pool
from paceline.distributed.devices import cpu_cores

_COUNT_BYTES = 32  # size of an int in a table
_MAX_CHUNK_BYTES = 1 << 20
_PIECE_CHARS = 1 << 18
_SCRATCH_PREFIX = "paceline-count-"


@dataclass(frozen=True)
class CountSpec:
    """Settings of a count. Picklable, because every process receives it.

    Args:
        files: path and size in bytes.
        by: words as ``str.split()`` returns them, or the tokens of each line (with ``field`` of
            each row).
        tokenizer: the folder of a tokenizer, with ``by="tokens"``.
        field: the files are JSON lines, and this key of each is the text.
        errors: as for ``bytes.decode``.
        memory_bytes: limit for the tables and buffers of a process.
        top: number of most frequent words to return.
    """

    files: tuple[tuple[Path, int], ...]
    by: Literal["words", "tokens"] = "words"
    tokenizer: Path | None = None
    field: str | None = None
    errors: Errors = "strict"
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    top: int = 10

    @property
    def reading(self) -> ReadOptions:
        # As Python objects, the words of a chunk take up to 25 times its size, so a chunk must be
        # much smaller than the table.
        chunk_bytes = min(_MAX_CHUNK_BYTES, self.memory_bytes // 64)
        return ReadOptions(
            self.by == "tokens", self.field, self.errors, chunk_bytes, self.memory_bytes // 8
        )

    @property
    def table_bytes(self) -> int:
        """Size at which a table is written to disk. A dict that grows is in memory twice for a
        moment, and sorting also needs memory."""
        return self.memory_bytes // 3


@dataclass
class CountResult:
    """The result of one process or engine. ``top``: (word, count), most frequent first, then by
    word. ``seconds``: time of each phase in the slowest process."""

    total: int = 0
    distinct: int = 0
    top: list[tuple[str, int]] = field(default_factory=list)
    spills: int = 0
    spilled_bytes: int = 0
    shuffled_bytes: int = 0
    replaced: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


def count_locally(spec: CountSpec, num_processes: int, output: Path | None) -> CountResult:
    """Count in ``num_processes`` processes of this machine, and write the table to ``output``
    unless it is None.

    Raises:
        ConfigError: the text is malformed.
        RunError: the disk is full, a word is too long, or a process was killed.
    """
    # The processes must end before the folder that they write to is removed.
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
            runs = [run for run, _ in maps]
            tables = [folder / f"table-{rank:03d}" for rank in range(num_processes)]
            sums = _results(
                pool.submit(reduce, runs, rank, spec, None if output is None else table)
                for rank, table in enumerate(tables)
            )
        except BrokenProcessPool as error:
            raise RunError(
                "a counting process was killed, possibly by the out-of-memory killer",
                code="counting-process-killed",
                fix="use fewer --ranks, or less --memory-per-rank to each",
            ) from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise RunError(
                    "the disk filled up while counts were written to {folder}",
                    code="disk-full-while-counting",
                    fix="free disk space, set TMPDIR to a folder on another disk, or increase"
                    " --memory-per-rank",
                    folder=folder,
                ) from error
            raise
        if output is not None:
            sorted_rows = [read_rows(path, 0, path.stat().st_size, 1 << 18) for path in tables]
            write_table(output, merge(sorted_rows))
    return _combine([*(mapped for _, mapped in maps), *sums], spec.top)


def _share_cores(num_processes: int) -> None:
    os.environ.setdefault("RAYON_NUM_THREADS", str(max(1, cpu_cores() // num_processes)))


def _results(futures: Iterable[Future[Any]]) -> list[Any]:
    """Return the results in order. Raise the first failure without waiting for the others."""
    submitted = list(futures)
    done = wait(submitted, return_when=FIRST_EXCEPTION).done
    return [future.result() for future in sorted(done, key=submitted.index)]


def count_shards(
    shards: list[TextShard], spec: CountSpec, folder: Path, num_parts: int
) -> tuple[SortedRun, CountResult]:
    """Run the map phase of one process, and merge its runs, which are in ``folder``. Return a run
    with a part for each process, and what has been counted so far.

    Raises:
        ConfigError, RunError: see :func:`~paceline.data.count.shards.read_texts`.
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
    return run, CountResult(
        spills=stats.full_tables,
        spilled_bytes=spills.size_bytes if stats.full_tables else 0,
        replaced=stats.replaced,
        seconds={"map": mapped - started, "shuffle": time.perf_counter() - mapped},
    )


def tables(shards: list[TextShard], spec: CountSpec, stats: ScanStats) -> Iterator[dict[str, int]]:
    """Run the map phase: yield the counts of the shards' words, as a new table whenever
    ``spec.table_bytes`` are full. A word may be in several tables."""
    tokens = _Tokens(spec) if spec.by == "tokens" else None
    table: Counter[Any] = Counter()
    size = 0
    for text in chain.from_iterable(read_texts(shard, spec.reading, stats) for shard in shards):
        before = len(table)
        table.update(text.split() if tokens is None else tokens.split(text))
        # Dicts keep their order, so new keys are at the end.
        size += sum(map(sys.getsizeof, islice(reversed(table), len(table) - before)))
        if size + _COUNT_BYTES * len(table) + sys.getsizeof(table) > spec.table_bytes:
            stats.full_tables += 1
            yield table if tokens is None else tokens.with_names(table)
            table, size = Counter(), 0
    if table:
        yield table if tokens is None else tokens.with_names(table)


class _Tokens:
    """Split texts into token IDs. Texts are tokenized by line (with a field, by row) in pieces of
    at most 2¹⁸ characters, so that counts do not depend on the shards."""

    def __init__(self, spec: CountSpec) -> None:
        from paceline.data.text.tokenizer import load_tokenizer

        assert spec.tokenizer is not None
        self.tokenizer = load_tokenizer(spec.tokenizer)
        self.is_row = spec.field is not None

    def split(self, text: str) -> Iterable[int]:
        units = [text] if self.is_row else re.split(r"(?<=\n)", text)
        pieces = [
            unit[start : start + _PIECE_CHARS]
            for unit in units
            for start in range(0, len(unit), _PIECE_CHARS)
        ]
        return chain.from_iterable(self.tokenizer.encode_batch(pieces, add_special_tokens=False))

    def with_names(self, table: Counter[Any]) -> dict[str, int]:
        return {self._name(token_id): count for token_id, count in table.items()}

    def _name(self, token_id: int) -> str:
        """Return the token as it is in the vocabulary. White space is escaped, because it would
        break the lines of the table."""
        token = self.tokenizer.token(token_id)
        if token is None:
            return f"#{token_id}"
        if not any(char.isspace() for char in token):
            return token
        escaped = (
            char.encode("unicode_escape").decode() if char.isspace() else char for char in token
        )
        return f"{''.join(escaped)}#{token_id}"


def reduce(runs: list[SortedRun], part: int, spec: CountSpec, table: Path | None) -> CountResult:
    """Sum the counts in one part of all ``runs``, and write them as a run to ``table`` unless it is
    None."""
    result = CountResult()
    started = time.perf_counter()
    buffer_bytes = merge_buffer_bytes(spec.memory_bytes)
    stream = tally(merge([run.part(part, buffer_bytes) for run in runs]), result, spec.top)
    if table is None:
        deque(stream, maxlen=0)
    else:
        with open(table, "wb") as handle:
            handle.writelines(format_rows(stream))
    result.shuffled_bytes = sum(
        run.part_bytes(part) for rank, run in enumerate(runs) if rank != part
    )
    result.seconds["reduce"] = time.perf_counter() - started
    return result


def tally(stream: Iterable[Row], result: CountResult, top: int) -> Iterator[Row]:
    """Yield the rows of ``stream``, which has each key once, and add their counts to ``result``."""
    heap: list[tuple[int, _ReversedBytes]] = []
    for key, count in stream:
        result.total += count
        result.distinct += 1
        if len(heap) < top:
            heapq.heappush(heap, (count, _ReversedBytes(key)))
        elif heap and count >= heap[0][0]:
            heapq.heappushpop(heap, (count, _ReversedBytes(key)))
        yield key, count
    result.top = [(decode(key), count) for count, key in sorted(heap, reverse=True)]


class _ReversedBytes(bytes):
    """Bytes in reverse order, so that among words with equal counts the first ranks highest."""

    def __lt__(self, other: bytes) -> bool:
        return bytes.__gt__(self, other)

    def __gt__(self, other: bytes) -> bool:
        return bytes.__lt__(self, other)


def _combine(parts: list[CountResult], top: int) -> CountResult:
    """Combine the results of the phases of all processes, whose words are disjoint."""
    result = CountResult()
    for part in parts:
        for name in ("total", "distinct", "spills", "spilled_bytes", "shuffled_bytes", "replaced"):
            setattr(result, name, getattr(result, name) + getattr(part, name))
        for phase, seconds in part.seconds.items():
            result.seconds[phase] = max(seconds, result.seconds.get(phase, 0.0))
        result.top += part.top
    result.top = sorted(result.top, key=lambda entry: (-entry[1], entry[0]))[:top]
    return result


def write_table(output: Path, stream: Iterable[Row]) -> None:
    """Write the table as UTF-8 lines ``word <tab> count``, completely or not at all. Lone
    surrogates, which are valid in JSON but not in UTF-8, are written as ``\\udXXX``."""
    staging = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with open(staging, "wb") as handle:
            for batch in format_rows(stream):
                handle.write(decode(batch).encode("utf-8", "backslashreplace"))
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(staging, output)
    finally:
        staging.unlink(missing_ok=True)
