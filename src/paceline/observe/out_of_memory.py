"""Describe what the memory of a rank contains when an allocation fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import OutOfMemory, first_line
from paceline.core.failures import requested_size
from paceline.core.files import human_bytes
from paceline.observe.memory import split_state
from paceline.observe.metrics import memory_now
from paceline.parallel.state import local_tensor

if TYPE_CHECKING:
    from torch import nn

    from paceline.parallel.strategy import Strategy

_NUM_LARGEST = 3


def out_of_memory(error: BaseException, strategy: Strategy, model: nn.Module) -> OutOfMemory:
    """Return the error that describes the memory of this rank, or only ``error`` if that fails too.
    Must be called while the traceback of ``error`` keeps the tensors of the failed step alive."""
    try:
        return _describe(error, strategy, model)
    except Exception as failure:  # another allocation may fail, or a device that no longer responds
        return OutOfMemory(
            "Out of memory on {device}: {reason} (what the memory contains is unknown: {kind})",
            code="out-of-memory",
            needed_bytes=requested_size(str(error)),
            device=strategy.world.device,
            reason=first_line(error),
            kind=type(failure).__name__,
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
        "Out of memory on {device}: {in_use_bytes} in use{request}. In use by kind: {kinds}. The"
        " largest parameters are {largest}",
        code="out-of-memory",
        needed_bytes=in_use_bytes + requested_bytes,
        device=device,
        in_use_bytes=human_bytes(in_use_bytes),
        request=request,
        kinds=kinds,
        largest=", ".join(_largest(model)),
    )


def _largest(model: nn.Module) -> list[str]:
    sizes = [(local_tensor(param.data).nbytes, name) for name, param in model.named_parameters()]
    largest = sorted(sizes, reverse=True)[:_NUM_LARGEST]
    return [f"{name} {human_bytes(size)}" for size, name in largest]
