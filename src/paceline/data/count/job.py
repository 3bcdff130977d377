"""Count words or tokens over all ranks in three phases: map on shards, shuffle by hash, reduce.
Exact, in bounded memory.

1. Map: each rank counts its share of the bytes into a table. A table that is full is written to
  disk as a sorted run.
2. Shuffle: the runs of a rank are merged, and each word goes to the rank that its hash names, all
  to all.
3. Reduce: each rank adds up the sorted runs that came in, one row in memory at a time.

(J. Dean and S. Ghemawat, MapReduce: Simplified Data Processing on Large Clusters, OSDI 2004, with
their combiner in the map.)
"""

from __future__ import annotations

import errno
import heapq
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.core.errors import RunError
from paceline.data.count.runs import Row, Spills, decoded, lines, merged, rows
from paceline.data.count.shards import Errors, ReadOptions, ScanStats, TextShard, plan_shards, texts

if TYPE_CHECKING:
    from paceline.distributed.communicator import Communicator

#: below this a chunk of text does not fit beside the table
LEAST_MEMORY_BYTES = 1 << 20
_COUNT_BYTES = 32  # of an int that is a table's value
_MOST_CHUNK_BYTES = 1 << 20
_PIECE_CHARS = 1 << 18


@dataclass(frozen=True)
class CountSpec:
    """What is counted. Picklable: it is sent to every rank.

    Args:
        files: path and size in bytes.
        by: words as ``str.split()`` gives them, or the tokens of each line (of each row, with
            ``field``).
        tokenizer: the folder of a tokenizer, with ``by="tokens"``.
        field: the files are JSON lines, and this key of each is the text.
        errors: as for ``bytes.decode``.
        memory_bytes: what a rank's tables and buffers may take.
        top: most frequent words to name.
        folder: for what does not fit into memory; removed by whoever made it.
        keep_table: whether the whole table is wanted, and not its figures alone.
    """

    files: tuple[tuple[Path, int], ...]
    by: Literal["words", "tokens"] = "words"
    tokenizer: Path | None = None
    field: str | None = None
    errors: Errors = "strict"
    memory_bytes: int = 256_000_000
    top: int = 10
    folder: Path = Path()
    keep_table: bool = False

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
    """What one rank, or one engine, has found. ``top``: (word, count), most frequent first, then by
    word."""

    total: int = 0
    distinct: int = 0
    top: list[tuple[str, int]] = field(default_factory=list)
    spills: int = 0
    spilled_bytes: int = 0
    shuffled_bytes: int = 0
    replaced: int = 0
    table: Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class MapSeen(ScanStats):
    """As :class:`ScanStats`, with the tables given out because they were full."""

    full: int = 0


def count_rank(world: Communicator, job: CountSpec) -> CountResult:
    """This rank's part of the work; every rank calls it. The words of a rank are those whose hash
    names it.

    Raises:
        ConfigError: text that is not as it must be.
        RunError: the disk is full, or a word too long.
    """
    if job.by == "tokens":
        import torch

        os.environ.setdefault("RAYON_NUM_THREADS", str(torch.get_num_threads()))
    try:
        return _count(world, job)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(
                f"the disk filled up while counts were written to {job.folder}",
                fix="make room, set TMPDIR to a folder on another disk, or give more with --memory",
            ) from error
        raise


def _count(world: Communicator, job: CountSpec) -> CountResult:
    from paceline.data.count.shuffle import shuffle

    folder = job.folder / f"rank-{world.rank:03d}"
    folder.mkdir()
    seen = MapSeen()
    spills = Spills(folder, world.size, job.memory_bytes)
    clock = [time.perf_counter()]
    for table in tables(plan_shards(list(job.files), world.size)[world.rank], job, seen):
        spills.add(table)
        table.clear()
    run = spills.finish()
    clock.append(time.perf_counter())
    incoming, sent = shuffle(world, run, folder, job.memory_bytes)
    clock.append(time.perf_counter())
    found = reduce(
        [rows(path, 0, path.stat().st_size, spills.buffer_bytes) for path in incoming],
        job,
        folder / "table",
    )
    clock.append(time.perf_counter())
    found.spills, found.shuffled_bytes, found.replaced = seen.full, sent, seen.replaced
    found.spilled_bytes = spills.size_bytes if seen.full else 0
    found.seconds = dict(
        zip(("map", "shuffle", "reduce"), (b - a for a, b in pairwise(clock)), strict=True)
    )
    return found


