"""What watching over a run costs, and how long a run takes to go on after a rank was killed.

python benchmarks/recovery.py [--steps N] [--rounds N] [--kills N] [--modes ddp,zero3] [--json]
[--output FILE]

The cost of the watchdog is measured within a run: all ranks switch it on and off every few steps
(``watched_task.py``), and a block of steps with it is compared with the block without it that lies
beside it. Two runs of the same work differ by several per cent on most machines, which is more than
what is looked for, and two blocks often do: the mean of the pairs is trimmed by a fifth at each
end. Beside it stands the time that the watchdog's thread was on a core. The hashes of replicas come
every so many steps; what such a step takes longer is divided by how often they come by default.
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
from run import _machine, log_line, report_results

from paceline.config.schema.recovery import RecoveryConfig

TASK = Path(__file__).resolve().with_name("watched_task.py")
AT_MOST = 0.01  # of a step
AT_MOST_RECOVERY = 1.5  # times the run's own first step
BLOCK, CHECK_EVERY = 4, 40  # steps
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
                runs = [watching(work, mode) for _ in range(args.rounds)]
                figures = {"mode": mode, **cost(runs), **recovery(work, mode, args.kills)}
                modes.append(figures)
                log_line(
                    f"{mode:<8} {100 * figures['cost']:+.2f} %; back after"
                    f" {median(figures['recovered_s']):.1f} s"
                )
        except BenchmarkFailed as error:
            log_line(f"error: {error}")
            return 1
    result = {
        "date": date.today().isoformat(),
        "machine": _machine(),
        "work": (
            f"{work.steps} steps of {work.global_batch} chats of {TOKENS} tokens"
            f" ({common.WORLD_SIZE} CPU ranks × {PER_DEVICE}), all weights of {common.MODEL},"
            f" float32; {args.rounds} runs of each"
        ),
        "modes": modes,
    }
    return report_results(args, result, as_markdown(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="runs of each mode that switch (default 2)"
    )
    parser.add_argument(
        "--steps", type=int, default=1000, help="training steps of a run (default 1000)"
    )
    parser.add_argument(
        "--kills", type=int, default=5, help="kills of a rank for each mode (default 5)"
    )
    parser.add_argument(
        "--modes",
        type=lambda text: text.split(","),
        default=["ddp", "zero3"],
        help="default: ddp,zero3",
    )
    parser.add_argument(
        "--json", action="store_true", help="print everything measured as one JSON value"
    )
    parser.add_argument(
        "--output", type=Path, help="write FILE.md (the table) and FILE.json (everything measured)"
    )
    return parser.parse_args()


def train(work: Work, mode: str, kind: str, max_steps: int, **settings: Any) -> common.Measured:
    overrides = {
        "task": f"{TASK}:{kind}",
        "parallel.mode": mode,
        "lora.enable": "false",
        "lora.rank": 8,
        "truncation_strategy": "truncate",
        "train_args.max_steps": max_steps,
        **settings,
    }
    return common.run_paceline(work, **overrides)


# -- what watching costs
def watching(work: Work, mode: str) -> dict[str, Any]:
    """What :class:`watched_task.Switched` has written of a run."""
    file = work.folder / "switched.json"
    settings = {
        "recovery.replica_check_steps": CHECK_EVERY,
        "task_args": json.dumps({"block": BLOCK, "file": str(file)}),
    }
    train(work, mode, "Switched", work.steps, **settings)
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def cost(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares of a step. ``low`` and ``high``: 90 % of the means over pairs drawn anew lie between
    them."""
    ratios, checks, usual = [], [], []
    for steps in (run["steps"] for run in runs):
        blocks: dict[int, tuple[bool, list[float]]] = {}
        for (step, begun, on), (_, ended, _) in pairwise(steps):
            place, within = divmod(step - 1, BLOCK)
            times = blocks.setdefault(place, (on, []))[1]
            if step % CHECK_EVERY == 0:
                checks.append(ended - begun - median(times))
            elif within:  # the step after a switch is neither
                times.append(ended - begun)
        usual += [median(times) for on, times in blocks.values() if not on]
        for first in range(2, len(blocks) - 1, 2):  # the first two warm up
            pair = dict(blocks[index] for index in (first, first + 1))
            if pair[True] and pair[False]:  # the last block may be cut
                ratios.append(median(pair[True]) / median(pair[False]) - 1)
    step_s = median(usual)
    check = max(0.0, median(checks)) / RecoveryConfig().replica_check_steps / step_s
    low, high = interval(ratios)
    return {
        "step_time_s": step_s,
        "watchdog": trimmed(ratios),
        "watchdog_low": low,
        "watchdog_high": high,
        "thread": median(run["thread"] for run in runs),
        "check_s": median(checks),
        "check": check,
        "cost": trimmed(ratios) + check,
        "met": trimmed(ratios) + check < AT_MOST,
        "pairs": ratios,
    }


