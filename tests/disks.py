"""Mount small or read-only file systems for tests, if this machine allows tests to mount."""

import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def mount_tmpfs(folder: Path, options: str) -> Iterator[bool]:
    """Mount a tmpfs with ``options`` (e.g. ``size=1m``) on ``folder``. Yields False, with a warning
    in pytest's summary, if mounting is not permitted; the test then checks less."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
            capture_output=True,
            text=True,
        )
        reason = done.stderr.strip() if done.returncode else ""
    except FileNotFoundError:
        reason = "`mount` not found"
    if reason:
        warnings.warn(f"NOT CHECKED on a tmpfs with {options}: {reason}", stacklevel=3)
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
