"""Read JSON: files with one row per line, and files with all rows in one text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, first_line
from paceline.core.log import Notice
from paceline.core.texts import UserText
from paceline.data.sources.opening import (
    HEAD_BYTES,
    Position,
    encoding_of,
    open_data,
    read_text,
    text_lines,
)
from paceline.data.sources.rows import RepeatedKey, Row, parse_json, parse_json_values
from paceline.data.sources.splits import split_kind, split_of_file


def has_rows_in_lines(path: Path) -> bool:
    """Return whether each line of a JSON file is a row. Otherwise its rows are in an array, or they
    are objects of several lines each.

    Raises:
        ConfigError: the file is not text.
    """
    with open_data(path) as handle:
        head = handle.read(HEAD_BYTES)
    return is_head_of_lines(head, path)


def is_head_of_lines(head: bytes, path: Path) -> bool:
    """Return whether the first bytes of a JSON file show that each line is a row.

    Raises:
        ConfigError: the file is not text.
    """
    text = head.decode(encoding_of(head, path), errors="ignore") if head else ""
    lines = re.split(r"\r\n|\n|\r", text.removeprefix("\ufeff").lstrip())
    if lines[0].startswith("["):
        return False
    if not lines[0].startswith("{"):
        return True
    if len(lines) == 1:
        return len(head) == HEAD_BYTES or not _has_extra(lines[0])
    if lines[0].strip() == "{":
        return False
    if _has_extra(lines[0]):
        return False
    # An object that continues in the next line, which does not begin another object.
    rest = next((line.strip() for line in lines[1:] if line.strip()), "{")
    return rest.startswith("{") or not _is_unfinished(lines[0])


def _has_extra(line: str) -> bool:
    """Return whether another object follows on the same line."""
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        return error.msg == "Extra data" and line[error.pos] == "{"
    return False


def _is_unfinished(line: str) -> bool:
    try:
        parse_json(line)
    except json.JSONDecodeError as error:
        return error.pos >= len(line.rstrip())
    except ValueError:
        return False
    return False


def json_lines(path: Path, position: Position) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file of JSON lines, each with its line number.

    Raises:
        ConfigError: a line is not text or not valid JSON.
    """
    with open_data(path, position) as handle:
        for number, line in enumerate(text_lines(handle, path), 1):
            if line.strip():
                yield number, parse_line(line, number, path)


def parse_line(line: str, number: int, path: Path) -> Any:
    """Return the row of a line.

    Raises:
        ConfigError: it is not valid JSON.
    """
    try:
        return parse_json(line.rstrip("\r\n"))
    except RepeatedKey as error:
        raise repeated_key(f"line {number} of `{path}`", error) from error
    except (ValueError, RecursionError) as error:
        raise _invalid_json(path, number, line, error) from error


def repeated_key(place: str, error: RepeatedKey, depth: int = 0) -> ConfigError:
    """Return the error for an object with a key that occurs twice.

    Args:
        depth: number of steps of its path that ``place`` describes.
    """
    return ConfigError(
        "{place} has the key `{reason}` twice{inside}",
        code="repeated-json-key",
        fix="keep one of the values, or give them different keys",
        place=place,
        reason=error.key,
        inside=error.place(depth),
    )


