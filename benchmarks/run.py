"""Compare Paceline with hand-written loops and with the transformers Trainer on the same work.

python benchmarks/run.py [--rounds N] [--steps N] [--only NAME,NAME] [--model CONFIG.json] [--json]
    [--output FILE]
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
import torch
from common import BenchmarkFailed, Measurement, Work

CONTENDERS: dict[str, Callable[[Work], Measurement]] = {
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
Runs = dict[str, list[Measurement]]


@dataclass(frozen=True)
class Goal:
    """A bound on a ratio of medians: Paceline's value divided by the rival's."""

    quantity: str
    value: Callable[[Measurement], float]
    rival: str
    at_most: float | None = None
    at_least: float | None = None

    def is_met(self, ratio: float) -> bool:
        return (
            ratio <= self.at_most if self.at_most is not None else ratio >= (self.at_least or 0.0)
        )

    @property
    def bound(self) -> str:
        return f"≤ {self.at_most}" if self.at_most is not None else f"≥ {self.at_least}"


def first_step_s(measurement: Measurement) -> float:
    return measurement.time_to_first_step_s


def samples_per_second(measurement: Measurement) -> float:
    return measurement.samples_per_second


def peak_memory_bytes(measurement: Measurement) -> float:
    return float(max(measurement.peak_memory_bytes))


GOALS = [
    Goal("time to first step", first_step_s, "handwritten", at_most=0.75),
    Goal("time to first step", first_step_s, "trainer", at_most=0.75),
    Goal("samples per second", samples_per_second, "handwritten", at_least=2.5),
    Goal("samples per second", samples_per_second, "trainer", at_least=2.5),
    Goal("samples per second", samples_per_second, "packed", at_least=0.98),
    Goal("peak memory of a rank", peak_memory_bytes, "handwritten", at_most=1.0),
]
MAX_LOSS_DIFFERENCE = 0.01
WARM_UP_STEPS = 2


def main() -> int:
    args = _arguments()
    common.PER_DEVICE = args.samples_per_device
    common.DEVICE, common.WORLD_SIZE = args.device, args.ranks
    signal.signal(signal.SIGTERM, _on_sigterm)
    names = [name for name in CONTENDERS if name in args.only]
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        work = common.make_work(Path(folder), args.steps, config=args.model)
        for line in describe(work):
            log_line(line)
        runs: Runs = {name: [] for name in names}
        try:
            for number in range(args.rounds + 1):
                # A short first round warms up the file cache and is discarded.
                round_work = work if number else replace(work, batches=work.batches[:WARM_UP_STEPS])
                for name in names:
                    measurement = CONTENDERS[name](round_work)
                    log_line(_progress(number, name, measurement))
                    if number > 0:
                        runs[name].append(measurement)
        except BenchmarkFailed as error:
            log_line(f"error: {error}")
            return 1
        result = summarize(work, runs, args.rounds)
    return report_results(args, result, as_markdown(result))


def _on_sigterm(*_: object) -> None:
    log_line("SIGTERM: stopped the running contender; nothing was written")
    sys.exit(143)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender (default 3)")
    parser.add_argument("--steps", type=int, default=20, help="training steps per run (default 20)")
    parser.add_argument(
        "--only",
        type=_names,
        default=list(CONTENDERS),
        help="comma-separated contenders: " + ",".join(CONTENDERS),
    )
    add_work_arguments(parser)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="type of device (default cpu)"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=common.WORLD_SIZE,
        help=f"ranks, each on a device of its own (default {common.WORLD_SIZE})",
    )
    parser.add_argument("--json", action="store_true", help="print all measurements as JSON")
    parser.add_argument(
        "--output", type=Path, help="write FILE.md (the tables) and FILE.json (all measurements)"
    )
    args = parser.parse_args()
    if args.rounds < 1 or args.steps < 2:
        parser.error(
            "expected --rounds of at least 1 and --steps of at least 2, because the throughput"
            " excludes the first step"
        )
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        parser.error(
            f"--device cuda --ranks {args.ranks} needs one GPU per rank, and torch"
            f" {torch.__version__} finds {torch.cuda.device_count()}: choose fewer --ranks or"
            " --device cpu"
        )
    return args


def add_work_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose the work: the model and the size of micro-batches."""
    parser.add_argument(
        "--model", type=Path, help="config.json of a model, trained from random weights"
    )
    parser.add_argument(
        "--samples-per-device",
        type=int,
        default=common.PER_DEVICE,
        help=f"samples of a micro-batch (default {common.PER_DEVICE})",
    )


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown contenders: {', '.join(unknown)}. Choose from: {', '.join(CONTENDERS)}"
        )
    return names