def trimmed(values: list[float]) -> float:
    """Mean without the lowest and the highest fifth."""
    cut = len(values) // 5
    middle = sorted(values)[cut : len(values) - cut]
    return sum(middle) / len(middle)


def interval(values: list[float]) -> tuple[float, float]:
    """Between these lie 90 % of the trimmed means of as many values drawn anew from these (a
    bootstrap)."""
    drawn = sorted(
        trimmed(random.Random(seed).choices(values, k=len(values))) for seed in range(2000)
    )
    return drawn[100], drawn[1899]


# -- how long a recovery takes
def recovery(work: Work, mode: str, kills: int) -> dict[str, Any]:
    """A rank kills itself at steps of which none is a checkpoint's. ``recovered_s``: from each kill
    to the end of the next step that had not been made before, with those made once more."""
    at = [
        SAVE_STEPS * (kill + 1) + random.Random(kill).randrange(2, SAVE_STEPS)
        for kill in range(kills)
    ]
    flags = work.folder / "kills"
    flags.mkdir(exist_ok=True)
    for flag in flags.iterdir():
        flag.unlink()
    settings = {
        "train_args.save_steps": SAVE_STEPS,
        "task_args": json.dumps({"at": at, "folder": str(flags)}),
    }
    measured = train(work, mode, "Killed", at[-1] + SAVE_STEPS, **settings)
    lines = (work.folder / "run" / "events.jsonl").read_text().splitlines()
    steps = [event for event in map(json.loads, lines) if event["type"] == "step"]
    recovered_s = []
    for step in at:
        killed_at = float((flags / str(step)).read_text())
        recovered_s.append(
            next(
                event["time"]
                for event in steps
                if event["time"] > killed_at and event["step"] >= step
            )
            - killed_at
        )
    first = measured.time_to_first_step_s
    return {
        "first_step_s": first,
        "recovered_s": recovered_s,
        "ratio": median(recovered_s) / first,
        "met_recovery": max(recovered_s) < AT_MOST_RECOVERY * first,
    }


def as_markdown(result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [
        "# What watching over a run costs, and how long it takes to go on after a fault",
        "",
        (
            f"{result['date']}: {machine['cores']} cores ({machine['architecture']}), Python"
            f" {machine['python']}, torch {machine['torch']}. {result['work']}."
        ),
        "",
        (
            f"More time for a step than without them (blocks of {BLOCK} steps in turns within a"
            " run, 90 % interval):"
        ),
        "",
        (
            "| mode | a step without | watchdog and heartbeats | its thread, of a core | a"
            f" comparison of hashes | it, every {RecoveryConfig().replica_check_steps} steps |"
            " together | under 1 % |"
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
            "From `kill -9` of a rank to the end of the next new step (a checkpoint every"
            f" {SAVE_STEPS} steps; those since it are made once more within this time), against the"
            " time from the command to the end of the first step:"
        ),
        "",
        (
            "| mode | first step | recovered: median | longest | median / first step | all under"
            " 1.5 × |"
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
