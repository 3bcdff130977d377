"""What can be wrong with a row, and what counts as an empty value."""

from typing import Any

from pydantic import JsonValue

#: A row of a dataset, whatever its columns hold.
Row = dict[str, JsonValue]


class MalformedRow(Exception):
    """A row that cannot be used. It is dropped and counted under this text."""


class Unsupported(Exception):
    """A row that Paceline could only train on wrongly, so the whole dataset is refused.

    Args:
        what: what the row holds, as a sentence without its place.
        allowed: what is accepted.
        fix: what to do.
    """

    def __init__(self, what: str, *, allowed: str | None = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what, self.allowed, self.fix = what, allowed, fix


def is_missing(value: Any) -> bool:
    """Whether a cell is empty. Tables write an empty cell as null or NaN."""
    return value is None or value != value or value == "" or value == []


def holds_nothing(value: Any) -> bool:
    """Whether a value is empty all the way down: Arrow fills absent structures with nulls, and CSV
    has ``[]``."""
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}", "null", "None")
    if isinstance(value, dict):
        return all(holds_nothing(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(holds_nothing(item) for item in value)
    return not value or value != value


def without_nulls(value: Any) -> Any:
    """The value without the null entries of its mappings: Arrow adds the keys of every other row to
    each structure."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
