"""What lies in a checkpoint's folder: names, the index of tensors and pieces, the header of a
safetensors file. No torch here.

``checkpoints/step-00000040/`` holds one ``state-00001-of-00004.safetensors`` for each rank that
owns a part of the state, ``index.json`` (of each tensor the dtype, the whole shape, and its
pieces), ``meta.json`` (step, config, who wrote it) and ``manifest.json`` (size and SHA-256 of every
other file). A checkpoint may also hold one ``state.safetensors`` with the whole tensors and no
index, as they were written before there were pieces.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypedDict

from pydantic import Field, JsonValue, NonNegativeInt, TypeAdapter

STATE, INDEX, META, MANIFEST = "state.safetensors", "index.json", "meta.json", "manifest.json"
_STATE_NAME = r"^state(-\d{5}-of-\d{5})?\.safetensors$"

#: safetensors' name of a dtype → (torch's name, bytes an element)
DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
DTYPE_NAMES = {f"torch.{torch_name}": name for name, (torch_name, _) in DTYPES.items()}


@dataclass(frozen=True)
class Piece:
    """Where a part of a tensor lies: a box at ``offset`` of the whole, or, where ``flat``, a range
    of the flattened whole from ``offset[0]`` on, as the tensor ``key`` of ``file``."""

    file: Annotated[str, Field(pattern=_STATE_NAME)]
    key: str
    offset: tuple[NonNegativeInt, ...]
    shape: tuple[NonNegativeInt, ...]
    flat: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Entry:
    """One tensor of the state: safetensors' name of its dtype, the whole shape, its pieces."""

    dtype: Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]
    shape: tuple[NonNegativeInt, ...]
    pieces: tuple[Piece, ...]


Index = dict[str, Entry]
#: Checks an index that was read: ``ValidationError``, a ValueError, where it is none.
INDEX_ADAPTER = TypeAdapter(Index)


class TensorHeader(TypedDict):
    """What the header of a safetensors file says of a tensor."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


class ManifestEntry(TypedDict):
    """What ``manifest.json`` says of a file."""

    size_bytes: int
    sha256: str


class BalanceRecord(TypedDict):
    """Micro-batches of each rank in a step (``parallel.balance``), and whether they may change."""

    shares: list[int]
    fixed: bool


class CheckpointMeta(TypedDict, total=False):
    """``meta.json``.

    Args:
        fingerprint: of the training data.
        torch: version of torch.
        frozen: digest of the weights that are not trained; None if all are trained.
        skipped_batches, recent_losses: see :class:`paceline.train.state.TrainState`.
    """

    step: int
    strategy: str
    world_size: int
    global_batch_size: int
    fingerprint: str | None
    config: dict[str, JsonValue]
    torch: str
    frozen: str | None
    skipped_batches: list[int]
    recent_losses: list[float]
    balance: BalanceRecord


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def is_file_of_checkpoint(name: str) -> bool:
    """Whether a checkpoint may hold a file of that name."""
    return name in (INDEX, META, MANIFEST) or re.fullmatch(_STATE_NAME, name) is not None


def state_file(rank: int, num_ranks: int) -> str:
    return f"state-{rank:05d}-of-{num_ranks:05d}.safetensors"


def read_index(path: Path) -> Index:
    """The index of a checkpoint; of an old one, made from the header of its one file.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: there is none, or it is broken.
    """
    if (path / INDEX).exists():
        return INDEX_ADAPTER.validate_python(json.loads((path / INDEX).read_text())["tensors"])
    _, header = read_header(path / STATE)
    raw = {}
    for name, tensor in header.items():
        dtype, shape = tensor["dtype"], tensor["shape"]
        piece = {"file": STATE, "key": name, "offset": [0] * len(shape), "shape": shape}
        raw[name] = {"dtype": dtype, "shape": shape, "pieces": [piece]}
    return INDEX_ADAPTER.validate_python(raw)


def read_header(file: Path) -> tuple[int, dict[str, TensorHeader]]:
    """(where the tensors' bytes begin, tensors by key) of a safetensors file:
    8 bytes little-endian header length, a JSON header, then the tensors' bytes (safetensors'
    README, "Format")."""
    with open(file, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file} is no safetensors file")
        header: dict[str, TensorHeader] = json.loads(handle.read(length))
    header.pop("__metadata__", None)
    return 8 + length, header


def merge(parts: Sequence[Index]) -> Index:
    """One index out of those of the ranks, each element of each tensor exactly once.

    Raises:
        ValueError: the ranks do not agree on a tensor, or leave a gap, or overlap.
    """
    merged: Index = {}
    for part in parts:
        for name, entry in part.items():
            add(merged, name, entry)
    for name, entry in merged.items():
        problem = cover_problem(entry)
        if problem is not None:
            raise ValueError(
                f"the ranks' pieces do not make up {name} of shape {list(entry.shape)}: {problem}"
            )
    return merged


def add(index: Index, name: str, entry: Entry) -> None:
    """Add pieces of a tensor. ValueError where what is there says otherwise of its dtype or
    shape."""
    before = index.get(name, Entry(entry.dtype, entry.shape, ()))
    if (before.dtype, before.shape) != (entry.dtype, entry.shape):
        raise ValueError(
            f"one part of {name} is of {before.dtype} {list(before.shape)}, another of"
            f" {entry.dtype} {list(entry.shape)}"
        )
    index[name] = Entry(entry.dtype, entry.shape, before.pieces + entry.pieces)


def cover_problem(entry: Entry) -> str | None:
    """None where the pieces hold each element of the tensor exactly once."""
    total, held = math.prod(entry.shape), sum(piece.numel for piece in entry.pieces)
    for piece in entry.pieces:
        whole = (total,) if piece.flat else entry.shape
        if len(piece.offset) != len(whole) or len(piece.shape) != len(whole):
            return f"a piece has offset {list(piece.offset)} and shape {list(piece.shape)}"
        if any(
            start + size > end
            for start, size, end in zip(piece.offset, piece.shape, whole, strict=True)
        ):
            return f"a piece of shape {list(piece.shape)} at {list(piece.offset)} reaches beyond it"
    if held != total:
        return f"they hold {held:,} elements of {total:,}"
    flat = [piece.flat for piece in entry.pieces]
    if any(flat) and not all(flat):
        return "some are ranges and some are boxes"
    pieces = sorted(
        (piece for piece in entry.pieces if piece.numel), key=lambda piece: piece.offset
    )
    open_boxes: list[Piece] = []
    for piece in pieces:
        if piece.offset:
            open_boxes = [
                one for one in open_boxes if one.offset[0] + one.shape[0] > piece.offset[0]
            ]
        if any(_overlap(one, piece) for one in open_boxes):
            return f"two hold what lies at {list(piece.offset)}"
        open_boxes.append(piece)
    return None


def _overlap(one: Piece, other: Piece) -> bool:
    return all(
        a < b + n and b < a + m
        for a, m, b, n in zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    )
