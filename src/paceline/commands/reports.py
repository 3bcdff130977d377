"""Print the report of a command, or write it to a file."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console, RenderableType

from paceline.core.errors import ConfigError
from paceline.core.files import write_atomic
from paceline.core.texts import UserText, translatable

_Report = TypeVar("_Report")


#: Columns if standard output is not a terminal.
_FILE_WIDTH = 120


def open_console() -> Console:
    """Return a console on standard output with the width of the terminal."""
    return Console(width=None if sys.stdout.isatty() else _FILE_WIDTH, highlight=False)


def print_report(
    args: Namespace, report: _Report, table: Callable[[_Report], RenderableType]
) -> None:
    """Print a report as JSON with ``--json``, else as a table."""
    if args.json:
        print(json.dumps(with_translations(report), indent=2))
    else:
        open_console().print(table(report))


def with_translations(report: Any) -> Any:
    """Return a report for JSON in which every mapping with texts also has ``translations``: their
    codes and values, by key, from which the panel makes texts in its language."""
    if isinstance(report, Mapping):
        translations = {key: found for key, value in report.items() if (found := _codes(value))}
        content = {key: with_translations(value) for key, value in report.items()}
        return content | ({"translations": translations} if translations else {})
    return [with_translations(each) for each in report] if isinstance(report, list) else report


def _codes(value: Any) -> Any:
    """Return the code and the values of a text, or a list of them for a list of texts."""
    if isinstance(value, UserText):
        return translatable(value)
    is_list = isinstance(value, list) and any(isinstance(each, UserText) for each in value)
    return [_codes(each) for each in value] if is_list else None


def write_output(path: Path, text: str) -> None:
    """Write the file of ``--output``, and print its path on standard error.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write_atomic(path, text)
    except OSError as error:
        raise ConfigError(
            "`--output {path}` cannot be written: {reason}",
            code="output-not-writable",
            path=path,
            reason=error.strerror or error,
        ) from error
    print(f"wrote {path}", file=sys.stderr)
