"""Measure Paceline against hand-written loops and the transformers Trainer on the same work, and
print the ratios.

python benchmarks/run.py [--rounds N] [--steps N] [--only NAME,NAME] [--json] [--output FILE]
"""

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import common
import numpy as np
from common import BenchmarkFailed, Measured, Work

CONTENDERS: dict[str, Callable[[Work], Measured]] = {
    "paceline": common.run_paceline,
    "handwritten": lambda work: common.run_rival(work, "handwritten_ddp_peft"),
    "packed": lambda work: common.run_rival(work, "handwritten_packed"),
    "trainer": lambda work: common.run_rival(work, "hf_trainer"),
}
TITLES = {
    "paceline": "Paceline",
    "handwritten": "hand-written DDP + peft",
    "packed": "hand-written, packed",
    "trainer": "transformers Trainer",
}
Runs = dict[str, list[Measured]]


@dataclass(frozen=True)
class Goal:
    """A ratio of medians, Paceline's figure over the rival's, and the bound it should keep."""

    what: str
    figure: Callable[[Measured], float]
    rival: str
    at_most: float | None = None
    at_least: float | None = None

    def met(self, ratio: float) -> bool:
        return (
            ratio <= self.at_most if self.at_most is not None else ratio >= (self.at_least or 0.0)
        )

    @property
    def bound(self) -> str:
        return f"≤ {self.at_most}" if self.at_most is not None else f"≥ {self.at_least}"


def first_step(measured: Measured) -> float:
    return measured.time_to_first_step_s


def rate(measured: Measured) -> float:
    return measured.samples_per_second


def peak(measured: Measured) -> float:
    return float(max(measured.peak_memory_bytes))


GOALS = [
    Goal("time to first step", first_step, "handwritten", at_most=0.8),
    Goal("time to first step", first_step, "trainer", at_most=0.8),
    Goal("samples per second", rate, "handwritten", at_least=1.8),
    Goal("samples per second", rate, "trainer", at_least=1.8),
    Goal("samples per second", rate, "packed", at_least=0.98),
    Goal("peak memory of a rank", peak, "handwritten", at_most=1.0),
]
MAX_LOSS_DIFFERENCE = 0.01
WARM_UP_STEPS = 2


def main() -> int:
    args = _arguments()
    signal.signal(signal.SIGTERM, _on_sigterm)
    names = [name for name in CONTENDERS if name in args.only]
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        work = common.make_work(Path(folder), args.steps)
        for line in describe(work):
            log_line(line)
        runs: Runs = {name: [] for name in names}
        try:
            for number in range(args.rounds + 1):
                # A short first round warms the file cache and is thrown away.
                this = work if number else replace(work, batches=work.batches[:WARM_UP_STEPS])
                for name in names:
                    measured = CONTENDERS[name](this)
                    log_line(_progress(number, name, measured))
                    if number > 0:
                        runs[name].append(measured)
        except BenchmarkFailed as error:
            log_line(f"error: {error}")
            return 1
        result = summary(work, runs, args.rounds)
    return report_results(args, result, as_markdown(result))


def _on_sigterm(*_: object) -> None:
    log_line("SIGTERM: the running contender was stopped, nothing was written")
    sys.exit(143)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often each contender is measured (default 3)"
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="training steps of a run (default 20)"
    )
    parser.add_argument(
        "--only", type=_names, default=list(CONTENDERS), help="some of: " + ",".join(CONTENDERS)
    )
    parser.add_argument(
        "--json", action="store_true", help="print everything measured as one JSON value"
    )
    parser.add_argument(
        "--output", type=Path, help="write FILE.md (the tables) and FILE.json (everything measured)"
    )
    args = parser.parse_args()
    if args.rounds < 1 or args.steps < 2:
        parser.error(
            "--rounds is at least 1, --steps at least 2: one step has no rate after the first"
        )
    return args


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; allowed: {', '.join(CONTENDERS)}")
    return names


def log_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _progress(number: int, name: str, measured: Measured) -> str:
    label = f"round {number}" if number else "warm-up"
    return (
        f"{label:<8} {name:<12} first step {measured.time_to_first_step_s:5.2f} s  "
        f" {measured.samples_per_second:6.2f} samples/s   eval loss {measured.eval_loss:.4f}   peak"
        f" {peak(measured) / 2**20:6.0f} MiB"
    )


def describe(work: Work) -> list[str]:
    low, first, half, third, high = (
        int(size) for size in np.percentile(work.lengths, [0, 25, 50, 75, 100])
    )
    return [
        (
            f"work: {work.steps} steps of {work.global_batch} chats ({common.WORLD_SIZE} CPU ranks"
            f" × {common.PER_DEVICE}), LoRA rank {common.LORA_RANK} on {common.MODEL}, float32"
        ),
        (
            f"data: {len(work.lengths)} chats of {low} to {high} tokens (quartiles {first}, {half},"
            f" {third}); padding each to the longest of {common.PER_DEVICE} makes"
            f" {work.padding_factor():.2f} times the positions"
        ),
    ]


# -- results


