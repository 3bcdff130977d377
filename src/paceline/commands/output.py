"""What commands print and write: reports, messages, and the file of ``--output``."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from paceline.core.errors import ConfigError
from paceline.core.files import write_atomic
from paceline.core.log import log_notices

if TYPE_CHECKING:
    from rich.console import RenderableType

_Report = TypeVar("_Report")


def write_output(path: Path, text: str) -> None:
    """Write the file of ``--output``, and print its path on standard error.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write_atomic(path, text)
    except OSError as error:
        raise ConfigError(
            f"`--output {path}` cannot be written: {error.strerror or error}"
        ) from error
    print(f"wrote {path}", file=sys.stderr)


def print_report(
    args: argparse.Namespace,
    report: _Report,
    table: Callable[[_Report], RenderableType],
    width: int | None,
) -> None:
    """Print a report as JSON with ``--json``, else as a table of a width in columns."""
    if args.json:
        print(json.dumps(report, indent=2))
        return
    from rich.console import Console

    Console(width=width, highlight=False).print(table(report))


def print_notices(notices: Iterable[tuple[str, str]]) -> None:
    """Print notices (level, text) on standard error."""
    log_notices(logging.getLogger(__name__), notices)
