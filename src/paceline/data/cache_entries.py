"""The entries of the cache: which exist, which a process uses, and which can be deleted.

An entry is a file or folder ``KIND/NAME`` in the cache folder. A process notes the entries that it
uses in a file that it locks until it ends, its lease. So an entry is in use if the lease of a
living process names it, on any host that shares the folder and its locks.
"""

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.core.files import cache_dir

#: Kind → what its entries are. The folder ``locks`` has none.
KINDS = {
    "builtin": "built-in datasets",
    "checks": "results of checks of models",
    "clicks": "converted click logs",
    "hub": "files of datasets on the Hugging Face Hub",
    "images": "downloaded images",
    "models": "built-in and converted models",
    "quantized": "quantized weights",
    "reference": "log-probabilities of reference models",
    "rows": "indices of the rows of data files",
    "shards": "downloaded files of streamed data",
    "simulation": "compiled simulations of devices",
    "tokenizers": "converted tokenizers",
    "tokens": "tokenized data",
    "windows": "packed rows of streamed data",
}
_LEASES = "leases"
#: A lease is valid for this long if the file system has no locks.
_UNLOCKED_LEASE_S = 7 * 86400.0


@dataclass(frozen=True)
class CacheEntry:
    """An entry of the cache.

    Args:
        kind: name of the folder that contains it, see :data:`KINDS`.
        used_at: time of the last use, in seconds since the epoch.
        is_used: whether a process uses it now.
    """

    kind: str
    path: Path
    size_bytes: int
    used_at: float
    is_used: bool


class _Lease:
    """The entries that this process uses. The file is created with the first one."""

    def __init__(self) -> None:
        self.noted: set[Path] = set()
        self.root: Path | None = None
        self.descriptor = -1  # of the file, which stays open until the process ends

    def note(self, entry: Path) -> None:
        root = cache_dir()
        if self.root != root:
            self._open(root)
        if entry not in self.noted:
            os.write(self.descriptor, f"{entry.relative_to(root)}\n".encode())
            self.noted.add(entry)

    def _open(self, root: Path) -> None:
        folder = root / _LEASES
        folder.mkdir(parents=True, exist_ok=True)
        remove_stale_leases(folder)
        path = folder / f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
        self.descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
        with suppress(OSError):  # no locks on this file system
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.root, self.noted = root, set()


_LEASE = _Lease()


def note_use(path: Path) -> None:
    """Record that this process uses a path in the cache until it ends, and when. Nothing is
    recorded in a cache that cannot be written."""
    root = cache_dir()
    if not path.is_relative_to(root):
        return
    with suppress(OSError):
        _LEASE.note(path)
        with suppress(FileNotFoundError):
            os.utime(root.joinpath(*path.relative_to(root).parts[:2]))


def list_entries() -> list[CacheEntry]:
    """Return all entries, the ones that were not used for the longest time first."""
    root, used = cache_dir(), _used_paths()
    entries = [
        CacheEntry(kind, path, _size_bytes(path), path.stat().st_mtime, _is_used(path, used))
        for kind in KINDS
        for path in (root / kind).glob("*")
    ]
    return sorted(entries, key=lambda entry: (entry.used_at, entry.path))


def select_prunable(
    entries: Sequence[CacheEntry], max_age_s: float | None, max_bytes: int | None
) -> list[CacheEntry]:
    """Return the entries to delete so that none is older than ``max_age_s`` and all together have
    at most ``max_bytes``. Entries in use are kept.

    Args:
        entries: entries in the order in which they are deleted.
    """
    now, total_bytes = time.time(), sum(entry.size_bytes for entry in entries)
    selected = []
    for entry in entries:
        is_old = max_age_s is not None and now - entry.used_at > max_age_s
        is_too_much = max_bytes is not None and total_bytes > max_bytes
        if (is_old or is_too_much) and not entry.is_used:
            selected.append(entry)
            total_bytes -= entry.size_bytes
    return selected


def delete_entry(entry: CacheEntry) -> bool:
    """Delete an entry. Return False if a process has begun to use it.

    The entry is renamed first. A process notes the use of an entry before it looks for it, so
    either it does not find the entry, or its lease is seen here and the entry gets its name back.
    """
    aside = entry.path.with_name(f".{entry.path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        os.rename(entry.path, aside)
    except FileNotFoundError:  # another process has deleted it
        return True
    if _is_used(entry.path, _used_paths()):
        with suppress(OSError):  # the process has built it again
            os.rename(aside, entry.path)
            return False
    if aside.is_dir():
        shutil.rmtree(aside)
    else:
        aside.unlink()
    return True


def remove_stale_leases(folder: Path) -> None:
    """Remove the leases of processes that have ended."""
    for path in folder.glob("*"):
        if not _is_held(path):
            path.unlink(missing_ok=True)


def _used_paths() -> set[Path]:
    """Return the paths that the leases of living processes name."""
    root, used = cache_dir(), set()
    for path in (root / _LEASES).glob("*"):
        with suppress(FileNotFoundError):
            if _is_held(path):
                used |= {root / line for line in path.read_text().splitlines()}
    return used


def _is_held(lease: Path) -> bool:
    """Return whether the process of a lease may be alive."""
    try:
        with open(lease) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:  # no locks on this file system
        return time.time() - lease.stat().st_mtime < _UNLOCKED_LEASE_S


def _is_used(entry: Path, used: set[Path]) -> bool:
    return any(path.is_relative_to(entry) for path in used)


def _size_bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