def json_rows(
    path: Path, split: str, notices: list[Notice] | None, position: Position
) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a JSON file, each with its number: the rows of an array or of an object
    that has one, or objects one after the other.

    Args:
        split: the list to read of an object that has several.
        notices: receives messages about the file.

    Raises:
        ConfigError: the file is not valid JSON, or has no such list.
    """
    text = read_text(path)
    if not text.strip():
        return
    try:
        rows = _rows_of_text(text, path, split, [] if notices is None else notices)
    except json.JSONDecodeError as error:
        lines = text.splitlines()
        line = lines[error.lineno - 1] if error.lineno <= len(lines) else ""
        error.pos = error.colno - 1
        raise _invalid_json(path, error.lineno, line, error) from error
    except RepeatedKey as error:
        if error.path and isinstance(error.path[0], int):
            place = f"row {error.path[0] + 1} of `{path}`"
            raise repeated_key(place, error, depth=1) from error
        raise repeated_key(f"`{path}`", error) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            "`{path}` is not valid JSON: {reason}",
            code="damaged-json",
            fix="correct the file",
            path=path,
            reason=first_line(error),
        ) from error
    if rows is None:
        # Many tools write JSON lines to files named .json.
        yield from json_lines(path, position)
        return
    number = 0
    position.follow(lambda: number / len(rows))
    for number, row in enumerate(rows, 1):
        yield number, {"text": row} if isinstance(row, str) else row


def _rows_of_text(text: str, path: Path, split: str, notices: list[Notice]) -> list[Any] | None:
    """Return the rows of a JSON text, or None if each line should be a row, and one is invalid."""
    try:
        value = parse_json(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        try:
            return list(parse_json_values(text))
        except ValueError:
            if text.lstrip().startswith("{") and has_rows_in_lines(path):
                return None  # the error of a line is clearer
            raise
    return _rows_of(value, path, split, notices)


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
    if reason == "Extra data" and text[column:].strip() == ",":
        fix = "remove the comma at the end of each line"
    elif text.lstrip("[ ").startswith(("{'", "('")):
        fix = "write the rows with `json.dumps`: JSON has double quotes, unlike Python's literals"
    elif not text.rstrip().endswith(("}", "]")):
        fix += "; the file may have been truncated while it was copied"
    return ConfigError(
        "line {number} of `{path}` is not valid JSON: {reason} at column {next_column}, near"
        " `{near}`",
        code="invalid-json",
        fix=fix,
        number=number,
        path=path,
        reason=reason,
        next_column=column + 1,
        near=near,
    )


def _rows_of(value: Any, path: Path, split: str, notices: list[Notice]) -> list[Any]:
    """Return the rows of a JSON value: a list, an object that has one, an object of splits or of
    columns, an object of pandas, or a single row."""
    if isinstance(value, list):
        if split_kind(split) not in ("train", split_of_file(path.name)):
            text = UserText(
                "{path}: `split: {split}` has no effect, because the file has no splits",
                code="split-without-effect",
                path=path,
                split=split,
            )
            notices.append(Notice("warning", text))
        return value
    if not isinstance(value, dict):
        raise ConfigError(
            "`{path}` contains a single {kind}",
            code="not-a-list-of-objects",
            allowed="a list of objects, or an object that has one",
            path=path,
            kind=type(value).__name__,
        )
    lists = {key: column for key, column in value.items() if isinstance(column, list)}
    if {"messages", "conversations"} & set(lists):
        return [value]
    splits = {
        key: rows
        for key, rows in value.items()
        if _split_kind(key) is not None and isinstance(rows, list | dict)
    }
    if (rows := _rows_of_pandas(value)) is not None:
        return rows
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
        "`{path}` is an object with several lists: {lists}",
        code="several-lists",
        allowed="a list of objects, or an object that has one such list",
        fix="select a list: `dataset: {path: ..., split: NAME}`",
        path=path,
        lists=", ".join(map(str, lists)),
    )


def _rows_of_pandas(value: dict[str, Any]) -> list[Any] | None:
    """Return the rows of an object that ``DataFrame.to_json`` wrote, or None for others: columns
    with a value for each number of a row (its default), rows by their number (``orient="index"``),
    or ``orient="split"``."""
    if set(value) == {"columns", "index", "data"} and isinstance(value["data"], list):
        names = value["columns"]
        if isinstance(names, list) and all(isinstance(row, list) for row in value["data"]):
            return [dict(zip(names, row, strict=False)) for row in value["data"]]
    if not value or not all(isinstance(item, dict) and item for item in value.values()):
        return None
    if all(key.isdecimal() for key in value):
        return list(value.values())
    numbers = list(next(iter(value.values())))
    if all(key.isdecimal() for key in numbers) and all(
        list(column) == numbers for column in value.values()
    ):
        return [{name: column[key] for name, column in value.items()} for key in numbers]
    return None


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
            "`{path}` has no split `{split}`; it has {splits}",
            code="unknown-json-split",
            fix="select one of them: `dataset: {path: ..., split: {first}}`",
            path=path,
            split=split,
            splits=", ".join(splits),
            first=next(iter(splits)),
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
        notices.append(
            Notice(
                level,
                UserText(
                    "{path}: using split `{name}`{unused}",
                    code="split-chosen",
                    path=path,
                    name=name,
                    unused=unused,
                ),
            )
        )
    rows = splits[name]
    return rows if isinstance(rows, list) else _rows_of(rows, path, split, notices)


def _length(rows: Any) -> int:
    """Return the number of rows of a list, or of an object of columns."""
    columns = list(rows.values()) if isinstance(rows, dict) else []
    return len(columns[0]) if columns and isinstance(columns[0], list) else len(rows)
