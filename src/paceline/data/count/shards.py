"""Split texts into shards, which are byte ranges of files that end between words or lines."""

import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal

from paceline.core.errors import ConfigError, RunError
from paceline.core.files import human_bytes
from paceline.data.sources.opening import encoding_fix
from paceline.data.sources.rows import parse_json

_FIRST_READ_BYTES = 4096
_BOM = b"\xef\xbb\xbf"
_REPLACEMENT = "\ufffd"

Errors = Literal["strict", "replace"]


@dataclass(frozen=True)
class ReadOptions:
    """How to convert bytes to texts.

    Args:
        lines: texts end at line ends; otherwise at white space.
        field: each line is a JSON object, and this key of it is the text; None: the file is the
            text.
        errors: handling of bytes that are not UTF-8.
        chunk_bytes: number of bytes to read at a time.
        longest_bytes: maximum size of a word (with ``lines`` of a line), which must fit in memory.
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
    """Planned bytes [start, stop) of a file. Reading starts and ends at the next edge.
    ``is_compressed``: the file can only be read from its start."""

    path: Path
    start: int
    stop: int
    is_compressed: bool = False


@dataclass
class ScanStats:
    """Counts of one process: ``size_bytes`` of text, ``replaced`` sequences that were not UTF-8,
    and tables written to disk because they were full."""

    size_bytes: int = 0
    replaced: int = 0
    full_tables: int = 0


def plan_shards(files: list[tuple[Path, int]], num_shards: int) -> list[list[TextShard]]:
    """Split the bytes of ``files`` (path, size) into equal shares, each a list of shards. A
    compressed file belongs to the share in which it starts."""
    total = sum(size for _, size in files)
    edges = [total * index // num_shards for index in range(num_shards + 1)]
    shares: list[list[TextShard]] = [[] for _ in range(num_shards)]
    offset = 0
    for path, size in files:
        for index, share in enumerate(shares):
            low, high = edges[index] - offset, edges[index + 1] - offset
            if is_compressed(path):
                if size and low <= 0 < high:
                    share.append(TextShard(path, 0, size, is_compressed=True))
            elif max(low, 0) < min(high, size):
                share.append(TextShard(path, max(low, 0), min(high, size)))
        offset += size
    return shares


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


@cache
def white_space() -> re.Pattern[bytes]:
    """Return a pattern for the white space at which ``str.split()`` splits, in UTF-8. Each match
    starts with a byte that never continues a character, so the pattern can search raw bytes."""
    forms = (chr(code).encode() for code in range(0x10000) if chr(code).isspace())
    return re.compile(b"|".join(re.escape(form) for form in forms))


def next_edge(handle: IO[bytes], offset: int, size: int, reading: ReadOptions) -> int:
    """Return the first position at or after ``offset`` where the text may be split. The shards on
    both sides of an edge compute the same position.

    Raises:
        RunError: there is no such position within ``longest_bytes``.
    """
    if offset <= 0:
        return 0
    handle.seek(offset)
    scanned = b""
    while offset + len(scanned) < size:
        block = handle.read(len(scanned) or _FIRST_READ_BYTES)
        if not block:
            break
        start = max(0, len(scanned) - 2)  # white space has up to three bytes
        scanned += block
        if reading.at_line_ends:
            line_end = scanned.find(b"\n", start)
            if line_end >= 0:
                return offset + line_end + 1
        elif match := white_space().search(scanned, start):
            return offset + match.start()
        if len(scanned) > reading.longest_bytes:
            raise _too_long(handle.name, offset, reading)
    return size


def read_texts(shard: TextShard, reading: ReadOptions, stats: ScanStats) -> Iterator[str]:
    """Yield the texts of a shard. None of them ends within a word, or with ``lines`` within a line.
    With a field, each row is one text.

    Raises:
        ConfigError: the bytes are not UTF-8, a row is malformed, or a compressed file is corrupt.
        RunError: a word does not fit in memory, or the file has changed.
    """
    for offset, chunk in _chunks(shard, reading):
        stats.size_bytes += len(chunk)
        if reading.field is None:
            yield _decode(chunk, shard.path, offset, reading, stats)
        else:
            yield from _rows(chunk, shard.path, offset, reading, stats)


def _chunks(shard: TextShard, reading: ReadOptions) -> Iterator[tuple[int, bytes]]:
    """Yield (offset in the file, bytes), each ending at an edge."""
    if shard.is_compressed:
        try:
            with gzip.open(shard.path, "rb") as stream:
                yield from _split(stream, 0, None, shard.path, reading)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ConfigError(
                "`{shard}` is not a complete gzip file: {reason}",
                code="damaged-gzip",
                fix="check the file or copy it again",
                shard=shard.path,
                reason=error,
            ) from error
        return
    size = shard.path.stat().st_size
    with open(shard.path, "rb") as handle:
        if size < shard.stop:
            raise _changed(shard.path)
        start = next_edge(handle, shard.start, size, reading)
        stop = size if shard.stop >= size else next_edge(handle, shard.stop, size, reading)
        handle.seek(start)
        yield from _split(handle, start, stop, shard.path, reading)


def _split(
    stream: IO[bytes] | gzip.GzipFile,
    offset: int,
    stop: int | None,
    path: Path,
    reading: ReadOptions,
) -> Iterator[tuple[int, bytes]]:
    pending: list[bytes] = []
    start = offset  # of the pending bytes
    while stop is None or offset < stop:
        block = stream.read(
            reading.chunk_bytes if stop is None else min(reading.chunk_bytes, stop - offset)
        )
        if not block:
            if stop is not None:
                raise _changed(path)
            break
        edge = _last_edge(block, reading)
        if edge < 0:
            pending.append(block)
            if offset + len(block) - start > reading.longest_bytes:
                raise _too_long(str(path), start, reading)
        else:
            chunk = b"".join([*pending, block[:edge]])
            yield start, chunk
            start += len(chunk)
            pending = [block[edge:]]
        offset += len(block)
    if any(pending):
        yield start, b"".join(pending)


def _last_edge(block: bytes, reading: ReadOptions) -> int:
    if reading.at_line_ends:
        return block.rfind(b"\n") + 1 or -1
    edge = max(block.rfind(b" "), block.rfind(b"\n"))
    if edge < 0:  # only other white space, if any
        edge = max((match.start() for match in white_space().finditer(block)), default=-1)
    return edge


def _decode(raw: bytes, path: Path, offset: int, reading: ReadOptions, stats: ScanStats) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if reading.errors == "strict":
            raise ConfigError(
                "`{path}` is not UTF-8 text: byte {raw} at offset {offset}{content}",
                code="count-not-utf8",
                fix="{encoding_fix}; or set `--decode-errors replace`",
                path=path,
                raw=f"{raw[error.start]:#04x}",
                offset=f"{offset + error.start:,}",
                content=" of the decompressed text" if is_compressed(path) else "",
                encoding_fix=encoding_fix(raw, path),
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
            text = _decode(line, path, offset + len(raw) - len(line), reading, stats)
            yield _field_of(text, path, offset, reading.field or "")
        offset += len(raw) + 1


def _field_of(line: str, path: Path, offset: int, name: str) -> str:
    place = f"the row at offset {offset:,} of `{path}`"
    try:
        row: Any = parse_json(line, checks_text=False)
    except ValueError as error:
        raise ConfigError(
            "{place} is not valid JSON: {reason}",
            code="count-invalid-json",
            allowed="JSON lines, one object per line",
            fix="correct this line, or remove --field to count the file as plain text",
            place=place,
            reason=getattr(error, "msg", error),
        ) from error
    if not isinstance(row, dict) or not isinstance(row.get(name), str):
        columns = row if isinstance(row, dict) else {}
        shown = ", ".join(f"{key} ({type(value).__name__})" for key, value in columns.items())
        raise ConfigError(
            "{place} has no text `{name}`",
            code="missing-column",
            allowed="a key whose value is a string{found}",
            fix="select another key with --field",
            place=place,
            name=name,
            found=f"; found: {shown}" if shown else "",
        )
    return str(row[name])


def _too_long(path: str, offset: int, reading: ReadOptions) -> RunError:
    unit = "line" if reading.at_line_ends else "sequence without white space"
    return RunError(
        "`{path}` has a {unit} of more than {longest_bytes} near offset {offset}, which does not"
        " fit in memory",
        code="line-too-long",
        fix="increase --memory-per-rank",
        path=path,
        unit=unit,
        longest_bytes=human_bytes(reading.longest_bytes),
        offset=f"{offset:,}",
    )


def _changed(path: Path) -> RunError:
    return RunError(
        "`{path}` was truncated while it was read",
        code="file-truncated",
        fix="run the command again when no other process writes to the file",
        path=path,
    )
