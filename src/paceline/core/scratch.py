"""Temporary folders that are not left for good: what a process that was killed has left goes with the next one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_LOCK = "lock"


class Scratch:
    """A folder ``path`` in the system's folder for temporary files, which :meth:`close` removes. It is locked: the lock of a
    process that was killed is free, and so the next one sees that its folder can go.

    Args:
        above: instead of the system's folder for temporary files.
    """

    def __init__(self, prefix: str = "paceline-run-", above: str | None = None) -> None:
        above = above or tempfile.gettempdir()
        _clear(prefix, above)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=above))
        aside = self.path / f"{_LOCK}.new"
        self._lock = open(aside, "w")  # noqa: SIM115  (the lock lives as long as the handle)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.replace(aside, self.path / _LOCK)  # nobody sees it before it is locked

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _clear(prefix: str, above: str) -> None:
    for lock in Path(above).glob(f"{prefix}*/{_LOCK}"):
        with suppress(OSError), open(lock, "r+") as handle:  # another user's, or another process has just removed it
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