def summary(work: Work, runs: Runs, rounds: int) -> dict[str, Any]:
    """Medians, ratios, checks that the work was the same, and every run behind them."""
    medians = {name: _medians(measured) for name, measured in runs.items()}
    goals = []
    for goal in GOALS:
        if "paceline" in runs and goal.rival in runs:
            ours, theirs = (
                [goal.figure(run) for run in runs[name]] for name in ("paceline", goal.rival)
            )
            ratio = median(ours) / median(theirs)
            spread = sorted(our / their for our, their in zip(ours, theirs, strict=True))
            goals.append(
                {
                    "what": goal.what,
                    "rival": goal.rival,
                    "ratio": ratio,
                    "lowest": spread[0],
                    "highest": spread[-1],
                    "bound": goal.bound,
                    "met": goal.met(ratio),
                }
            )
    for name in runs:
        if name != "paceline" and "paceline" in runs:
            difference = abs(medians["paceline"]["eval_loss"] / medians[name]["eval_loss"] - 1)
            goals.append(
                {
                    "what": "final evaluation loss, relative difference",
                    "rival": name,
                    "ratio": difference,
                    "lowest": difference,
                    "highest": difference,
                    "bound": f"≤ {MAX_LOSS_DIFFERENCE}",
                    "met": difference <= MAX_LOSS_DIFFERENCE,
                }
            )
    return {
        "date": date.today().isoformat(),
        "machine": _machine(),
        "work": describe(work),
        "rounds": rounds,
        "medians": medians,
        "goals": goals,
        "same_work": _same_work(work, runs),
        "runs": {name: [asdict(run) for run in measured] for name, measured in runs.items()},
    }


def _medians(measured: list[Measured]) -> dict[str, float]:
    return {
        "time_to_first_step_s": median(map(first_step, measured)),
        "samples_per_second": median(map(rate, measured)),
        "peak_memory_bytes": median(map(peak, measured)),
        "eval_loss": median(run.eval_loss for run in measured),
    }


def _same_work(work: Work, runs: Runs) -> dict[str, bool]:
    """Whether each contender saw the tokens of the plan in every step, and all evaluated over the
    same number of labels."""
    every = [run for measured in runs.values() for run in measured]
    return {
        "tokens_of_every_step": all(run.tokens == work.batch_lengths for run in every),
        "labels_of_the_held_out_set": len({run.eval_count for run in every}) == 1,
    }


def _machine() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    versions = {name: version(name) for name in ("torch", "transformers", "peft", "accelerate")}
    return {
        "cores": cores,
        "architecture": platform.machine(),
        "memory_gib": round(memory / 2**30),
        "python": platform.python_version(),
        **versions,
    }


def as_markdown(result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [
        f"# Two CPU ranks, LoRA on ragged chats: {result['date']}",
        "",
        f"{machine['cores']} cores ({machine['architecture']}), {machine['memory_gib']} GiB; Python"
        f" {machine['python']}, "
        + ", ".join(
            f"{name} {machine[name]}" for name in ("torch", "transformers", "peft", "accelerate")
        )
        + f". Medians of {result['rounds']} alternating rounds after one warm-up.",
        "",
        *(f"- {line}" for line in result["work"]),
        (
            "- every step saw the planned tokens:"
            f" {_yes(result['same_work']['tokens_of_every_step'])}; same held-out labels:"
            f" {_yes(result['same_work']['labels_of_the_held_out_set'])}"
        ),
        "",
        "| | first step (s) | samples/s after it | final eval loss | peak of a rank (MiB) |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, line in result["medians"].items():
        lines.append(
            f"| {TITLES[name]} | {line['time_to_first_step_s']:.2f} |"
            f" {line['samples_per_second']:.2f} | {line['eval_loss']:.4f} |"
            f" {line['peak_memory_bytes'] / 2**20:.0f} |"
        )
    lines += [
        "",
        "| Paceline against | what | ratio | lowest to highest of a round | goal | |",
        "|---|---|---:|---:|---:|---|",
    ]
    for goal in result["goals"]:
        lines.append(
            f"| {TITLES[goal['rival']]} | {goal['what']} | {goal['ratio']:.4f} |"
            f" {goal['lowest']:.4f} to {goal['highest']:.4f} | {goal['bound']} |"
            f" {'met' if goal['met'] else 'missed'} |"
        )
    return "\n".join(lines)


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def report_results(args: argparse.Namespace, result: dict[str, Any], text: str) -> int:
    """Write and print a result as ``--output`` and ``--json`` ask for; the exit code."""
    if args.output is not None:
        for path in write_results(args.output, result, text):
            log_line(f"wrote {path}")
    print(json.dumps(result, indent=2) if args.json else text)
    return 0


def write_results(path: Path, result: dict[str, Any], text: str) -> list[Path]:
    base = path.with_suffix("") if path.suffix in (".md", ".json") else path
    base.parent.mkdir(parents=True, exist_ok=True)
    written = [base.with_name(base.name + ".md"), base.with_name(base.name + ".json")]
    written[0].write_text(text + "\n", encoding="utf-8")
    written[1].write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return written


if __name__ == "__main__":
    sys.exit(main())
