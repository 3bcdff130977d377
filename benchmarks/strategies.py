"""Compare each strategy with the same feature of torch or DeepSpeed in a hand-written loop.

python benchmarks/strategies.py [--rounds N] [--steps N] [--only ddp,zero3] [--json] [--output FILE]
"""

import argparse
import sys
import tempfile
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import common
from common import BenchmarkFailed, Measurement, Work
from run import describe_machine, log_line, report_results

#: Mode → (overrides for Paceline, mode of the rival).
MODES: dict[str, tuple[dict[str, Any], str]] = {
    "ddp": ({}, "ddp"),
    "zero1": ({}, "zero1"),
    "zero2": ({}, "zero2"),
    "zero3": ({}, "zero3"),
    "deepspeed": ({"parallel__deepspeed_stage": 2}, "deepspeed"),
}
RIVALS = {
    "ddp": "DistributedDataParallel",
    "zero1": "DDP + ZeroRedundancyOptimizer",
    "zero2": "fully_shard(reshard_after_forward=False)",
    "zero3": "fully_shard(reshard_after_forward=True)",
    "deepspeed": "deepspeed.initialize, stage 2",
}
MIN_RATIO = 0.98  # steps per second relative to the rival
PER_DEVICE, TOKENS = 4, 128
STATE_RANKS, MAX_STATE_SHARE = 4, 0.27  # training state of zero3 relative to ddp
WARM_UP_STEPS = 2


def main() -> int:
    args = _arguments()
    common.PER_DEVICE, common.MAX_LENGTH = PER_DEVICE, TOKENS
    names = [name for name in MODES if name in args.only]
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        work = common.make_work(Path(folder), args.steps, even_tokens=TOKENS)
        runs: dict[str, tuple[list[Measurement], list[Measurement]]] = {
            name: ([], []) for name in names
        }
        try:
            for number in range(args.rounds + 1):
                round_work = work if number else replace(work, batches=work.batches[:WARM_UP_STEPS])
                for name in names:
                    paceline, rival = measure(round_work, name)
                    if number:
                        runs[name][0].append(paceline)
                        runs[name][1].append(rival)
                    log_line(
                        f"round {number} {name:<10} {steps_per_second(paceline):.3f} steps/s,"
                        " hand-written "
                        f"{steps_per_second(rival):.3f} "
                        f" last loss {paceline.losses[-1]:.5f}, hand-written {rival.losses[-1]:.5f}"
                    )
            state = None if args.no_state else measure_state_bytes(work)
        except BenchmarkFailed as error:
            log_line(f"error: {error}")
            return 1
        result = summarize(work, runs, state, args.rounds)
    return report_results(args, result, as_markdown(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender (default 3)")
    parser.add_argument("--steps", type=int, default=20, help="training steps per run (default 20)")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=list(MODES),
        help="comma-separated strategies: " + ",".join(MODES),
    )
    parser.add_argument(
        "--no-state",
        action="store_true",
        help=f"skip the measurement of the training state on {STATE_RANKS} ranks",
    )
    parser.add_argument("--json", action="store_true", help="print all measurements as JSON")
    parser.add_argument(
        "--output", type=Path, help="write FILE.md (the tables) and FILE.json (all measurements)"
    )
    args = parser.parse_args()
    unknown = [name for name in args.only if name not in MODES]
    if unknown:
        parser.error(f"unknown strategies: {', '.join(unknown)}. Choose from: {', '.join(MODES)}")
    return args


def measure(work: Work, name: str) -> tuple[Measurement, Measurement]:
    """Run Paceline and the rival on the same batches."""
    settings, rival_mode = MODES[name]
    paceline = common.run_paceline(
        work,
        parallel__mode=name,
        lora__enable="false",
        truncation_strategy="truncate",
        train_args__async_save="false",
        **settings,
    )
    rival = common.run_rival(work, "handwritten_strategies", mode=rival_mode)
    return paceline, rival


def steps_per_second(measurement: Measurement) -> float:
    return measurement.samples_per_second / (common.WORLD_SIZE * PER_DEVICE)


def measure_state_bytes(work: Work) -> dict[str, int]:
    """Return the measured training state under ddp and zero3 of the rank with the most, of four
    ranks."""
    short_work = replace(work, batches=work.batches[:2])
    settings = {
        "lora__enable": "false",
        "parallel__num_gpus": STATE_RANKS,
        "train_args__per_device_train_batch_size": 1,
    }
    return {
        mode: int(common.run_paceline(short_work, parallel__mode=mode, **settings).state_bytes or 0)
        for mode in ("ddp", "zero3")
    }


def summarize(work: Work, runs: Any, state: dict[str, int] | None, rounds: int) -> dict[str, Any]:
    rows = []
    for name, (paceline, rival) in runs.items():
        ratio = median(map(steps_per_second, paceline)) / median(map(steps_per_second, rival))
        rows.append(
            {
                "mode": name,
                "rival": RIVALS[name],
                "steps_per_second": median(map(steps_per_second, paceline)),
                "rival_steps_per_second": median(map(steps_per_second, rival)),
                "ratio": ratio,
                "met": ratio >= MIN_RATIO,
                "loss_difference": max(
                    abs(loss / rival_loss - 1)
                    for loss, rival_loss in zip(paceline[0].losses, rival[0].losses, strict=True)
                ),
                "same_tokens": all(run.tokens == work.batch_lengths for run in [*paceline, *rival]),
            }
        )
    return {
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        "work": (
            f"{work.steps} steps of {work.global_batch} chats of {TOKENS} tokens"
            f" ({common.WORLD_SIZE} CPU ranks × {PER_DEVICE}), all weights of {common.MODEL},"
            " float32"
        ),
        "rounds": rounds,
        "modes": rows,
        "state_bytes_on_4_ranks": state,
        "runs": {
            name: {
                "paceline": [asdict(run) for run in paceline],
                "rival": [asdict(run) for run in rival],
            }
            for name, (paceline, rival) in runs.items()
        },
    }


def as_markdown(result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [
        f"# Strategies compared with hand-written loops: {result['date']}",
        "",
        (
            f"{machine['cores']} cores ({machine['architecture']}), {machine['memory_gib']} GiB;"
            f" Python {machine['python']}, torch {machine['torch']}, transformers"
            f" {machine['transformers']}. Medians of {result['rounds']} alternating rounds after a"
            " warm-up round."
        ),
        "",
        f"- {result['work']}",
        "",
        (
            "| mode | hand-written with | steps/s | hand-written, steps/s | ratio | goal | |"
            " largest relative loss difference | same tokens |"
        ),
        "|---|---|---:|---:|---:|---|---|---:|---|",
    ]
    for row in result["modes"]:
        lines.append(
            f"| `{row['mode']}` | {row['rival']} | {row['steps_per_second']:.3f} |"
            f" {row['rival_steps_per_second']:.3f} | {row['ratio']:.3f} | ≥ {MIN_RATIO} |"
            f" {'met' if row['met'] else 'missed'} | {row['loss_difference']:.1e} |"
            f" {'yes' if row['same_tokens'] else 'NO'} |"
        )
    state = result["state_bytes_on_4_ranks"]
    if state is not None:
        share = state["zero3"] / state["ddp"]
        lines += [
            "",
            (
                f"Training state of the rank with the most, of {STATE_RANKS} ranks: `ddp`"
                f" {state['ddp']:,} bytes, `zero3` {state['zero3']:,} bytes, which is"
                f" {share:.4f} times"
                f" as much (goal ≤ {MAX_STATE_SHARE}:"
                f" {'met' if share <= MAX_STATE_SHARE else 'missed'})."
            ),
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
