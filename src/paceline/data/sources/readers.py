"""Read the rows of one local file of any supported kind, each with its line or row number. Errors
name the malformed line."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, first_line
from paceline.core.log import Notice
from paceline.data.sources.opening import (
    COMPRESSED_SUFFIXES,
    HEAD_BYTES,
    Position,
    compression_of,
    data_suffix,
    encoding_of,
    not_text,
    open_data,
    read_text,
    text_lines,
)
from paceline.data.sources.rows import Row, parse_json
from paceline.data.sources.splits import split_kind
from paceline.data.sources.tar import TAR_SUFFIX, tar_rows

NumberedRows = Iterator[tuple[int, Any]]

TABLE_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", TAR_SUFFIX)
TEXT_SUFFIXES = (".txt", ".md")
KINDS = (
    "JSON (.json), JSON lines (.jsonl), CSV (.csv, .tsv), Parquet (.parquet), Arrow (.arrow), tar"
    " shards of samples (.tar), plain text (.txt, .md); JSON, CSV and text also compressed (.gz,"
    " .bz2, .xz, .zst)"
)
#: The key of a plain-text file's content. A document is cut into samples; a row of text is one
#: sample.
DOCUMENT = "\0document"
#: Number of bytes of lines to read at once; the last line may exceed it.
_BLOCK_BYTES = 1 << 18


@dataclass(frozen=True)
class LineBlock:
    """Consecutive unparsed lines of a JSON lines file, which another process may parse.

    Args:
        lines: with their line ends; includes blank lines.
        first_number: the number of the first line.
    """

    lines: list[bytes]
    first_number: int
    path: Path

    def part(self, start: int, end: int) -> LineBlock:
        """Return the lines with the indices ``start`` to ``end - 1``."""
        return LineBlock(self.lines[start:end], self.first_number + start, self.path)


def read_file(
    path: Path,
    split: str = "train",
    notices: list[Notice] | None = None,
    position: Position | None = None,
) -> NumberedRows:
    """Yield the rows of ``path`` as (number, row): the line number for JSON lines and CSV, the row
    number from 1 for other files.

    JSON, CSV and plain text may be compressed (see :mod:`paceline.data.sources.opening`) and may be
    UTF-16 with a byte order mark.

    Args:
        split: the list to read of a JSON object that has several.
        notices: receives messages about the file.
        position: updated as rows are read.

    Raises:
        ConfigError: the kind of file is not supported, a line is malformed (with its number and the
            text near the error), or the file is not text.
    """
    suffix, position = data_suffix(path), position or Position()
    if suffix in (".jsonl", ".ndjson"):
        if first_char(_head(path), path) == "[":
            return _json(path, split, notices, position)
        return _json_lines(path, position)
    if suffix == ".json":
        return _json(path, split, notices, position)
    if suffix in (".csv", ".tsv"):
        return _csv(path, suffix, position)
    if suffix in (".parquet", ".arrow") and compression_of(path) is not None:
        raise ConfigError(
            f"`{path}`: compressed {suffix} files are not supported, because the format has its own"
            " compression",
            fix="decompress it first",
        )
    if suffix == ".parquet":
        return _parquet(path, position)
    if suffix == ".arrow":
        return _arrow(path, position)
    if suffix == TAR_SUFFIX:
        return tar_rows(path)
    if suffix in TEXT_SUFFIXES:
        return _text(path, position)
    raise unknown_kind(path)


def is_table(path: Path) -> bool:
    """Return whether the file name is that of a table: JSON, CSV, Parquet, Arrow, or a tar shard of
    samples."""
    return data_suffix(path) in TABLE_SUFFIXES


def is_text(path: Path) -> bool:
    """Return whether the file name is that of plain text."""
    return data_suffix(path) in TEXT_SUFFIXES


def unknown_kind(path: Path) -> ConfigError:
    """Return the error for a file whose name does not show what it contains."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSED_SUFFIXES:
        what = f"`{path}`: the file name does not show the type of the compressed data"
        fix = f"rename the file to match its content, e.g. `{path.stem}.jsonl{path.suffix}`"
    elif suffix in (".zip", ".tgz", ".7z", ".rar"):
        what = f"`{path}` is an archive"
        fix = "unpack it and use the folder or file inside"
    else:
        shown = f"the suffix `{suffix}`" if suffix else "a file name without a suffix"
        what = f"`{path}` is not a supported data file ({shown})"
        fix = conversion_fix(path) or "rename the file to match its content"
    return ConfigError(what, allowed=KINDS, fix=fix)


