"""Observe a running command from outside: its processes, events and temporary files."""

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

TOKEN = "PACELINE_FAULT_LAB"
_TIMEOUT_S, _LONG_S = 240.0, 1800.0


class LiveRun:
    """A running `paceline sft` command, with its processes, its events, and the files that it
    creates outside of its output folder.

    Args:
        scratch: folder for the temporary files of the run (``tmp``), its shared memory (``shm``, if
            this machine allows tests to mount) and its output.
    """

    def __init__(self, args: Sequence[str], folder: Path, scratch: Path, token: str) -> None:
        self.folder, self.tmp, self.token = folder, scratch / "tmp", token
        for directory in (self.tmp, scratch / "shm"):
            directory.mkdir(parents=True, exist_ok=True)
        self._output_file = scratch / "output"
        environment = {**os.environ, "TMPDIR": str(self.tmp), TOKEN: token}
        command = [
            *isolate_shared_memory(scratch / "shm"),
            sys.executable,
            "-m",
            "paceline",
            "sft",
            *args,
            f"output_dir={folder}",
        ]
        with open(self._output_file, "wb") as output:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=output,
                start_new_session=True,
            )
        self._events, self._offset = [], self._log_size()
        self._server: psutil.Process | None = None
        self._old_ranks: set[int] = set()  # PIDs of the ranks of attempts that a fault has ended

    @property
    def output(self) -> str:
        return self._output_file.read_text(errors="replace")

    # -- its processes
    @property
    def launcher(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    def server(self) -> psutil.Process | None:
        """The fork server."""
        if self._server is None or not self._server.is_running():
            self._server = None
            with contextlib.suppress(psutil.Error):
                servers = [
                    process
                    for process in self.launcher.children()
                    if "forkserver" in " ".join(process.cmdline())
                ]
                self._server = servers[0] if servers else None
        return self._server

    def all_processes(self) -> list[psutil.Process]:
        """Return all processes that this run has started and that still exist, including
        orphans."""
        return [process for process in psutil.process_iter() if _has_token(process, self.token)]

    def ranks(self) -> dict[int, psutil.Process]:
        """Return {rank: process} of the current attempt, of the ranks that have written their
        PID."""
        server, ranks = self.server(), {}
        for file in self.tmp.glob("paceline-run-*/rank-*.start.json"):
            with contextlib.suppress(psutil.Error, OSError, ValueError):
                process = psutil.Process(json.loads(file.read_text())["pid"])
                if (
                    server is not None
                    and process.ppid() == server.pid
                    and process.pid not in self._old_ranks
                ):
                    ranks[int(file.name.split("-")[1].partition(".")[0])] = process
        return ranks

    def rank_processes(self) -> list[psutil.Process]:
        """Return the rank processes of the current attempt, including those that are starting."""
        server = self.server()
        with contextlib.suppress(psutil.Error):
            return (
                sorted(
                    (
                        process
                        for process in server.children()
                        if process.pid not in self._old_ranks
                    ),
                    key=lambda process: process.pid,
                )
                if server
                else []
            )
        return []

    def begin_attempt_after(self, ending: set[int]) -> None:
        """Ignore the processes of an attempt that a fault has just ended, and the events logged so
        far."""
        self.events()
        self._old_ranks |= ending
        self._events = []

    # -- its events
    def _log_size(self) -> int:
        with contextlib.suppress(OSError):
            return (self.folder / "events.jsonl").stat().st_size
        return 0

    def events(self) -> list[dict[str, Any]]:
        """Return the events of the current attempt from the complete lines of the log."""
        with contextlib.suppress(OSError), open(self.folder / "events.jsonl", "rb") as handle:
            handle.seek(self._offset)
            complete, _, _ = handle.read().rpartition(b"\n")
            if complete:
                self._offset += len(complete) + 1
                for line in filter(None, complete.split(b"\n")):
                    with contextlib.suppress(ValueError):  # a line that a fault has truncated
                        self._events.append(json.loads(line))
        starts = [index for index, event in enumerate(self._events) if event["type"] == "run_start"]
        return self._events[starts[-1] :] if starts else []

    def steps(self) -> int:
        """Return the number of steps logged in the current attempt."""
        return sum(event["type"] == "step" for event in self.events())

    # -- time
    def wait(
        self,
        condition: Callable[[], object],
        timeout_s: float = _TIMEOUT_S,
        interval_s: float = 0.005,
    ) -> bool:
        """Wait until the condition holds and return True; return False if the run ends before."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                output = self.output
                self.kill()
                raise AssertionError(
                    f"the condition did not hold within {timeout_s:.0f} s\n{output[-3000:]}"
                )
            time.sleep(interval_s)
        return True

    def wait_for_exit(self) -> int:
        """Wait until the run has ended; return its exit code."""
        self.wait(lambda: self.process.poll() is not None, _LONG_S, interval_s=0.02)
        return int(self.process.wait())

    def kill(self) -> None:
        for process in self.all_processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()


def _has_token(process: psutil.Process, token: str) -> bool:
    try:
        return process.environ().get(TOKEN) == token and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):
        return False


def new_token() -> str:
    return uuid.uuid4().hex


@functools.cache
def _can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    done = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True
    )
    return done.returncode == 0


def isolate_shared_memory(folder: Path) -> list[str]:
    """Return a command prefix that mounts ``folder`` at /dev/shm for the command that follows."""
    if not _can_mount():
        warnings.warn(
            "NOT CHECKED for files left in /dev/shm: this machine does not allow tests to mount",
            stacklevel=2,
        )
        return []
    return [
        "unshare",
        "-m",
        "sh",
        "-c",
        'mount --bind "$1" /dev/shm && shift && exec "$@"',
        "sh",
        str(folder),
    ]
