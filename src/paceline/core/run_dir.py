"""The files in the folder of a run (`output_dir`), and its two locks.

The launcher locks the folder from before it reads anything until it ends, and the rank that writes
locks it while it trains. Both use ``flock``, so the kernel releases them when their process ends
for any reason. A launcher that exits normally also removes its lock file, and the folders that it
created if they are still empty.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import re
import shlex
import shutil
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.core.errors import ConfigError, RunError
from paceline.core.event_log import tail_events
from paceline.core.log import CONSOLE_ONLY
from paceline.core.processes import pid_alive
from paceline.core.texts import UserText

logger = logging.getLogger(__name__)

#: How long to wait for a run that has written ``run_end`` and whose process is still exiting.
_ENDING_S = 15.0
#: How long a lock may be held by a process that has not signed it: one that is about to sign it, or
#: one that only checks the lock.
_UNSIGNED_S = 2.0
_POLL_S = 0.05


def propose_folder(folder: str) -> str:
    """Return a name for a new run beside ``folder`` that is free: ``output/run-2``, or the next
    number."""
    path = Path(folder)
    if path.name in ("", ".."):
        path /= "run"
    name, _, number = path.name.rpartition("-")
    stem, first = (name, int(number) + 1) if name and number.isdecimal() else (path.name, 2)
    names = (path.with_name(f"{stem}-{count}") for count in itertools.count(first))
    return str(next(each for each in names if not os.path.lexists(each)))


@dataclass(frozen=True)
class RunDir:
    """The paths inside the folder of a run. Creates nothing on disk."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def chosen(self) -> Path:
        """The memory settings that were chosen for the run."""
        return self.root / "chosen.json"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def heartbeats(self) -> Path:
        return self.root / "heartbeats.json"

    @property
    def trackers(self) -> Path:
        """Identifiers of the run at experiment trackers."""
        return self.root / "trackers.json"

    @property
    def profile(self) -> Path:
        return self.root / "profile"

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
    def rollouts(self) -> Path:
        """The completions that the run has trained on, a file for each rollout."""
        return self.root / "rollouts"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    @property
    def launch_lock(self) -> Path:
        """Locked by the launcher; ``lock`` is locked by the rank that writes."""
        return self.root / ".launch.lock"

    def is_run(self) -> bool:
        """Return whether a run has already begun in this folder."""
        return self.config.is_file() or self.events.is_file() or self.checkpoints.is_dir()


#: Temporary names (core/files.py, train/final_model.py).
_DEBRIS = re.compile(
    r"\.(config\.yaml|chosen\.json|report\.json|report\.html|model)\.\d+\.(tmp|old)"
)


def clear_debris(run_dir: RunDir) -> None:
    """Remove the temporary files and model folders of a process that was killed. The caller must
    hold the lock. Ignores checkpoints."""
    for path in run_dir.root.iterdir():
        if _DEBRIS.fullmatch(path.name):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def is_unsupported(error: OSError) -> bool:
    """Return whether ``flock`` failed for a reason other than that another process holds the
    lock."""
    return error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EINTR)