def log_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _progress(number: int, name: str, measurement: Measurement) -> str:
    label = f"round {number}" if number else "warm-up"
    return (
        f"{label:<8} {name:<12} first step {measurement.time_to_first_step_s:5.2f} s  "
        f" {measurement.samples_per_second:6.2f} samples/s   eval loss"
        f" {measurement.eval_loss:.4f}   peak"
        f" {peak_memory_bytes(measurement) / 2**20:6.0f} MiB"
    )


def describe(work: Work) -> list[str]:
    minimum, first, second, third, maximum = (
        int(size) for size in np.percentile(work.lengths, [0, 25, 50, 75, 100])
    )
    return [
        (
            f"work: {work.steps} steps of {work.global_batch} chats ({shown_ranks()}"
            f" × {common.PER_DEVICE}), LoRA rank {common.LORA_RANK} on {shown_model(work)},"
            f" {'float32' if common.DEVICE == 'cpu' else 'bfloat16'}"
        ),
        (
            f"data: {len(work.lengths)} chats of {minimum} to {maximum} tokens (quartiles {first},"
            f" {second}, {third}); padding to the longest of {common.PER_DEVICE} samples gives"
            f" {work.padding_factor():.2f} times as many positions"
        ),
    ]


# -- results


def summarize(work: Work, runs: Runs, rounds: int) -> dict[str, Any]:
    """Return medians, ratios, whether all contenders did the same work, and all measurements."""
    medians = {name: _medians(measurements) for name, measurements in runs.items()}
    goals = []
    for goal in GOALS:
        if "paceline" in runs and goal.rival in runs:
            values, rival_values = (
                [goal.value(run) for run in runs[name]] for name in ("paceline", goal.rival)
            )
            ratio = median(values) / median(rival_values)
            ratios = sorted(
                value / rival_value for value, rival_value in zip(values, rival_values, strict=True)
            )
            goals.append(
                {
                    "what": goal.quantity,
                    "rival": goal.rival,
                    "ratio": ratio,
                    "lowest": ratios[0],
                    "highest": ratios[-1],
                    "bound": goal.bound,
                    "met": goal.is_met(ratio),
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
        "machine": describe_machine(),
        "ranks": shown_ranks(),
        "work": describe(work),
        "rounds": rounds,
        "medians": medians,
        "goals": goals,
        "same_work": _same_work(work, runs),
        "runs": {
            name: [asdict(run) for run in measurements] for name, measurements in runs.items()
        },
    }


def _medians(measurements: list[Measurement]) -> dict[str, float]:
    return {
        "time_to_first_step_s": median(map(first_step_s, measurements)),
        "samples_per_second": median(map(samples_per_second, measurements)),
        "peak_memory_bytes": median(map(peak_memory_bytes, measurements)),
        "eval_loss": median(run.eval_loss for run in measurements),
    }


def _same_work(work: Work, runs: Runs) -> dict[str, bool]:
    """Return whether all contenders trained on the planned number of tokens in each step, and
    evaluated the same number of labels."""
    all_runs = [run for measurements in runs.values() for run in measurements]
    return {
        "tokens_of_every_step": all(run.tokens == work.batch_lengths for run in all_runs),
        "labels_of_the_held_out_set": len({run.eval_count for run in all_runs}) == 1,
    }


def describe_machine() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    versions = {name: version(name) for name in ("torch", "transformers", "peft", "accelerate")}
    return {
        "device": device_name(),
        "cores": cores,
        "architecture": platform.machine(),
        "memory_gib": round(memory / 2**30),
        "python": platform.python_version(),
        **versions,
    }


def device_name() -> str:
    """Return the name of the GPU with a comma, or "" on a CPU."""
    if common.DEVICE == "cpu":
        return ""
    import torch

    return f"{torch.cuda.get_device_name()}, "


def as_markdown(result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [
        f"# LoRA fine-tuning on {result['ranks']}: {result['date']}",
        "",
        f"{machine['device']}{machine['cores']} cores ({machine['architecture']}),"
        f" {machine['memory_gib']} GiB; Python"
        f" {machine['python']}, "
        + ", ".join(
            f"{name} {machine[name]}" for name in ("torch", "transformers", "peft", "accelerate")
        )
        + f". Medians of {result['rounds']} alternating rounds after a warm-up round.",
        "",
        *(f"- {line}" for line in result["work"]),
        (
            "- planned number of tokens in every step:"
            f" {_yes_or_no(result['same_work']['tokens_of_every_step'])}; same number of"
            " held-out labels:"
            f" {_yes_or_no(result['same_work']['labels_of_the_held_out_set'])}"
        ),
        "",
        "| | first step (s) | samples/s | final eval loss | peak memory of a rank (MiB) |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, medians in result["medians"].items():
        lines.append(
            f"| {TITLES[name]} | {medians['time_to_first_step_s']:.2f} |"
            f" {medians['samples_per_second']:.2f} | {medians['eval_loss']:.4f} |"
            f" {medians['peak_memory_bytes'] / 2**20:.0f} |"
        )
    lines += [
        "",
        "| Paceline compared with | quantity | ratio | range over the rounds | goal | |",
        "|---|---|---:|---:|---:|---|",
    ]
    for goal in result["goals"]:
        lines.append(
            f"| {TITLES[goal['rival']]} | {goal['what']} | {goal['ratio']:.4f} |"
            f" {goal['lowest']:.4f} to {goal['highest']:.4f} | {goal['bound']} |"
            f" {'met' if goal['met'] else 'missed'} |"
        )
    return "\n".join(lines)


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "NO"


def shown_ranks() -> str:
    kind = "CPU" if common.DEVICE == "cpu" else "GPU"
    return f"{common.WORLD_SIZE} {kind} rank{'s' if common.WORLD_SIZE > 1 else ''}"


def shown_model(work: Work) -> str:
    if not Path(work.model).is_relative_to(work.folder / "model"):
        return common.MODEL
    size = sum(path.stat().st_size for path in Path(work.model).glob("*.safetensors"))
    return f"a model of {size / 2 / 1e9:.2f} B parameters (random weights, bfloat16 in the file)"


def report_results(args: argparse.Namespace, result: dict[str, Any], text: str) -> int:
    """Write and print a result according to ``--output`` and ``--json``, and return the exit
    code."""
    if args.output is not None:
        for path in write_results(args.output, result, text):
            log_line(f"wrote {path}")
    print(json.dumps(result, indent=2) if args.json else text)
    return 0


def write_results(path: Path, result: dict[str, Any], text: str) -> list[Path]:
    """Write ``path`` with the suffixes .md and .json, and return both paths."""
    base = path.with_suffix("") if path.suffix in (".md", ".json") else path
    base.parent.mkdir(parents=True, exist_ok=True)
    paths = [base.with_name(base.name + ".md"), base.with_name(base.name + ".json")]
    paths[0].write_text(text + "\n", encoding="utf-8")
    paths[1].write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return paths


if __name__ == "__main__":
    sys.exit(main())
