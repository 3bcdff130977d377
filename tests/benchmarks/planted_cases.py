"""Sections for the test of the GPU benchmark: cases that fail, hang, crash, and skip."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cases import Case, Section, Skipped
from context import Context

THIS = "planted_cases"


def succeed(context: Context, value: int = 1) -> dict[str, Any]:
    return {"value": value, "pid": os.getpid()}


def fail(context: Context) -> None:
    raise ValueError("planted failure")


def hang(context: Context, pid_file: str) -> None:
    """Start a process, write its number, and never return."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pid_file).write_text(str(child.pid))
    time.sleep(600)


def crash(context: Context) -> None:
    os._exit(7)


def skip(context: Context) -> None:
    raise Skipped("planted reason")


def fail_on_one_rank(context: Context, port: int) -> None:
    if context.rank == 1:
        raise ValueError("planted failure of a rank")
    time.sleep(600)


def sum_ranks(context: Context, port: int) -> dict[str, Any]:
    """Wait until all ranks have written a file, and add up the numbers in the files."""
    (context.scratch / str(context.rank)).write_text(str(context.rank))
    while len(list(context.scratch.iterdir())) < context.num_ranks:
        time.sleep(0.01)
    return {"sum": sum(range(context.num_ranks)), "port": port}


def overlaps(context: Context, seconds: float) -> dict[str, Any]:
    started_at = time.time()
    time.sleep(seconds)
    return {"from": started_at, "to": time.time()}


def _case(name: str, function: str, **settings: Any) -> Case:
    return Case(name, f"{THIS}:{function}", **settings)


PID_FILE = os.environ.get("PLANTED_PID_FILE", "")
SECTIONS = [
    Section("first", 60, [
        _case("good", "succeed"),
        _case("bad", "fail"),
        _case("hanging", "hang", arguments={"pid_file": PID_FILE}, limit_s=1),
        _case("crashing", "crash"),
        _case("skipping", "skip"),
        _case("excluded", "succeed", why_skipped="known in advance"),
    ]),
    Section("ranks", 60, [
        _case("sum", "sum_ranks", num_ranks=3),
        _case("one fails", "fail_on_one_rank", num_ranks=2),
    ]),
    Section("limited", 1.0, [
        *(_case(f"sleep {number}", "overlaps", arguments={"seconds": 0.7}) for number in range(2)),
        _case("alone", "overlaps", arguments={"seconds": 0.7}, is_timing=True),
        _case("late", "succeed"),
    ]),
    Section("last", 60, [
        _case("measured", "overlaps", arguments={"seconds": 0.3}, is_timing=True),
        _case("slow", "fail", is_timing=True),
        _case("good again", "succeed", arguments={"value": 2}),
    ]),
]  # fmt: skip
