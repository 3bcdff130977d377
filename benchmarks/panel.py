"""Measure what the browser UI costs a run: the time of a step with and without `paceline ui` and
its clients.

python benchmarks/panel.py [--viewers N] [--steps N] [--modes ddp] [--json] [--output FILE]

One client reads the stream of events as a page does; the others request the stream and never read
it. During one run the server and the clients are paused and resumed in turns (SIGSTOP, SIGCONT).
The steps inside each interval with them are compared with those of the adjacent interval without
them, because the difference between two runs of the same work is larger than the expected cost.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import common
from common import BenchmarkFailed, Work
from recovery import PER_DEVICE, TOKENS, bootstrap_interval, trimmed_mean
from run import describe_machine, log_line, report_results

MAX_COST = 0.01  # share of a step
INTERVAL_S = 2.5
#: Whether the server runs in each of four intervals. This order cancels a linear drift.
ORDER = (True, False, False, True)
#: The program of the client process; arguments: HOST PORT RUN_ID NUM_CLIENTS.
CLIENTS = """
import socket, sys, threading
host, port, run, num_clients = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
request = f"GET /api/runs/{run}/stream HTTP/1.1\\r\\nHost: {host}:{port}\\r\\n\\r\\n".encode()
connections = [socket.create_connection((host, port)) for _ in range(num_clients)]
for connection in connections:
    connection.sendall(request)
print("connected", flush=True)
while connections[0].recv(1 << 16):
    pass
"""


def main() -> int:
    args = _arguments()
    common.PER_DEVICE, common.MAX_LENGTH = PER_DEVICE, TOKENS
    modes = []
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        work = common.make_work(Path(folder), args.steps, even_tokens=TOKENS)
        try:
            modes = [{"mode": mode, **measure(work, mode, args.viewers)} for mode in args.modes]
        except BenchmarkFailed as error:
            log_line(f"error: {error}")
            return 1
    result = {
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        "viewers": args.viewers,
        "work": (
            f"{work.steps} steps of {work.global_batch} chats of {TOKENS} tokens"
            f" ({common.WORLD_SIZE} CPU ranks × {PER_DEVICE}), all weights of {common.MODEL},"
            " float32, every step logged"
        ),
        "modes": modes,
    }
    return report_results(args, result, as_markdown(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--viewers", type=int, default=100, help="clients of the run's stream (default 100)"
    )
    parser.add_argument(
        "--steps", type=int, default=1000, help="training steps per run (default 1000)"
    )
    parser.add_argument(
        "--modes",
        type=lambda text: text.split(","),
        default=["ddp"],
        help="comma-separated strategies (default ddp)",
    )
    parser.add_argument("--json", action="store_true", help="print all measurements as JSON")
    parser.add_argument(
        "--output", type=Path, help="write FILE.md (the table) and FILE.json (all measurements)"
    )
    return parser.parse_args()


def measure(work: Work, mode: str, viewers: int) -> dict[str, Any]:
    """Return the cost as a share of a step. ``low`` and ``high`` bound its 90 % bootstrap
    interval."""
    errors: list[BenchmarkFailed] = []

    def train() -> None:
        try:
            common.run_paceline(
                work,
                parallel__mode=mode,
                lora__enable="false",
                truncation_strategy="truncate",
                logging_steps=1,
            )
        except BenchmarkFailed as error:
            errors.append(error)

    training = threading.Thread(target=train)
    training.start()
    intervals = _alternate_panel(work.folder, training, viewers)
    training.join()
    if errors:
        raise errors[0]
    lines = (work.folder / "run" / "events.jsonl").read_text().splitlines()
    steps = [event for event in map(json.loads, lines) if event["type"] == "step"]
    step_times = [
        [
            event["step_time_s"]
            for event in steps
            if begin < event["time"] - event["step_time_s"] and event["time"] < end
        ]
        for begin, end, _ in intervals
    ]
    ratios = []
    for first in range(0, len(intervals) - 1, 2):
        pair = {intervals[index][2]: step_times[index] for index in (first, first + 1)}
        if min(map(len, pair.values())) >= 3:
            ratios.append(median(pair[True]) / median(pair[False]) - 1)
    if len(ratios) < 5:
        raise BenchmarkFailed(
            f"too few pairs of intervals: {len(ratios)}, expected at least 5. Increase --steps."
        )
    cost, (low, high) = trimmed_mean(ratios), bootstrap_interval(ratios)
    return {
        "step_time_s": median(event["step_time_s"] for event in steps),
        "cost": cost, "low": low, "high": high, "met": cost < MAX_COST, "pairs": ratios,
    }  # fmt: skip


def _alternate_panel(
    folder: Path, training: threading.Thread, viewers: int
) -> list[tuple[float, float, bool]]:
    """Pause and resume the server and its clients in turns until the training ends.

    Return (begin, end, whether they ran) of each interval, in seconds since the epoch.
    """
    events = folder / "run" / "events.jsonl"
    started_at = time.time()
    while training.is_alive() and not (
        events.exists()
        and events.stat().st_mtime > started_at
        and events.read_text().count('"type": "step"') > 10
    ):
        time.sleep(0.2)
    command = [
        sys.executable,
        "-m",
        "paceline",
        "ui",
        str(folder),
        "--port",
        "0",
        "--no-browser",
        "--json",
    ]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    ]
    intervals: list[tuple[float, float, bool]] = []
    try:
        assert processes[0].stdout is not None
        url = json.loads(processes[0].stdout.readline())["url"].partition("?")[0]
        with urllib.request.urlopen(f"{url}api/runs") as response:
            runs = json.load(response)["runs"]
        run_id = next(run["id"] for run in runs if run["path"] == "run")
        host, port = url.removeprefix("http://").rstrip("/").split(":")
        command = [sys.executable, "-c", CLIENTS, host, port, run_id, str(viewers)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert processes[1].stdout is not None
        processes[1].stdout.readline()
        time.sleep(2.0)  # until the existing events have been sent
        while training.is_alive():
            is_running = ORDER[len(intervals) % len(ORDER)]
            for process in processes:
                os.kill(process.pid, signal.SIGCONT if is_running else signal.SIGSTOP)
            begin = time.time()
            training.join(INTERVAL_S)
            intervals.append((begin, time.time(), is_running))
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
    return intervals


def as_markdown(result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [
        "# Cost of the browser UI",
        "",
        (
            f"{result['date']}: {machine['cores']} cores ({machine['architecture']}), Python"
            f" {machine['python']}, torch {machine['torch']}. {result['work']}. {result['viewers']}"
            " clients, one of which reads."
        ),
        "",
        (
            "Additional time per step while the server and its clients run (alternating"
            " intervals of"
            f" {INTERVAL_S} s within a run; 90 % confidence interval):"
        ),
        "",
        "| mode | step | cost | pairs | under 1 % |",
        "| --- | --- | --- | --- | --- |",
    ]
    for mode in result["modes"]:
        lines.append(
            f"| `{mode['mode']}` | {1000 * mode['step_time_s']:.1f} ms | {100 * mode['cost']:+.2f}"
            f" % ({100 * mode['low']:+.2f} … {100 * mode['high']:+.2f}) | {len(mode['pairs'])} |"
            f" {'yes' if mode['met'] else 'NO'} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
