"""The report of `paceline doctor` for a terminal."""

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from paceline.core.check import Check
from paceline.core.files import human_bytes
from paceline.core.formatting import counted, short_duration

#: So many links are shown, the slowest ones.
_MAX_LINKS = 8


def report_table(checks: list[Check], report: dict[str, Any]) -> Group:
    """The checks, the slowest links, and the verdict."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        text = Text(check.value)
        if check.advice:
            text.append(f"\n→ {check.advice}", style="bold" if check.fatal else "")
        table.add_row(_mark(check), check.name, text)
    verdict = Text(_verdict(checks), style="bold green" if report["ok"] else "bold red")
    return Group(table, *_link_lines(report["links"]), verdict)


def _mark(check: Check) -> Text:
    if check.ok:
        return Text("ok", style="green")
    return Text("FAIL", style="bold red") if check.fatal else Text("warn", style="yellow")


def _link_lines(links: list[dict[str, Any]]) -> list[Text]:
    if len(links) < 2:
        return []
    slowest = sorted(links, key=lambda link: link["bandwidth_bytes_s"])[:_MAX_LINKS]
    lines = []
    for link in slowest:
        rate = f"{human_bytes(link['bandwidth_bytes_s'])}/s"
        latency = short_duration(link["latency_s"])
        lines.append(Text(f"  rank {link['from']} ↔ rank {link['to']}  {latency:>9}  {rate:>12}"))
    if len(links) > _MAX_LINKS:
        lines.append(Text(f"  and {len(links) - _MAX_LINKS} faster ones (--json)"))
    return lines


def _verdict(checks: list[Check]) -> str:
    fatal = [check.name for check in checks if check.fatal]
    doubts = [check.name for check in checks if not check.ok and not check.fatal]
    tail = f"; worth a look: {', '.join(doubts)}" if doubts else ""
    if fatal:
        return f"\na run would fail: {', '.join(fatal)}{tail}"
    return f"\n{counted(len(checks), 'check')}, nothing that would make a run fail{tail}"
