"""Rows of one local file, whatever its kind, each with its line or row number; a broken file says where it is broken."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError

Numbered = Iterator[tuple[int, Any]]

TABLE_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
TEXT_SUFFIXES = (".txt", ".md")
KINDS = "JSON (.json), JSON lines (.jsonl), CSV (.csv, .tsv), Parquet (.parquet), Arrow (.arrow), plain text (.txt, .md)"

#: The key under which a plain-text file's content stands: a document is cut into samples, a row of text is one.
DOCUMENT = "\0document"


def read_file(path: Path, split: str = "train") -> Numbered:
    """Rows of ``path`` as (number, row): lines for JSON lines and CSV, rows from 1 for the others.

    Raises:
        ConfigError: a kind that is not known, a broken line (with its number and the text near it), bytes that are not UTF-8.
    """
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return _json(path, split) if _first_char(path) == "[" else _json_lines(path)
    if suffix == ".json":
        return _json(path, split)
    if suffix in (".csv", ".tsv"):
        return _csv(path, suffix)
    if suffix == ".parquet":
        return _parquet(path)
    if suffix == ".arrow":
        return _arrow(path)
    if suffix in TEXT_SUFFIXES:
        return _text(path)
    raise ConfigError(
        f"`{path}` is of no known kind (its name ends in {suffix or 'no suffix'})",
        allowed=KINDS,
        fix="rename the file after what is in it",
    )


def _first_char(path: Path) -> str:
    with open(path, "rb") as handle:
        return handle.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1].decode("latin-1")


def _json_lines(path: Path) -> Numbered:
    with open(path, "rb") as handle:
        for number, raw in enumerate(handle, 1):
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8").rstrip("\r\n"))
            except UnicodeDecodeError as error:
                raise _not_utf8(path, f"line {number}", error) from error
            except ValueError as error:
                raise _broken(path, number, line.decode("utf-8"), error) from error
            yield number, row


def _broken(path: Path, number: int, line: str, error: ValueError) -> ConfigError:
    column = getattr(error, "pos", 0)
    before, text = max(0, column - 30), line.rstrip("\r\n")
    near = ("…" if before else "") + text[before : column + 30] + ("…" if column + 30 < len(text) else "")
    reason = getattr(error, "msg", str(error)).removesuffix(" starting at").removesuffix(" at")
    cut = "" if text.rstrip().endswith(("}", "]")) else "; the file may have been cut off while it was copied"
    return ConfigError(
        f"line {number} of `{path}` is no valid JSON: {reason} at column {column + 1}, near `{near}`",
        fix=f"correct or delete line {number}{cut}",
    )


def _not_utf8(path: Path, where: str, error: UnicodeDecodeError) -> ConfigError:
    return ConfigError(
        f"{where} of `{path}` is not UTF-8 text (byte {error.object[error.start]:#04x} at position {error.start})",
        fix=f"convert the file, e.g. `iconv -f latin1 -t utf-8 {path.name}`",
    )


def _read_utf8(path: Path) -> str:
    raw = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise _not_utf8(path, f"line {line}", error) from error


def _json(path: Path, split: str) -> Numbered:
    text = _read_utf8(path)
    if not text.strip():
        return
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            yield from _json_lines(path)  # JSON lines under the name .json, as many tools write them
            return
        line = text.splitlines()[error.lineno - 1] if error.lineno <= len(text.splitlines()) else ""
        error.pos = error.colno - 1
        raise _broken(path, error.lineno, line, error) from error
    for number, row in enumerate(_rows_of(value, path, split), 1):
        yield number, {"text": row} if isinstance(row, str) else row


def _rows_of(value: Any, path: Path, split: str) -> list[Any]:
    """The rows in a JSON value: a list, an object that holds one, an object of columns, or a single row."""
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        raise ConfigError(
            f"`{path}` holds a single {type(value).__name__}", allowed="a list of objects, or an object that holds one"
        )
    lists = {key: one for key, one in value.items() if isinstance(one, list)}
    if {"messages", "conversations"} & set(lists) or not lists:
        return [value]
    if split in lists:
        return lists[split]
    of_objects = [one for one in lists.values() if one and all(isinstance(row, dict) for row in one)]
    if len(of_objects) == 1:
        return of_objects[0]
    if not of_objects and len(lists) == len(value) and len({len(one) for one in lists.values()}) == 1 and len(lists) > 1:
        return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
    if len(lists) == 1:
        return next(iter(lists.values()))
    raise ConfigError(
        f"`{path}` is an object with several lists: {', '.join(map(str, lists))}",
        allowed="a list of objects, or an object that holds one such list",
        fix="name the list you want: `dataset: {path: ..., split: NAME}`",
    )


def _csv(path: Path, suffix: str) -> Numbered:
    csv.field_size_limit(1 << 30)
    with open(path, encoding="utf-8-sig", newline="") as handle:
        try:
            header = handle.readline()
            handle.seek(0)
            delimiter = "\t" if suffix == ".tsv" else _delimiter(header)
            reader = csv.DictReader(handle, delimiter=delimiter)
            for row in reader:
                if None in row:
                    yield reader.line_num, None  # more fields than the header has columns
                else:
                    yield reader.line_num, row
        except UnicodeDecodeError as error:
            raise _not_utf8(path, "the text", error) from error
        except csv.Error as error:
            what = f"line {reader.line_num} of `{path}` is no valid CSV: {error}"
            raise ConfigError(what, fix="correct that line") from error


def _delimiter(header: str) -> str:
    return max((",", ";", "\t"), key=header.count)


def _parquet(path: Path) -> Numbered:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pa.ArrowInvalid, OSError) as error:
        raise _unreadable(path, "Parquet", error) from error


def _arrow(path: Path) -> Numbered:
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source:
            try:
                batches: Any = pa.ipc.open_stream(source)
            except pa.ArrowInvalid:
                file = pa.ipc.open_file(source)
                batches = (file.get_batch(one) for one in range(file.num_record_batches))
            number = 0
            for batch in batches:
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pa.ArrowInvalid, OSError) as error:
        raise _unreadable(path, "Arrow", error) from error


def _unreadable(path: Path, kind: str, error: Exception) -> ConfigError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ConfigError(f"`{path}` cannot be read as {kind}: {reason}", fix="check the file, or copy it anew")


def _text(path: Path) -> Numbered:
    text = _read_utf8(path)
    if text.strip():
        yield 1, {DOCUMENT: text}
