"""The file of a checkpoint that one rank writes: the parts of the state that it owns, as
safetensors, hashed on their way."""

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
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import TypeAdapter

from paceline.checkpoint.format import (
    DTYPE_NAMES,
    DTYPES,
    INDEX,
    INDEX_ADAPTER,
    MANIFEST,
    META,
    CheckpointMeta,
    Entry,
    Index,
    ManifestEntry,
    Piece,
    add,
    merge,
    name_of,
    state_file,
)
from paceline.core.errors import SaveError
from paceline.core.files import fsync_dir, human_bytes

if TYPE_CHECKING:
    from paceline.parallel.state import TensorShard

_CHUNK_BYTES = 1 << 22


class Sink(Protocol):
    """A file without a buffer, or what takes bytes as one does."""

    def write(self, data: memoryview, /) -> int | None:
        """Returns how many bytes were taken."""


def size_of(parts: Sequence[TensorShard]) -> int:
    """Bytes of the tensors."""
    return sum(one.tensor.numel() * one.tensor.element_size() for one in parts)


@dataclass(frozen=True)
class ShardRecord:
    """A rank's file, as it says of it to rank 0. ``file``: None if it owns nothing."""

    file: str | None = None
    size_bytes: int = 0
    sha256: str = ""
    tensors: Index = field(default_factory=dict)


_RECORD_ADAPTER = TypeAdapter(ShardRecord)


def write_shard(path: Path, parts: Sequence[TensorShard]) -> ShardRecord:
    """Write the parts as one safetensors file, synced; no file if there are none."""
    if not parts:
        return ShardRecord()
    file = StateFile(path.name, parts)
    with open(path, "wb", buffering=0) as handle:
        sha256 = file.write(handle)
        os.fsync(handle.fileno())
    return ShardRecord(path.name, file.size_bytes, sha256, file.index)


class StateFile:
    """A rank's file before it is written: its size and what the index says of it are known then.

    Raises:
        TypeError: a tensor that a checkpoint cannot hold.
    """

    def __init__(self, name: str, parts: Sequence[TensorShard]) -> None:
        self._keys = _keys(parts)
        # so that each tensor lies at a multiple of its item
        self._order = sorted(
            self._keys, key=lambda key: (-self._keys[key].tensor.element_size(), key)
        )
        header, at = {}, 0
        for key in self._order:
            part = self._keys[key]
            end = at + part.tensor.numel() * part.tensor.element_size()
            header[key] = {
                "dtype": dtype_name(part),
                "shape": list(part.tensor.shape),
                "data_offsets": [at, end],
            }
            at = end
        raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        raw += b" " * (-len(raw) % 8)
        self._header = len(raw).to_bytes(8, "little") + raw
        self.size_bytes = len(self._header) + at
        self.index = _index(name, self._keys)

    def write(self, sink: Sink) -> str:
        """Write all of it. Returns its SHA-256."""
        digest = hashlib.sha256()
        _write(sink, digest, memoryview(self._header))
        for key in self._order:
            _write(sink, digest, _bytes_of(self._keys[key].tensor))
        return digest.hexdigest()


def _keys(parts: Sequence[TensorShard]) -> dict[str, TensorShard]:
    # A rank may own several ranges of one tensor; the first goes by the tensor's own name.
    found: dict[str, TensorShard] = {}
    for part in parts:
        key, number = part.name, 1
        while key in found:
            number += 1
            key = f"{part.name}#{number}"
        found[key] = part
    return found


def _index(file: str, keys: dict[str, TensorShard]) -> Index:
    found: Index = {}
    for key, part in keys.items():
        flat, offset, shape = part.flat, part.offset, tuple(part.tensor.shape)
        if part.flat and part.is_whole:
            flat, offset, shape = False, (0,) * len(part.shape), part.shape
        elif part.flat:
            shape = (part.tensor.numel(),)
        piece = Piece(file, key, tuple(offset), shape, flat)
        add(
            found,
            part.name,
            Entry(dtype_name(part), tuple(part.shape), (piece,) if piece.numel else ()),
        )
    return found


def dtype_name(part: TensorShard) -> str:
    name = DTYPE_NAMES.get(str(part.tensor.dtype))
    if name is None:
        raise TypeError(
            f"{part.name} is {part.tensor.dtype}, which a checkpoint cannot hold"
            f" ({', '.join(DTYPES)})"
        )
    return name


