"""Measure the cost of monitoring, and the time that a run takes to recover from a killed rank.

python benchmarks/recovery.py [--steps N] [--rounds N] [--kills N] [--modes ddp,zero3] [--json]
[--output FILE]

The cost of the watchdog is measured within a run: all ranks switch it on and off every few steps
(``watched_task.py``), and each block of steps with it is compared with the adjacent block without
it. Two runs of the same work differ by several percent on most machines, which is more than the
expected cost. Two blocks often differ as well, so the mean over the pairs is trimmed by a fifth at
each end. The CPU time of the watchdog thread is reported too. The comparison of the replicas'
hashes takes place at a fixed interval; its cost is divided by the default interval.
"""

import argparse
import json
import random
import sys
import tempfile
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import common
from common import BenchmarkFailed, Work
from run import describe_machine, log_line, report_results

from paceline.config.schema.recovery import RecoveryConfig

TASK = Path(__file__).resolve().with_name("watched_task.py")
MAX_COST = 0.01  # share of a step
MAX_RECOVERY_RATIO = 1.5  # relative to the time to the first step of the run
BLOCK_STEPS, CHECK_INTERVAL_STEPS = 4, 40
PER_DEVICE, TOKENS = 2, 128
SAVE_STEPS = 10


def main() -> int:
    args = _arguments()
    common.PER_DEVICE, common.MAX_LENGTH = PER_DEVICE, TOKENS
    modes: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        work = common.make_work(Path(folder), args.steps, even_tokens=TOKENS)
        try:
            for mode in args.modes:
                runs = [measure_watchdog(work, mode) for _ in range(args.rounds)]
                measurements = {
                    "mode": mode,
                    **summarize_cost(runs),
                    **measure_recovery(work, mode, args.kills),
                }
                modes.append(measurements)
                log_line(
                    f"{mode:<8} cost {100 * measurements['cost']:+.2f} %; recovered in"
                    f" {median(measurements['recovered_s']):.1f} s"
                )
        except BenchmarkFailed as error:
            log_line(f"error: {error}")
            return 1
    result = {
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        "work": (
            f"{work.steps} steps of {work.global_batch} chats of {TOKENS} tokens"
            f" ({common.WORLD_SIZE} CPU ranks × {PER_DEVICE}), all weights of {common.MODEL},"
            f" float32; {args.rounds} runs per mode"
        ),
        "modes": modes,
    }
    return report_results(args, result, as_markdown(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="runs per mode for the cost of monitoring (default 2)"
    )
    parser.add_argument(
        "--steps", type=int, default=1000, help="training steps per run (default 1000)"
    )
    parser.add_argument(
        "--kills", type=int, default=5, help="number of killed ranks per mode (default 5)"
    )
    parser.add_argument(
        "--modes",
        type=lambda text: text.split(","),
        default=["ddp", "zero3"],
        help="comma-separated strategies (default ddp,zero3)",
    )
    parser.add_argument("--json", action="store_true", help="print all measurements as JSON")
    parser.add_argument(
        "--output", type=Path, help="write FILE.md (the table) and FILE.json (all measurements)"
    )
    return parser.parse_args()


def train(work: Work, mode: str, task: str, max_steps: int, **settings: Any) -> common.Measurement:
    """Train with a task class of ``watched_task.py``."""
    overrides = {
        "task": f"{TASK}:{task}",
        "parallel.mode": mode,
        "lora.enable": "false",
        "lora.rank": 8,
        "truncation_strategy": "truncate",
        "train_args.max_steps": max_steps,
        **settings,
    }
    return common.run_paceline(work, **overrides)


# -- cost of monitoring
def measure_watchdog(work: Work, mode: str) -> dict[str, Any]:
    """Train once, and return the records of :class:`watched_task.AlternatingWatchdog`."""
    file = work.folder / "watchdog.json"
    settings = {
        "recovery.replica_check_steps": CHECK_INTERVAL_STEPS,
        "task_args": json.dumps({"block": BLOCK_STEPS, "file": str(file)}),
    }
    train(work, mode, "AlternatingWatchdog", work.steps, **settings)
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def summarize_cost(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the costs as shares of a step. ``watchdog_low`` and ``watchdog_high`` bound the 90 %
    bootstrap interval."""
    ratios, check_times, step_times = [], [], []
    for steps in (run["steps"] for run in runs):
        blocks: dict[int, tuple[bool, list[float]]] = {}
        for (step, begin, is_active), (_, end, _) in pairwise(steps):
            block, offset = divmod(step - 1, BLOCK_STEPS)
            times = blocks.setdefault(block, (is_active, []))[1]
            if step % CHECK_INTERVAL_STEPS == 0:
                check_times.append(end - begin - median(times))
            elif offset:  # the first step after a switch is excluded
                times.append(end - begin)
        step_times += [median(times) for is_active, times in blocks.values() if not is_active]
        for first in range(2, len(blocks) - 1, 2):  # the first two are warm-up
            pair = dict(blocks[index] for index in (first, first + 1))
            if pair[True] and pair[False]:  # the last block may be incomplete
                ratios.append(median(pair[True]) / median(pair[False]) - 1)
    step_s = median(step_times)
    check = max(0.0, median(check_times)) / RecoveryConfig().replica_check_steps / step_s
    low, high = bootstrap_interval(ratios)
    return {
        "step_time_s": step_s,
        "watchdog": trimmed_mean(ratios),
        "watchdog_low": low,
        "watchdog_high": high,
        "thread": median(run["thread"] for run in runs),
        "check_s": median(check_times),
        "check": check,
        "cost": trimmed_mean(ratios) + check,
        "met": trimmed_mean(ratios) + check < MAX_COST,
        "pairs": ratios,
    }


def trimmed_mean(values: list[float]) -> float:
    """Return the mean without the lowest and the highest fifth."""
    cut = len(values) // 5
    middle = sorted(values)[cut : len(values) - cut]
    return sum(middle) / len(middle)


def bootstrap_interval(values: list[float]) -> tuple[float, float]:
    """Return the 90 % bootstrap interval of the trimmed mean."""
    means = sorted(
        trimmed_mean(random.Random(seed).choices(values, k=len(values))) for seed in range(2000)
    )
    return means[100], means[1899]


# -- time to recover
def measure_recovery(work: Work, mode: str, kills: int) -> dict[str, Any]:
    """Measure the recovery from a rank that kills itself at several steps between two checkpoints.

    ``recovered_s`` contains the time from each kill to the end of the first new step, including the
    steps that are repeated.
    """
    kill_steps = [
        SAVE_STEPS * (kill + 1) + random.Random(kill).randrange(2, SAVE_STEPS)
        for kill in range(kills)
    ]
    flags = work.folder / "kills"
    flags.mkdir(exist_ok=True)
    for flag in flags.iterdir():
        flag.unlink()
    settings = {
        "train_args.save_steps": SAVE_STEPS,
        "task_args": json.dumps({"at": kill_steps, "folder": str(flags)}),
    }
    measurement = train(work, mode, "SelfKilling", kill_steps[-1] + SAVE_STEPS, **settings)
    lines = (work.folder / "run" / "events.jsonl").read_text().splitlines()
    steps = [event for event in map(json.loads, lines) if event["type"] == "step"]
    recovered_s = []
    for step in kill_steps:
        killed_at = float((flags / str(step)).read_text())
        recovered_s.append(
            next(
                event["time"]
                for event in steps
                if event["time"] > killed_at and event["step"] >= step
            )
            - killed_at
        )
    first_step_s = measurement.time_to_first_step_s
    return {
        "first_step_s": first_step_s,
        "recovered_s": recovered_s,
        "ratio": median(recovered_s) / first_step_s,
        "met_recovery": max(recovered_s) < MAX_RECOVERY_RATIO * first_step_s,
    }


def as_markdown(result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [
        "# Cost of monitoring, and time to recover from a killed rank",
        "",
        (
            f"{result['date']}: {machine['cores']} cores ({machine['architecture']}), Python"
            f" {machine['python']}, torch {machine['torch']}. {result['work']}."
        ),
        "",
        (
            f"Additional time per step (alternating blocks of {BLOCK_STEPS} steps within a"
            " run; 90 %"
            " confidence interval):"
        ),
        "",
        (
            "| mode | step without monitoring | watchdog and heartbeats | CPU share of their"
            " thread |"
            " one replica check | replica checks, every"
            f" {RecoveryConfig().replica_check_steps} steps | total | under 1 % |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for mode in result["modes"]:
        lines.append(
            f"| `{mode['mode']}` | {1000 * mode['step_time_s']:.1f} ms |"
            f" {100 * mode['watchdog']:+.2f} % ({100 * mode['watchdog_low']:+.2f} …"
            f" {100 * mode['watchdog_high']:+.2f}) | {100 * mode['thread']:.2f} % |"
            f" {1000 * mode['check_s']:.1f} ms | {100 * mode['check']:+.3f} % |"
            f" {100 * mode['cost']:+.2f} % | {'yes' if mode['met'] else 'NO'} |"
        )
    lines += [
        "",
        (
            "Time from `kill -9` of a rank to the end of the next new step, with a checkpoint every"
            f" {SAVE_STEPS} steps, compared with the time from the command to the end of the first"
            " step. It includes the repeated steps."
        ),
        "",
        (
            "| mode | first step | recovery: median | longest | median / first step | all under"
            f" {MAX_RECOVERY_RATIO} × |"
        ),
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for mode in result["modes"]:
        recovered_s = mode["recovered_s"]
        lines.append(
            f"| `{mode['mode']}` | {mode['first_step_s']:.1f} s | {median(recovered_s):.1f} s |"
            f" {max(recovered_s):.1f} s | {mode['ratio']:.2f} |"
            f" {'yes' if mode['met_recovery'] else 'NO'} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
