"""Each strategy through Paceline against the same feature of torch (or DeepSpeed) in a hand-written
loop, on the same work.

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
from common import BenchmarkFailed, Measured, Work
from run import _machine, log_line, report_results

#: mode → (settings of Paceline, the rival's mode)
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
AT_LEAST = 0.98  # of the rival's steps per second
PER_DEVICE, TOKENS = 4, 128
STATE_RANKS, STATE_AT_MOST = 4, 0.27  # zero3's state on that many ranks, as a share of ddp's
WARM_UP_STEPS = 2


def main() -> int:
    args = _arguments()
    common.PER_DEVICE, common.MAX_LENGTH = PER_DEVICE, TOKENS
    names = [name for name in MODES if name in args.only]
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        work = common.make_work(Path(folder), args.steps, even_tokens=TOKENS)
        runs: dict[str, tuple[list[Measured], list[Measured]]] = {name: ([], []) for name in names}
        try:
            for number in range(args.rounds + 1):
                this = work if number else replace(work, batches=work.batches[:WARM_UP_STEPS])
                for name in names:
                    ours, theirs = measure(this, name)
                    if number:
                        runs[name][0].append(ours)
                        runs[name][1].append(theirs)
                    log_line(
                        f"round {number} {name:<10} {steps_per_second(ours):.3f} steps/s, by hand "
                        f"{steps_per_second(theirs):.3f} "
                        f" last loss {ours.losses[-1]:.5f}, by hand {theirs.losses[-1]:.5f}"
                    )
            state = None if args.no_state else state_bytes(work)
        except BenchmarkFailed as error:
            log_line(f"error: {error}")
            return 1
        result = summary(work, runs, state, args.rounds)
    return report_results(args, result, as_markdown(result))


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
        "--only",
        type=lambda text: text.split(","),
        default=list(MODES),
        help="some of: " + ",".join(MODES),
    )
    parser.add_argument(
        "--no-state", action="store_true", help=f"leave the {STATE_RANKS} ranks' state memory out"
    )
    parser.add_argument(
        "--json", action="store_true", help="print everything measured as one JSON value"
    )
    parser.add_argument(
        "--output", type=Path, help="write FILE.md (the tables) and FILE.json (everything measured)"
    )
    args = parser.parse_args()
    unknown = [name for name in args.only if name not in MODES]
    if unknown:
        parser.error(f"{', '.join(unknown)}; allowed: {', '.join(MODES)}")
    return args


def measure(work: Work, name: str) -> tuple[Measured, Measured]:
    """Both contenders, one after the other, on the same batches."""
    settings, rival = MODES[name]
    ours = common.run_paceline(
        work,
        parallel__mode=name,
        lora__enable="false",
        truncation_strategy="truncate",
        train_args__async_save="false",
        **settings,
    )
    theirs = common.run_rival(work, "handwritten_strategies", mode=rival)
    return ours, theirs


def steps_per_second(measured: Measured) -> float:
    return measured.samples_per_second / (common.WORLD_SIZE * PER_DEVICE)


def state_bytes(work: Work) -> dict[str, int]:
    """Training state of the fullest of four ranks under ddp and zero3, as the run measures it."""
    short = replace(work, batches=work.batches[:2])
    settings = {
        "lora__enable": "false",
        "parallel__num_gpus": STATE_RANKS,
        "train_args__per_device_train_batch_size": 1,
    }
    return {
        mode: int(common.run_paceline(short, parallel__mode=mode, **settings).state_bytes or 0)
        for mode in ("ddp", "zero3")
    }


def summary(work: Work, runs: Any, state: dict[str, int] | None, rounds: int) -> dict[str, Any]:
    rows = []
    for name, (ours, theirs) in runs.items():
        ratio = median(map(steps_per_second, ours)) / median(map(steps_per_second, theirs))
        rows.append(
            {
                "mode": name,
                "rival": RIVALS[name],
                "steps_per_second": median(map(steps_per_second, ours)),
                "rival_steps_per_second": median(map(steps_per_second, theirs)),
                "ratio": ratio,
                "met": ratio >= AT_LEAST,
                "loss_difference": max(
                    abs(ours_loss / other - 1)
                    for ours_loss, other in zip(ours[0].losses, theirs[0].losses, strict=True)
                ),
                "same_tokens": all(run.tokens == work.batch_lengths for run in [*ours, *theirs]),
            }
        )
    return {
        "date": date.today().isoformat(),
        "machine": _machine(),
        "work": (
            f"{work.steps} steps of {work.global_batch} chats of {TOKENS} tokens"
            f" ({common.WORLD_SIZE} CPU ranks × {PER_DEVICE}), all weights of {common.MODEL},"
            " float32"
        ),
        "rounds": rounds,
        "modes": rows,
        "state_bytes_on_4_ranks": state,
        "runs": {
            name: {"paceline": [asdict(run) for run in a], "rival": [asdict(run) for run in b]}
            for name, (a, b) in runs.items()
        },
    }


def as_markdown(result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [
        f"# Strategies against hand-written loops: {result['date']}",
        "",
        (
            f"{machine['cores']} cores ({machine['architecture']}), {machine['memory_gib']} GiB;"
            f" Python {machine['python']}, torch {machine['torch']}, transformers"
            f" {machine['transformers']}. Medians of {result['rounds']} alternating rounds after a"
            " warm-up."
        ),
        "",
        f"- {result['work']}",
        "",
        (
            "| mode | the same by hand | steps/s | by hand | ratio | goal | | losses differ by at"
            " most | same tokens |"
        ),
        "|---|---|---:|---:|---:|---|---|---:|---|",
    ]
    for row in result["modes"]:
        lines.append(
            f"| `{row['mode']}` | {row['rival']} | {row['steps_per_second']:.3f} |"
            f" {row['rival_steps_per_second']:.3f} | {row['ratio']:.3f} | ≥ {AT_LEAST} |"
            f" {'met' if row['met'] else 'missed'} | {row['loss_difference']:.1e} |"
            f" {'yes' if row['same_tokens'] else 'NO'} |"
        )
    state = result["state_bytes_on_4_ranks"]
    if state is not None:
        share = state["zero3"] / state["ddp"]
        lines += [
            "",
            (
                f"State of the fullest of {STATE_RANKS} ranks: `ddp` {state['ddp']:,} bytes,"
                f" `zero3` {state['zero3']:,}: {share:.4f} of it (goal ≤ {STATE_AT_MOST}:"
                f" {'met' if share <= STATE_AT_MOST else 'missed'})."
            ),
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
