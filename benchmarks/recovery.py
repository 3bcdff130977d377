"""What watching over a run costs: the time of a step with the watchdog and the hashes of replicas, against one without.

python benchmarks/recovery.py [--rounds N] [--steps N] [--modes ddp,zero3] [--json] [--output FILE]

Runs with and without take turns, and in each round the one that begins changes; a round's figure is the ratio of the medians of
their step times. Needs two quiet cores: what is looked for is smaller than most of what else a machine does.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import common
from common import BenchmarkFailed, Work
from run import _machine, _say, write_results

#: What is switched off for the comparison.
OFF = {"recovery__watchdog": "false", "recovery__check_replicas_steps": 0}
AT_MOST = 0.01  # of a step
WARM_UP_STEPS = 5  # of each run, left out
PER_DEVICE, TOKENS = 4, 128


def main() -> int:
    args = _arguments()
    common.PER_DEVICE, common.MAX_LENGTH = PER_DEVICE, TOKENS
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in args.modes}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        work = common.make_work(Path(folder), args.steps, even_tokens=TOKENS)
        try:
            for number in range(args.rounds):
                for mode, rounds in found.items():
                    rounds.append(measure(work, mode, on_first=number % 2 == 0))
                    _say(f"round {number + 1} {mode:<8} {rounds[-1]['on_s']:.5f} s with, {rounds[-1]['off_s']:.5f} s without")
        except BenchmarkFailed as error:
            _say(f"error: {error}")
            return 1
        result = summary(work, found)
    text = as_markdown(result)
    if args.output is not None:
        for path in write_results(args.output, result, text):
            _say(f"written: {path}")
    print(json.dumps(result, indent=2) if args.json else text)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="pairs of runs for each mode (default 8)")
    parser.add_argument("--steps", type=int, default=120, help="training steps of a run (default 120)")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["ddp", "zero3"], help="default: ddp,zero3")
    parser.add_argument("--json", action="store_true", help="print everything measured as one JSON value")
    parser.add_argument("--output", type=Path, help="write FILE.md (the table) and FILE.json (everything measured)")
    return parser.parse_args()


def measure(work: Work, mode: str, on_first: bool) -> dict[str, float]:
    """Median step times of two runs in seconds, with (``on_s``) and without (``off_s``)."""
    times = {}
    for name in ("on_s", "off_s") if on_first else ("off_s", "on_s"):
        settings = OFF if name == "off_s" else {}
        common.run_paceline(
            work, parallel__mode=mode, lora__enable="false", overlong="truncate", logging_steps=1, **settings
        )  # fmt: skip
        times[name] = step_time(work)
    return times


def step_time(work: Work) -> float:
    lines = (work.folder / "run" / "events.jsonl").read_text().splitlines()
    steps = [one["step_time_s"] for one in map(json.loads, lines) if one["type"] == "step"]
    return median(steps[WARM_UP_STEPS:])


def summary(work: Work, found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    rows = []
    for mode, rounds in found.items():
        costs = sorted(one["on_s"] / one["off_s"] - 1 for one in rounds)
        rows.append(
            {
                "mode": mode,
                "step_time_s": median(one["off_s"] for one in rounds),
                "cost": median(costs),
                "least": costs[0],
                "most": costs[-1],
                "met": median(costs) < AT_MOST,
                "rounds": rounds,
            }
        )
    return {
        "date": date.today().isoformat(),
        "machine": _machine(),
        "work": f"{work.steps} steps of {work.global_batch} chats of {TOKENS} tokens "
        f"({common.WORLD_SIZE} CPU ranks × {PER_DEVICE}), all weights of {common.MODEL}, float32",
        "modes": rows,
    }


def as_markdown(result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [
        "# What watching over a run costs",
        "",
        f"{result['date']}: {machine['cores']} cores ({machine['architecture']}), Python {machine['python']}, "
        f"torch {machine['torch']}. {result['work']}.",
        "",
        "The time of a step with the watchdog and the hashes of replicas, more than without them:",
        "",
        "| mode | a step without | cost (median of the rounds) | lowest … highest round | under 1 % |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in result["modes"]:
        lines.append(
            f"| `{one['mode']}` | {1000 * one['step_time_s']:.1f} ms | {100 * one['cost']:+.2f} % "
            f"| {100 * one['least']:+.2f} … {100 * one['most']:+.2f} % | {'yes' if one['met'] else 'NO'} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
