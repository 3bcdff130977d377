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


def replace_dir(staging_dir: Path, final: Path, overwrites: bool = True) -> None:
    """Replace ``final`` by the finished folder ``staging_dir``, which must be on the same file
    system. Its files get the permissions of new files: safetensors makes its files readable for
    their owner only.

    Args:
        overwrites: whether ``final`` may exist.

    Raises:
        OSError: ``final`` exists and must not, and is not an empty folder.
    """
    mask = os.umask(0)
    os.umask(mask)
    for file in staging_dir.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(file.stat().st_mode | (0o666 & ~mask))
    sync_tree(staging_dir)
    old = final.with_name(f".{final.name}.{os.getpid()}.old")
    if overwrites and final.exists():
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


class Scratch:
    """A temporary folder ``path``, which :meth:`close` removes. The folder itself is locked while
    in use (``flock``); if its process is killed, the lock is released and the next process of this
    host removes the folder. Other hosts leave it alone: a file system that they share may not show
    them the lock.

    Args:
        parent: where to create it, instead of the system's folder for temporary files.
    """

    def __init__(self, prefix: str = "paceline-run-", parent: str | None = None) -> None:
        self._parent = Path(parent or tempfile.gettempdir())
        self._prefix = f"{prefix}{hashlib.sha256(socket.gethostname().encode()).hexdigest()[:4]}-"
        self._remove_abandoned()
        self._folder: int | None
        self.path, self._folder = self._create()

    def _create(self) -> tuple[Path, int]:
        """Return a new folder and a file descriptor that holds its lock."""
        while True:
            path = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._parent))
            # Until it is locked, another process takes it for abandoned and may remove it.
            with suppress(FileNotFoundError):
                folder = os.open(path, os.O_RDONLY)
                # OSError: without locks, no other process can lock and remove it either.
                with suppress(OSError):
                    fcntl.flock(folder, fcntl.LOCK_EX)
                if path.exists():
                    return path, folder
                os.close(folder)

    def _remove_abandoned(self) -> None:
        """Remove the folders that no process has locked. What could not be removed, because orphans
        were still writing to it, stays for the next process."""
        for path in self._parent.glob(f"{self._prefix}*"):
            # OSError: it belongs to another user, is in use, or was just removed by another
            # process.
            with suppress(OSError):
                folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(folder)

    def close(self) -> None:
        """Remove the folder, and those that killed processes have left behind meanwhile."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None
            self._remove_abandoned()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()
