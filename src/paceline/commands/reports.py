"""Print the report of a command."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import TypeVar

from rich.console import Console, RenderableType

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
        print(json.dumps(report, indent=2))
    else:
        open_console().print(table(report))
