"""Run Paceline commands as a user would, in a separate process with real ranks."""

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
import torch
from command_server import SERVERS, Command

from paceline.cli import build_parser

MICRO = (
    "model=builtin:qwen2-micro",
    "dataset=builtin:python-docs#240",
    "parallel.device=cpu",
    "per_device_train_batch_size=4",
    "max_length=128",
)


def parse(*tokens: str) -> argparse.Namespace:
    """Parse the arguments of a command without running it."""
    parser, rest = build_parser(tokens[:1]).resolve(tokens)
    return parser.parse(rest)


def start(*args: str, verb: str = "sft", **settings: Any) -> subprocess.Popen[str] | Command:
    """Start `paceline VERB ARGS`, through :mod:`command_server` if possible. ``settings`` are
    arguments of :class:`subprocess.Popen`."""
    environment = settings.get("env") or os.environ
    # A process that is forked from the server cannot use a GPU, because the server's imports
    # initialize the driver.
    has_gpu = torch.accelerator.is_available()
    if settings.keys() <= {"env", "cwd", "start_new_session"} and not has_gpu:
        for server in SERVERS:
            if server.can_run(environment):
                return server.start(
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
    """Run `paceline VERB ARGS` and check its exit code."""
    process = start(*args, verb=verb, **settings)
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == expect, (
        f"exit code {process.returncode}, expected {expect}\n{err[-3000:]}"
    )
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def train(
    output_dir: Path, *args: str, expect: int = 0, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Run `paceline sft` on the smallest built-in model and dataset."""
    return run(*MICRO, f"output_dir={output_dir}", *args, expect=expect, **settings)


def report(output_dir: Path) -> dict[str, Any]:
    """Return the contents of `report.json`."""
    return json.loads((output_dir / "report.json").read_text())


def events(output_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of one type from the event log."""
    # without a last line that is being written
    *lines, _incomplete = (output_dir / "events.jsonl").read_text().split("\n")
    return [event for event in map(json.loads, lines) if event["type"] == kind]


def losses(output_dir: Path) -> list[float]:
    """Return the training loss of each step."""
    return [event["loss"] for event in events(output_dir, "step")]


def digest(path: Path) -> str:
    """Return the digest of the weights in a checkpoint, or in the latest one of a run."""
    from paceline.checkpoint import store

    return store.inspect(store.find(path))["digest"]


def wait_for_step(
    folder: Path, step: int, process: subprocess.Popen[str] | Command, timeout_s: float = 180.0
) -> None:
    """Wait until the run has logged ``step``; fail if it ends before."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        if (folder / "events.jsonl").exists() and any(
            event["step"] >= step for event in events(folder, "step")
        ):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


def find_fork_server(process: subprocess.Popen[str] | Command) -> psutil.Process:
    """Return the process from which a command forks its ranks."""
    return next(
        child
        for child in psutil.Process(process.pid).children()
        if {"forkserver", "command_server"} & set(re.findall(r"\w+", " ".join(child.cmdline())))
    )


def find_forked_ranks(process: subprocess.Popen[str] | Command) -> list[psutil.Process]:
    """Return the ranks of a command that forks them from a fork server: its grandchildren."""
    processes = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.ppid() != process.pid:
                processes.append(child)
    return processes


def find_spawned_workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the worker processes that a command has find_spawned_workers without a fork server."""
    workers = []
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.Error):
            if "spawn_main" in " ".join(child.cmdline()):
                workers.append(child)
    return workers


def end_with_signal(
    process: subprocess.Popen[str] | Command,
    number: signal.Signals,
    num_ranks: int,
    ready: Callable[[], object] = lambda: True,
    find_ranks: Callable[[subprocess.Popen[str]], list[psutil.Process]] = find_forked_ranks,
) -> str:
    """Send a command a signal once it has started its ranks and is ``ready``. Fails if a rank
    survives. SIGINT goes to the whole process group, as from a terminal, so the command must have
    been started with ``start_new_session``. Returns the standard error of the command."""
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
