"""Files that appear whole or not at all."""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

_CHUNK_BYTES = 1 << 20


def fsync_dir(folder: Path) -> None:
    """Make a rename inside ``folder`` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write ``data`` aside, sync it, and rename it over ``path``: a reader sees the old file or the
    new one."""
    raw = data.encode() if isinstance(data, str) else data
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as handle:
            handle.write(raw)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def write_json_atomic(path: Path, value: Any) -> None:
    """As :func:`write_atomic`, for a JSON value (two-space indent, keys in the order given)."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sync_tree(folder: Path) -> None:
    """fsync every file below ``folder`` and the folders themselves, deepest first."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            handle = os.open(Path(root) / name, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        fsync_dir(Path(root))


def replace_dir(aside: Path, final: Path) -> None:
    """Put the finished folder ``aside`` in the place of ``final``. ``aside`` must be on the same
    file system."""
    sync_tree(aside)
    old = final.with_name(f".{final.name}.{os.getpid()}.old")
    if final.exists():
        os.replace(final, old)
    os.replace(aside, final)
    fsync_dir(final.parent)
    if old.exists():
        shutil.rmtree(old, ignore_errors=True)


def sha256_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while chunk := handle.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def human_bytes(size_bytes: float) -> str:
    """``1536`` → ``1.5 KiB``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def cache_dir() -> Path:
    """Where tokenised data and the built-in models are kept: ``$XDG_CACHE_HOME/paceline`` or
    ``~/.cache/paceline``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline"


_LOCK = "lock"


class Scratch:
    """A folder ``path`` in the system's folder for temporary files, which :meth:`close` removes. It
    is locked: the lock of a process that was killed is free, and so the next one sees that its
    folder can go.

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _clear(prefix: str, above: str) -> None:
    for lock in Path(above).glob(f"{prefix}*/{_LOCK}"):
        # another user's, or another process has just removed it
        with suppress(OSError), open(lock, "r+") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