#: How to convert files of other programs.
_CONVERSIONS = {
    (".xlsx", ".xlsm", ".xls", ".ods", ".numbers"): (
        "save the sheet as CSV in UTF-8 (in Excel: `CSV UTF-8` in the list of file types)"
    ),
    (".docx", ".doc", ".odt", ".rtf", ".pdf", ".html", ".htm", ".epub"): "save its text as .txt",
    (".pkl", ".pickle", ".npy", ".npz", ".pt", ".h5", ".hdf5", ".feather", ".orc", ".avro"): (
        "write the rows as JSON lines or Parquet, e.g. with pandas"
    ),
    (".db", ".sqlite", ".sqlite3", ".mdb"): "export the table as CSV",
    (".yaml", ".yml", ".xml", ".toml"): "write the rows as JSON lines",
}


def conversion_fix(path: Path) -> str | None:
    """Return how to convert a file of another program, or None for other files."""
    suffix = path.suffix.lower()
    return next((fix for suffixes, fix in _CONVERSIONS.items() if suffix in suffixes), None)


def _head(path: Path) -> bytes:
    with open_data(path) as handle:
        return handle.read(HEAD_BYTES)


def first_char(head: bytes, path: Path) -> str:
    """Return the first character of a text that is not white space, or an empty string."""
    text = head.decode(encoding_of(head, path), errors="ignore") if head else ""
    return text.removeprefix("\ufeff").lstrip()[:1]


def _json_lines(path: Path, position: Position) -> NumberedRows:
    with open_data(path, position) as handle:
        for number, line in enumerate(text_lines(handle, path), 1):
            if line.strip():
                yield number, _parsed(line, number, path)


def line_blocks(path: Path, position: Position) -> Iterator[LineBlock] | None:
    """Yield the lines of ``path`` unparsed. Returns None if it is not a UTF-8 file of JSON lines;
    use :func:`read_file` then.

    Raises:
        ConfigError: the file is not text.
    """
    if data_suffix(path) not in (".jsonl", ".ndjson"):
        return None
    head = _head(path)
    if not encoding_of(head, path).startswith("utf-8") or first_char(head, path) == "[":
        return None
    return _line_blocks(path, position)


def _line_blocks(path: Path, position: Position) -> Iterator[LineBlock]:
    number = 1
    with open_data(path, position) as handle:
        while lines := handle.readlines(_BLOCK_BYTES):
            if number == 1:
                lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)
            yield LineBlock(lines, number, path)
            number += len(lines)


def parse_lines(block: LineBlock) -> NumberedRows:
    """Yield the rows of a block, each with its line number. Blank lines are skipped.

    Raises:
        ConfigError: a line is not UTF-8 or not JSON.
    """
    for number, line in enumerate(block.lines, block.first_number):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise not_text(block.path, f"line {number}", error) from error
        if text and not text.isspace():
            yield number, _parsed(text, number, block.path)


def _parsed(line: str, number: int, path: Path) -> Any:
    try:
        return parse_json(line.rstrip("\r\n"))
    except (ValueError, RecursionError) as error:
        raise _invalid_json(path, number, line, error) from error


def _invalid_json(
    path: Path, number: int, line: str, error: ValueError | RecursionError
) -> ConfigError:
    column = getattr(error, "pos", 0)
    before, text = max(0, column - 30), line.rstrip("\r\n")
    prefix = "…" if before else ""
    suffix = "…" if column + 30 < len(text) else ""
    near = prefix + text[before : column + 30] + suffix
    reason = getattr(error, "msg", str(error)).removesuffix(" starting at").removesuffix(" at")
    fix = f"correct or delete line {number}"
    if not text.rstrip().endswith(("}", "]")):
        fix += "; the file may have been truncated while it was copied"
    return ConfigError(
        f"line {number} of `{path}` is not valid JSON: {reason} at column {column + 1}, near"
        f" `{near}`",
        fix=fix,
    )


def _json(path: Path, split: str, notices: list[Notice] | None, position: Position) -> NumberedRows:
    text = read_text(path)
    if not text.strip():
        return
    try:
        value = parse_json(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            # Many tools write JSON lines to files named .json.
            yield from _json_lines(path, position)
            return
        line = text.splitlines()[error.lineno - 1] if error.lineno <= len(text.splitlines()) else ""
        error.pos = error.colno - 1
        raise _invalid_json(path, error.lineno, line, error) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"`{path}` is not valid JSON: {first_line(error)}", fix="correct the file"
        ) from error
    rows, number = _rows_of(value, path, split, [] if notices is None else notices), 0
    position.follow(lambda: number / len(rows))
    for number, row in enumerate(rows, 1):
        yield number, {"text": row} if isinstance(row, str) else row


