"""Rows: their type, the errors that reject them, and tests for empty values."""

import json
import re
from typing import Any

from pydantic import JsonValue

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


#: The escape of a surrogate in JSON.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not valid JSON, or it has half of a surrogate pair, which is not text.
    """
    value = json.loads(text)
    if _SURROGATE.search(text) is not None:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it has an unpaired surrogate, such as \\ud83d") from None
    return value