def _bytes_of(tensor: Any) -> memoryview:
    import torch

    on_host = tensor.detach().to("cpu").contiguous()
    if on_host.is_complex():
        on_host = torch.view_as_real(on_host)
    return memoryview(on_host.reshape(-1).view(torch.uint8).numpy())


def _write(sink: Sink, digest: Any, data: memoryview) -> None:
    for start in range(0, len(data), _CHUNK_BYTES):
        chunk = data[start : start + _CHUNK_BYTES]
        digest.update(chunk)
        while len(chunk):
            chunk = chunk[sink.write(chunk) :]


#: A rank whose files do not grow for so long is taken for dead (a sync of a large file on a slow
#: disk shows no growth).
STALL_S = 900.0


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was written."""

    path: Path
    size_bytes: int


@dataclass(frozen=True)
class ShardWriter:
    """A rank that takes part in a save: its process, and the bytes of its tensors."""

    host: str
    pid: int
    size_bytes: int

    @classmethod
    def here(cls, parts: Sequence[TensorShard]) -> ShardWriter:
        return cls(_process_space(), os.getpid(), size_of(parts))

    @property
    def has_ended(self) -> bool:
        """True where the process is known to be gone; one on another host, or in another container,
        is not looked at."""
        if self.host != _process_space():
            return False
        try:
            os.kill(self.pid, 0)
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except ProcessLookupError:
            return True
        except (OSError, IndexError):  # another user's, or a system without /proc
            return False
        return state in "ZX"


@cache
def _process_space() -> str:
    """Within it, process numbers mean the same: hosts may share a name, and containers of a host
    have numbers of their own."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts += [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    return " ".join(parts)


class ShardWriteError(Exception):
    """A rank could not write what it owns."""


def prepare(folder: Path, step: int, num_ranks: int) -> Path:
    """The hidden folder for a save of ``step`` below ``folder``; what is left of saves that were
    cut is removed. OSError where it cannot be made."""
    aside = folder / aside_name(step, os.getpid())
    folder.mkdir(parents=True, exist_ok=True)
    clear_debris(folder)
    aside.mkdir()
    try:
        for rank in range(num_ranks):
            _marker(aside, rank, "writing").touch()
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return aside


def aside_name(step: int, pid: int) -> str:
    """Of the hidden folder in which the process ``pid`` leads a save."""
    return f".{name_of(step)}.{pid}.tmp"


def clear_debris(folder: Path) -> None:
    """Remove what saves that were cut have left below ``folder``; no other save may be under
    way."""
    for path in folder.glob(".step-*"):
        remove(path)


def remove(path: Path) -> None:
    """Remove a folder and what is in it, as far as that can be done; of a link the link alone."""
    if path.is_symlink() or path.is_file():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def write_part(aside: Path, rank: int, num_ranks: int, parts: Sequence[TensorShard]) -> None:
    """Write what this rank owns and say so to rank 0, or why it could not. Raises nothing."""
    deliver(aside, rank, num_ranks, partial(write_shard, parts=parts))


def deliver(
    aside: Path, rank: int, num_ranks: int, write: Callable[[Path], ShardRecord]
) -> Exception | None:
    """Let ``write`` bring a rank's file to the disk, and leave for rank 0 what it says of it, or
    why it could not. Raises nothing; returns why."""
    writing = _marker(aside, rank, "writing")
    path = aside / state_file(rank, num_ranks)
    try:
        writing.write_bytes(_RECORD_ADAPTER.dump_json(write(path)))
        os.replace(writing, _marker(aside, rank, "json"))
    except Exception as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)  # makes room for the reason
            writing.write_text(reason_of(error))
        number = getattr(error, "errno", None) or 0
        # where nothing can be said on this disk, rank 0 waits until its patience ends
        with suppress(OSError):
            os.replace(writing, _marker(aside, rank, f"failed-{number}"))
        return error
    return None


def has_failed(aside: Path) -> bool:
    """Whether some rank could not write its part of the save in this folder."""
    return any(aside.glob("rank-*.failed-*"))


