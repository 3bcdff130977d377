"""DeepSpeed as a package: whether it is installed, its import without output, and its partitions,
read as ranges of the named parameters they were cut from. No other module touches private names of
DeepSpeed."""

import importlib
import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.core.errors import ConfigError

SUPPORTED = "deepspeed>=0.19,<0.20"


def check_installed(stage: int) -> None:
    """Raise ConfigError if DeepSpeed is not installed. It is not imported: that takes a second, and
    each rank reports by itself if DeepSpeed does not load.

    Args:
        stage: the ZeRO stage that is asked for, for the remedy.
    """
    found = importlib.util.find_spec("deepspeed")
    if found is None or found.origin is None:  # a folder of that name is not DeepSpeed
        raise _not_installed(f"zero{stage}")


def import_deepspeed(device_type: str) -> Any:
    """The module ``deepspeed``. ``device_type``: "cpu" makes it compute there whatever else it
    finds.

    Raises:
        ConfigError: not installed, or it does not load on this machine.
    """
    if device_type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # read once, when DeepSpeed is first imported
    try:
        with quiet():
            found = importlib.import_module("deepspeed")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "deepspeed":
            raise _does_not_load(error) from error
        raise _not_installed("zero2") from error
    except Exception as error:  # it looks for compilers and drivers while it is imported
        raise _does_not_load(error) from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device_type == "cpu":
        # DeepSpeed asks oneDNN, which needs AVX512-FP16; torch computes float16 on every CPU.
        found.accelerator.get_accelerator().is_fp16_supported = lambda: True
    return found


def _not_installed(mode: str) -> ConfigError:
    return ConfigError(
        "`parallel.mode: deepspeed`, and DeepSpeed is not installed",
        allowed="`parallel.mode: zero1`, `zero2` and `zero3` shard the same without DeepSpeed",
        fix=(
            f"run `pip install 'paceline[deepspeed]'`, or set `parallel.mode: {mode}`"
            f" (`parallel.mode={mode}` on the command line)"
        ),
    )


def _does_not_load(error: Exception) -> ConfigError:
    return ConfigError(
        f"`parallel.mode: deepspeed`, and DeepSpeed does not load here: {type(error).__name__}:"
        f" {error}",
        allowed="`parallel.mode: zero1`, `zero2` and `zero3` do the same without it",
        fix="run `pip install 'paceline[deepspeed]'`, or set another mode",
    )


@contextmanager
def quiet() -> Iterator[None]:
    """DeepSpeed logs to the terminal at every turn, and calls what torch has renamed."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


@dataclass(frozen=True)
class Range:
    """``count`` elements of ``parameter`` from ``offset`` on (row-major), which lie in ``flat``
    from ``start`` on: this rank's float32 partition of a parameter group, the tensor that the
    optimizer updates."""

    parameter: nn.Parameter
    flat: torch.Tensor
    start: int
    offset: int
    count: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The range's elements in ``flat``, or in another tensor that lies as it does (Adam's
        moments)."""
        return flat.detach().narrow(0, self.start, self.count)


def ranges(zero: Any, stage: int, rank: int) -> Iterator[Range]:
    """What this rank's partitions hold, padding left out. ``zero``: DeepSpeed's ZeRO optimizer."""
    return _ranges_of_weights(zero, rank) if stage == 3 else _ranges_of_groups(zero, rank)


def _ranges_of_groups(zero: Any, rank: int) -> Iterator[Range]:
    """Stages 1 and 2 lay the parameters of a group one behind the other and cut the whole into
    equal parts."""
    for number, flat in enumerate(zero.single_partition_of_fp32_groups):
        first, last = rank * flat.numel(), (rank + 1) * flat.numel()
        position = 0
        offsets = getattr(zero, "round_robin_bit16_offsets", None)
        for index, parameter in enumerate(zero.round_robin_bit16_groups[number]):
            begin = offsets[number][index] if offsets else position
            position = begin + parameter.numel()
            low, high = max(begin, first), min(position, last)
            if low < high:
                yield Range(parameter, flat, low - first, low - begin, high - low)


def _ranges_of_weights(zero: Any, rank: int) -> Iterator[Range]:
    """Stage 3 cuts each parameter into equal parts, the last ones padded or empty."""
    for flat, parameters in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
        start = 0
        for parameter in parameters:
            size = parameter.partition_numel()
            count = min(size, parameter.ds_numel - rank * size)
            if count > 0:
                yield Range(parameter, flat, start, rank * size, count)
            start += size


def owners(zero: Any, stage: int) -> list[torch.Tensor]:
    """The float32 partitions themselves: the keys of the optimizer's state."""
    return list(
        zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
    )


def refresh_weights(zero: Any, stage: int) -> None:
    """Bring the weights of the forward pass to the float32 partitions' values. A collective."""
    if stage < 3:
        zero.update_lp_params()
        return
    partition = _find(zero, "_partition_all_parameters")
    reassign = _find(zero, "_reassign_or_swap_out_partitioned_parameters")
    partition()
    for number in range(len(zero.fp16_groups)):
        reassign(number)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def gradient_tensors(zero: Any, module: nn.Module) -> list[torch.Tensor]:
    """All tensors that hold gradients now, wherever DeepSpeed keeps them; several may share a
    storage."""
    found: list[Any] = []
    for one in module.parameters():
        found += [one.grad, getattr(one, "grad_accum", None)]
    for kept in ("averaged_gradients", "all_grad_tensors"):
        for value in getattr(zero, kept, {}).values():
            found += value if isinstance(value, list | tuple) else [value]
    for bucket in getattr(zero, "ipg_buckets", {}).values():
        held = bucket.buffer
        found += held if isinstance(held, list | tuple) else [held]
    found += [
        getattr(zero, "grads_in_partition", None),
        getattr(zero, "grad_partitions_flat_buffer", None),
    ]
    return [one for one in found if isinstance(one, torch.Tensor)]


def _find(zero: Any, name: str) -> Any:
    if not hasattr(zero, name):
        version = importlib.metadata.version("deepspeed")
        raise ConfigError(
            f"deepspeed {version} has no `{type(zero).__name__}.{name}`, which Paceline uses.",
            allowed=SUPPORTED,
            fix=f"run `pip install '{SUPPORTED}'`",
        )
    return getattr(zero, name)
