"""Describe what the memory of a rank contains when an allocation fails."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from paceline.core.errors import OutOfMemory, first_line
from paceline.core.files import human_bytes
from paceline.observe.memory import split_state
from paceline.observe.metrics import memory_now
from paceline.parallel.state import local_tensor

if TYPE_CHECKING:
    from torch import nn

    from paceline.parallel.strategy import Strategy

_NUM_LARGEST = 3
#: The size in the messages of CUDA's caching allocator ("Tried to allocate 2.50 GiB") and of the
#: CPU's ("you tried to allocate 4096 bytes").
_REQUESTED = re.compile(r"allocate ([\d.]+) (GiB|MiB|KiB|bytes)")
#: Messages of the CPU's allocator, of CUDA and NCCL beside the caching allocator, and of CUDA's
#: libraries when they create a handle.
_NO_MEMORY = re.compile(
    r"can't allocate memory|out of memory|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on an accelerator or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))


def out_of_memory(error: BaseException, strategy: Strategy, model: nn.Module) -> OutOfMemory:
    """Return the error that describes the memory of this rank, or only ``error`` if that fails too.
    Must be called while the traceback of ``error`` keeps the tensors of the failed step alive."""
    try:
        return _describe(error, strategy, model)
    except Exception as failure:  # another allocation may fail, or a device that no longer responds
        return OutOfMemory(
            f"Out of memory on {strategy.world.device}: {first_line(error)} (what the memory"
            f" contains is unknown: {type(failure).__name__})",
            needed_bytes=requested_size(str(error)),
        )


def _describe(error: BaseException, strategy: Strategy, model: nn.Module) -> OutOfMemory:
    device = strategy.world.device
    in_use_bytes, requested_bytes = memory_now(device), requested_size(str(error))
    state = split_state(strategy, model, device)
    rest = "activations and temporary tensors"
    if device.type == "cpu":
        rest = "activations, temporary tensors and libraries"
    sizes = {**state, rest: max(0, in_use_bytes - sum(state.values()))}
    kinds = ", ".join(f"{kind} {human_bytes(size)}" for kind, size in sizes.items() if size)
    request = f", {human_bytes(requested_bytes)} requested" if requested_bytes else ""
    return OutOfMemory(
        f"Out of memory on {device}: {human_bytes(in_use_bytes)} in use{request}. In use by kind:"
        f" {kinds}. The largest parameters are {', '.join(_largest(model))}",
        needed_bytes=in_use_bytes + requested_bytes,
    )


def requested_size(message: str) -> int:
    """Return the bytes that an allocator's error message names; 0 if it names none."""
    match = _REQUESTED.search(message)
    return round(float(match[1]) * _UNITS[match[2]]) if match else 0


def _largest(model: nn.Module) -> list[str]:
    sizes = [(local_tensor(param.data).nbytes, name) for name, param in model.named_parameters()]
    largest = sorted(sizes, reverse=True)[:_NUM_LARGEST]
    return [f"{name} {human_bytes(size)}" for size, name in largest]
