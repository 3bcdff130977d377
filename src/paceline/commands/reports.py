"""Print the report of a command."""

import json
from argparse import Namespace
from collections.abc import Callable
from typing import TypeVar

from rich.console import Console, RenderableType

_Report = TypeVar("_Report")


def print_report(
    args: Namespace, report: _Report, table: Callable[[_Report], RenderableType], width: int | None
) -> None:
    """Print a report as JSON with ``--json``, else as a table of a width in columns."""
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        Console(width=width, highlight=False).print(table(report))
