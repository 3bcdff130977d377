"""Read CSV files."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.data.sources.opening import Position, not_text, open_data, text_lines
from paceline.data.sources.rows import BrokenRow, Row

#: Longest field in characters; the default of the module `csv` is 128 KiB.
_MAX_FIELD = 1 << 30
#: The line with which Excel states the delimiter.
_STATED_DELIMITER = re.compile(r"sep=(.)\s*", re.IGNORECASE)
NOT_CSV = "not UTF-8 text, or not CSV (is a quote not closed?)"
TOO_MANY_FIELDS = "more fields than the header has columns (is a delimiter not in quotes?)"


def csv_delimiter(header: str, suffix: str) -> str:
    """Return the delimiter of a CSV file, from its first line."""
    if stated := stated_delimiter(header):
        return stated
    return "\t" if suffix == ".tsv" else max((",", ";", "\t", "|"), key=header.count)


def stated_delimiter(line: str) -> str | None:
    """Return the delimiter if a line only states it (``sep=;``), as the first line of a file that
    Excel wrote."""
    match = _STATED_DELIMITER.fullmatch(line)
    return match[1] if match else None


def csv_rows(path: Path, suffix: str, position: Position) -> Iterator[tuple[int, Row | BrokenRow]]:
    """Yield the rows of a CSV file, each with the number of its first line.

    Raises:
        ConfigError: the file is not text or not CSV, or a name occurs twice in its header.
    """
    csv.field_size_limit(_MAX_FIELD)
    with open_data(path, position) as handle:
        lines = text_lines(handle, path)
        num_skipped, header = _skip_blank(lines, 0)
        delimiter = csv_delimiter(header, suffix)
        if stated_delimiter(header):
            num_skipped, header = _skip_blank(lines, num_skipped + 1)
        reader = csv.reader(chain([header], lines), delimiter=delimiter)
        try:
            names = header_names(next(reader, []), path)
            start = end = reader.line_num
            for fields in reader:
                start, end = end, reader.line_num
                if fields:
                    yield start + num_skipped + 1, make_row(names, fields)
        except csv.Error as error:
            raise invalid_csv(reader.line_num + num_skipped, path, error) from error
    if end - start > 1:
        _check_closed(path, start + num_skipped, delimiter)


def _check_closed(path: Path, num_before: int, delimiter: str) -> None:
    """Check that the last row, which has several lines, does not begin with a quote that is never
    closed: the module `csv` then returns the rest of the file as one field.

    Args:
        num_before: number of lines before the row.

    Raises:
        ConfigError: a quote is not closed.
    """
    with open_data(path) as handle:
        text = "".join(islice(text_lines(handle, path), num_before, None))
    try:
        list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except csv.Error as error:
        if "end of data" in str(error):
            raise _not_closed(f"line {num_before + 1} of `{path}`") from error


def _not_closed(place: str) -> ConfigError:
    return ConfigError(
        "{place} has a quote that is not closed, so that the lines after it are part of its field",
        code="unclosed-quote",
        fix='close the quote, or double a quote that belongs to the text (`""`)',
        place=place,
    )


def _skip_blank(lines: Iterator[str], num_skipped: int) -> tuple[int, str]:
    """Return the number of lines before the next one that is not blank, and this line; an empty
    text after the last line."""
    for number, line in enumerate(lines, num_skipped):
        if line.strip():
            return number, line
    return num_skipped, ""


def read_fields(line: bytes, number: int, path: Path, delimiter: str) -> list[str]:
    """Return the fields of one row.

    Raises:
        ConfigError: it is not text or not CSV, or a quote is not closed.
    """
    csv.field_size_limit(_MAX_FIELD)
    try:
        text = io.StringIO(line.decode("utf-8"), newline="")
        records = [record for record in csv.reader(text, delimiter=delimiter) if record]
        is_open = line.count(b'"') % 2 == 1 and b"\n" in line.strip()
        if len(records) > 1 or is_open:
            raise _not_closed(f"line {number} of `{path}`")
        return records[0] if records else []
    except UnicodeDecodeError as error:
        raise not_text(path, f"line {number}", error) from error
    except csv.Error as error:
        raise invalid_csv(number, path, error) from error


def header_names(fields: Sequence[str], path: Path) -> list[str]:
    """Return the names of the columns, without spaces around them. Columns without a name cannot be
    used.

    Raises:
        ConfigError: a name occurs twice.
    """
    names = [field.strip() for field in fields]
    repeated = [name for name in names if name and names.count(name) > 1]
    if repeated:
        raise repeated_column(path, repeated[0])
    return names


def repeated_column(path: Path, name: str) -> ConfigError:
    """Return the error for a table that has two columns with the same name."""
    return ConfigError(
        "`{path}` has two columns with the name `{name}`",
        code="repeated-column",
        fix="rename or remove one of them",
        path=path,
        name=name,
    )


def make_row(names: Sequence[str], fields: list[str]) -> Row | BrokenRow:
    """Return the columns of a row, None for fields that it lacks. Empty fields after the last
    column are ignored."""
    if len(fields) == len(names):
        return dict(zip(names, fields, strict=True))
    if len(fields) > len(names) and any(field.strip() for field in fields[len(names) :]):
        return BrokenRow(TOO_MANY_FIELDS)
    missing = [None] * (len(names) - len(fields))
    return dict(zip(names, [*fields[: len(names)], *missing], strict=True))


def invalid_csv(line: int, path: Path, error: csv.Error) -> ConfigError:
    """Return the error for a line that is not CSV."""
    return ConfigError(
        "line {line} of `{path}` is not valid CSV: {reason}",
        code="invalid-csv",
        fix="correct this line",
        line=line,
        path=path,
        reason=error,
    )
