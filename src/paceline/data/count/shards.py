"""Texts to count, cut into shards: byte ranges of files, between words or lines, so that nothing is
cut in two."""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal

from paceline.core.errors import ConfigError, RunError
from paceline.core.files import human_bytes

_LOOK_BYTES = 4096
_BOM = b"\xef\xbb\xbf"
_REPLACEMENT = "\ufffd"

Errors = Literal["strict", "replace"]


@dataclass(frozen=True)
class ReadOptions:
    """How bytes become texts.

    Args:
        lines: texts end at line ends; otherwise at white space.
        field: each line is a JSON object, and this key of it is the text; None: the file is the
            text.
        errors: what is done with bytes that are not UTF-8.
        chunk_bytes: read at a time.
        longest_bytes: of one word (one line with ``lines``): it has to be held in memory.
    """

    lines: bool = False
    field: str | None = None
    errors: Errors = "strict"
    chunk_bytes: int = 1 << 20
    longest_bytes: int = 64 << 20

    @property
    def at_line_ends(self) -> bool:
        return self.lines or self.field is not None


@dataclass(frozen=True)
class TextShard:
    """Bytes [start, stop) of a file, as planned: what is read begins and ends at the next edge.
    ``whole``: a compressed file, which can only be read from its beginning."""

    path: Path
    start: int
    stop: int
    whole: bool = False


@dataclass
class ScanStats:
    """What a process met while it read: ``size_bytes`` of text, the ``replaced`` stretches that
    were not UTF-8, and the tables written to disk because they were full."""

    size_bytes: int = 0
    replaced: int = 0
    full_tables: int = 0


