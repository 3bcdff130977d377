"""Print the report of a command, or write it to a file."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console, RenderableType

from paceline.core.errors import ConfigError
from paceline.core.files import write_atomic
from paceline.core.texts import with_translations

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