def _rows_of(value: Any, path: Path, split: str, notices: list[Notice]) -> list[Any]:
    """Return the rows of a JSON value: a list, an object that has one, an object of splits or of
    columns, or a single row."""
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        raise ConfigError(
            f"`{path}` contains a single {type(value).__name__}",
            allowed="a list of objects, or an object that has one",
        )
    lists = {key: column for key, column in value.items() if isinstance(column, list)}
    if {"messages", "conversations"} & set(lists):
        return [value]
    splits = {
        key: rows
        for key, rows in value.items()
        if _split_kind(key) is not None and isinstance(rows, list | dict)
    }
    if split in lists or (splits and len(splits) == len(value)):
        return _rows_of_split(value, lists if split in lists else splits, path, split, notices)
    if not lists:
        return [value]
    of_objects = {
        key: rows
        for key, rows in lists.items()
        if rows and all(isinstance(row, dict) for row in rows)
    }
    if len(of_objects) == 1:
        return next(iter(of_objects.values()))
    if (
        not of_objects
        and len(lists) == len(value)
        and len({len(column) for column in lists.values()}) == 1
        and len(lists) > 1
    ):
        return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
    if len(lists) == 1:
        return next(iter(lists.values()))
    raise ConfigError(
        f"`{path}` is an object with several lists: {', '.join(map(str, lists))}",
        allowed="a list of objects, or an object that has one such list",
        fix="select a list: `dataset: {path: ..., split: NAME}`",
    )


def _split_kind(key: str) -> str | None:
    """Return the kind of split that the start of a key shows (``val_2`` → ``validation``)."""
    return split_kind(key.partition("_")[0])


def _rows_of_split(
    value: Row, splits: Mapping[str, list[Any] | Row], path: Path, split: str, notices: list[Notice]
) -> list[Any]:
    """Return the rows of one split of an object of splits, and report the splits not used."""
    wanted = [key for key in splits if key == split] or [
        key for key in splits if _split_kind(key) == _split_kind(split) is not None
    ]
    if not wanted and len(splits) > 1:
        raise ConfigError(
            f"`{path}` has no split `{split}`; it has {', '.join(splits)}",
            fix=f"select one of them: `dataset: {{path: ..., split: {next(iter(splits))}}}`",
        )
    name = (wanted or list(splits))[0]
    others = [
        f"{key} ({_length(rows):,} rows)"
        for key, rows in value.items()
        if key != name and isinstance(rows, list | dict)
    ]
    if others or not wanted:
        unused = f"; not used: {', '.join(others)}" if others else ""
        level = "info" if wanted else "warning"
        notices.append(Notice(level, f"{path}: using split `{name}`{unused}"))
    rows = splits[name]
    return rows if isinstance(rows, list) else _rows_of(rows, path, split, notices)


def _length(rows: Any) -> int:
    """Return the number of rows of a list, or of an object of columns."""
    columns = list(rows.values()) if isinstance(rows, dict) else []
    return len(columns[0]) if columns and isinstance(columns[0], list) else len(rows)


def csv_delimiter(header: str, suffix: str) -> str:
    """Return the delimiter of a CSV file, from its first line."""
    return "\t" if suffix == ".tsv" else max((",", ";", "\t"), key=header.count)


def _csv(path: Path, suffix: str, position: Position) -> NumberedRows:
    csv.field_size_limit(1 << 30)
    with open_data(path, position) as handle:
        lines = text_lines(handle, path)
        header = next(lines, "")
        reader = csv.DictReader(chain([header], lines), delimiter=csv_delimiter(header, suffix))
        try:
            for row in reader:
                # The key None means more fields than the header has columns.
                yield reader.line_num, None if None in row else row
        except csv.Error as error:
            what = f"line {reader.line_num} of `{path}` is not valid CSV: {error}"
            raise ConfigError(what, fix="correct this line") from error


def _parquet(path: Path, position: Position) -> NumberedRows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            number, total = 0, max(1, file.metadata.num_rows)
            position.follow(lambda: number / total)
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pa.ArrowInvalid, OSError) as error:
        raise _unreadable(path, "Parquet", error) from error


def _arrow(path: Path, position: Position) -> NumberedRows:
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source:
            try:
                batches: Any = pa.ipc.open_stream(source)
                position.follow(
                    lambda: 1.0 if source.closed else source.tell() / max(1, source.size())
                )
            except pa.ArrowInvalid:
                file = pa.ipc.open_file(source)
                batches = (file.get_batch(number) for number in range(file.num_record_batches))
                position.follow(lambda: current / max(1, file.num_record_batches))
            number = current = 0
            for current, batch in enumerate(batches, 1):  # noqa: B007
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pa.ArrowInvalid, OSError) as error:
        raise _unreadable(path, "Arrow", error) from error


def _unreadable(path: Path, kind: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"`{path}` cannot be read as {kind}: {first_line(error)}",
        fix="check the file or copy it again",
    )


def _text(path: Path, position: Position) -> NumberedRows:
    text = read_text(path)
    position.follow(lambda: 1.0)
    if text.strip():
        yield 1, {DOCUMENT: text}