def wait_for_parts(
    aside: Path,
    writers: Sequence[ShardWriter],
    patience_s: Callable[[], float] = lambda: STALL_S,
    tick: Callable[[], None] = lambda: None,
) -> list[ShardRecord]:
    """What each rank said of its file, in order of rank, when all have ended. ``tick`` is called as
    they grow.

    Raises:
        ShardWriteError: a rank could not write, or its process ended, or nothing has grown for
            ``patience_s()``.
    """
    seen, since, pause_s = -1, time.monotonic(), 0.001
    while True:
        names = {path.name for path in aside.iterdir()}
        open_ranks = [rank for rank in range(len(writers)) if f"rank-{rank:05d}.writing" in names]
        # A rank that ended before the folder was listed has left its last word in it.
        lost = [
            rank
            for rank in open_ranks
            if writers[rank].has_ended and _marker(aside, rank, "writing").exists()
        ]
        grown = sum(_size(aside / name) for name in names) + len(writers) - len(open_ranks)
        if grown != seen:
            seen, since = grown, time.monotonic()
            tick()
        if (
            not open_ranks
            or len(lost) == len(open_ranks)
            or time.monotonic() - since > patience_s()
        ):
            break
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)
    return [_outcome(aside, rank, len(writers)) for rank in range(len(writers))]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _outcome(aside: Path, rank: int, num_ranks: int) -> ShardRecord:
    who = f" (on rank {rank})" if num_ranks > 1 else ""
    for failed in aside.glob(f"rank-{rank:05d}.failed-*"):
        # a disk that is full may have no room for the words
        number = int(failed.name.rpartition("-")[2])
        raise ShardWriteError(
            (os.strerror(number) if number else failed.read_text() or "it is not known why") + who
        )
    if not _marker(aside, rank, "json").exists():
        raise ShardWriteError(f"rank {rank} ended, or stopped writing, before its part was on disk")
    return _RECORD_ADAPTER.validate_json(_marker(aside, rank, "json").read_bytes())


def commit(
    folder: Path, step: int, aside: Path, meta: CheckpointMeta, records: Sequence[ShardRecord]
) -> SavedCheckpoint:
    """Give the folder its name, when every rank's file is in it.

    Raises:
        OSError: it could not be written.
        ValueError: the pieces do not make up the state.
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
        _write_synced(aside / name, raw)
        files[name] = {"size_bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    manifest = json.dumps({"format": 2, "files": files}, indent=2)
    _write_synced(aside / MANIFEST, f"{manifest}\n".encode())
    for rank in range(len(records)):
        _marker(aside, rank, "json").unlink()
    fsync_dir(aside)
    old = folder / f".{final.name}.{os.getpid()}.old"
    # left by an earlier attempt that was rolled back; the new checkpoint has the same content
    if final.exists():
        os.replace(final, old)
    try:
        os.replace(aside, final)
    except OSError:
        if old.exists():
            os.replace(old, final)
        raise
    fsync_dir(folder)
    shutil.rmtree(old, ignore_errors=True)
    return SavedCheckpoint(final, sum(file["size_bytes"] for file in files.values()))


def _write_synced(path: Path, raw: bytes) -> None:
    with open(path, "wb") as handle:
        handle.write(raw)
        handle.flush()
        os.fsync(handle.fileno())


def _marker(aside: Path, rank: int, what: str) -> Path:
    return aside / f"rank-{rank:05d}.{what}"


def not_written(folder: Path, step: int, size_bytes: int, reason: str) -> SaveError:
    """The error of a save that failed, as a person reads it."""
    free = _free_bytes(folder)
    free_text = human_bytes(free) if free is not None else "not known"
    missing = (
        f"; missing: {size_bytes - free:,} bytes" if free is not None and free < size_bytes else ""
    )
    return SaveError(
        f"the checkpoint of step {step} could not be written to {folder / name_of(step)}: {reason} "
        f"(it needs {size_bytes:,} bytes, {human_bytes(size_bytes)}; free: {free_text}{missing})",
        fix=(
            "free some space, or set another `output_dir`; earlier checkpoints are untouched and"
            " the same command resumes from the latest one"
        ),
    )


def write_errors() -> tuple[type[Exception], ...]:
    """What a write of tensors may raise: safetensors has an error of its own for a full disk."""
    from safetensors import SafetensorError

    return OSError, SafetensorError


def reason_of(error: BaseException) -> str:
    """``No space left on device``, out of whatever words a library puts around it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    inner = re.search(r"I/O error: (.+?)(?: \(os error \d+\))?$", str(error))
    return inner[1] if inner else str(error) or type(error).__name__


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder if folder.exists() else folder.parent).free
    except OSError:
        return None
