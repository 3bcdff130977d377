"""The certificate as a table for a terminal of 100 columns."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from paceline.core import formatting
from paceline.observe.report.certificate import Certificate, rows, summary

_COLORS = {"ok": "green", "not ok": "bold red", "refused": "yellow"}


def certificate_table(certificate: Certificate) -> Group:
    """Return the modes, the reasons of modes that were refused or did not pass, and the bounds."""
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        caption="predicted → measured",
        caption_justify="right",
    )
    table.add_column("mode", overflow="fold", min_width=25)
    table.add_column("")
    for name in ("loss", "weights", "state", "traffic/step", "time"):
        table.add_column(name, justify="right")
    reasons = []
    for mode in rows(certificate):
        style = _COLORS[mode["verdict"]]
        figures = [mode[key] for key in ("loss", "weights", "state", "traffic", "time")]
        name = formatting.clean(mode["mode"])
        table.add_row(name, Text(mode["verdict"], style=style), *figures)
        if mode["reason"]:
            reason = formatting.clean(mode["reason"])
            reasons.append(Text(f"{mode['mode']}: {reason}", style=style))
    return Group(table, *reasons, Text(summary(certificate)))