def plan_shards(files: list[tuple[Path, int]], num_shards: int) -> list[list[TextShard]]:
    """Equal shares of the bytes of ``files`` (path, size), one list of shards a share. A compressed
    file goes to the share in which it begins."""
    total = sum(size for _, size in files)
    edges = [total * number // num_shards for number in range(num_shards + 1)]
    shares: list[list[TextShard]] = [[] for _ in range(num_shards)]
    offset = 0
    for path, size in files:
        for number, share in enumerate(shares):
            low, high = edges[number] - offset, edges[number + 1] - offset
            if is_compressed(path):
                if size and low <= 0 < high:
                    share.append(TextShard(path, 0, size, whole=True))
            elif max(low, 0) < min(high, size):
                share.append(TextShard(path, max(low, 0), min(high, size)))
        offset += size
    return shares


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


@cache
def white_space() -> re.Pattern[bytes]:
    """What ``str.split()`` splits at, in UTF-8. Each form starts with a byte that never continues a
    character, so it is found in the bytes as they are."""
    forms = (chr(code).encode() for code in range(0x10000) if chr(code).isspace())
    return re.compile(b"|".join(re.escape(form) for form in forms))


def next_edge(handle: IO[bytes], at: int, size: int, reading: ReadOptions) -> int:
    """The first place at or after byte ``at`` where the text may be cut. Both neighbours of a shard
    find the same.

    Raises:
        RunError: none within ``longest_bytes``.
    """
    if at <= 0:
        return 0
    handle.seek(at)
    look, seen = _LOOK_BYTES, b""
    while at + len(seen) < size:
        block = handle.read(look)
        if not block:
            break
        begin = max(0, len(seen) - 2)  # white space has up to three bytes
        seen += block
        if reading.at_line_ends:
            line_end = seen.find(b"\n", begin)
            if line_end >= 0:
                return at + line_end + 1
        elif match := white_space().search(seen, begin):
            return at + match.start()
        if len(seen) > reading.longest_bytes:
            raise _too_long(handle.name, at, reading)
        look = len(seen)
    return size


def texts(shard: TextShard, reading: ReadOptions, stats: ScanStats) -> Iterator[str]:
    """The texts of a shard; none of them ends within a word, nor within a line with ``lines``. With
    a field one text a row.

    Raises:
        ConfigError: bytes that are not UTF-8, a row that is not as it must be, a broken compressed
            file.
        RunError: a word too long for the memory; a file that has changed.
    """
    for offset, chunk in _chunks(shard, reading):
        stats.size_bytes += len(chunk)
        if reading.field is None:
            yield _decoded(chunk, shard.path, offset, reading, stats)
        else:
            yield from _rows(chunk, shard.path, offset, reading, stats)


def _chunks(shard: TextShard, reading: ReadOptions) -> Iterator[tuple[int, bytes]]:
    """(place in the file, bytes), each cut at an edge."""
    if shard.whole:
        try:
            with gzip.open(shard.path, "rb") as stream:
                yield from _cut(stream, 0, None, shard.path, reading)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ConfigError(
                f"`{shard.path}` is no whole gzip file: {error}",
                fix="check the file, or copy it anew",
            ) from error
        return
    size = shard.path.stat().st_size
    with open(shard.path, "rb") as handle:
        if size < shard.stop:
            raise _changed(shard.path)
        start = next_edge(handle, shard.start, size, reading)
        stop = size if shard.stop >= size else next_edge(handle, shard.stop, size, reading)
        handle.seek(start)
        yield from _cut(handle, start, stop, shard.path, reading)


def _cut(
    stream: IO[bytes] | gzip.GzipFile, at: int, stop: int | None, path: Path, reading: ReadOptions
) -> Iterator[tuple[int, bytes]]:
    held: list[bytes] = []
    begin = at  # where what is held begins
    while stop is None or at < stop:
        block = stream.read(
            reading.chunk_bytes if stop is None else min(reading.chunk_bytes, stop - at)
        )
        if not block:
            if stop is not None:
                raise _changed(path)
            break
        edge = _last_edge(block, reading)
        if edge < 0:
            held.append(block)
            if at + len(block) - begin > reading.longest_bytes:
                raise _too_long(str(path), begin, reading)
        else:
            chunk = b"".join([*held, block[:edge]])
            yield begin, chunk
            begin += len(chunk)
            held = [block[edge:]]
        at += len(block)
    if any(held):
        yield begin, b"".join(held)


def _last_edge(block: bytes, reading: ReadOptions) -> int:
    if reading.at_line_ends:
        return block.rfind(b"\n") + 1 or -1
    edge = max(block.rfind(b" "), block.rfind(b"\n"))
    if edge < 0:  # only other white space, if any
        edge = max((match.start() for match in white_space().finditer(block)), default=-1)
    return edge


def _decoded(raw: bytes, path: Path, offset: int, reading: ReadOptions, stats: ScanStats) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if reading.errors == "strict":
            raise ConfigError(
                f"`{path}` is not UTF-8 text: byte {raw[error.start]:#04x} at offset"
                f" {offset + error.start:,}"
                + (" of the text it holds" if is_compressed(path) else ""),
                fix=(
                    f"convert the file, e.g. `iconv -f latin1 -t utf-8 {path.name}`, or give"
                    " `--decode-errors replace`"
                ),
            ) from error
        text = raw.decode("utf-8", "replace")
        stats.replaced += text.count(_REPLACEMENT) - raw.count(_REPLACEMENT.encode())
        return text


def _rows(
    chunk: bytes, path: Path, offset: int, reading: ReadOptions, stats: ScanStats
) -> Iterator[str]:
    for raw in chunk.split(b"\n"):
        line = raw.removeprefix(_BOM) if offset == 0 else raw
        if line.strip():
            text = _decoded(line, path, offset + len(raw) - len(line), reading, stats)
            yield _field_of(text, path, offset, reading.field or "")
        offset += len(raw) + 1


def _field_of(line: str, path: Path, offset: int, name: str) -> str:
    place = f"the row at offset {offset:,} of `{path}`"
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"{place} is no valid JSON: {getattr(error, 'msg', error)}",
            allowed="JSON lines, one object a line",
            fix="correct that line, or leave --field out to count the file as plain text",
        ) from error
    if not isinstance(row, dict) or not isinstance(row.get(name), str):
        has = (
            ", ".join(f"{key} ({type(value).__name__})" for key, value in row.items())
            if isinstance(row, dict)
            else ""
        )
        raise ConfigError(
            f"{place} has no text `{name}`",
            allowed="a key whose value is a string" + (f"; found: {has}" if has else ""),
            fix="name another one with --field",
        )
    return str(row[name])


def _too_long(path: str, at: int, reading: ReadOptions) -> RunError:
    what = "line" if reading.at_line_ends else "stretch without white space"
    return RunError(
        f"`{path}` has a {what} of more than {human_bytes(reading.longest_bytes)} around offset"
        f" {at:,}: too much to hold",
        fix="give more with --memory-per-rank",
    )


def _changed(path: Path) -> RunError:
    return RunError(
        f"`{path}` became shorter while it was read",
        fix="count it when nothing writes to it any more",
    )
