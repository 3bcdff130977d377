"""The certificate as a table in a terminal of 100 columns."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.core import formatting
from paceline.observe.report.certificate import rows, summary

_WIDTH = 100
_COLOURS = {"ok": "green", "not ok": "bold red", "refused": "yellow"}


def print_certificate(certificate: dict[str, Any], console: Console | None = None) -> None:
    """Print the modes, the reasons of those that were refused or did not pass, and what it was
    judged by."""
    console = console or Console(width=_WIDTH, highlight=False)
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        caption="predicted → measured",
        caption_justify="right",
    )
    table.add_column("mode", overflow="fold", min_width=25)
    table.add_column("")
    for name in ("loss", "weights", "state", "traffic a step", "time"):
        table.add_column(name, justify="right")
    lines = rows(certificate)
    for one in lines:
        verdict = Text(one["verdict"], style=_COLOURS[one["verdict"]])
        figures = [one[key] for key in ("loss", "weights", "state", "traffic", "time")]
        table.add_row(formatting.clean(one["mode"]), verdict, *figures)
    console.print(table)
    for one in lines:
        if one["reason"]:
            console.print(
                Text(
                    f"{one['mode']}: {formatting.clean(one['reason'])}",
                    style=_COLOURS[one["verdict"]],
                )
            )
    console.print(Text(summary(certificate)))
