"""Measure `parallel.balance: speed` against equal shares: its gain if one of two ranks is slow, and
its cost if both are equally fast.

python benchmarks/balance.py [--steps N] [--rounds N] [--slow-cores X] [--json] [--output FILE]

Each round trains once with `parallel.balance: equal` and once with `speed`. The two ranks are
started like those of two hosts: as separate processes with the variables that torchrun sets, and
with one thread each. The slow rank runs in a cgroup with a CPU quota, which needs root. Throughput
is measured after the steps in which Paceline measures the speeds and checks the new shares.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import common
from common import BenchmarkFailed
from quota import QuotaUnavailable, cpu_quota
from run import describe_machine, log_line, report_results

PER_DEVICE, ACCUMULATION, TOKENS = 2, 4, 256
MODEL = "builtin:qwen2-tiny"
#: Steps excluded from the throughput: warm-up, measurement, warm-up and check of the new shares.
NUM_EXCLUDED_STEPS = 16
MIN_RATIO = 1.4  # throughput relative to equal shares, with one rank limited to a third of a core


def main() -> int:
    args = _arguments()
    setups: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        try:
            for name, cores in (("one slow rank", args.slow_cores), ("equal ranks", None)):
                rounds = []
                for _ in range(args.rounds):
                    measurements = {
                        balance: train(Path(folder), args.steps, balance, cores)
                        for balance in ("equal", "speed")
                    }
                    rounds.append(measurements)
                    rates = {key: run["samples_per_second"] for key, run in measurements.items()}
                    log_line(
                        f"{name}: {rates['equal']:.2f} → {rates['speed']:.2f} samples/s, shares"
                        f" {measurements['speed']['shares']}"
                    )
                setups.append(
                    {"setup": name, "slow_cores": cores, "rounds": rounds, **summarize(rounds)}
                )
        except (BenchmarkFailed, QuotaUnavailable) as error:
            log_line(f"error: {error}")
            return 1
    result = {
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        "load_average": os.getloadavg()[0],
        "steps": args.steps,
        "setups": setups,
    }
    return report_results(args, result, as_markdown(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of rounds per setup (default 3)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=50,
        help=f"training steps per run, more than {NUM_EXCLUDED_STEPS + 1} (default 50)",
    )
    parser.add_argument(
        "--slow-cores",
        type=float,
        default=1 / 3,
        help="CPU quota of the slow rank, in cores (default 1/3)",
    )
    parser.add_argument("--json", action="store_true", help="print all measurements as JSON")
    parser.add_argument(
        "--output", type=Path, help="write FILE.md (the table) and FILE.json (all measurements)"
    )
    args = parser.parse_args()
    if args.steps <= NUM_EXCLUDED_STEPS + 1:
        parser.error(f"--steps {args.steps}: expected more than {NUM_EXCLUDED_STEPS + 1}")
    return args


def train(folder: Path, steps: int, balance: str, slow_cores: float | None) -> dict[str, Any]:
    """Train on two ranks and return the throughput, the losses, and the shares of the last step."""
    output = folder / "run"
    shutil.rmtree(output, ignore_errors=True)
    settings = {
        "model": MODEL,
        "dataset": "builtin:python-docs",
        "output_dir": output,
        "parallel.device": "cpu",
        "parallel.mode": "ddp",
        "parallel.balance": balance,
        "train_args.per_device_train_batch_size": PER_DEVICE,
        "train_args.gradient_accumulation_steps": ACCUMULATION,
        "train_args.max_length": TOKENS,
        "train_args.max_steps": steps,
        "train_args.logging_steps": 1,
        "train_args.save_steps": 0,
    }
    command = [
        sys.executable,
        "-m",
        "paceline",
        "sft",
        *(f"{key}={value}" for key, value in settings.items()),
    ]
    common_env = {
        **os.environ,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks: list[subprocess.Popen[bytes]] = []
    log = folder / "output.txt"
    quota = cpu_quota(slow_cores) if slow_cores else nullcontext()
    with open(log, "wb") as handle, quota as tasks_file:
        try:
            for rank in range(2):
                env = {
                    **common_env,
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "1",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
                ranks.append(
                    subprocess.Popen(command, stdout=handle, stderr=subprocess.STDOUT, env=env)
                )
                if rank == 1 and tasks_file is not None:
                    tasks_file.write_text(str(ranks[1].pid))
            failed = [
                rank for rank, process in enumerate(ranks) if process.wait(common.TIMEOUT_S) != 0
            ]
        except subprocess.TimeoutExpired:
            failed = [0, 1]
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
    if failed:
        raise BenchmarkFailed(
            f"rank {failed[0]} failed:\n{log.read_text(errors='replace')[-3000:]}"
        )
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    steps_logged = [event for event in events if event["type"] == "step"]
    end_times = [event["time"] for event in steps_logged[NUM_EXCLUDED_STEPS:]]
    global_batch_size = 2 * PER_DEVICE * ACCUMULATION
    return {
        "samples_per_second": (len(end_times) - 1)
        * global_batch_size
        / (end_times[-1] - end_times[0]),
        "losses": [event["loss"] for event in steps_logged],
        "shares": (
            json.loads((output / "report.json").read_text())
            .get("balance", {})
            .get("shares", [ACCUMULATION] * 2)
        ),
        "events": [event["text"] for event in events if event["type"] == "balance"],
    }


def summarize(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median ratio of the throughputs and the largest relative loss difference."""
    ratios = [
        round_["speed"]["samples_per_second"] / round_["equal"]["samples_per_second"]
        for round_ in rounds
    ]
    differences = [
        abs(speed - equal) / equal
        for round_ in rounds
        for speed, equal in zip(round_["speed"]["losses"], round_["equal"]["losses"], strict=True)
    ]
    return {"ratio": median(ratios), "ratios": ratios, "loss_rel_diff": max(differences)}


