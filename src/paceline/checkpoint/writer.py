"""Write a checkpoint: each rank writes and hashes its shards in one safetensors file, then rank 0
commits the folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pydantic import TypeAdapter

from paceline.checkpoint.format import (
    DTYPE_NAMES,
    DTYPES,
    INDEX,
    INDEX_ADAPTER,
    MANIFEST,
    META,
    CheckpointMeta,
    Index,
    ManifestEntry,
    StoredShard,
    TensorEntry,
    add,
    merge,
    name_of,
    state_file,
)
from paceline.core.errors import SaveError
from paceline.core.files import fsync_path, human_bytes
from paceline.core.processes import pid_alive

if TYPE_CHECKING:
    from paceline.parallel.state import TensorShard

_CHUNK_BYTES = 1 << 22

#: A rank whose files do not grow for this long counts as dead. The limit is high because a large
#: file does not grow while it is synced to a slow disk.
STALL_S = 900.0


class Sink(Protocol):
    """An unbuffered binary file, or any object that accepts bytes in the same way."""

    def write(self, data: memoryview, /) -> int | None:
        """Write ``data`` or its beginning. Return how many bytes were accepted."""


@dataclass(frozen=True)
class ShardRecord:
    """What a rank reports to rank 0 about its state file. ``file`` is None if the rank owns no
    shards."""

    file: str | None = None
    size_bytes: int = 0
    sha256: str = ""
    tensors: Index = field(default_factory=dict)


_RECORD_ADAPTER = TypeAdapter(ShardRecord)


class StateFile:
    """The state file of a rank. Its size and its index are known before it is written.

    Raises:
        TypeError: a checkpoint cannot store the dtype of a tensor.
    """

    def __init__(self, name: str, shards: Sequence[TensorShard]) -> None:
        # A rank may own several ranges of one tensor; the first has the tensor's name as its key.
        self._shards: dict[str, TensorShard] = {}
        for shard in shards:
            key, number = shard.name, 1
            while key in self._shards:
                number += 1
                key = f"{shard.name}#{number}"
            self._shards[key] = shard
        # Tensors with the largest elements come first, so that each begins at a multiple of its
        # element size.
        self._order = sorted(
            self._shards, key=lambda key: (-self._shards[key].tensor.element_size(), key)
        )
        header, begin = {}, 0
        for key in self._order:
            shard = self._shards[key]
            end = begin + shard.tensor.numel() * shard.tensor.element_size()
            header[key] = {
                "dtype": _dtype_name(shard),
                "shape": list(shard.tensor.shape),
                "data_offsets": [begin, end],
            }
            begin = end
        raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        raw += b" " * (-len(raw) % 8)
        self._header = len(raw).to_bytes(8, "little") + raw
        self.size_bytes = len(self._header) + begin
        self.index: Index = {}
        for key, shard in self._shards.items():
            stored = _stored_shard(name, key, shard)
            pieces = (stored,) if stored.numel else ()
            add(self.index, shard.name, TensorEntry(_dtype_name(shard), shard.shape, pieces))

    def write(self, sink: Sink, tick: Callable[[], None] = lambda: None) -> str:
        """Write the file to ``sink``. Return its SHA-256. ``tick`` is called after each chunk."""
        digest = hashlib.sha256()
        _write(sink, digest, memoryview(self._header), tick)
        for key in self._order:
            _write(sink, digest, _bytes_of(self._shards[key].tensor), tick)
        return digest.hexdigest()


def _stored_shard(file: str, key: str, shard: TensorShard) -> StoredShard:
    if not shard.flat:
        return StoredShard(file, key, tuple(shard.offset), tuple(shard.tensor.shape))
    if shard.is_full:
        return StoredShard(file, key, (0,) * len(shard.shape), tuple(shard.shape))
    return StoredShard(file, key, tuple(shard.offset), (shard.tensor.numel(),), flat=True)


def _dtype_name(shard: TensorShard) -> str:
    name = DTYPE_NAMES.get(str(shard.tensor.dtype))
    if name is None:
        raise TypeError(
            f"{shard.name} has dtype {shard.tensor.dtype}, which a checkpoint cannot store"
            f" (supported: {', '.join(DTYPES)})"
        )
    return name


def _bytes_of(tensor: Any) -> memoryview:
    import torch

    on_host = tensor.detach().to("cpu").contiguous()
    if on_host.is_complex():
        on_host = torch.view_as_real(on_host)
    return memoryview(on_host.reshape(-1).view(torch.uint8).numpy())


def _write(sink: Sink, digest: Any, data: memoryview, tick: Callable[[], None]) -> None:
    for start in range(0, len(data), _CHUNK_BYTES):
        chunk = data[start : start + _CHUNK_BYTES]
        digest.update(chunk)
        while len(chunk):
            chunk = chunk[sink.write(chunk) :]
        tick()


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint."""

    path: Path
    size_bytes: int