def lock_run(run_dir: RunDir, wait_s: float, *, sign: bool = True) -> IO[str]:
    """Return an exclusive lock on the folder of a run.

    Args:
        sign: whether to write the ID and the host of this process to the file.

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
            if is_unsupported(error):
                break  # the file system has no locks; the launcher warns about it
            if time.monotonic() >= deadline:
                handle.seek(0)
                holder = handle.read().strip() or "unknown"
                handle.close()
                raise RunError(
                    "`output_dir: {root}` is in use by another run (process {holder})",
                    code="output-dir-locked",
                    fix="wait until it ends, stop it, or set another `output_dir`",
                    root=run_dir.root,
                    holder=holder,
                ) from error
            time.sleep(0.1)
    if sign:
        handle.truncate(0)
        handle.write(f"{os.getpid()} on {socket.gethostname()}")
        handle.flush()
    return handle


def holder_alive(run_dir: RunDir) -> bool | None:
    """Return whether the process that last signed a run's lock is alive, or None if there is none
    or it is on another host. Does not take the lock."""
    try:
        handle = os.open(run_dir.lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(handle, encoding="utf-8", errors="replace") as lock:
            signed = re.fullmatch(r"(\d{1,9}) on (.+)", lock.read(1000))
            signed_at = os.fstat(lock.fileno()).st_mtime
    except OSError:
        return None
    if signed is None or signed[2] != socket.gethostname():
        return None
    return pid_alive(int(signed[1]), signed_at)


class LaunchLock:
    """Exclusive use of a run's folder, as a context manager.

    Args:
        run_dir: the folder, which is created if it does not exist.
        setting: how the user named it; default: as ``output_dir``.

    Raises:
        ConfigError: another process holds the lock (the message names it), or the folder cannot be
            written.
    """

    def __init__(self, run_dir: RunDir, setting: str | None = None) -> None:
        self.run_dir = run_dir
        self._setting = setting or f"output_dir: {run_dir.root}"
        self._other = "choose another folder" if setting else "set another `output_dir`"
        self._handle: IO[str] | None = None
        self._created: list[Path] = []

    def __enter__(self) -> LaunchLock:
        try:
            self._handle = self._acquire()
            _sign(self._handle)
        except OSError as error:
            self._remove_created()
            raise ConfigError(
                "`{setting}` cannot be written: {reason}",
                code="not-writable",
                fix="free some space there, or {other}",
                setting=self._setting,
                reason=error.strerror or error,
                other=self._other,
            ) from error
        except BaseException:
            self._remove_created()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is None:
            return
        if _is_at(self._handle, self.run_dir.launch_lock):
            self.run_dir.launch_lock.unlink(missing_ok=True)
        self._handle.close()
        self._remove_created()

    def _acquire(self) -> IO[str]:
        begun = time.monotonic()
        waiting = False
        while True:
            self._create_folders()
            try:
                handle = open(self.run_dir.launch_lock, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115
            except FileNotFoundError:  # a launcher that has just ended removed the folder
                if time.monotonic() - begun > _UNSIGNED_S:
                    raise
                time.sleep(_POLL_S)
                continue
            if self._lock(handle):
                if _is_at(handle, self.run_dir.launch_lock):
                    return handle
                handle.close()  # the file was removed between opening and locking it
                continue
            holder, since = _read_holder(handle)
            handle.close()
            waited = time.monotonic() - begun
            ending = since is not None and has_ended(self.run_dir, since)
            if waited > (_ENDING_S if ending else _UNSIGNED_S if holder is None else 0.0):
                raise ConfigError(
                    "`output_dir: {root}` is in use by another run: {holder}",
                    code="in-use",
                    fix="wait until it ends, stop it, or set another `output_dir`",
                    root=self.run_dir.root,
                    holder=holder or "an unknown process",
                )
            if ending and not waiting:
                waiting = True
                logger.info(
                    "waiting for the run in %s to exit…", self.run_dir.root, extra=CONSOLE_ONLY
                )
            time.sleep(_POLL_S)

    def _lock(self, handle: IO[str]) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if not is_unsupported(error):
                return False
            logger.warning(
                UserText(
                    "the file system of {root} does not support locks ({reason}): Paceline cannot"
                    " prevent a second run in this folder",
                    code="no-file-locks",
                    root=self.run_dir.root,
                    reason=error.strerror,
                ),
            )
        return True

    def _create_folders(self) -> None:
        missing, folder = [], self.run_dir.root
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            if folder not in self._created:
                self._created.append(folder)

    def _remove_created(self) -> None:
        for folder in reversed(self._created):
            try:
                folder.rmdir()
            except OSError:  # it is not empty, or was removed
                return


def is_launching(run_dir: RunDir) -> bool:
    """Return whether a launcher has locked the folder and its run has not ended. Changes nothing on
    disk."""
    try:
        with open(run_dir.launch_lock, encoding="utf-8", errors="replace") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:
                if is_unsupported(error):
                    return False
                _, since = _read_holder(handle)
                return since is None or not has_ended(run_dir, since)
    except OSError:
        return False
    return False


def has_ended(run_dir: RunDir, since: float) -> bool:
    """Return whether the last event of the run is ``run_end``, written after ``since`` (in seconds
    since the epoch)."""
    events = tail_events(run_dir.events, 1 << 14)
    return bool(events) and events[-1]["type"] == "run_end" and events[-1]["time"] >= since


def _is_at(handle: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle.fileno()))
    except OSError:
        return False


def _sign(handle: IO[str]) -> None:
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    if program == "__main__.py":
        program = "paceline"
    command = shlex.join([program, *sys.argv[1:]])[:500].replace("\n", " ")
    handle.truncate(0)
    handle.write(f"{os.getpid()} on {socket.gethostname()}\n{time.time()}\n{command}\n")
    handle.flush()


def _read_holder(handle: IO[str]) -> tuple[str | None, float | None]:
    """Return (process and command of the holder, when it took the lock) from the signed file, or
    (None, None) if that process has ended."""
    handle.seek(0)
    signed = re.fullmatch(r"(\d{1,9}) on (.+)\n([\d.]+)\n(.*)\n", handle.read(2000))
    if signed is None:
        return None, None
    pid, host, since, command = signed.groups()
    if host == socket.gethostname() and not pid_alive(int(pid), float(since)):
        return None, None
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(since)))
    return f"process {pid} on {host}, started {began} (`{command}`)", float(since)
