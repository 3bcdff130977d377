"""The checkpoint format: file names, the tensor index and the safetensors header.

Imports no torch.

``checkpoints/step-00000040/`` holds one ``state-00001-of-00004.safetensors`` for each rank that
owns shards of the state, ``index.json`` (dtype, full shape and stored shards of each tensor),
``meta.json`` (step, config, torch version) and ``manifest.json`` (size and SHA-256 of every other
file). Older checkpoints hold one ``state.safetensors`` with full tensors and no index.
"""

import json
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypedDict

from pydantic import Field, JsonValue, NonNegativeInt, TypeAdapter

STATE, INDEX, META, MANIFEST = "state.safetensors", "index.json", "meta.json", "manifest.json"
_STATE_NAME = r"^state(-\d{5}-of-\d{5})?\.safetensors$"

#: dtype name in safetensors → (dtype name in torch, bytes per element)
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
class StoredShard:
    """The location of a shard of a tensor: it is stored as the tensor ``key`` of ``file``.

    The shard is a box at ``offset`` of the full tensor or, with ``flat``, a range of the flattened
    tensor that starts at ``offset[0]``.
    """

    file: Annotated[str, Field(pattern=_STATE_NAME)]
    key: str
    offset: tuple[NonNegativeInt, ...]
    shape: tuple[NonNegativeInt, ...]
    flat: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the state: its dtype as safetensors names it, its full shape and its stored
    shards."""

    dtype: Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]
    shape: tuple[NonNegativeInt, ...]
    pieces: tuple[StoredShard, ...]


Index = dict[str, TensorEntry]
#: Validates an index; raises ``pydantic.ValidationError``, which is a ValueError.
INDEX_ADAPTER = TypeAdapter(Index)


class TensorHeader(TypedDict):
    """The entry of a tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


class ManifestEntry(TypedDict):
    """The entry of a file in ``manifest.json``."""

    size_bytes: int
    sha256: str


class BalanceRecord(TypedDict):
    """Numbers of micro-batches per step of each rank (``parallel.balance``), and whether they are
    fixed."""

    shares: list[int]
    fixed: bool


class CheckpointMeta(TypedDict, total=False):
    """The content of ``meta.json``.

    Attributes:
        fingerprint: hash of the training data.
        image_backend: the library that processes the images of a vision-language model, or None.
        torch: version of torch.
        frozen: digest of the frozen weights, or None if all weights are trained.
        skipped_batches, recent_losses, stop_reason: see :class:`paceline.train.state.TrainState`.
        callbacks: states of the callbacks by name.
    """

    step: int
    strategy: str
    world_size: int
    global_batch_size: int
    fingerprint: str | None
    image_backend: str | None
    config: dict[str, JsonValue]
    torch: str
    frozen: str | None
    skipped_batches: list[int]
    recent_losses: list[float]
    balance: BalanceRecord
    callbacks: dict[str, dict[str, JsonValue]]
    stop_reason: str


