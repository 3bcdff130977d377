"""Access to the DeepSpeed package: its import, and its partitions as ranges of named parameters.

No other module uses private names of DeepSpeed.
"""

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.strategies.deepspeed.installation import SUPPORTED, not_installed


def import_deepspeed(device_type: str) -> Any:
    """Import and return the module ``deepspeed``.

    Args:
        device_type: "cpu" makes DeepSpeed use the CPU even if there is an accelerator.

    Raises:
        ConfigError: DeepSpeed is not installed, or its import fails on this machine.
    """
    if device_type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # read once, when DeepSpeed is first imported
    try:
        with quiet():
            module = importlib.import_module("deepspeed")
    except Exception as error:  # the import looks for compilers and drivers
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if (missing or "").partition(".")[0] == "deepspeed":
            raise not_installed("zero2") from error
        raise ConfigError(
            "`parallel.mode: deepspeed`: DeepSpeed cannot be imported: {kind}: {reason}",
            code="deepspeed-import-failed",
            allowed="`parallel.mode: zero1`, `zero2` and `zero3` do the same without it",
            fix="run `pip install 'paceline[deepspeed]'`, or set another mode",
            kind=type(error).__name__,
            reason=error,
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device_type == "cpu":
        # DeepSpeed asks oneDNN, which needs AVX512-FP16; torch computes float16 on every CPU.
        module.accelerator.get_accelerator().is_fp16_supported = lambda: True
    elif device_type == "cuda":
        # DeepSpeed's own function fails if CUDA_VISIBLE_DEVICES has names such as MIG-….
        module.accelerator.get_accelerator().available_memory = _free_device_memory
    return module


def _free_device_memory(device_index: int | None = None) -> int:
    free_bytes, _ = torch.cuda.mem_get_info(device_index)
    return int(free_bytes)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the log messages of DeepSpeed, and warnings about its calls of renamed functions.
    What it prints goes to standard error: with ``--json``, standard output has only the result."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with redirect_stdout(sys.stderr):  # which kernels it cannot compile, on accelerators
            yield
    finally:
        logging.disable(before)


@dataclass(frozen=True)
class PartitionRange:
    """A range of a parameter in this rank's partition.

    Args:
        parameter: the parameter; the range has ``count`` of its elements from ``offset`` on
            (row-major).
        flat: this rank's float32 partition of a parameter group, which the optimizer updates; the
            range lies in it from ``start`` on.
    """

    parameter: nn.Parameter
    flat: torch.Tensor
    start: int
    offset: int
    count: int

    @property
    def values(self) -> torch.Tensor:
        """The elements of the range in ``flat``."""
        return self.flat.detach().narrow(0, self.start, self.count)


def ranges(zero: Any, stage: int, rank: int) -> Iterator[PartitionRange]:
    """Yield the ranges in this rank's partitions, without padding.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
    """
    return _ranges_of_weights(zero, rank) if stage == 3 else _ranges_of_groups(zero, rank)


def _ranges_of_groups(zero: Any, rank: int) -> Iterator[PartitionRange]:
    """Stages 1 and 2 concatenate the parameters of a group and split the result into equal
    parts."""
    for number, flat in enumerate(zero.single_partition_of_fp32_groups):
        first, last = rank * flat.numel(), (rank + 1) * flat.numel()
        position = 0
        offsets = getattr(zero, "round_robin_bit16_offsets", None)
        for index, parameter in enumerate(zero.round_robin_bit16_groups[number]):
            begin = offsets[number][index] if offsets else position
            position = begin + parameter.numel()
            low, high = max(begin, first), min(position, last)
            if low < high:
                yield PartitionRange(parameter, flat, low - first, low - begin, high - low)


def _ranges_of_weights(zero: Any, rank: int) -> Iterator[PartitionRange]:
    """Stage 3 splits each parameter into equal parts; the last part may be padded or empty."""
    for flat, parameters in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
        start = 0
        for parameter in parameters:
            size = parameter.partition_numel()
            count = min(size, parameter.ds_numel - rank * size)
            if count > 0:
                yield PartitionRange(parameter, flat, start, rank * size, count)
            start += size


def prepare_backward(engine: Any) -> None:
    """Prepare DeepSpeed's engine for its ``backward``; older versions do so within it."""
    getattr(engine, "_backward_prologue", lambda: None)()


def owners(zero: Any, stage: int) -> list[torch.Tensor]:
    """Return the float32 partitions: the keys of the optimizer's state."""
    return list(
        zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
    )


def refresh_weights(zero: Any, stage: int) -> None:
    """Update the weights of the forward pass from the float32 partitions. A collective."""
    if stage < 3:
        zero.update_lp_params()
        return
    _find(zero, "_partition_all_parameters")()
    reassign = _find(zero, "_reassign_or_swap_out_partitioned_parameters")
    for number in range(len(zero.fp16_groups)):
        reassign(number)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def gradient_tensors(zero: Any, module: nn.Module) -> list[torch.Tensor]:
    """Return all tensors that hold gradients now, in parameters and in DeepSpeed's buffers.

    Several of them may share a storage.
    """
    stores: list[Any] = [
        getattr(zero, "grads_in_partition", None),
        getattr(zero, "grad_partitions_flat_buffer", None),
    ]
    for parameter in module.parameters():
        stores += [parameter.grad, getattr(parameter, "grad_accum", None)]
    for attribute in ("averaged_gradients", "all_grad_tensors"):
        stores += getattr(zero, attribute, {}).values()
    stores += [bucket.buffer for bucket in getattr(zero, "ipg_buckets", {}).values()]
    gradients: list[torch.Tensor] = []
    for store in stores:
        entries = store if isinstance(store, list | tuple) else [store]
        gradients += [entry for entry in entries if isinstance(entry, torch.Tensor)]
    return gradients


def _find(zero: Any, name: str) -> Any:
    if not hasattr(zero, name):
        version = importlib.metadata.version("deepspeed")
        raise ConfigError(
            "deepspeed {version} has no `{kind}.{name}`, which Paceline requires",
            code="missing-in-deepspeed",
            allowed=SUPPORTED,
            fix="run `pip install '{supported}'`",
            version=version,
            kind=type(zero).__name__,
            name=name,
            supported=SUPPORTED,
        )
    return getattr(zero, name)
