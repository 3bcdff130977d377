"""Small and read-only disks, real ones, where this machine lets tests mount."""

import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def disk(folder: Path, options: str) -> Iterator[bool]:
    """Mount a tmpfs with ``options`` (e.g. ``size=1m``) on ``folder``. False, and a warning in
    pytest's summary, where this machine does not let a test mount: the test then checks less."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
            capture_output=True,
            text=True,
        )
        reason = done.stderr.strip() if done.returncode else ""
    except FileNotFoundError:
        reason = "there is no `mount`"
    if reason:
        warnings.warn(f"NOT CHECKED on a real disk with {options}: {reason}", stacklevel=3)
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
