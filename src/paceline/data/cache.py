"""Entries of the cache: keyed by what they are made from, built by one process at a time, there
whole or not at all."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, RunError
from paceline.core.files import cache_dir, human_bytes, replace_dir

#: Part of every key: raise it when what is stored, or how it is made, changes.
LAYOUT = 2
#: Files up to this size are hashed whole; of larger ones the size, the time, and both ends.
HASH_WHOLE_BYTES = 256 << 20
_END_BYTES = 4 << 20


def fingerprint(path: Path) -> list[Any]:
    """What tells one version of a file from another: its content's hash, for a very large file
    size, time and ends."""
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=20)
    with open(path, "rb") as handle:
        if size <= HASH_WHOLE_BYTES:
            while chunk := handle.read(1 << 20):
                digest.update(chunk)
            return [digest.hexdigest()]
        digest.update(handle.read(_END_BYTES))
        handle.seek(-_END_BYTES, os.SEEK_END)
        digest.update(handle.read(_END_BYTES))
    return [digest.hexdigest(), size, path.stat().st_mtime_ns]


def key_of(parts: Any) -> str:
    """A short key of a JSON value: 24 hexadecimal digits."""
    raw = json.dumps([LAYOUT, parts], sort_keys=True, ensure_ascii=True, default=str).encode()
    return hashlib.blake2b(raw, digest_size=12).hexdigest()


def build_once(final: Path, mark: str, build: Callable[[Path], None]) -> bool:
    """Make the folder ``final`` unless it is there already; True where this call built it.

    ``build`` fills an empty folder aside, which then takes its place by a rename; an entry counts
    as there when it holds the file ``mark``. Of several processes one builds and the others wait. A
    lock dies with its process, and what a killed build left aside is cleared by the next one.
    """
    if (final / mark).is_file():
        return False
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _lock(final) as alone:
            if (final / mark).is_file():
                return False
            if alone:
                for stale in final.parent.glob(f".{final.name}.*.tmp"):
                    shutil.rmtree(stale, ignore_errors=True)
            aside = final.with_name(f".{final.name}.{os.getpid()}.tmp")
            aside.mkdir()
            try:
                build(aside)
                replace_dir(aside, final)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        if error.filename is not None and not str(error.filename).startswith(str(cache_dir())):
            raise
        raise _cannot_write(final, error) from error
    return True


@contextmanager
def _lock(final: Path) -> Iterator[bool]:
    """Hold the entry's lock; yields False where the file system has no locks (some network
    homes)."""
    import fcntl

    folder = cache_dir() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{final.parent.name}-{final.name}", "a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True


def _cannot_write(final: Path, error: OSError) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = human_bytes(shutil.disk_usage(_existing(final)).free)
        return RunError(
            f"the disk filled up while {final} was written ({free} free)",
            fix="make room, or set XDG_CACHE_HOME to a folder on another disk",
        )
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR):
        return ConfigError(
            f"the cache cannot be written at {final.parent} ({error.strerror})",
            fix="set XDG_CACHE_HOME to a folder that you may write to",
        )
    return error


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
