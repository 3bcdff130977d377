"""Measure the latency of the browser UI in Chromium: a list of 50 runs, a run of a million steps,
and a new event.

python benchmarks/panel_page.py [--rounds N] [--steps N] [--json] [--output FILE]

The first three figures are compared with TensorBoard in its default configuration, with the same 50
loss curves. Each round opens a page with an empty cache. Helpers of the tests write the logs in the
format of a run.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from run import describe_machine, log_line, report_results

TESTS = Path(__file__).parents[1] / "tests" / "web"
sys.path[:0] = [str(TESTS), str(TESTS / "browser")]

import event_logs  # noqa: E402
import psutil  # noqa: E402
from panel_pages import ARGUMENTS, NAMES  # noqa: E402
from playwright.sync_api import Browser, Page, sync_playwright  # noqa: E402

from paceline.web.runs.discovery import run_id  # noqa: E402

RUNS, RUN_STEPS = 50, 1000
RANKS, EVENTS = 8, 20
#: Upper bounds of the goals.
FIRST_PAINT_S, LONG_RUN_S, EVENT_S, START_S, MEMORY_BYTES = 1.0, 2.0, 1.0, 1.0, 300 << 20
FIRST_PAINT_MS = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
#: Records the time at which each new loss appears on the page.
WATCH = """() => {
  const readLoss = () => document.querySelector("[data-key='f.loss'] .figure-value")?.textContent;
  window.lossTimes = {}; let previous = readLoss();
  new MutationObserver(() => {
    const loss = readLoss();
    if (loss !== previous) { previous = loss; window.lossTimes[loss] ??= Date.now(); }
  }).observe(document.body, {subtree: true, childList: true, characterData: true});
}"""


def main() -> int:
    args = _arguments()
    browser_path = next((path for name in NAMES if (path := shutil.which(name))), None)
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=browser_path, args=ARGUMENTS)
        folder = Path(scratch)
        log_line(f"measuring {RUNS} runs of {RUN_STEPS} steps")
        make_runs(folder / "runs", folder / "tensorboard")
        result = {
            "panel": measure_run_list(browser, panel_command(folder / "runs"), args.rounds),
            "tensorboard": measure_run_list(
                browser, tensorboard_command(folder / "tensorboard"), args.rounds
            ),
            "event": measure_event_delay(browser, folder / "live"),
        }
        shutil.rmtree(folder / "runs")
        log_line(f"measuring a run of {args.steps:,} steps and {RANKS} ranks")
        event_logs.write_long(folder / "long/run/events.jsonl", args.steps, RANKS)
        result["long"] = measure_long_run(browser, folder / "long", args.rounds)
        browser.close()
    result = {
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        "steps": args.steps,
        "rounds": args.rounds,
        **result,
    }
    return report_results(args, result, as_markdown(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="measurements per figure; the median counts (default 5)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=1_000_000,
        help="steps of the long run (default 1,000,000: 2.3 GB)",
    )
    parser.add_argument("--json", action="store_true", help="print all measurements as JSON")
    parser.add_argument(
        "--output", type=Path, help="write FILE.md (the table) and FILE.json (all measurements)"
    )
    return parser.parse_args()


def make_runs(folder: Path, tensorboard_folder: Path) -> None:
    """Write the same losses as runs of Paceline and as TensorBoard logs."""
    from torch.utils.tensorboard import SummaryWriter

    for number in range(RUNS):
        event_logs.finished(folder / f"run-{number:02d}", steps=RUN_STEPS)
        with SummaryWriter(str(tensorboard_folder / f"run-{number:02d}")) as writer:  # type: ignore[no-untyped-call]
            for step in range(1, RUN_STEPS + 1):
                writer.add_scalar("loss", 9 / step, step)  # type: ignore[no-untyped-call]


def panel_command(folder: Path) -> list[str]:
    """Return the command line of `paceline ui`, without the port number."""
    return [sys.executable, "-m", "paceline", "ui", str(folder), "--no-browser", "--port"]


def tensorboard_command(folder: Path) -> list[str]:
    """Return the command line of TensorBoard, without the port number."""
    return [str(Path(sys.executable).with_name("tensorboard")), "--logdir", str(folder), "--port"]


@contextmanager
def start_server(command: list[str]) -> Iterator[tuple[str, float, psutil.Process]]:
    """Start a server, and yield (URL, seconds until its first response, process)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started_at = time.perf_counter()
    process = subprocess.Popen(
        [*command, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}/"
        while True:
            with suppress(OSError), urllib.request.urlopen(url, timeout=60) as response:
                response.read()
                break
            time.sleep(0.01)
        yield url, time.perf_counter() - started_at, psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@contextmanager
def open_page(browser: Browser) -> Iterator[Page]:
    """Yield a page of a new browser context, whose cache is empty."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, locale="en-GB")
    yield context.new_page()
    context.close()


def measure_run_list(browser: Browser, command: list[str], rounds: int) -> dict[str, list[float]]:
    """Return the seconds until the first response of the server, until the first paint, and until
    the page lists all runs."""
    figures: dict[str, list[float]] = {"start_s": [], "first_paint_s": [], "list_s": []}
    for _ in range(rounds):
        with start_server(command) as (url, start_s, _process), open_page(browser) as page:
            started_at = time.perf_counter()
            page.goto(url, wait_until="commit")
            page.get_by_text(f"run-{RUNS - 1:02d}").first.wait_for(
                state="attached", timeout=120_000
            )
            figures["list_s"].append(time.perf_counter() - started_at)
            figures["first_paint_s"].append(page.evaluate(FIRST_PAINT_MS) / 1000)
            figures["start_s"].append(start_s)
    return figures


def measure_event_delay(browser: Browser, folder: Path) -> dict[str, list[float]]:
    """Return the seconds between the writing of an event and the change of the page."""
    log = event_logs.begin(folder / "run", steps=1000)
    event_logs.emit_steps(log, 1, 5)
    delays = []
    with start_server(panel_command(folder)) as (url, _, _process), open_page(browser) as page:
        page.goto(f"{url}#/run/{run_id('run')}/overview")
        page.get_by_role("application").first.wait_for()
        page.evaluate(WATCH)
        for step in range(10, 10 + EVENTS):
            time.sleep(0.53)
            written = time.time()
            event_logs.emit_steps(log, step, step)
            while len(times := page.evaluate("Object.values(window.lossTimes)")) < step - 9:
                time.sleep(0.02)
            delays.append(max(times) / 1000 - written)
    log.close()
    return {"seen_s": delays}


def measure_long_run(browser: Browser, folder: Path, rounds: int) -> dict[str, Any]:
    """Return the seconds until the curve of a long run is drawn, with a new server, and the peak
    memory of the server until it has read the whole log."""
    drawn, memory = [], 0
    for number in range(rounds):
        with start_server(panel_command(folder)) as (url, _, process), open_page(browser) as page:
            started_at = time.perf_counter()
            page.goto(f"{url}#/run/{run_id('run')}/overview", wait_until="commit")
            page.locator("[role=application][aria-label*='ends at']").first.wait_for(
                timeout=120_000
            )
            drawn.append(time.perf_counter() - started_at)
            while number == 0 and page.get_by_text("this is a sample").count():
                memory = max(memory, process.memory_info().rss)
                time.sleep(0.5)
            memory = max(memory, process.memory_info().rss)
    return {
        "drawn_s": drawn,
        "memory_bytes": memory,
        "log_bytes": os.path.getsize(folder / "run/events.jsonl"),
    }


def as_markdown(result: dict[str, Any]) -> str:
    machine, long = result["machine"], result["long"]

    def seconds(values: list[float]) -> str:
        return f"{median(values):.2f} s ({min(values):.2f} … {max(values):.2f})"

    def row(name: str, values: list[float], goal_s: float, rival: list[float] | None = None) -> str:
        comparison = (
            f"{seconds(rival)} | {median(rival) / median(values):.1f} ×" if rival else "– | –"
        )
        return (
            f"| {name} | {seconds(values)} | {goal_s:g} s |"
            f" {'yes' if median(values) < goal_s else 'NO'} | {comparison} |"
        )

    panel, tensorboard = result["panel"], result["tensorboard"]
    memory = long["memory_bytes"]
    return "\n".join(
        [
            "# Latency of the browser UI",
            "",
            (
                f"{result['date']}: {machine['cores']} cores ({machine['architecture']}), Python"
                f" {machine['python']}, headless Chromium on the same machine. Medians of"
                f" {result['rounds']} rounds (lowest … highest), each with a new server and an"
                " empty cache."
            ),
            "",
            "| | Paceline | goal: under | met | TensorBoard | ratio |",
            "| --- | --- | --- | --- | --- | --- |",
            row(
                "from the command to the first response of the server",
                panel["start_s"],
                START_S,
                tensorboard["start_s"],
            ),
            row(
                f"until the first paint with {RUNS} runs",
                panel["first_paint_s"],
                FIRST_PAINT_S,
                tensorboard["first_paint_s"],
            ),
            row(
                f"until the page lists all {RUNS} runs",
                panel["list_s"],
                FIRST_PAINT_S,
                tensorboard["list_s"],
            ),
            row(
                f"until the curve of a run with {result['steps']:,} steps and {RANKS} ranks"
                f" ({long['log_bytes'] / 1e9:.2f} GB) is drawn",
                long["drawn_s"],
                LONG_RUN_S,
            ),
            row(
                f"from the writing of an event to its display ({EVENTS} events)",
                result["event"]["seen_s"],
                EVENT_S,
            ),
            "",
            (
                f"Peak memory of the server while it read the long run: {memory / (1 << 20):.0f}"
                f" MiB (goal: under {MEMORY_BYTES >> 20} MiB;"
                f" {'yes' if memory < MEMORY_BYTES else 'NO'})."
            ),
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