def as_markdown(result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [
        f"# Shares by speed compared with equal shares: {result['date']}",
        "",
        (
            f"{machine['cores']} cores ({machine['architecture']}), {machine['memory_gib']} GiB;"
            f" Python {machine['python']}, torch {machine['torch']}; load average at the end"
            f" {result['load_average']:.1f}. Two CPU ranks with one thread each, ddp, {MODEL},"
            f" {2 * ACCUMULATION} micro-batches of {PER_DEVICE} samples per step, {result['steps']}"
            f" steps; the throughput excludes the first {NUM_EXCLUDED_STEPS}. The CPU time of"
            " the slow"
            " rank is limited by a cgroup."
        ),
        "",
        (
            "| setup | equal, samples/s | speed, samples/s | shares | ratio (each round) | largest"
            " relative loss difference |"
        ),
        "|---|---|---|---|---|---|",
    ]
    for setup in result["setups"]:
        rates = {
            key: median(round_[key]["samples_per_second"] for round_ in setup["rounds"])
            for key in ("equal", "speed")
        }
        shares = ", ".join(
            sorted({"+".join(map(str, round_["speed"]["shares"])) for round_ in setup["rounds"]})
        )
        name = setup["setup"] + (
            f" with {setup['slow_cores']:.2f} cores" if setup["slow_cores"] else ""
        )
        ratios = ", ".join(f"{ratio:.2f}" for ratio in setup["ratios"])
        lines.append(
            f"| {name} | {rates['equal']:.2f} | {rates['speed']:.2f} | {shares} |"
            f" {setup['ratio']:.2f}× ({ratios}) | {setup['loss_rel_diff']:.1e} |"
        )
    return "\n".join(
        [*lines, "", f"Goal with a rank limited to a third of a core: at least {MIN_RATIO}×."]
    )


if __name__ == "__main__":
    sys.exit(main())
