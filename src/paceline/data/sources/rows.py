"""Rows: their type, the errors that reject them, and tests for empty values."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from paceline.core.errors import ConfigError

#: A row of a dataset, with columns of any type.
Row = dict[str, JsonValue]


class MalformedRow(Exception):
    """A row that cannot be used. The row is dropped and counted under the exception's text."""


class Unsupported(Exception):
    """A row that needs a kind of training that Paceline does not have. The dataset is rejected.

    Args:
        what: what the row contains, as a sentence without its place.
        allowed: what is accepted.
        fix: what to do.
    """

    def __init__(self, what: str, *, allowed: str | None = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what, self.allowed, self.fix = what, allowed, fix


def unsupported_row(error: Unsupported, place: str) -> ConfigError:
    """Return the error for a dataset with a row for another kind of training."""
    return ConfigError(
        "{place}: {reason}",
        code="data-of-another-method",
        allowed=error.allowed,
        fix=error.fix,
        place=place,
        reason=error.what,
    )


def is_missing(value: Any) -> bool:
    """Return whether a cell is empty. Tables write an empty cell as null or NaN."""
    return value is None or value != value or value == "" or value == []


def holds_nothing(value: Any) -> bool:
    """Return whether the value of a column of lists or objects is empty at every level: Arrow fills
    absent structures with nulls, and CSV files have the text ``[]``. Not for columns of texts: the
    text ``null`` may be an answer."""
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}", "null", "None")
    return not value or _is_hollow(value)


def _is_hollow(value: Any) -> bool:
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, dict):
        return all(_is_hollow(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_is_hollow(item) for item in value)
    return value is None or value != value or value == b""


def struct_columns(schema: Any) -> frozenset[str]:
    """Return the columns of an Arrow schema whose values have structures. Arrow gives each of these
    the keys of all rows, with null for the keys that a row does not have."""
    return frozenset(field.name for field in schema if _has_struct(field.type))


def _has_struct(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_struct(kind):
        return True
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return is_list and _has_struct(kind.value_type)


def without_added_nulls(row: Row, columns: frozenset[str]) -> Row:
    """Return a row of an Arrow table without the null entries of its structures: a null of the
    data cannot be distinguished from one that Arrow added.

    Args:
        columns: result of :func:`struct_columns`.
    """
    if not columns:
        return row
    return {
        name: _without_nulls(value) if name in columns else value for name, value in row.items()
    }


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class BrokenRow:
    """A row of a table that has no columns, with the reason for which it is dropped."""

    reason: str


class RepeatedKey(ValueError):
    """A JSON object has a key twice.

    Args:
        path: keys and indices that lead to the object.
    """

    def __init__(self, key: str, path: tuple[str | int, ...] = ()) -> None:
        self.key, self.path = key, path
        super().__init__(f"the key `{key}` occurs twice{self.place()}")

    def place(self, depth: int = 0) -> str:
        """Return where the object is, below the first ``depth`` steps of the path."""
        steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path[depth:])
        path = "".join(steps).removeprefix(".")
        return f" in `{path}`" if path else ""


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise RepeatedKey(_first_repeat(pairs))
    return value


def _first_repeat(pairs: list[tuple[str, Any]]) -> str:
    return next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)


class _MarkedObject(dict[str, Any]):
    """An object with a key that occurs twice."""

    repeated: str | None = None


def _mark_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = _MarkedObject(pairs)
    if len(value) != len(pairs):
        value.repeated = _first_repeat(pairs)
    return value


def _find_repeat(value: Any, path: tuple[str | int, ...] = ()) -> RepeatedKey | None:
    if isinstance(value, _MarkedObject) and value.repeated is not None:
        return RepeatedKey(value.repeated, path)
    items: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    repeats = (_find_repeat(item, (*path, step)) for step, item in items)
    return next((repeat for repeat in repeats if repeat is not None), None)


#: The hook costs about 0.3 µs for each object. Without it, the last value of a key would win.
_DECODER = json.JSONDecoder(object_pairs_hook=_read_object)
_MARKING_DECODER = json.JSONDecoder(object_pairs_hook=_mark_object)
_SPACE = re.compile(r"\s*")
#: The escape of a surrogate in JSON.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str, *, checks_text: bool = True) -> Any:
    """Return the value of a JSON text.

    Args:
        checks_text: whether half of a surrogate pair is an error.

    Raises:
        RepeatedKey: an object has a key twice.
        ValueError: it is not valid JSON, or it has half of a surrogate pair, which is not text.
    """
    try:
        value = _DECODER.decode(text)
    except RepeatedKey as error:
        raise _find_repeat(_MARKING_DECODER.decode(text)) or error from None
    if checks_text and _SURROGATE.search(text) is not None:
        _check_text(value)
    return value


def parse_cell(text: str) -> Any:
    """Return the value of JSON text in a cell, or in a value, of a row.

    Raises:
        Unsupported: an object has a key twice.
        ValueError: it is not valid JSON.
    """
    try:
        return parse_json(text, checks_text=False)
    except RepeatedKey as error:
        raise repeated_in_cell(error) from error


def repeated_in_cell(error: RepeatedKey) -> Unsupported:
    """Return the error for text in a cell with an object that has a key twice."""
    return Unsupported(
        f"JSON text in a value of the row has the key `{error.key}` twice{error.place()}",
        fix="keep one of the values, or give them different keys",
    )


def parse_json_values(text: str) -> Iterator[Any]:
    """Yield the JSON values of a text, one after the other.

    Raises:
        ValueError: as :func:`parse_json`. The path of a repeated key begins with the index of the
            value.
    """
    index, start = 0, _skip_space(text, 0)
    while start < len(text):
        try:
            value, end = _DECODER.raw_decode(text, start)
        except RepeatedKey as error:
            value, _ = _MARKING_DECODER.raw_decode(text, start)
            raise _find_repeat(value, (index,)) or error from None
        if _SURROGATE.search(text, start, end) is not None:
            _check_text(value)
        yield value
        index, start = index + 1, _skip_space(text, end)


def _skip_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    assert match is not None
    return match.end()


def _check_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it has an unpaired surrogate, such as \\ud83d") from None
