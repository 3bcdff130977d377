"""The processes that elastic has started on this host: how they are stopped, and how they ended."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from paceline.cluster.failures import AgentFolder
from paceline.core.files import write_atomic
from paceline.core.processes import pid_alive
from paceline.launch.worker import STOP_FILE

_EXIT_CODE_AFTER_S = 0.5


class StoppedWithoutWorkers(BaseException):
    """A signal arrived while no rank was running."""


class WorkerProcesses:
    """The workers of this host, to which a signal forwarder passes on what it gets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def forward(self, number: int) -> None:
        """Ask the ranks to stop; where none runs, leave the rendezvous."""
        write_atomic(self.folder / STOP_FILE, str(number))
        if not self._send(signal.SIGTERM):
            raise StoppedWithoutWorkers

    def kill(self, wait_s: float = 0.0) -> None:
        deadline = time.monotonic() + wait_s
        while self._send(signal.SIGKILL) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _send(self, number: int) -> bool:
        """Whether some rank was there to get it."""
        has_any = False
        for process in multiprocessing.active_children():
            if process.pid is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)
                    has_any = True
        return has_any


class ExitWatch:
    """Records when each worker ended and with which exit code, for the ranks of the next round. A
    killed rank cannot."""

    def __init__(self, folder: AgentFolder) -> None:
        self.folder = folder
        self._known: dict[int, Any] = {}  # process by pid
        self._gone_at: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="exit-watch", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            for local_rank, pid in self.folder.pids().items():
                if pid_alive(pid):
                    if pid not in self._known:
                        self._known.update(
                            {child.pid or 0: child for child in multiprocessing.active_children()}
                        )
                    continue
                gone_at = self._gone_at.setdefault(pid, time.time())
                process = self._known.get(pid)
                # Elastic polls its workers in the main thread. The exit code is read from a pipe
                # once, so it is asked for here only after elastic has read it.
                if process is not None and time.time() > gone_at + _EXIT_CODE_AFTER_S:
                    self.folder.write(
                        local_rank, "exit", {"code": process.exitcode, "time": gone_at, "pid": pid}
                    )
                    del self._known[pid]

    def close(self) -> None:
        self._ended.set()
        self._thread.join(1.0)
