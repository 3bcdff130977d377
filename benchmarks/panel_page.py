"""How soon the panel shows what it shall, in a real Chromium: 50 runs, a run of a million steps, an
event just written.

python benchmarks/panel_page.py [--rounds N] [--steps N] [--json] [--output FILE]

The rival for the first three figures is TensorBoard as it comes, with the same 50 losses. Each
round opens a browser page with an empty cache. The logs are made by the helpers of the tests, with
lines as a run writes them.
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

from run import _machine, log_line, report_results

TESTS = Path(__file__).parents[1] / "tests" / "web"
sys.path[:0] = [str(TESTS), str(TESTS / "browser")]

import event_logs  # noqa: E402
import psutil  # noqa: E402
from panel_pages import ARGUMENTS, NAMES  # noqa: E402
from playwright.sync_api import Browser, Page, sync_playwright  # noqa: E402

from paceline.web.runs.discovery import run_id  # noqa: E402

RUNS, RUN_STEPS = 50, 1000
RANKS, EVENTS = 8, 20
#: What is asked for: seconds, and bytes.
FIRST_PAINT_S, LONG_RUN_S, EVENT_S, START_S, MEMORY_BYTES = 1.0, 2.0, 1.0, 1.0, 300 << 20
PAINTED = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
#: The moment at which the loss that the page shows becomes another one.
WATCH = """() => {
  const place = () => document.querySelector("[data-key='f.loss'] .figure-value")?.textContent;
  window.seen = {}; let last = place();
  new MutationObserver(() => {
    const now = place();
    if (now !== last) { last = now; window.seen[now] ??= Date.now(); }
  }).observe(document.body, {subtree: true, childList: true, characterData: true});
}"""


def main() -> int:
    args = _arguments()
    browser_path = next((path for name in NAMES if (path := shutil.which(name))), None)
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as place,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=browser_path, args=ARGUMENTS)
        folder = Path(place)
        log_line(f"{RUNS} runs of {RUN_STEPS} steps")
        make_runs(folder / "many", folder / "boards")
        result = {
            "panel": of_many(browser, panel(folder / "many"), args.rounds),
            "tensorboard": of_many(browser, tensorboard(folder / "boards"), args.rounds),
            "event": of_events(browser, folder / "live"),
        }
        shutil.rmtree(folder / "many")
        log_line(f"a run of {args.steps:,} steps and {RANKS} ranks")
        event_logs.write_long(folder / "long/one/events.jsonl", args.steps, RANKS)
        result["long"] = of_long(browser, folder / "long", args.rounds)
        browser.close()
    result = {
        "date": date.today().isoformat(),
        "machine": _machine(),
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
        "--rounds", type=int, default=5, help="of each figure; the median counts (default 5)"
    )
    parser.add_argument(
        "--steps", type=int, default=1_000_000, help="of the long run (default a million: 2.3 GB)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print everything measured as one JSON value"
    )
    parser.add_argument(
        "--output", type=Path, help="write FILE.md (the table) and FILE.json (everything measured)"
    )
    return parser.parse_args()


def make_runs(folder: Path, boards: Path) -> None:
    """The same losses as runs, and as TensorBoard has them."""
    from torch.utils.tensorboard import SummaryWriter

    for number in range(RUNS):
        event_logs.finished(folder / f"run-{number:02d}", steps=RUN_STEPS)
        with SummaryWriter(str(boards / f"run-{number:02d}")) as writer:  # type: ignore[no-untyped-call]
            for step in range(1, RUN_STEPS + 1):
                writer.add_scalar("loss", 9 / step, step)  # type: ignore[no-untyped-call]


def panel(folder: Path) -> list[str]:
    return [sys.executable, "-m", "paceline", "ui", str(folder), "--no-browser", "--port"]


def tensorboard(folder: Path) -> list[str]:
    return [str(Path(sys.executable).with_name("tensorboard")), "--logdir", str(folder), "--port"]


@contextmanager
def served(command: list[str]) -> Iterator[tuple[str, float, psutil.Process]]:
    """(address, seconds from the command to the first answer, process)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begun = time.perf_counter()
    process = subprocess.Popen(
        [*command, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}/"
        while True:
            with suppress(OSError), urllib.request.urlopen(url, timeout=60) as answer:
                answer.read()
                break
            time.sleep(0.01)
        yield url, time.perf_counter() - begun, psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@contextmanager
def fresh(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, locale="en-GB")
    yield context.new_page()
    context.close()


def of_many(browser: Browser, command: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds: to the server's first answer, to the first paint, and until the last of the runs is
    on the page."""
    figures: dict[str, list[float]] = {"start_s": [], "first_paint_s": [], "list_s": []}
    for _ in range(rounds):
        with served(command) as (url, start_s, _process), fresh(browser) as page:
            begun = time.perf_counter()
            page.goto(url, wait_until="commit")
            page.get_by_text(f"run-{RUNS - 1:02d}").first.wait_for(
                state="attached", timeout=120_000
            )
            figures["list_s"].append(time.perf_counter() - begun)
            figures["first_paint_s"].append(page.evaluate(PAINTED) / 1000)
            figures["start_s"].append(start_s)
    return figures


def of_events(browser: Browser, folder: Path) -> dict[str, list[float]]:
    """Seconds from the time in an event to the change on the page."""
    log = event_logs.begin(folder / "one", steps=1000)
    event_logs.emit_steps(log, 1, 5)
    delays = []
    with served(panel(folder)) as (url, _, _process), fresh(browser) as page:
        page.goto(f"{url}#/run/{run_id('one')}/overview")
        page.get_by_role("application").first.wait_for()
        page.evaluate(WATCH)
        for step in range(10, 10 + EVENTS):
            time.sleep(0.53)
            written = time.time()
            event_logs.emit_steps(log, step, step)
            while len(seen := page.evaluate("Object.values(window.seen)")) < step - 9:
                time.sleep(0.02)
            delays.append(max(seen) / 1000 - written)
    log.close()
    return {"seen_s": delays}


def of_long(browser: Browser, folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds until the curve of a long run is drawn, by a server that has not read it; its memory
    until it has."""
    drawn, memory = [], 0
    for number in range(rounds):
        with served(panel(folder)) as (url, _, process), fresh(browser) as page:
            begun = time.perf_counter()
            page.goto(f"{url}#/run/{run_id('one')}/overview", wait_until="commit")
            page.locator("[role=application][aria-label*='at the end']").first.wait_for(
                timeout=120_000
            )
            drawn.append(time.perf_counter() - begun)
            while number == 0 and page.get_by_text("a sample of it").count():
                memory = max(memory, process.memory_info().rss)
                time.sleep(0.5)
            memory = max(memory, process.memory_info().rss)
    return {
        "drawn_s": drawn,
        "memory_bytes": memory,
        "log_bytes": os.path.getsize(folder / "one/events.jsonl"),
    }


def as_markdown(result: dict[str, Any]) -> str:
    machine, long = result["machine"], result["long"]

    def seconds(values: list[float]) -> str:
        return f"{median(values):.2f} s ({min(values):.2f} … {max(values):.2f})"

    def line(
        name: str, values: list[float], goal_s: float, rival: list[float] | None = None
    ) -> str:
        beside = f"{seconds(rival)} | {median(rival) / median(values):.1f} ×" if rival else "– | –"
        return (
            f"| {name} | {seconds(values)} | {goal_s:g} s |"
            f" {'yes' if median(values) < goal_s else 'NO'} | {beside} |"
        )

    panel, other = result["panel"], result["tensorboard"]
    memory = long["memory_bytes"]
    return "\n".join(
        [
            "# How soon the panel shows what it shall",
            "",
            (
                f"{result['date']}: {machine['cores']} cores ({machine['architecture']}), Python"
                f" {machine['python']}, headless Chromium on the same machine. Medians of"
                f" {result['rounds']} rounds (lowest … highest), each with a new server and an"
                " empty cache."
            ),
            "",
            "| | panel | at most | met | TensorBoard | how much sooner |",
            "| --- | --- | --- | --- | --- | --- |",
            line(
                "from the command to the server's first answer",
                panel["start_s"],
                START_S,
                other["start_s"],
            ),
            line(
                f"first paint with {RUNS} runs",
                panel["first_paint_s"],
                FIRST_PAINT_S,
                other["first_paint_s"],
            ),
            line(
                f"until all {RUNS} runs are on the page",
                panel["list_s"],
                FIRST_PAINT_S,
                other["list_s"],
            ),
            line(
                f"a run of {result['steps']:,} steps, {RANKS} ranks ({long['log_bytes'] / 1e9:.2f}"
                " GB), until its curve is drawn",
                long["drawn_s"],
                LONG_RUN_S,
            ),
            line(
                f"from the writing of an event to the screen ({EVENTS} events)",
                result["event"]["seen_s"],
                EVENT_S,
            ),
            "",
            (
                f"Memory of the server, until it had read the long run: {memory / (1 << 20):.0f}"
                f" MiB at most (goal {MEMORY_BYTES >> 20}:"
                f" {'yes' if memory < MEMORY_BYTES else 'NO'})."
            ),
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
