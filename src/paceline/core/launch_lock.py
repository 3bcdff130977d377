"""The right to run in a folder: held by one launcher at a time, from before it reads anything until
it ends.

The lock is a file in the run's folder that is locked with ``flock``, so the kernel releases it when
its process ends, however it ends. A launcher that ends normally also removes the file, and the
folders that it created for it if they are still empty.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shlex
import socket
import sys
import time
from pathlib import Path
from typing import IO

from paceline.core.errors import ConfigError
from paceline.core.event_log import tail_events
from paceline.core.log import CONSOLE_ONLY
from paceline.core.processes import pid_alive
from paceline.core.run_dir import RunDir

logger = logging.getLogger(__name__)

#: How long to wait for a run that has written its end and whose process is still exiting.
_ENDING_S = 15.0
#: How long a lock may belong to a process that has not signed it: one that is about to, or one that
#: only checks the lock.
_UNSIGNED_S = 2.0
_POLL_S = 0.05


class LaunchLock:
    """Exclusive use of a run's folder, as a context manager.

    Args:
        run_dir: its folder is created if it does not exist.

    Raises:
        ConfigError: another process holds the lock (the message names it), or the folder cannot be
            written.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self._handle: IO[str] | None = None
        self._created: list[Path] = []

    def __enter__(self) -> LaunchLock:
        try:
            self._handle = self._acquire()
            _sign(self._handle)
        except OSError as error:
            self._remove_created()
            raise ConfigError(
                f"`output_dir: {self.run_dir.root}` cannot be written: {error.strerror or error}",
                fix="free some space there, or set another `output_dir`",
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
                raise self._in_use(holder)
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
                "the file system of %s does not support locks (%s): Paceline cannot prevent a"
                " second run in this folder",
                self.run_dir.root,
                error.strerror,
            )
        return True

    def _in_use(self, holder: str | None) -> ConfigError:
        return ConfigError(
            f"`output_dir: {self.run_dir.root}` is in use by another run:"
            f" {holder or 'a process whose number is not known'}",
            fix="wait until it ends, stop it, or set another `output_dir`",
        )

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
            except OSError:  # it has content, or is gone
                return


def is_unsupported(error: OSError) -> bool:
    """Return whether ``flock`` failed for another reason than a lock that another process holds."""
    return error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EINTR)


def is_launching(run_dir: RunDir) -> bool:
    """Return whether a launcher holds the folder and has not written the end of its run. Changes
    nothing on disk."""
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
    """Return whether the newest event of the run is its end, written after ``since`` (seconds since
    the epoch)."""
    events = tail_events(run_dir.events, 1 << 14)
    return bool(events) and events[-1]["type"] == "run_end" and events[-1]["time"] >= since


def _is_at(handle: IO[str], path: Path) -> bool:
    try:
        at_path, opened = path.stat(), os.fstat(handle.fileno())
    except OSError:
        return False
    return (at_path.st_dev, at_path.st_ino) == (opened.st_dev, opened.st_ino)


def _sign(handle: IO[str]) -> None:
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    if program == "__main__.py":
        program = "paceline"
    command = shlex.join([program, *sys.argv[1:]])[:500].replace("\n", " ")
    handle.truncate(0)
    handle.write(f"{os.getpid()} on {socket.gethostname()}\n{time.time()}\n{command}\n")
    handle.flush()


def _read_holder(handle: IO[str]) -> tuple[str | None, float | None]:
    """Return (its process and command, when it took the lock) as the holder signed them; None for a
    process that is gone."""
    handle.seek(0)
    signed = re.fullmatch(r"(\d{1,9}) on (.+)\n([\d.]+)\n(.*)\n", handle.read(2000))
    if signed is None:
        return None, None
    pid, host, since, command = signed.groups()
    if host == socket.gethostname() and not pid_alive(int(pid), float(since)):
        return None, None
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(since)))
    return f"process {pid} on {host}, started {began} (`{command}`)", float(since)
