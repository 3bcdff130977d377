"""The names of the files in a run's folder (`output_dir`)."""

import errno
import fcntl
import os
import re
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.core.errors import RunError


@dataclass(frozen=True)
class RunDir:
    """Paths inside one run's folder. Making one touches nothing on disk."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def heartbeats(self) -> Path:
        return self.root / "heartbeats.json"

    @property
    def report(self) -> Path:
        return self.root / "report.json"

    @property
    def report_html(self) -> Path:
        return self.root / "report.html"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    @property
    def launch_lock(self) -> Path:
        """Held by the launcher (core/launch_lock.py); ``lock`` is held by the rank that writes."""
        return self.root / ".launch.lock"

    def is_run(self) -> bool:
        """True where a run has already begun here."""
        return self.config.is_file() or self.events.is_file() or self.checkpoints.is_dir()


#: What is written aside before it gets its name (core/files.py, train/final_model.py).
_DEBRIS = re.compile(r"\.(config\.yaml|report\.json|report\.html|model)\.\d+\.(tmp|old)")


def clear_debris(run_dir: RunDir) -> None:
    """Remove what a process that was killed has left of files and of ``model/``, for whoever holds
    the run's folder. Checkpoints are not looked at."""
    for path in run_dir.root.iterdir():
        if _DEBRIS.fullmatch(path.name):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def lock_run(run_dir: RunDir, wait_s: float, *, sign: bool = True) -> IO[str]:
    """An exclusive lock on a run's folder. ``sign``: leave in it who holds it; without, no file is
    changed.

    Raises:
        RunError: another process holds it for longer than ``wait_s``.
    """
    handle = open(run_dir.lock, "a+")  # noqa: SIM115  (the lock lives as long as the handle)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EINTR):
                break  # this file system has no locks; the launcher reports it
            if time.monotonic() >= deadline:
                handle.seek(0)
                who = handle.read().strip() or "not known"
                handle.close()
                raise RunError(
                    f"another run is going on in {run_dir.root} (process {who})",
                    fix="wait for it, stop it, or set another `output_dir`",
                ) from error
            time.sleep(0.1)
    if sign:
        handle.truncate(0)
        handle.write(f"{os.getpid()} on {socket.gethostname()}")
        handle.flush()
    return handle
