"""Write tensors to safetensors files one after the other, so that only one of them is in memory."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.files import write_json_atomic
from paceline.models.json_config import read_object
from paceline.models.weights.stored_files import HeaderEntry, read_header

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_CHUNK_BYTES = 16 << 20
#: Names of torch's dtypes in safetensors files.
STORED_DTYPES = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor that is read only when it is written.

    Args:
        dtype: name of its dtype in a safetensors file.
        shape: sizes of its dimensions.
        num_bytes: size of its values.
        chunks: function that returns its bytes, in parts.
    """

    dtype: str
    shape: list[int]
    num_bytes: int
    chunks: Callable[[], Iterator[bytes]]


def tensor_as_stored(file: Path, entry: HeaderEntry, data_start: int) -> TensorToWrite:
    """Return a tensor of a safetensors file, byte for byte.

    Args:
        data_start: position in the file of the first tensor's first byte.
    """
    start, end = entry["data_offsets"]

    def chunks() -> Iterator[bytes]:
        with file.open("rb") as content:
            content.seek(data_start + start)
            remaining = end - start
            while remaining:
                part = content.read(min(remaining, _CHUNK_BYTES))
                if not part:
                    raise OSError(f"{file} ends before its last tensor")
                remaining -= len(part)
                yield part

    return TensorToWrite(entry["dtype"], list(entry["shape"]), end - start, chunks)


def tensor_as(
    dtype: torch.dtype, shape: list[int], read: Callable[[], torch.Tensor]
) -> TensorToWrite:
    """Return a tensor that is converted to ``dtype`` when it is written.

    Args:
        shape: sizes of its dimensions.
        read: function that returns the tensor.
    """
    import torch

    def chunks() -> Iterator[bytes]:
        values = read().to(dtype).contiguous().reshape(-1).view(torch.uint8)
        yield values.numpy().tobytes()

    name = STORED_DTYPES[str(dtype).removeprefix("torch.")]
    return TensorToWrite(name, shape, math.prod(shape) * dtype.itemsize, chunks)


def write_safetensors(file: Path, tensors: Mapping[str, TensorToWrite]) -> None:
    """Write a safetensors file, tensor by tensor. Tensors with wide numbers come first, so that
    each starts at a multiple of its numbers' size."""
    widths = {
        name: tensor.num_bytes // max(1, math.prod(tensor.shape))
        for name, tensor in tensors.items()
    }
    names = sorted(tensors, key=lambda name: (-widths[name], name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in names:
        tensor = tensors[name]
        end = position + tensor.num_bytes
        header[name] = HeaderEntry(
            dtype=tensor.dtype, shape=tensor.shape, data_offsets=(position, end)
        )
        position = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with file.open("wb") as output:
        output.write(len(raw).to_bytes(8, "little"))
        output.write(raw)
        for name in names:
            for part in tensors[name].chunks():
                output.write(part)


def add_shard(folder: Path, tensors: Mapping[str, TensorToWrite]) -> None:
    """Add a file with tensors to the safetensors files of a model's folder, which only this process
    uses, and list all of them in its index."""
    files = shard_files(folder)
    total = len(files) + 1
    metadata = (read_object(folder / INDEX) or {}).get("metadata")
    metadata = dict(metadata) if isinstance(metadata, dict) else {}
    weight_map: dict[str, str] = {}
    size = 0
    for number, file in enumerate(files, start=1):
        renamed = file.with_name(_shard_name(number, total))
        file.rename(renamed)
        for name, entry in read_header(renamed)[0].items():
            weight_map[name] = renamed.name
            size += entry["data_offsets"][1] - entry["data_offsets"][0]
    last = folder / _shard_name(total, total)
    write_safetensors(last, tensors)
    weight_map |= dict.fromkeys(tensors, last.name)
    metadata["total_size"] = size + sum(tensor.num_bytes for tensor in tensors.values())
    metadata.pop("total_parameters", None)  # transformers counts the model's only
    write_json_atomic(
        folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    )


def shard_files(folder: Path) -> list[Path]:
    """Return the safetensors files that ``save_pretrained`` has written to a folder, in order."""
    single = folder / _SINGLE
    if single.is_file():
        return [single]
    return sorted(file for file in folder.glob("*.safetensors") if _SHARD.fullmatch(file.name))


def _shard_name(number: int, total: int) -> str:
    return f"model-{number:05d}-of-{total:05d}.safetensors"
