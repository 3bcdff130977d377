"""Run the command line as a user does: a process of its own, real ranks."""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from command_server import SERVER, Command

from paceline.cli import build_parser

MICRO = (
    "model=builtin:qwen2-micro",
    "dataset=builtin:python-docs#240",
    "parallel.device=cpu",
    "per_device_train_batch_size=4",
    "max_length=128",
)


def parse(*tokens: str) -> argparse.Namespace:
    """The arguments of a command, without running it."""
    parser, rest = build_parser(tokens[:1]).resolve(tokens)
    return parser.parse(rest)


def start(*args: str, verb: str = "sft", **settings: Any) -> subprocess.Popen[str] | Command:
    """Start `paceline VERB WORDS`, see :mod:`command_server`. ``settings``: of
    :class:`subprocess.Popen`."""
    environment = settings.get("env") or os.environ
    if settings.keys() <= {"env", "cwd", "start_new_session"} and SERVER.can_run(environment):
        return SERVER.start(
            [verb, *args],
            environment,
            Path(settings.get("cwd") or Path.cwd()),
            settings.get("start_new_session", False),
        )
    command = [sys.executable, "-m", "paceline", verb, *args]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings
    )


def run(
    *args: str, verb: str = "sft", expect: int = 0, timeout_s: float = 300.0, **settings: Any
) -> subprocess.CompletedProcess[str]:
    process = start(*args, verb=verb, **settings)
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == expect, (
        f"exit code {process.returncode}, expected {expect}\n{err[-3000:]}"
    )
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def train(
    output_dir: Path, *args: str, expect: int = 0, **settings: Any
) -> subprocess.CompletedProcess[str]:
    return run(*MICRO, f"output_dir={output_dir}", *args, expect=expect, **settings)


def report(output_dir: Path) -> dict[str, Any]:
    return json.loads((output_dir / "report.json").read_text())


def events(output_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (output_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["type"] == kind]


def losses(output_dir: Path) -> list[float]:
    return [event["loss"] for event in events(output_dir, "step")]


def digest(path: Path) -> str:
    from paceline.checkpoint import store

    return store.inspect(store.find(path))["digest"]


def wait_for_step(
    folder: Path, step: int, process: subprocess.Popen[str] | Command, timeout_s: float = 180.0
) -> None:
    """Until the run has made ``step`` updates; fails where it ends before."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        if (folder / "events.jsonl").exists() and any(
            event["step"] >= step for event in events(folder, "step")
        ):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


def rank_server(process: subprocess.Popen[str] | Command) -> psutil.Process:
    """The process from which a command forks its ranks."""
    return next(
        child
        for child in psutil.Process(process.pid).children()
        if {"forkserver", "command_server"} & set(re.findall(r"\w+", " ".join(child.cmdline())))
    )


def forked(process: subprocess.Popen[str] | Command) -> list[psutil.Process]:
    """The ranks of a command that starts them from a warm server: the server is the command's own
    child, they are its."""
    processes = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.ppid() != process.pid:
                processes.append(child)
    return processes


def spawned(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The worker processes of a command that starts them itself."""
    workers = []
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.Error):
            if "spawn_main" in " ".join(child.cmdline()):
                workers.append(child)
    return workers


def end_by(
    process: subprocess.Popen[str] | Command,
    number: signal.Signals,
    num_ranks: int,
    ready: Callable[[], object] = lambda: True,
    find_ranks: Callable[[subprocess.Popen[str]], list[psutil.Process]] = forked,
) -> str:
    """Send a command a signal when it has its ranks and is ``ready``; fails where a rank lives on.
    A Ctrl-C goes to the whole group, as from a terminal: start it with ``start_new_session``.
    Returns what it said on standard error."""
    ranks: list[psutil.Process] = []
    deadline = time.monotonic() + 120
    while not (len(ranks) == num_ranks and ready()) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        ranks = find_ranks(process)
        time.sleep(0.02)
    assert len(ranks) == num_ranks
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    _, err = process.communicate(timeout=60)
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert alive == []
    return err
