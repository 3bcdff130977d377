"""`paceline doctor`: check this machine and the links between its ranks."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from paceline.commands.options import Integer, OptionParser, add_config, config_and_overrides
from paceline.commands.reports import print_report
from paceline.core.errors import ConfigError
from paceline.core.files import human_bytes
from paceline.core.formatting import counted, short_duration

if TYPE_CHECKING:
    from paceline.doctor.links import PairRecord
    from paceline.doctor.run import DoctorOptions, DoctorReport
    from paceline.launch.passes.host_checks import CheckResult


_MAX_RANKS = 64
_PLACEHOLDER_CONFIG = ("model=builtin:qwen2-tiny", "dataset=builtin:python-docs")


def add_arguments(parser: OptionParser) -> None:
    add_config(parser)
    parser.add_option(
        "--ranks",
        Integer(1, _MAX_RANKS),
        "N",
        "number of ranks (default: as many as a run with this config has)",
    )
    parser.example = "paceline doctor --ranks 2"


def run(args: Namespace) -> int:
    """Check, measure and print. Exit code 1: a run would fail."""
    options = make_options(args)
    from paceline.doctor.run import doctor

    result = doctor(options)
    if result.report is not None:
        print_report(args, result.report, partial(report_table, result.checks))
    return result.exit_code


def make_options(args: Namespace) -> DoctorOptions:
    """Load the config, or a placeholder if none is named.

    Raises:
        ConfigError: the config is invalid, or sets another number of ranks.
    """
    from paceline.config.load import load_config

    path, overrides = config_and_overrides(args)
    has_config = path is not None or any(
        not override.lstrip("-").startswith("parallel.") for override in overrides
    )
    loaded = load_config(path, [*([] if has_config else _PLACEHOLDER_CONFIG), *overrides])
    num_gpus = loaded.config.parallel.num_gpus
    if args.ranks is not None and num_gpus not in ("auto", args.ranks):
        raise ConfigError(
            "`--ranks {rank_list}` contradicts `parallel.num_gpus: {num_gpus}`",
            code="ranks-contradict-config",
            fix="remove one of them",
            rank_list=args.ranks,
            num_gpus=num_gpus,
        )
    from paceline.doctor.run import DoctorOptions

    return DoctorOptions(loaded, has_config, args.ranks)


#: Only the slowest links are shown.
_MAX_LINKS = 8


def report_table(checks: list[CheckResult], report: DoctorReport) -> Group:
    """Return the checks, the slowest links, and the verdict."""
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


def _mark(check: CheckResult) -> Text:
    if check.ok:
        return Text("ok", style="green")
    return Text("FAIL", style="bold red") if check.fatal else Text("warn", style="yellow")


def _link_lines(links: list[PairRecord]) -> list[Text]:
    if len(links) < 2:
        return []
    slowest = sorted(links, key=lambda link: link["bandwidth_bytes_s"])[:_MAX_LINKS]
    lines = []
    for link in slowest:
        rate = f"{human_bytes(link['bandwidth_bytes_s'])}/s"
        latency = short_duration(link["latency_s"])
        lines.append(Text(f"  rank {link['from']} ↔ rank {link['to']}  {latency:>9}  {rate:>12}"))
    if len(links) > _MAX_LINKS:
        lines.append(Text(f"  and {len(links) - _MAX_LINKS} faster links (see --json)"))
    return lines


def _verdict(checks: list[CheckResult]) -> str:
    fatal = [check.name for check in checks if check.fatal]
    warnings = [check.name for check in checks if not check.ok and not check.fatal]
    tail = f"; warnings: {', '.join(warnings)}" if warnings else ""
    if fatal:
        return f"\na run would fail: {', '.join(fatal)}{tail}"
    return f"\n{counted(len(checks), 'check')}, no errors{tail}"
