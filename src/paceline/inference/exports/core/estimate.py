"""What an export needs: sizes, memory, time."""

from __future__ import annotations

import logging
import math
import os
import shutil
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.core.files import human_bytes
from paceline.core.formatting import duration
from paceline.core.processes import available_memory
from paceline.core.texts import UserText
from paceline.inference.exports.core.forms import ExportEstimate
from paceline.models.weights.dequantize import safetensors_files
from paceline.models.weights.stored_files import read_header

logger = logging.getLogger(__name__)

#: Bytes of a number in a dtype of the command line.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FLOATS = ("F64", "F32", "BF16", "F16")
#: Start of two processes with transformers, and the prompts of the proof.
_START_S = 30.0
#: Reading, merging and writing a model, of its bytes: a disk of 500 MB/s is used three times.
_BYTES_PER_S = 150e6


def stored_sizes(name: str) -> list[tuple[str, str, list[int], int]]:
    """Return name, dtype, shape and bytes of each tensor in the safetensors files of a folder or
    hub ID; none if they are not here."""
    try:
        return [
            (
                key,
                entry["dtype"],
                entry["shape"],
                entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for file in safetensors_files(name)
            for key, entry in read_header(file)[0].items()
        ]
    except (OSError, ValueError):
        return []


def model_bytes(name: str, dtype: str = "auto") -> int:
    """Return the size of a model's weights in a dtype; 0 if its files are not here. Pickled weights
    count as they are."""
    width = DTYPE_BYTES.get(dtype)
    sizes = stored_sizes(name)
    if not sizes:
        return sum(file.stat().st_size for file in Path(name).glob("pytorch_model*.bin"))
    return sum(
        size if width is None or stored not in _FLOATS else math.prod(shape) * width
        for _, stored, shape, size in sizes
    )


def read_and_write_time_s(size_bytes: int) -> float:
    """Return an estimate of the time to load a model of this size, write it, and prove it."""
    return _START_S + size_bytes / _BYTES_PER_S


def check_space(size_bytes: int, memory_bytes: int, parent: Path) -> int:
    """Return how many bytes are free on the disk that an export is written to.

    Args:
        size_bytes: size of all files that it writes, also temporary ones.
        memory_bytes: memory at the peak.
        parent: folder of the export, which may not exist yet.

    Raises:
        ConfigError: the disk or the memory is too small.
    """
    while not os.path.exists(parent):  # unlike Path.exists(), also if its name is too long
        parent = parent.parent
    free, available = shutil.disk_usage(parent).free, available_memory()
    if size_bytes > free:
        raise ConfigError(
            "the export needs {needed} in {folder}, where {free} are free",
            code="export-needs-disk",
            fix="free some space, or give a folder on another disk with --output DIR",
            needed=human_bytes(size_bytes),
            free=human_bytes(free),
            folder=parent,
        )
    if memory_bytes > available:
        raise ConfigError(
            "the export needs {needed} of memory (estimated), and {available} are available",
            code="export-needs-memory",
            fix="end other processes, or use a machine with more memory",
            needed=human_bytes(memory_bytes),
            available=human_bytes(available),
        )
    return free


def check_estimate(estimate: ExportEstimate, scratch_bytes: int, parent: Path) -> None:
    """Log what an export needs. For the errors, see :func:`check_space`.

    Args:
        scratch_bytes: size of temporary files.
    """
    free = check_space(estimate.num_bytes + scratch_bytes, estimate.memory_bytes, parent)
    logger.info(
        UserText(
            "export: {size} to write, {temporary} of temporary files, {free} free; about {duration}"
            " (estimated)",
            code="export-estimate",
            size=human_bytes(estimate.num_bytes),
            temporary=human_bytes(scratch_bytes),
            free=human_bytes(free),
            duration=duration(estimate.time_s),
        )
    )
