"""Delete the folder of a run, and nothing else."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from paceline.core.errors import ConfigError, RunError
from paceline.core.run_dir import LaunchLock
from paceline.web.jobs.runs import is_locked
from paceline.web.responses import Conflict
from paceline.web.runs.discovery import Run

_IN_PROGRESS = ("live", "waiting")


def delete_run(run: Run, folder: Path) -> None:
    """Delete a run's folder with its checkpoints and its model.

    The folder is opened from the served folder on without following a symbolic link, so that
    nothing outside of the served folder can be deleted, even if a folder is replaced meanwhile.

    Args:
        folder: the served folder.

    Raises:
        Conflict: the run is in progress, or it starts at this moment.
        ConfigError: the run is in the served folder itself.
        RunError: files cannot be deleted.
    """
    if run.root == folder:
        raise ConfigError(
            "the run {run} is in the served folder itself, which the panel does not delete",
            code="run-is-served-folder",
            fix="start `paceline ui` with the folder above it",
            run=run.name,
        )
    if run.run_dir.launch_lock.is_symlink():  # taking the lock would write to its target
        raise ConfigError(
            "{path} is a symbolic link",
            code="lock-is-link",
            fix="remove it in a terminal",
            path=run.run_dir.launch_lock,
        )
    if run.entry()["status"] in _IN_PROGRESS or is_locked(run.root):
        raise Conflict(
            "{run} is running",
            code="run-is-running",
            fix="stop it first, and wait until it has ended",
            run=run.name,
        )
    try:
        # The lock keeps a launcher from starting in the folder meanwhile.
        with _opened(folder, run.root.parent) as parent, LaunchLock(run.run_dir):
            # A run that is deleted in part must not appear in the list.
            hidden = f".deleted-{secrets.token_hex(6)}"
            os.rename(run.root.name, hidden, src_dir_fd=parent, dst_dir_fd=parent)
            shutil.rmtree(hidden, dir_fd=parent)
    except OSError as error:
        raise RunError(
            "cannot delete {folder}: {reason}",
            code="run-not-deleted",
            fix="check the permissions of the folder, or delete it in a terminal",
            folder=run.root,
            reason=error.strerror or error,
        ) from error


@contextlib.contextmanager
def _opened(folder: Path, inner: Path) -> Iterator[int]:
    """Open a folder below ``folder``, without following a symbolic link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(folder, flags)
    try:
        for name in inner.relative_to(folder).parts:
            outer, handle = handle, os.open(name, flags, dir_fd=handle)
            os.close(outer)
        yield handle
    finally:
        os.close(handle)
