"""Read the headers of the safetensors files in which a model's weights are stored. Imports no
torch."""

import json
import re
from pathlib import Path
from typing import Any, TypedDict

#: From this size on, frozen weights that have to be converted are converted once per host; see
#: :mod:`paceline.models.weights.converted`.
MIN_CONVERTED_BYTES = 1 << 30
#: Names of dtypes in safetensors files.
_STORED_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
#: Weights of a single expert.
_EXPERT = re.compile(r"\.experts\.\d+\.")


class IncompleteHeaderError(ValueError):
    """A file has no complete safetensors header. The message says what it is instead."""


class HeaderEntry(TypedDict):
    """A tensor in the header of a safetensors file. ``data_offsets``: its range of bytes."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_header(file: Path) -> tuple[dict[str, HeaderEntry], int]:
    """Read the header of a safetensors file: the dtype, shape and range of bytes of each tensor.

    The file starts with the size of the header (8 bytes, little endian) and the header in JSON.

    Returns:
        The entries by tensor name, and the position of the first byte after the header.

    Raises:
        ValueError: the header cannot be read.
    """
    with file.open("rb") as content:
        size, start = file.stat().st_size, content.read(8)
        if start == b"version ":
            raise IncompleteHeaderError("is a pointer of git-lfs: run `git lfs pull`")
        header_size = int.from_bytes(start, "little")
        if size < 8 or header_size > size - 8:
            raise IncompleteHeaderError(f"is truncated or not a safetensors file ({size:,} bytes)")
        header = json.loads(content.read(header_size))
    if not isinstance(header, dict):
        raise ValueError("expected an object")
    header.pop("__metadata__", None)
    return header, 8 + header_size


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model's folder."""
    single = folder / "model.safetensors"
    return [single] if single.exists() else sorted(folder.glob("model-*.safetensors"))


def files_identity(folder: Path) -> list[Any]:
    """Return a JSON value that changes when the files of a model change, without reading its
    weights.

    Raises:
        OSError: there is no config.json, or a file cannot be read.
    """
    files = [*weight_files(folder), *sorted(folder.glob("*.bin"))]
    stats = [(file.name, file.stat()) for file in files]
    return [
        str(folder.resolve()),
        [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
        (folder / "config.json").read_text(encoding="utf-8"),
    ]


def mapped_bytes(folder: Path, dtype: str) -> int:
    """Return the size of the weights that a folder's files store as the model uses them: in
    ``dtype`` (such as ``bfloat16``), and not as one tensor per expert, which transformers merges. 0
    if a file cannot be read."""
    total = 0
    try:
        for file in weight_files(folder):
            total += sum(
                entry["data_offsets"][1] - entry["data_offsets"][0]
                for name, entry in read_header(file)[0].items()
                if entry["dtype"] == _STORED_DTYPES.get(dtype) and not _EXPERT.search(name)
            )
    except (OSError, ValueError, TypeError, LookupError):
        return 0
    return total
