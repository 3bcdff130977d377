"""A cache on disk, keyed by the inputs of each entry. One process at a time builds an entry,
completely or not at all."""

import errno
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, RunError
from paceline.core.files import cache_dir, human_bytes, replace_dir
from paceline.data.cache_entries import note_use

#: Part of every key. Increase it when the stored data or its computation changes.
LAYOUT = 4
#: Files up to this size are hashed completely; for larger files, the size, the modification time
#: and both ends are hashed.
FULL_HASH_BYTES = 256 << 20
_END_BYTES = 4 << 20


def fingerprint(path: Path, full_hash_bytes: int = FULL_HASH_BYTES) -> list[Any]:
    """Return values that identify the version of a file: the hash of its content or, for a large
    file, its size, its modification time and both ends."""
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=20)
    with open(path, "rb") as handle:
        if size <= full_hash_bytes:
            while chunk := handle.read(1 << 20):
                digest.update(chunk)
            return [digest.hexdigest()]
        digest.update(handle.read(_END_BYTES))
        handle.seek(-_END_BYTES, os.SEEK_END)
        digest.update(handle.read(_END_BYTES))
    return [digest.hexdigest(), size, path.stat().st_mtime_ns]


def key_of(parts: Any) -> str:
    """Return a short key of a JSON value: 24 hexadecimal digits."""
    raw = json.dumps([LAYOUT, parts], sort_keys=True, ensure_ascii=True, default=str).encode()
    return hashlib.blake2b(raw, digest_size=12).hexdigest()


def build_once(
    final: Path, mark: str, build: Callable[[Path], None], *, waits: bool = True
) -> bool:
    """Build the folder ``final`` unless it exists. Return whether this call built it.

    ``build`` fills an empty staging folder, which is then renamed. An entry exists if it has the
    file ``mark``. If several processes call this, one builds and the others wait. The lock of a
    killed process is released, and the next build on its host removes its staging folder. If the
    hosts that share a cache cannot see each other's locks, each of them builds, and the first one
    to finish provides the entry.

    Args:
        waits: whether to wait for another process that builds it; otherwise this call then does
            nothing.

    Raises:
        ConfigError: the cache is not writable.
        RunError: the disk is full.
    """
    note_use(final)
    if (final / mark).is_file():
        return False
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with locked_entry(final, waits) as is_locked:
            if (final / mark).is_file() or (not is_locked and not waits):
                return False
            if is_locked:
                for stale in final.parent.glob(f"{_staging_prefix(final)}*.tmp"):
                    shutil.rmtree(stale, ignore_errors=True)
            staging = final.with_name(f"{_staging_prefix(final)}{os.getpid()}.tmp")
            staging.mkdir()
            note_use(staging)
            try:
                build(staging)
                if (final / mark).is_file():
                    return False
                was_renamed = _rename(staging, final, mark)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        if error.filename is not None and not str(error.filename).startswith(str(cache_dir())):
            raise
        raise _cannot_write(final, error) from error
    return was_renamed


def discard(final: Path, is_damaged: Callable[[], bool]) -> bool:
    """Remove an entry if it is damaged, so that it is built again. Return whether this call removed
    it.

    Args:
        is_damaged: function that is called while no other process builds the entry: another one may
            have repaired it.

    Raises:
        ConfigError: the cache is not writable.
    """
    try:
        with locked_entry(final):
            if not is_damaged():
                return False
            shutil.rmtree(final)
    except OSError as error:
        raise _cannot_write(final, error) from error
    return True


def _rename(staging: Path, final: Path, mark: str) -> bool:
    """Rename the entry to ``final``. Return False if another host has already provided it."""
    try:
        replace_dir(staging, final)
    except OSError:
        # Another host has provided the entry since it was checked: a folder that is not empty
        # cannot be replaced.
        if not (final / mark).is_file():
            raise
        return False
    return True


def _staging_prefix(final: Path) -> str:
    """Return how the names of this host's staging folders for an entry begin."""
    return f".{final.name}.{socket.gethostname()}."


@contextmanager
def locked_entry(final: Path, waits: bool = True) -> Iterator[bool]:
    """Hold the lock of an entry. Yields False if the file system does not support locks (some
    network home folders), or if another process holds it and this one does not wait."""
    import fcntl

    folder = cache_dir() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{final.parent.name}-{final.name}", "a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except OSError:
            yield False
            return
        yield True


def _cannot_write(final: Path, error: OSError) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        folder = next(path for path in (final, *final.parents) if path.exists())
        free = human_bytes(shutil.disk_usage(folder).free)
        return RunError(
            "the disk filled up while {final} was written ({free} free)",
            code="disk-full",
            fix="free disk space, or set XDG_CACHE_HOME to a folder on another disk",
            final=final,
            free=free,
        )
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR):
        return ConfigError(
            "the cache folder {parent} is not writable ({reason})",
            code="cache-not-writable",
            fix="set XDG_CACHE_HOME to a writable folder",
            parent=final.parent,
            reason=error.strerror,
        )
    return error
