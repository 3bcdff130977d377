"""`paceline verify`: certify that the parallel modes agree and cost what was estimated."""

from argparse import Namespace

from rich.console import Group
from rich.table import Table
from rich.text import Text as RichText

from paceline.commands.options import (
    AnyPath,
    AnyText,
    Integer,
    OptionParser,
    add_config,
    load_fitted_config,
)
from paceline.commands.reports import print_report
from paceline.core import formatting
from paceline.observe.report.certificate import Certificate, rows, summary

_COLORS = {"ok": "green", "not ok": "bold red", "refused": "yellow"}


def add_arguments(parser: OptionParser) -> None:
    add_config(parser)
    parser.add_option(
        "--modes",
        AnyText("comma-separated names, all, or hybrid"),
        "NAME,...",
        "parallel modes (default: all that this config supports)",
    )
    parser.add_option(
        "--world-size",
        Integer(2),
        "N",
        "number of ranks (default: number of GPUs, or 4 on the CPU)",
    )
    parser.add_option("--steps", Integer(1), "N", "number of steps of each mode", default=20)
    parser.add_option(
        "--output",
        AnyPath("a folder, also of a finished run"),
        "DIR",
        "folder to write verify.json and verify.html to",
    )
    parser.example = "paceline verify examples/demo.yaml --modes ddp,zero3 --world-size 2"


def run(args: Namespace) -> int:
    """Print the certificate. Exit code 1: a mode exceeded a bound or failed; 2: a requested mode is
    not supported."""
    from paceline.verify.run import VerifyOptions, verify

    options = VerifyOptions(args.modes, args.world_size, args.steps, args.output)
    result = verify(load_fitted_config(args), options)
    if result.certificate is not None:
        print_report(args, result.certificate, certificate_table)
    return result.exit_code


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
        table.add_row(name, RichText(mode["verdict"], style=style), *figures)
        if mode["reason"]:
            reason = formatting.clean(mode["reason"])
            reasons.append(RichText(f"{mode['mode']}: {reason}", style=style))
    return Group(table, *reasons, RichText(summary(certificate)))
