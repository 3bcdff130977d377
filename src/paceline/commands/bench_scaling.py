"""`paceline bench scaling`: measure the efficiency of several numbers of ranks."""

from __future__ import annotations

import time
from argparse import Namespace
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from paceline.commands.options import (
    Choice,
    CommaList,
    Integer,
    OptionParser,
    OutputFile,
    add_config,
    load_job_config,
)
from paceline.commands.reports import print_report, write_output
from paceline.core import formatting
from paceline.core.errors import EXIT_DONE

if TYPE_CHECKING:
    from paceline.bench.scaling import ScalingOptions, ScalingReport
    from paceline.config.load import Loaded
    from paceline.train.run_spec import TrainResult

_MAX_RANKS = 64
#: Number of measured steps of a run, and seconds that they should take if the number is open.
MIN_STEPS, MEASURED_S = 10, 3.0
#: The config if none is named.
BUILTIN = ("model=builtin:qwen2-tiny", "dataset=builtin:python-docs", "max_length=256")


def add_arguments(parser: OptionParser) -> None:
    add_config(parser)
    parser.add_option(
        "--ranks", CommaList(Integer(1, _MAX_RANKS)), "N,...", "numbers of ranks", default="1,2,4"
    )
    parser.add_option(
        "--scaling",
        CommaList(Choice(("weak", "strong"))),
        "KIND,...",
        "weak: the batch of each rank stays the same; strong: the global batch does",
        default="weak,strong",
    )
    add_run_options(parser, repeats=3, steps=MIN_STEPS)
    parser.add_option(
        "--predict",
        CommaList(Integer(2, 1 << 20)),
        "N,...",
        "numbers of ranks to predict (default: the next three powers of two)",
    )
    parser.add_option(
        "--output", OutputFile("an HTML file"), "FILE", "HTML page with charts to write"
    )
    parser.example = "paceline bench scaling examples/demo.yaml --ranks 1,2 --output scaling.html"


def add_run_options(parser: OptionParser, *, repeats: int, steps: int | None) -> None:
    """Add the options that set the number and the length of the runs. Without a default number of
    steps, they are as many as :data:`MEASURED_S` seconds take."""
    parser.add_option(
        "--steps",
        Integer(2),
        "N",
        "measured steps of each run"
        + ("" if steps else f" (default: for {MEASURED_S:.0f} s, at least {MIN_STEPS})"),
        default=steps,
    )
    parser.add_option("--warm-up", Integer(1), "N", "steps before them", default=3)
    parser.add_option("--repeats", Integer(1), "N", "runs of each case", default=repeats)


def run(args: Namespace) -> int:
    """Measure, print the table, and write the page."""
    from paceline.bench.scaling import measure_scaling
    from paceline.bench.scaling_page import render

    report = measure_scaling(load_job_config(args, BUILTIN), make_options(args), train)
    if args.output is not None:
        write_output(args.output, render(report))
    print_report(args, report, scaling_tables)
    return EXIT_DONE


def make_options(args: Namespace) -> ScalingOptions:
    from paceline.bench.scaling import ScalingOptions
    from paceline.bench.short_runs import RunLength

    return ScalingOptions(
        ranks=tuple(sorted(args.ranks)),
        kinds=args.scaling,
        length=RunLength(args.steps, args.warm_up),
        repeats=args.repeats,
        predict=tuple(sorted(args.predict or ())),
    )


def train(loaded: Loaded) -> TrainResult:
    """Train as `paceline sft` does, without saving the model."""
    from paceline.api import run as run_training

    return run_training(loaded, time.time(), saves_state=False)


def scaling_tables(report: ScalingReport) -> Group:
    """Return the measured figures and the predictions."""
    from paceline.bench.scaling_text import PARTS, interval_text, notes, shares_of

    measured = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    names = ("scaling", "ranks", "step", "speedup", "efficiency", "95 % interval")
    for name in (*names, *PARTS):
        measured.add_column(name, justify="left" if name == "scaling" else "right")
    for row in report["rows"]:
        share = shares_of(row["parts"])
        measured.add_row(
            row["scaling"],
            f"{row['ranks']}{' *' if row['oversubscribed'] else ''}",
            formatting.short_duration(row["step_time_s"]),
            formatting.UNKNOWN if row["speedup"] is None else f"{row['speedup']:.2f}",
            formatting.percent(row["efficiency"]),
            interval_text(row["efficiency_interval"]),
            *(formatting.percent(value) for value in share),
        )
    return Group(measured, *(Text(line, style="dim") for line in notes(report)), *_fit(report))


def _fit(report: ScalingReport) -> list[Text | Table]:
    from paceline.bench.scaling_text import fit_notes, interval_text

    fit, lines = report["fit"], [Text(line, style="dim") for line in fit_notes(report)]
    if fit is None:
        return [*lines]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("predicted", "ranks", "step", "speedup", "efficiency", "over the repeats"):
        table.add_column(name, justify="left" if name == "predicted" else "right")
    for row in fit["predictions"]:
        table.add_row(
            row["scaling"],
            str(row["ranks"]),
            formatting.short_duration(row["step_time_s"]),
            f"{row['speedup']:.2f}",
            formatting.percent(row["efficiency"]),
            interval_text(row["efficiency_interval"]),
        )
    return [Text(), table, *lines]
