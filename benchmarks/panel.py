"""What the panel costs a run: the time of a step with `paceline ui` and its viewers beside it,
against one without.

python benchmarks/panel.py [--viewers N] [--steps N] [--modes ddp] [--json] [--output FILE]

One viewer reads all that comes, as a page does; the others have asked for the run's stream and
never read. Within one run the server and its viewers are stopped and let go on (SIGSTOP, SIGCONT)
in turns, and the steps that lie wholly in a stretch with them are compared with those of the
stretch without them beside it: two runs of the same work differ by more than what is looked for.
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
from recovery import PER_DEVICE, TOKENS, interval, trimmed
from run import _machine, log_line, report_results

AT_MOST = 0.01  # of a step
STRETCH_S = 2.5
ORDER = (True, False, False, True)
#: The viewers, in a process of their own: ADDRESS PORT ID NUMBER.
VIEWERS = """
import socket, sys, threading
host, port, run, number = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
request = f"GET /api/runs/{run}/stream HTTP/1.1\\r\\nHost: {host}:{port}\\r\\n\\r\\n".encode()
links = [socket.create_connection((host, port)) for _ in range(number)]
for link in links:
    link.sendall(request)
print("there", flush=True)
while links[0].recv(1 << 16):
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
        "machine": _machine(),
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
    parser.add_argument("--viewers", type=int, default=100, help="that watch the run (default 100)")
    parser.add_argument(
        "--steps", type=int, default=1000, help="training steps of a run (default 1000)"
    )
    parser.add_argument(
        "--modes", type=lambda text: text.split(","), default=["ddp"], help="default: ddp"
    )
    parser.add_argument(
        "--json", action="store_true", help="print everything measured as one JSON value"
    )
    parser.add_argument(
        "--output", type=Path, help="write FILE.md (the table) and FILE.json (everything measured)"
    )
    return parser.parse_args()


def measure(work: Work, mode: str, viewers: int) -> dict[str, Any]:
    """Shares of a step. ``low`` and ``high``: 90 % of the means over pairs drawn anew lie between
    them."""
    failed: list[BenchmarkFailed] = []

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
            failed.append(error)

    run = threading.Thread(target=train)
    run.start()
    stretches = _watch(work.folder, run, viewers)
    run.join()
    if failed:
        raise failed[0]
    lines = (work.folder / "run" / "events.jsonl").read_text().splitlines()
    steps = [event for event in map(json.loads, lines) if event["type"] == "step"]
    inside = [
        [
            event["step_time_s"]
            for event in steps
            if begin < event["time"] - event["step_time_s"] and event["time"] < end
        ]
        for begin, end, _ in stretches
    ]
    ratios = []
    for place in range(0, len(stretches) - 1, 2):
        pair = {stretches[index][2]: inside[index] for index in (place, place + 1)}
        if min(map(len, pair.values())) >= 3:
            ratios.append(median(pair[True]) / median(pair[False]) - 1)
    if len(ratios) < 5:
        raise BenchmarkFailed(f"{len(ratios)} pairs of stretches: too few; more --steps")
    cost, (low, high) = trimmed(ratios), interval(ratios)
    return {
        "step_time_s": median(event["step_time_s"] for event in steps),
        "cost": cost, "low": low, "high": high, "met": cost < AT_MOST, "pairs": ratios,
    }  # fmt: skip


def _watch(folder: Path, run: threading.Thread, viewers: int) -> list[tuple[float, float, bool]]:
    """(begin, end, on) of each stretch, in seconds since the epoch."""
    events = folder / "run" / "events.jsonl"
    begun = time.time()
    while run.is_alive() and not (
        events.exists()
        and events.stat().st_mtime > begun
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
    stretches: list[tuple[float, float, bool]] = []
    try:
        assert processes[0].stdout is not None
        url = json.loads(processes[0].stdout.readline())["url"].partition("?")[0]
        with urllib.request.urlopen(f"{url}api/runs") as answer:
            runs = json.load(answer)["runs"]
        run_id = next(run["id"] for run in runs if run["path"] == "run")
        host, port = url.removeprefix("http://").rstrip("/").split(":")
        command = [sys.executable, "-c", VIEWERS, host, port, run_id, str(viewers)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert processes[1].stdout is not None
        processes[1].stdout.readline()
        time.sleep(2.0)  # they have been sent what was there
        while run.is_alive():
            on = ORDER[len(stretches) % len(ORDER)]
            for process in processes:
                os.kill(process.pid, signal.SIGCONT if on else signal.SIGSTOP)
            begin = time.time()
            run.join(STRETCH_S)
            stretches.append((begin, time.time(), on))
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
    return stretches


def as_markdown(result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [
        "# What the panel costs a run",
        "",
        (
            f"{result['date']}: {machine['cores']} cores ({machine['architecture']}), Python"
            f" {machine['python']}, torch {machine['torch']}. {result['work']}. {result['viewers']}"
            " viewers, of which one reads."
        ),
        "",
        (
            "More time for a step with the panel and its viewers than without (stretches of "
            f"{STRETCH_S} s in turns within a run, 90 % interval):"
        ),
        "",
        "| mode | a step | cost | pairs | under 1 % |",
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