def name_of(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    """Return the step of the checkpoint whose folder has this name."""
    return int(name.rpartition("-")[2])


def names_to_prune(
    names: Sequence[str],
    keep: int | None,
    superseded: Collection[int],
    best_steps: Collection[int] = (),
) -> list[str]:
    """Return the names of the checkpoints to remove. ``names`` are sorted by step.

    Args:
        keep: number of checkpoints to retain; None retains all.
        superseded: steps whose checkpoints are removed in any case and do not count towards
            ``keep``.
        best_steps: steps of the best evaluations so far. The latest of them that has a checkpoint
            is retained in any case.
    """
    removed = [name for name in names if step_of(name) in superseded]
    if keep is not None:
        rest = [name for name in names if name not in removed]
        best = max((step_of(name) for name in rest if step_of(name) in best_steps), default=None)
        removed += [name for name in rest[:-keep] if step_of(name) != best]
    return removed


def is_checkpoint_file(name: str) -> bool:
    """Return whether a checkpoint may contain a file with this name."""
    return name in (INDEX, META, MANIFEST) or re.fullmatch(_STATE_NAME, name) is not None


def state_file(rank: int, num_ranks: int) -> str:
    """Return the name of the state file that a rank writes."""
    return f"state-{rank:05d}-of-{num_ranks:05d}.safetensors"


def read_index(path: Path) -> Index:
    """Read the index of a checkpoint. For an old checkpoint without an index, build it from the
    header of its single file.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: the index is missing or damaged.
    """
    if (path / INDEX).exists():
        return INDEX_ADAPTER.validate_python(json.loads((path / INDEX).read_text())["tensors"])
    _, header = read_header(path / STATE)
    raw = {}
    for name, tensor in header.items():
        dtype, shape = tensor["dtype"], tensor["shape"]
        shard = {"file": STATE, "key": name, "offset": [0] * len(shape), "shape": shape}
        raw[name] = {"dtype": dtype, "shape": shape, "pieces": [shard]}
    return INDEX_ADAPTER.validate_python(raw)


def read_header(file: Path) -> tuple[int, dict[str, TensorHeader]]:
    """Return the offset at which the tensor data of a safetensors file begins, and its tensors by
    key.

    The file consists of the header's length (8 bytes, little-endian), a JSON header, and the tensor
    data (see "Format" in the README of safetensors).
    """
    with open(file, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file} is not a safetensors file")
        header: dict[str, TensorHeader] = json.loads(handle.read(length))
    header.pop("__metadata__", None)
    return 8 + length, header


def merge(rank_indexes: Sequence[Index]) -> Index:
    """Merge the indexes of the ranks into one that contains each element of each tensor once.

    Raises:
        ValueError: the ranks disagree on a tensor, or their shards leave a gap or overlap.
    """
    merged: Index = {}
    for index in rank_indexes:
        for name, entry in index.items():
            add(merged, name, entry)
    for name, entry in merged.items():
        problem = coverage_error(entry)
        if problem is not None:
            raise ValueError(
                f"the shards of {name}, shape {list(entry.shape)}, do not cover it exactly once:"
                f" {problem}"
            )
    return merged


def add(index: Index, name: str, entry: TensorEntry) -> None:
    """Add shards of a tensor to an index.

    Raises:
        ValueError: the dtype or the shape differs from that in the index.
    """
    before = index.get(name, TensorEntry(entry.dtype, entry.shape, ()))
    if (before.dtype, before.shape) != (entry.dtype, entry.shape):
        raise ValueError(
            f"the shards of {name} disagree on its dtype or shape: {before.dtype}"
            f" {list(before.shape)} and {entry.dtype} {list(entry.shape)}"
        )
    index[name] = TensorEntry(entry.dtype, entry.shape, before.pieces + entry.pieces)


def coverage_error(entry: TensorEntry) -> str | None:
    """Return why the shards do not cover the tensor exactly once, or None if they do."""
    total, stored = math.prod(entry.shape), sum(shard.numel for shard in entry.pieces)
    for shard in entry.pieces:
        bounds = (total,) if shard.flat else entry.shape
        if len(shard.offset) != len(bounds) or len(shard.shape) != len(bounds):
            return f"a shard has offset {list(shard.offset)} and shape {list(shard.shape)}"
        if any(
            start + size > end
            for start, size, end in zip(shard.offset, shard.shape, bounds, strict=True)
        ):
            return (
                f"a shard of shape {list(shard.shape)} at offset {list(shard.offset)} exceeds"
                " the tensor"
            )
    if stored != total:
        return f"they hold {stored:,} elements, the tensor has {total:,}"
    if len({shard.flat for shard in entry.pieces}) > 1:
        return "some are ranges and some are boxes"
    shards = sorted(
        (shard for shard in entry.pieces if shard.numel), key=lambda shard: shard.offset
    )
    open_boxes: list[StoredShard] = []
    for shard in shards:
        if shard.offset:
            open_boxes = [
                box for box in open_boxes if box.offset[0] + box.shape[0] > shard.offset[0]
            ]
        if any(_overlap(box, shard) for box in open_boxes):
            return f"two of them overlap at offset {list(shard.offset)}"
        open_boxes.append(shard)
    return None


def _overlap(first: StoredShard, second: StoredShard) -> bool:
    return all(
        a < b + n and b < a + m
        for a, m, b, n in zip(first.offset, first.shape, second.offset, second.shape, strict=True)
    )