def tables(shards: list[TextShard], job: CountSpec, seen: MapSeen) -> Iterator[dict[str, int]]:
    """The map: counts of the shards' words, a new table each time ``job.table_bytes`` are full. A
    word may be in several."""
    split = _Tokens(job.tokenizer) if job.by == "tokens" and job.tokenizer is not None else _Words()
    table: Counter[Any] = Counter()
    size = 0
    for text in chain.from_iterable(texts(shard, job.reading, seen) for shard in shards):
        before = len(table)
        table.update(split(text, whole=job.field is not None))
        # the newest keys are the last
        size += sum(map(sys.getsizeof, islice(reversed(table), len(table) - before)))
        if size + _COUNT_BYTES * len(table) + sys.getsizeof(table) > job.table_bytes:
            seen.full += 1
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
        units = [text] if whole else text.split("\n")
        if not whole:
            units = [f"{one}\n" for one in units[:-1]] + units[-1:]
        pieces = [
            one[at : at + _PIECE_CHARS] for one in units for at in range(0, len(one), _PIECE_CHARS)
        ]
        if self.tokenizer.backend is not None:
            found = self.tokenizer.backend.encode_batch_fast(pieces, add_special_tokens=False)
            return chain.from_iterable(one.ids for one in found)
        python = self.tokenizer.python
        return chain.from_iterable(
            python(one, add_special_tokens=False)["input_ids"] for one in pieces
        )

    def named(self, table: Counter[Any]) -> dict[str, int]:
        return {self._name(number): count for number, count in table.items()}

    def _name(self, number: int) -> str:
        """The token as the vocabulary writes it. White space in it, which would break the table's
        lines, is escaped."""
        backend, python = self.tokenizer.backend, self.tokenizer.python
        token = (
            backend.id_to_token(number)
            if backend is not None
            else python.convert_ids_to_tokens(number)
        )
        if token is None:
            return f"#{number}"
        if not any(one.isspace() for one in token):
            return str(token)
        return (
            "".join(
                one.encode("unicode_escape").decode() if one.isspace() else one for one in token
            )
            + f"#{number}"
        )


def reduce(streams: list[Iterator[Row]], job: CountSpec, path: Path) -> CountResult:
    """Add up sorted streams: the figures, and with ``job.keep_table`` the table itself at ``path``,
    sorted by word."""
    found = CountResult()
    heap: list[tuple[int, int, bytes]] = []

    def counted() -> Iterator[Row]:
        for word, count in merged(streams):
            found.total += count
            found.distinct += 1
            if len(heap) < job.top:
                heapq.heappush(heap, (count, -found.distinct, word))
            elif (
                heap and count > heap[0][0]
            ):  # an equal count does not push out: it comes later in the order of words
                heapq.heapreplace(heap, (count, -found.distinct, word))
            yield word, count

    if job.keep_table:
        with open(path, "wb") as handle:
            for some in lines(counted()):
                handle.write(some)
        found.table = path
    else:
        for _ in counted():
            pass
    found.top = [(decoded(word), count) for count, _, word in sorted(heap, reverse=True)]
    return found


def combined(parts: list[CountResult], top: int) -> CountResult:
    """The figures of all ranks as one: their words are disjoint."""
    best = sorted((one for part in parts for one in part.top), key=lambda one: (-one[1], one[0]))[
        :top
    ]
    whole = CountResult(top=best)
    for name in ("total", "distinct", "spills", "spilled_bytes", "shuffled_bytes", "replaced"):
        setattr(whole, name, sum(getattr(part, name) for part in parts))
    whole.seconds = {name: max(part.seconds[name] for part in parts) for name in parts[0].seconds}
    return whole


def write_table(output: Path, stream: Iterator[Row]) -> None:
    """The whole table as UTF-8 lines ``word <tab> count``, whole or not at all. Lone surrogates,
    which JSON can hold and UTF-8 cannot, are written as ``\\udXXX``."""
    aside = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as handle:
            for some in lines(stream):
                handle.write(_as_utf8(some))
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(aside, output)
    finally:
        aside.unlink(missing_ok=True)


def _as_utf8(raw: bytes) -> bytes:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return decoded(raw).encode("utf-8", "backslashreplace")
    return raw
