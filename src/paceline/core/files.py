"""Write files and folders atomically: they appear completely or not at all."""

import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any


def fsync_path(path: Path) -> None:
    """Sync a file, or a folder, so that a rename inside it survives a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write ``data`` to a temporary file, sync it, and rename it to ``path``: a reader sees either
    the old file or the new one."""
    raw = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as handle:
            handle.write(raw)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def write_json_atomic(path: Path, value: Any) -> None:
    """Write a JSON value as :func:`write_atomic` does (two-space indent, keys in the given
    order)."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sync_tree(folder: Path) -> None:
    """Sync every file below ``folder`` and the folders themselves, deepest first."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            fsync_path(Path(root) / name)
        fsync_path(Path(root))


def replace_dir(staging_dir: Path, final: Path) -> None:
    """Replace ``final`` by the finished folder ``staging_dir``, which must be on the same file
    system."""
    sync_tree(staging_dir)
    old = final.with_name(f".{final.name}.{os.getpid()}.old")
    if final.exists():
        os.replace(final, old)
    os.replace(staging_dir, final)
    fsync_path(final.parent)
    if old.exists():
        shutil.rmtree(old, ignore_errors=True)


def sha256_file(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def human_bytes(size_bytes: float) -> str:
    """Format a size in bytes: ``1536`` → ``1.5 KiB``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def cache_dir() -> Path:
    """Return the folder of tokenized data, built-in models and quantized weights:
    ``$XDG_CACHE_HOME/paceline`` or ``~/.cache/paceline``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline"


_LOCK = "lock"


class Scratch:
    """A temporary folder ``path``, which :meth:`close` removes. It is locked while in use; if its
    process is killed, the lock is released and the next process of this host removes the folder.
    Other hosts leave it alone: a file system that they share may not show them the lock.

    Args:
        parent: where to create it, instead of the system's folder for temporary files.
    """

    def __init__(self, prefix: str = "paceline-run-", parent: str | None = None) -> None:
        parent = parent or tempfile.gettempdir()
        prefix += hashlib.sha256(socket.gethostname().encode()).hexdigest()[:4] + "-"
        for lock in Path(parent).glob(f"{prefix}*/{_LOCK}"):
            # OSError: it belongs to another user, is in use, or was just removed by another
            # process.
            with suppress(OSError), open(lock, "r+") as handle:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        new_lock = self.path / f"{_LOCK}.new"
        self._lock = open(new_lock, "w")  # noqa: SIM115  (the lock lives as long as the handle)
        with suppress(OSError):  # without locks, no other process can lock and remove it either
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.replace(new_lock, self.path / _LOCK)  # never visible without its lock
        # systemd-tmpfiles, which removes old files, leaves locked folders alone.
        self._folder: int | None = os.open(self.path, os.O_RDONLY)
        with suppress(OSError):
            fcntl.flock(self._folder, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()
