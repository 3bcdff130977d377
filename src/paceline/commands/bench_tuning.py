"""`paceline bench tuning`: measure what each setting gains, and write the tuned config."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from paceline.commands.bench_scaling import MEASURED_S, MIN_STEPS, add_run_options, train
from paceline.commands.options import (
    Choice,
    CommaList,
    Number,
    OptionParser,
    OutputFile,
    add_config,
    load_job_config,
)
from paceline.commands.reports import print_report, write_output
from paceline.core import formatting
from paceline.core.errors import EXIT_DONE

if TYPE_CHECKING:
    from paceline.bench.tuning import ClaimReport, TuningChangeReport, TuningOptions, TuningReport

_TECHNIQUES = (
    "precision",
    "checkpointing",
    "prefetch",
    "compression",
    "packing",
    "accumulation",
    "compile",
)
_COLORS = {"recommended": "green", "failed": "red", "unclear": "yellow"}


def add_arguments(parser: OptionParser) -> None:
    add_config(parser)
    parser.add_option(
        "--goal",
        Choice(("time", "memory")),
        "GOAL",
        "what the recommended changes improve",
        default="time",
    )
    parser.add_option(
        "--techniques",
        CommaList(Choice(_TECHNIQUES)),
        "NAME,...",
        "techniques to measure (default: all)",
    )
    parser.add_option(
        "--margin",
        Number("0 to below 1", (0, 1)),
        "SHARE",
        "smallest gain that counts, with its whole confidence interval",
        default=0.05,
    )
    parser.add_flag(
        "--keep-result",
        "leave out changes that change the trained weights by more than the order of sums",
    )
    add_run_options(parser, repeats=5, steps=None)
    parser.add_option(
        "--output",
        OutputFile("a YAML file"),
        "FILE",
        "tuned config to write (default: CONFIG.tuned.yaml)",
    )
    parser.example = "paceline bench tuning examples/demo.yaml"


def run(args: Namespace) -> int:
    """Measure, print the table and the recommendation, and write the tuned config."""
    from paceline.bench.tuned_config import check_path, default_path, tuned_text
    from paceline.bench.tuning import measure_tuning

    loaded = load_job_config(args)
    path = args.output or default_path(loaded)
    check_path(path)
    report = measure_tuning(loaded, make_options(args), train)
    text = tuned_text(loaded, report)
    if text is not None:
        write_output(path, text)
        report["tuned_config"] = str(path)
    print_report(args, report, tuning_tables)
    return EXIT_DONE


def make_options(args: Namespace) -> TuningOptions:
    from paceline.bench.short_runs import RunLength
    from paceline.bench.tuning import TuningOptions

    return TuningOptions(
        length=RunLength(args.steps or MIN_STEPS, args.warm_up),
        min_measured_s=0.0 if args.steps else MEASURED_S,
        rounds=args.repeats,
        margin=args.margin,
        goal=args.goal,
        keep_result=args.keep_result,
        techniques=args.techniques or (),
    )


def tuning_tables(report: TuningReport) -> Group:
    """Return the measured changes, the claims, and the recommendation."""
    baseline = report["baseline"]
    step, rate = baseline["step_time_s"], baseline["work_per_second"]
    head = (
        f"{report['model']}, {report['strategy']}, {formatting.ranks(report['world_size'])} on"
        f" {report['device']}, precision {report['precision']}:"
        f" {formatting.short_duration(step)} per step, {formatting.short_count(rate)}"
        f" {baseline['unit']}/s, peak memory {formatting.size(baseline['peak_memory_bytes'])}"
    )
    return Group(
        Text(head),
        Text(),
        _changes_table(report["changes"], baseline["planned_steps"]),
        *(
            Text(f"{change['name']} is {change['verdict']}: {change['reason']}")
            if change["verdict"] == "not supported"
            else Text(f"{change['name']} {change['verdict']}: {change['reason']}", style="red")
            for change in report["changes"]
            if change["reason"] is not None
        ),
        Text(
            "relative to the unchanged config, with 95 % intervals; result: same up to the order of"
            " sums, or changed, with the largest relative difference of a loss",
            style="dim",
        ),
        Text(),
        *_claim_lines(report["claims"]),
        Text(),
        *_recommendation(report),
    )


def _changes_table(changes: list[TuningChangeReport], planned_steps: int | None) -> Table:
    from paceline.bench.tuning_text import ratio_text, result_text, verdict_text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("change", "speed", "peak memory", "traffic", "result"):
        table.add_column(name, no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for change in changes:
        traffic = change["traffic_ratio"]
        table.add_row(
            change["name"],
            ratio_text(change, "speedup"),
            ratio_text(change, "memory"),
            formatting.UNKNOWN if traffic is None else f"{traffic:.2f} ×",
            result_text(change),
            Text(verdict_text(change, planned_steps), style=_COLORS.get(change["verdict"], "")),
        )
    return table


def _claim_lines(claims: list[ClaimReport]) -> list[Text]:
    from paceline.bench.tuning_text import measured_text

    lines = [Text("what is often said, and what was measured here:")]
    for claim in claims:
        source = f"    source: {claim['source']}, {claim['url']}: {claim['source_says']}"
        lines.append(Text(f"  {claim['claim']}: {measured_text(claim)}"))
        lines.append(Text(source, style="dim"))
    return lines


def _recommendation(report: TuningReport) -> list[Text]:
    from paceline.bench.tuning_text import ratio_text, result_text

    best = report["recommendation"]
    if best is None:
        return [Text("recommendation: no change; no gain is certain to exceed the margin")]
    lines = [
        Text(f"recommendation: {best['name']}", style="bold green"),
        Text(
            f"  speed {ratio_text(best, 'speedup')}, peak memory {ratio_text(best, 'memory')};"
            f" result: {result_text(best)}"
        ),
    ]
    if report["tuned_config"] is not None:
        lines.append(Text(f"  train with it: paceline sft {report['tuned_config']}"))
    return lines
