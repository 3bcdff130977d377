"""Read a checkpoint in any layout: assemble boxes or flat ranges of tensors from the stored shards.

Reads only the bytes that are needed, in blocks of bounded size, directly into the memory of the
result. torch is imported only when a tensor is requested.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, TypedDict

import numpy as np

from paceline.checkpoint.format import (
    DTYPES,
    INDEX,
    META,
    STATE,
    CheckpointMeta,
    StoredShard,
    TensorEntry,
    TensorHeader,
    name_of,
    read_header,
    read_index,
)
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    Array = np.ndarray[Any, Any]
    #: Fills a contiguous 1-D array with the elements that begin at index ``start``.
    Fetch = Callable[[int, Array], None]

_BLOCK_BYTES = 8 << 20
#: If only parts of rows are needed, and each is at least this long, the bytes between them are
#: skipped.
_RUN_BYTES = 64 << 10


class TensorDigest(TypedDict):
    """What ``paceline inspect`` shows of a tensor."""

    dtype: str
    shape: list[int]
    sha256: str


class CheckpointReader:
    """Reads the state from a checkpoint's folder; implements
    :class:`~paceline.parallel.state.StateReader`. Use it in a ``with`` statement.

    Raises:
        ConfigError: ``path`` is not a checkpoint, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, tuple[IO[bytes], int, dict[str, TensorHeader]]] = {}
        try:
            self.entries = read_index(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _not_a_checkpoint(path, f"{STATE} and {INDEX} are missing or damaged") from error
        self.meta = read_meta(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for opened in self._files.values():
            opened[0].close()
        self._files.clear()

    # -- the StateReader protocol
    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return the dtype and the full shape of each tensor, by name."""
        return {
            name: (_torch_dtype(entry.dtype), entry.shape) for name, entry in self.entries.items()
        }

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return a box of a tensor, on the CPU."""
        entry = self._entry(name)
        out = np.empty(tuple(shape), _item_type(entry))
        self._fill_box(name, entry, tuple(offset), out)
        return _as_tensor(out, entry)

    def read_flat(self, name: str, start: int, count: int) -> torch.Tensor:
        """Return ``count`` elements of the flattened tensor, beginning at index ``start``, on the
        CPU."""
        entry = self._entry(name)
        out = np.empty((count,), _item_type(entry))
        self._fill_flat(name, entry, start, out)
        return _as_tensor(out, entry)

    # -- in blocks
    def box_blocks(
        self, name: str, offset: Sequence[int], shape: Sequence[int], block_bytes: int
    ) -> Iterator[memoryview]:
        """Yield the bytes of a box of a tensor in row-major order, in blocks of at most
        ``block_bytes``."""
        entry = self._entry(name)
        total, step = math.prod(shape), max(1, block_bytes // _item_type(entry).itemsize)
        for start in range(0, total, step):
            out = np.empty((min(step, total - start),), _item_type(entry))
            filled = 0
            for inner, size in _boxes(tuple(shape), start, out.size):
                count = math.prod(size)
                at = tuple(a + b for a, b in zip(offset, inner, strict=True))
                self._fill_box(name, entry, at, out[filled : filled + count].reshape(size))
                filled += count
            yield out.view(np.uint8).data

    def flat_blocks(
        self, name: str, start: int, count: int, block_bytes: int
    ) -> Iterator[memoryview]:
        """Yield the bytes of ``count`` elements of the flattened tensor, beginning at index
        ``start``, in blocks of at most ``block_bytes``."""
        entry = self._entry(name)
        step = max(1, block_bytes // _item_type(entry).itemsize)
        for begin in range(start, start + count, step):
            out = np.empty((min(step, start + count - begin),), _item_type(entry))
            self._fill_flat(name, entry, begin, out)
            yield out.view(np.uint8).data

    # -- without torch
    def describe(self, name: str) -> TensorDigest:
        """Return the dtype, the shape and the SHA-256 (of the bytes in row-major order) of a full
        tensor."""
        entry = self._entry(name)
        digest = hashlib.sha256()
        total, block_bytes = math.prod(entry.shape), _BLOCK_BYTES
        row_bytes = math.prod(entry.shape[1:]) * _item_type(entry).itemsize
        if 0 < row_bytes <= block_bytes:  # read full rows, unless a row is too long
            block_bytes -= block_bytes % row_bytes
        for block in self.flat_blocks(name, 0, total, block_bytes):
            digest.update(block)
        return {"dtype": entry.dtype, "shape": list(entry.shape), "sha256": digest.hexdigest()}

    # -- assembling
    def _entry(self, name: str) -> TensorEntry:
        entry = self.entries.get(name)
        if entry is None:
            raise ConfigError(
                "the checkpoint {path} does not contain the tensor {name}: it was written with"
                " another model or other settings",
                code="tensor-not-in-checkpoint",
                fix="resume with the config that wrote it, or set another `output_dir`",
                path=self.path,
                name=f"{name!r}",
            )
        return entry

    def _fill_box(self, name: str, entry: TensorEntry, offset: tuple[int, ...], out: Array) -> None:
        _check_inside(name, entry.shape, offset, out.shape)
        if out.size == 0:
            return
        if any(shard.flat for shard in entry.pieces):
            _gather(
                lambda start, into: self._fill_flat(name, entry, start, into),
                entry.shape,
                offset,
                out,
            )
            return
        filled = 0
        for shard in entry.pieces:
            start = tuple(map(max, offset, shard.offset))
            end = tuple(
                min(a + n, b + m)
                for a, n, b, m in zip(offset, out.shape, shard.offset, shard.shape, strict=True)
            )
            if any(a >= b for a, b in zip(start, end, strict=True)):
                continue
            slices: Any = tuple(
                slice(a - o, b - o) for a, b, o in zip(start, end, offset, strict=True)
            )
            target = out[(..., *slices)]  # a view, even of a scalar
            inside = tuple(a - o for a, o in zip(start, shard.offset, strict=True))
            _gather(self._fetch(shard, entry), shard.shape, inside, target)
            filled += target.size
        self._check_filled(name, filled, out.size)

    def _fill_flat(self, name: str, entry: TensorEntry, start: int, out: Array) -> None:
        _check_inside(name, (math.prod(entry.shape),), (start,), out.shape)
        if not any(shard.flat for shard in entry.pieces):
            at = 0
            for offset, shape in _boxes(entry.shape, start, out.size):
                count = math.prod(shape)
                self._fill_box(name, entry, offset, out[at : at + count].reshape(shape))
                at += count
            return
        filled = 0
        for shard in entry.pieces:
            first, last = (
                max(start, shard.offset[0]),
                min(start + out.size, shard.offset[0] + shard.numel),
            )
            if first < last:
                self._fetch(shard, entry)(
                    first - shard.offset[0], out[first - start : last - start]
                )
                filled += last - first
        self._check_filled(name, filled, out.size)

    def _check_filled(self, name: str, filled: int, wanted: int) -> None:
        if filled != wanted:
            raise damaged_checkpoint(
                self.path, f"{wanted - filled:,} elements of {name} are missing"
            )

    def _fetch(self, shard: StoredShard, entry: TensorEntry) -> Fetch:
        handle, base, header = self._open(shard.file)
        tensor = header.get(shard.key)
        size_bytes = shard.numel * _item_type(entry).itemsize
        if (
            tensor is None
            or tensor["dtype"] != entry.dtype
            or tensor["data_offsets"][1] - tensor["data_offsets"][0] != size_bytes
        ):
            raise damaged_checkpoint(
                self.path, f"{shard.key} in {shard.file} does not match the index"
            )
        at = base + int(tensor["data_offsets"][0])

        def fetch(start: int, out: Array) -> None:
            handle.seek(at + start * out.itemsize)
            left = out.view(np.uint8).data
            while len(left):
                count = handle.readinto(left)  # type: ignore[attr-defined]
                if not count:
                    raise damaged_checkpoint(self.path, f"{shard.file} is truncated")
                left = left[count:]

        return fetch

    def _open(self, name: str) -> tuple[IO[bytes], int, dict[str, TensorHeader]]:
        if name not in self._files:
            file = self.path / name
            try:
                if file.is_symlink():
                    raise ValueError(f"{file} is a symbolic link")
                base, header = read_header(file)
                stream = open(file, "rb", buffering=0)  # noqa: SIM115  (closed by __exit__)
                self._files[name] = (stream, base, header)
            except (OSError, ValueError) as error:
                raise damaged_checkpoint(self.path, f"{name}: {error}") from error
        return self._files[name]


def _gather(fetch: Fetch, shape: tuple[int, ...], offset: tuple[int, ...], out: Array) -> None:
    """Fill ``out`` with the box at ``offset`` of an array of ``shape`` that ``fetch`` reads in
    row-major order."""
    strides = _strides(shape)
    first = sum(a * s for a, s in zip(offset, strides, strict=True))
    # Number of elements from the first to the last element of the box.
    span = sum((n - 1) * s for n, s in zip(out.shape, strides, strict=True)) + 1
    is_contiguous = span == out.size
    if is_contiguous and out.flags.c_contiguous:
        fetch(first, out.reshape(-1))
        return
    axis = next((axis for axis, size in enumerate(out.shape) if size > 1), None)
    inner_bytes = out.nbytes // out.shape[axis] if axis is not None else 0
    wasteful = not is_contiguous and inner_bytes >= _RUN_BYTES and span > 2 * out.size
    if axis is None or (span * out.itemsize <= _BLOCK_BYTES and not wasteful):
        block = np.empty((span,), out.dtype)
        fetch(first, block)
        out[...] = np.lib.stride_tricks.as_strided(
            block, out.shape, [s * out.itemsize for s in strides], writeable=False
        )
        return
    rows = 1 if wasteful else max(1, _BLOCK_BYTES // (strides[axis] * out.itemsize))
    for start in range(0, out.shape[axis], rows):
        at = (*offset[:axis], offset[axis] + start, *offset[axis + 1 :])
        _gather(fetch, shape, at, out[(slice(None),) * axis + (slice(start, start + rows),)])


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _boxes(
    shape: tuple[int, ...], start: int, count: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offset, shape) of the boxes that make up ``count`` elements in row-major order,
    beginning at index ``start``: the rest of a row, full rows, the beginning of a row; at most two
    per dimension."""
    strides = _strides(shape)
    end = start + count
    while start < end:
        at, rest = [], start
        for stride in strides:
            at.append(rest // stride)
            rest %= stride
        # The outermost axis along which full slices begin at this element and fit.
        for axis, stride in enumerate(strides):
            num = min(shape[axis] - at[axis], (end - start) // stride)
            if start % stride == 0 and num > 0:
                yield tuple(at), (*(1,) * axis, num, *shape[axis + 1 :])
                start += num * stride
                break
        else:  # the tensor is a scalar
            yield (), ()
            start += 1


def _check_inside(
    name: str, shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]
) -> None:
    fits = len(shape) == len(offset) == len(size)
    if not fits or any(a < 0 or a + n > m for a, n, m in zip(offset, size, shape, strict=True)):
        raise ConfigError(
            "{name} has shape {shape} in the checkpoint: a box of shape {size} at offset {offset}"
            " exceeds it",
            code="tensor-shape-mismatch",
            fix="resume with the model that wrote the checkpoint, or set another `output_dir`",
            name=name,
            shape=list(shape),
            size=list(size),
            offset=list(offset),
        )


def _item_type(entry: TensorEntry) -> np.dtype[Any]:
    return np.dtype(f"u{DTYPES[entry.dtype][1]}")


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES[name][0])
    return dtype


def _as_tensor(values: Array, entry: TensorEntry) -> torch.Tensor:
    import torch

    raw = torch.from_numpy(values.reshape(-1).view(np.uint8))
    return raw.view(_torch_dtype(entry.dtype)).view(values.shape)


def read_meta(path: Path) -> CheckpointMeta:
    """Read the ``meta.json`` of a checkpoint.

    Raises:
        ConfigError: ``path`` is not a checkpoint.
    """
    try:
        meta: CheckpointMeta = json.loads((path / META).read_text())
    except (OSError, ValueError) as error:
        raise _not_a_checkpoint(path, f"{META} is missing or damaged") from error
    return meta


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, on the CPU."""
    with CheckpointReader(path) as reader:
        return {
            name: reader.read(name, (0,) * len(shape), shape)
            for name, (_, shape) in reader.tensors().items()
        }


def damaged_checkpoint(path: Path, reason: str) -> ConfigError:
    """Return the error of a checkpoint that cannot be read."""
    return ConfigError(
        "the checkpoint {path} is damaged: {reason}",
        code="damaged-checkpoint",
        fix="use an earlier one, or `resume: auto`, which does",
        path=path,
        reason=reason,
    )


def _not_a_checkpoint(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        "{path} is not a checkpoint: {reason}",
        code="not-a-checkpoint",
        allowed="a folder such as RUN/checkpoints/{example}",
        fix="list them with `ls RUN/checkpoints`",
        path=path,
        reason=reason,
        example=name_of(40),
    )
