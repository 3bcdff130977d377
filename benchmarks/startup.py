"""Record what `paceline sft` does from the command to its first step, and what it imports.

python benchmarks/startup.py [--rounds N] [--cached] [--model CONFIG.json] [--json] [--output FILE]
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import common
import run

HOOKS = Path(__file__).resolve().parent / "startup_hooks"
STEPS = 2
#: Packages and calls below this time are left out of the tables; the JSON file has all of them.
MIN_S = 0.02


@dataclass(frozen=True)
class Timeline:
    """The records of one run. Times are in seconds since the command was started.

    Args:
        processes: by role (launcher, fork server, rank 0, …) when the process began to run Python,
            and the calls in it.
        imports: by role, the packages that were imported.
    """

    first_step_s: float
    processes: dict[str, dict[str, Any]]
    imports: dict[str, list[dict[str, Any]]]


def main() -> int:
    args = _arguments()
    common.PER_DEVICE = args.samples_per_device
    signal.signal(signal.SIGTERM, run._on_sigterm)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        work = common.make_work(Path(folder), STEPS, config=args.model)
        model = run.shown_model(work)
        timelines = []
        try:
            for number in range(args.rounds + 1):
                timeline = measure(work, keep_tokens=args.cached and number > 0)
                label = f"round {number}" if number else "warm-up"
                run.log_line(f"{label:<8} first step {timeline.first_step_s:5.2f} s")
                if number > 0:
                    timelines.append(timeline)
        except common.BenchmarkFailed as error:
            run.log_line(f"error: {error}")
            return 1
    timelines.sort(key=lambda timeline: timeline.first_step_s)
    middle = timelines[(len(timelines) - 1) // 2]
    result = {
        "date": date.today().isoformat(),
        "machine": run.describe_machine(),
        "model": model,
        "samples_per_device": common.PER_DEVICE,
        "rounds_first_step_s": [timeline.first_step_s for timeline in timelines],
        "has_token_cache": args.cached,
        "first_step_s": middle.first_step_s,
        "processes": middle.processes,
        "imports": middle.imports,
    }
    return run.report_results(args, result, as_markdown(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs after a warm-up (default 3)")
    parser.add_argument("--cached", action="store_true", help="keep the token cache between runs")
    run.add_work_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--output", type=Path, help="write FILE.md and FILE.json")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("expected --rounds of at least 1")
    return args


def measure(work: common.Work, keep_tokens: bool = False) -> Timeline:
    """Run the command once with the hooks, and return its timeline."""
    trace = work.folder / "trace"
    shutil.rmtree(trace, ignore_errors=True)
    trace.mkdir()
    with _hooks(trace):
        measurement = common.run_paceline(work, keep_tokens=keep_tokens)
    records = {
        int(file.stem): [json.loads(line) for line in file.read_text().splitlines()]
        for file in trace.glob("*.jsonl")
    }
    started_at = measurement.started_at
    processes, imports = {}, {}
    for pid, role in sorted(_roles(records).items(), key=lambda item: item[1]):
        calls = [record for record in records[pid] if "call" in record]
        calls.sort(key=lambda call: call["start"])
        for number, call in enumerate([call for call in calls if call["call"] == "step"], 1):
            call["call"] = f"step {number}"
        processes[role] = {
            "python_s": next(
                (record["python"] - started_at for record in records[pid] if "python" in record),
                None,
            ),
            "calls": [
                {
                    "call": call["call"],
                    "start_s": call["start"] - started_at,
                    "seconds": call["end"] - call["start"],
                    "depth": call["depth"],
                }
                for call in calls
            ],
        }
        imports[role] = packages([record for record in records[pid] if "module" in record])
    return Timeline(measurement.time_to_first_step_s, processes, imports)


@contextmanager
def _hooks(trace: Path) -> Iterator[None]:
    """Set the environment in which Python imports `startup_hooks/sitecustomize.py`."""
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HOOKS), path]))
    os.environ["PACELINE_STARTUP_TRACE"] = str(trace)
    try:
        yield
    finally:
        del os.environ["PACELINE_STARTUP_TRACE"], os.environ["PYTHONPATH"]
        if path is not None:
            os.environ["PYTHONPATH"] = path


def _roles(records: dict[int, list[dict[str, Any]]]) -> dict[int, str]:
    """Return the role of each process that belongs to the run. Ranks are forked from the fork
    server, so they do not start Python."""
    roles, num_ranks = {}, 0
    for pid, lines in sorted(records.items()):
        calls = {line.get("call") for line in lines}
        if "read and check the config" in calls:
            roles[pid] = "launcher"
        elif "process group" in calls:
            roles[pid] = f"rank process {num_ranks}"
            num_ranks += 1
        elif any(line.get("module") == "paceline.launch.ranks.worker" for line in lines):
            roles[pid] = "fork server"
    return roles


def packages(modules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sum the time of modules by package, without the modules of other packages that they import.
    Return the packages from the slowest to the fastest, each with what imported it first."""
    totals: dict[str, dict[str, Any]] = defaultdict(
        lambda: {"modules": 0, "seconds": 0.0, "imported_by": None}
    )
    for record in modules:
        package = record["module"].partition(".")[0]
        total = totals[package]
        total["modules"] += 1
        total["seconds"] += record["seconds"]
        importer = record["importer"]
        if importer is not None and importer.partition(".")[0] != package:
            total["imported_by"] = total["imported_by"] or importer
    rows = [{"package": name, **total} for name, total in totals.items()]
    return sorted(rows, key=lambda row: row["seconds"], reverse=True)


def as_markdown(result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [
        f"# From the command to the first step: {result['date']}",
        "",
        f"{machine['cores']} cores ({machine['architecture']}), {machine['memory_gib']} GiB; Python"
        f" {machine['python']}, torch {machine['torch']}, transformers {machine['transformers']},"
        f" peft {machine['peft']}. `paceline sft` with LoRA on {result['model']}, two CPU"
        f" ranks (`ddp`) × {result['samples_per_device']} samples,"
        f" {'with' if result['has_token_cache'] else 'without'} a token cache. First step"
        f" after {result['first_step_s']:.2f} s, the middle one of {_rounds(result)}.",
        "",
        "| process | at (s) | seconds | |",
        "|---|---:|---:|---|",
    ]
    for role, process in result["processes"].items():
        if process["python_s"] is not None:
            lines.append(f"| {role} | {process['python_s']:.2f} | | Python is running |")
        for call in process["calls"]:
            if call["seconds"] >= MIN_S:
                indent = "&nbsp;&nbsp;" * call["depth"]
                lines.append(
                    f"| {role} | {call['start_s']:.2f} | {call['seconds']:.2f} |"
                    f" {indent}{call['call']} |"
                )
    lines += [
        "",
        "Time to execute modules, without the modules of other packages that they import:",
        "",
        "| process | package | modules | seconds | first imported by |",
        "|---|---|---:|---:|---|",
    ]
    for role, rows in result["imports"].items():
        lines += [
            f"| {role} | {row['package']} | {row['modules']} | {row['seconds']:.2f} |"
            f" {row['imported_by'] or ''} |"
            for row in rows
            if row["seconds"] >= MIN_S
        ]
    return "\n".join(lines)


def _rounds(result: dict[str, Any]) -> str:
    return " / ".join(f"{seconds:.2f}" for seconds in result["rounds_first_step_s"]) + " s"


if __name__ == "__main__":
    sys.exit(main())
