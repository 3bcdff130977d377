"""Read the rows of one local file of any supported kind, each with its line or row number. Errors
name the malformed line."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, first_line
from paceline.core.log import Notice
from paceline.data.sources.csv_rows import csv_rows, repeated_column
from paceline.data.sources.json_rows import (
    has_rows_in_lines,
    is_head_of_lines,
    json_lines,
    json_rows,
    parse_line,
)
from paceline.data.sources.opening import (
    COMPRESSED_SUFFIXES,
    HEAD_BYTES,
    Position,
    compression_of,
    data_suffix,
    encoding_of,
    ends_with_returns,
    not_text,
    open_data,
    read_text,
)
from paceline.data.sources.rows import Row, struct_columns, without_added_nulls
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
        if has_rows_in_lines(path):
            return json_lines(path, position)
        return json_rows(path, split, notices, position)
    if suffix == ".json":
        return json_rows(path, split, notices, position)
    if suffix in (".csv", ".tsv"):
        return csv_rows(path, suffix, position)
    if suffix in (".parquet", ".arrow") and compression_of(path) is not None:
        raise ConfigError(
            "`{path}`: compressed {suffix} files are not supported, because the format has its own"
            " compression",
            code="compressed-format",
            fix="decompress it first",
            path=path,
            suffix=suffix,
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


def row_unit(path: Path) -> str:
    """Return what :func:`read_file` counts: ``line`` or ``row``."""
    suffix = data_suffix(path)
    if suffix in (".csv", ".tsv"):
        return "line"
    return "line" if suffix in (".jsonl", ".ndjson") and has_rows_in_lines(path) else "row"


def is_table(path: Path) -> bool:
    """Return whether the file name is the name of a table: JSON, CSV, Parquet, Arrow, or a tar
    shard of samples."""
    return data_suffix(path) in TABLE_SUFFIXES


def is_text(path: Path) -> bool:
    """Return whether the file name is the name of a plain text file."""
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
    return ConfigError(what, code="unsupported-data-file", allowed=KINDS, fix=fix)


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


def line_blocks(path: Path, position: Position) -> Iterator[LineBlock] | None:
    """Yield the lines of ``path`` unparsed. Returns None if it is not a UTF-8 file of JSON lines
    that end with line feeds; use :func:`read_file` then.

    Raises:
        ConfigError: the file is not text.
    """
    if data_suffix(path) not in (".jsonl", ".ndjson"):
        return None
    with open_data(path) as handle:
        head = handle.read(HEAD_BYTES)
    is_plain = encoding_of(head, path).startswith("utf-8") and is_head_of_lines(head, path)
    if not is_plain or ends_with_returns(head, path):
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
            yield number, parse_line(text, number, block.path)


def _parquet(path: Path, position: Position) -> NumberedRows:
    import pyarrow.parquet as pq

    with arrow_errors(path, " as Parquet"), pq.ParquetFile(path) as file:
        check_schema(file.schema_arrow, path)
        number, total = 0, max(1, file.metadata.num_rows)
        position.follow(lambda: number / total)
        batches = file.iter_batches(batch_size=1024)
        for number, row in enumerate(chain.from_iterable(map(arrow_rows, batches)), 1):
            yield number, row


def _arrow(path: Path, position: Position) -> NumberedRows:
    import pyarrow as pa

    with arrow_errors(path, " as Arrow"), pa.memory_map(str(path)) as source:
        try:
            batches: Any = pa.ipc.open_stream(source)
            check_schema(batches.schema, path)
            position.follow(lambda: 1.0 if source.closed else source.tell() / max(1, source.size()))
        except pa.ArrowInvalid:
            file = pa.ipc.open_file(source)
            check_schema(file.schema, path)
            batches = map(file.get_batch, range(file.num_record_batches))
            position.follow(lambda: current / max(1, file.num_record_batches))
        number = current = 0
        for current, batch in enumerate(batches, 1):  # noqa: B007
            for row in arrow_rows(batch):
                number += 1
                yield number, row


def arrow_rows(batch: Any) -> Iterator[Row]:
    """Yield the rows of a table or a record batch, without nulls that Arrow added."""
    columns = struct_columns(batch.schema)
    for row in batch.to_pylist():
        yield without_added_nulls(row, columns)


@contextmanager
def arrow_errors(path: Path, kind: str = "") -> Iterator[None]:
    """Raise ConfigError if the file of Arrow or Parquet that is read in the block is damaged."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(
            "`{path}` cannot be read{kind}: {reason}",
            code="unreadable-data-file",
            fix="check the file or copy it again",
            path=path,
            kind=kind,
            reason=first_line(error),
        ) from error


def check_schema(fields: Any, path: Path, parent: str = "") -> None:
    """Check that a schema of Arrow has no two columns, or fields of a structure, with one name.

    Raises:
        ConfigError: a name occurs twice.
    """
    import pyarrow as pa

    names = [f"{parent}{field.name}" for field in fields]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise repeated_column(path, repeated[0])
    for name, field in zip(names, fields, strict=True):
        kind = field.type
        while pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind = kind.value_type
        if pa.types.is_struct(kind):
            check_schema(list(kind), path, f"{name}.")


def _text(path: Path, position: Position) -> NumberedRows:
    text = read_text(path)
    position.follow(lambda: 1.0)
    if text.strip():
        yield 1, {DOCUMENT: text}