@dataclass(frozen=True)
class ShardWriter:
    """A rank that takes part in a save: its process, and the total size of its tensors."""

    host: str
    pid: int
    size_bytes: int

    @classmethod
    def local(cls, shards: Sequence[TensorShard]) -> ShardWriter:
        """Return the record of this process."""
        size_bytes = sum(shard.tensor.numel() * shard.tensor.element_size() for shard in shards)
        return cls(_pid_namespace(), os.getpid(), size_bytes)

    @property
    def has_ended(self) -> bool:
        """Return True if the process is known to have ended. Processes on other hosts or in other
        containers cannot be checked."""
        return self.host == _pid_namespace() and not pid_alive(self.pid)


class RankSaveStatus(NamedTuple):
    """What a rank reports to all others when a save begins.

    Args:
        staging_dir: the hidden folder to write to; set by rank 0.
        problem: why the save cannot begin, or None.
        unpinned: see :class:`~paceline.checkpoint.staging.StagingBuffer`.
        is_idle: whether the rank neither writes nor sends anything.
        is_broken: whether the rank needs a new connection to rank 0.
    """

    process: ShardWriter
    staging_dir: Path | None
    problem: str | None
    unpinned: str | None
    is_idle: bool
    is_broken: bool


@cache
def _pid_namespace() -> str:
    """Identify the namespace in which process IDs are unique: hosts may share a name, and each
    container of a host has its own IDs."""
    names = [socket.gethostname()]
    with suppress(OSError):
        names += [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    return " ".join(names)


class ShardWriteError(Exception):
    """A rank could not write its shards."""


def prepare(folder: Path, step: int, num_ranks: int) -> Path:
    """Create the hidden folder for a save of ``step`` below ``folder``, and remove what interrupted
    saves left behind.

    Raises:
        OSError: the folder cannot be created.
    """
    staging_dir = folder / f".{name_of(step)}.{os.getpid()}.tmp"
    folder.mkdir(parents=True, exist_ok=True)
    clear_debris(folder)
    staging_dir.mkdir()
    try:
        for rank in range(num_ranks):
            _marker(staging_dir, rank, "writing").touch()
    except OSError:
        shutil.rmtree(staging_dir, ignore_errors=True)
        raise
    return staging_dir


def clear_debris(folder: Path) -> None:
    """Remove what interrupted saves left behind in ``folder``. No other save may be in progress."""
    for path in folder.glob(".step-*"):
        remove(path)


def remove(path: Path) -> None:
    """Remove a folder and its content as far as possible. Of a symbolic link, remove only the
    link."""
    if path.is_symlink() or path.is_file():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def write_shards(
    staging_dir: Path,
    rank: int,
    num_ranks: int,
    shards: Sequence[TensorShard],
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Write this rank's shards and leave the result for rank 0. Raises no exceptions. ``tick`` is
    called whenever bytes were written."""
    write = partial(_write_state_file, shards=shards, tick=tick)
    write_and_report(staging_dir, rank, num_ranks, write)


def _write_state_file(
    path: Path, shards: Sequence[TensorShard], tick: Callable[[], None]
) -> ShardRecord:
    """Write the shards to one safetensors file and sync it. Without shards, no file is written."""
    if not shards:
        return ShardRecord()
    file = StateFile(path.name, shards)
    with open(path, "wb", buffering=0) as handle:
        sha256 = file.write(handle, tick)
        os.fsync(handle.fileno())
    return ShardRecord(path.name, file.size_bytes, sha256, file.index)


def write_and_report(
    staging_dir: Path, rank: int, num_ranks: int, write: Callable[[Path], ShardRecord]
) -> None:
    """Write a rank's state file with ``write``, and leave its record, or the reason for the
    failure, for rank 0. Raises no exceptions."""
    writing = _marker(staging_dir, rank, "writing")
    path = staging_dir / state_file(rank, num_ranks)
    try:
        writing.write_bytes(_RECORD_ADAPTER.dump_json(write(path)))
        os.replace(writing, _marker(staging_dir, rank, "json"))
    except Exception as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)  # frees disk space for the reason
            writing.write_text(reason_of(error))
        number = getattr(error, "errno", None) or 0
        # If even this fails, rank 0 waits until its timeout.
        with suppress(OSError):
            os.replace(writing, _marker(staging_dir, rank, f"failed-{number}"))


def has_failed(staging_dir: Path) -> bool:
    """Return whether some rank could not write its shards of the save in this folder."""
    return any(staging_dir.glob("rank-*.failed-*"))


def wait_for_shards(
    staging_dir: Path,
    writers: Sequence[ShardWriter],
    timeout_s: Callable[[], float] = lambda: STALL_S,
    tick: Callable[[], None] = lambda: None,
) -> list[ShardRecord]:
    """Wait until all ranks have written their files, and return their records by rank.

    Args:
        timeout_s: returns how long to wait while no file grows; called at each check.
        tick: called whenever a file has grown.

    Raises:
        ShardWriteError: a rank could not write, its process ended, or the timeout expired.
    """
    progress, since, pause_s = -1, time.monotonic(), 0.001
    while True:
        names = {path.name for path in staging_dir.iterdir()}
        writing = [rank for rank in range(len(writers)) if f"rank-{rank:05d}.writing" in names]
        # A rank may have left its result and ended after the folder was listed, so check again.
        lost = [
            rank
            for rank in writing
            if writers[rank].has_ended and _marker(staging_dir, rank, "writing").exists()
        ]
        seen = sum(_size(staging_dir / name) for name in names) + len(writers) - len(writing)
        if seen != progress:
            progress, since = seen, time.monotonic()
            tick()
        if not writing or len(lost) == len(writing) or time.monotonic() - since > timeout_s():
            break
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)
    return [_read_record(staging_dir, rank, len(writers)) for rank in range(len(writers))]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_record(staging_dir: Path, rank: int, num_ranks: int) -> ShardRecord:
    for failed in staging_dir.glob(f"rank-{rank:05d}.failed-*"):
        # A full disk may have no space for the reason, so the file's name contains the error
        # number.
        number = int(failed.name.rpartition("-")[2])
        reason = os.strerror(number) if number else failed.read_text() or "unknown error"
        raise ShardWriteError(f"{reason} (on rank {rank})" if num_ranks > 1 else reason)
    record = _marker(staging_dir, rank, "json")
    if not record.exists():
        raise ShardWriteError(f"rank {rank} ended or stalled before its shards were written")
    return _RECORD_ADAPTER.validate_json(record.read_bytes())


def commit(
    folder: Path, step: int, staging_dir: Path, meta: CheckpointMeta, records: Sequence[ShardRecord]
) -> SavedCheckpoint:
    """Write index, metadata and manifest, and rename the folder to its final name.

    Raises:
        OSError: a file could not be written.
        ValueError: the shards do not add up to the full state.
    """
    final = folder / name_of(step)
    index = merge([record.tensors for record in records])
    tensors = INDEX_ADAPTER.dump_python(dict(sorted(index.items())), mode="json")
    files: dict[str, ManifestEntry] = {
        record.file: {"size_bytes": record.size_bytes, "sha256": record.sha256}
        for record in records
        if record.file is not None
    }
    for name, text in (
        (INDEX, json.dumps({"format": 2, "tensors": tensors})),
        (META, json.dumps({**meta, "step": step}, indent=2)),
    ):
        raw = f"{text}\n".encode()
        _write_synced(staging_dir / name, raw)
        files[name] = {"size_bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    manifest = json.dumps({"format": 2, "files": files}, indent=2)
    _write_synced(staging_dir / MANIFEST, f"{manifest}\n".encode())
    for rank in range(len(records)):
        _marker(staging_dir, rank, "json").unlink()
    fsync_path(staging_dir)
    old = folder / f".{final.name}.{os.getpid()}.old"
    # The folder may exist because an earlier attempt was rolled back; the new checkpoint has the
    # same content.
    if final.exists():
        os.replace(final, old)
    try:
        os.replace(staging_dir, final)
    except OSError:
        if old.exists():
            os.replace(old, final)
        raise
    fsync_path(folder)
    shutil.rmtree(old, ignore_errors=True)
    return SavedCheckpoint(final, sum(file["size_bytes"] for file in files.values()))


def _write_synced(path: Path, raw: bytes) -> None:
    with open(path, "wb") as handle:
        handle.write(raw)
        handle.flush()
        os.fsync(handle.fileno())


def _marker(staging_dir: Path, rank: int, state: str) -> Path:
    return staging_dir / f"rank-{rank:05d}.{state}"


def not_written(folder: Path, step: int, size_bytes: int, reason: str) -> SaveError:
    """Return the error for a failed save."""
    room = f"it needs {size_bytes:,} bytes, {human_bytes(size_bytes)}"
    with suppress(OSError):
        free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
        room += f"; free: {human_bytes(free)}"
        if free < size_bytes:
            room += f"; missing: {size_bytes - free:,} bytes"
    return SaveError(
        "the checkpoint of step {step} could not be written to {folder}: {reason} ({room})",
        code="checkpoint-not-written",
        fix="free some space, or set another `output_dir`; earlier checkpoints are untouched, and"
        " the same command resumes from the latest one",
        step=step,
        folder=folder / name_of(step),
        reason=reason,
        room=room,
    )


def reason_of(error: BaseException) -> str:
    """Return the operating system's description of an error, such as ``No space left on device``,
    without what a library adds to it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    inner = re.search(r"I/O error: (.+?)(?: \(os error \d+\))?$", str(error))
    return inner[1] if inner else str(error) or type(error).__name__
