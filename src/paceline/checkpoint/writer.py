"""The file of a checkpoint that one rank writes: the parts of the state that it owns, as
safetensors, hashed on their way."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.checkpoint.format import DTYPE_NAMES, DTYPES, Entry, Index, Piece, add

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


def write_state(path: Path, parts: Sequence[TensorShard]) -> tuple[int, str, Index]:
    """Write the parts as one safetensors file, synced. Returns (bytes, SHA-256 of the file, its
    tensors)."""
    file = StateFile(path.name, parts)
    with open(path, "wb", buffering=0) as handle:
        sha256 = file.write(handle)
        os.fsync(handle.fileno())
    return file.size_bytes, sha256, file.index


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
