"""Measure what the memory of each rank contains: parameters, gradients, optimizer state and
activations.

A storage counts once, even if several tensors share it. Sharded tensors count with their local
shard.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.event_log import EventLog
from paceline.core.events import MemoryParts
from paceline.distributed.traffic import uncounted
from paceline.observe.metrics import peak_since
from paceline.parallel.save_load import device_tensors, memory_bytes
from paceline.parallel.state import local_tensor, storage_bytes
from paceline.parallel.strategy import Strategy

if TYPE_CHECKING:
    from torch import nn

#: Memory is measured after this many steps of an attempt, because the first step creates the
#: optimizer state.
STEPS_BEFORE = 2
_KINDS = ("parameters", "gradients", "optimizer", "activations", "total")
_UNKNOWN = -1.0


def emit_memory(strategy: Strategy, model: nn.Module, events: EventLog, step: int) -> None:
    """Measure the memory of all ranks and emit the ``memory`` event. A collective."""
    comm = strategy.world
    device = comm.device
    state = split_state(strategy, model, device)
    state_bytes, peak = sum(state.values()), peak_since(device)
    activations = None if peak is None else max(0, peak - state_bytes)
    local: dict[str, int | None] = {
        **state,
        "activations": activations,
        "total": state_bytes + (activations or 0),
    }
    with uncounted():
        columns = [
            comm.gather_numbers(_UNKNOWN if size_bytes is None else float(size_bytes))
            for size_bytes in (local[kind] for kind in _KINDS)
        ]
    ranks: list[MemoryParts] = []
    for sizes in zip(*columns, strict=True):
        known = [None if size < 0 else int(size) for size in sizes]
        parameters, gradients, optimizer, peak_activations, total = known
        ranks.append(
            {
                "parameters": parameters,
                "gradients": gradients,
                "optimizer": optimizer,
                "activations": peak_activations,
                "total": total,
            }
        )
    events.emit({"type": "memory", "step": step, "ranks": ranks})


def split_state(strategy: Strategy, model: nn.Module, device: torch.device) -> dict[str, int]:
    """Return the bytes of ``parameters``, ``gradients`` and ``optimizer`` on ``device`` at the peak
    of a step. Their sum is :func:`~paceline.parallel.save_load.memory_bytes` minus the bytes on
    other devices.

    Tensors that are not weights, gradients or optimizer state count as
    :attr:`~paceline.parallel.strategy.Strategy.other_memory_kind`.

    Args:
        strategy: the strategy.
        model: the model as the strategy has set it up.
        device: the device to measure.
    """
    storages = {
        kind: _storages(tensors) for kind, tensors in strategy.memory_by_kind(model).items()
    }
    default = strategy.other_memory_kind
    by_kind: dict[str, list[torch.Tensor]] = {kind: [] for kind in storages}
    for tensor in device_tensors(strategy):
        if isinstance(tensor, torch.Tensor) and local_tensor(tensor).device.type == device.type:
            storage = _storage(tensor)
            kind = next((kind for kind in storages if storage in storages[kind]), default)
            by_kind[kind].append(tensor)
    sizes = {kind: storage_bytes(tensors) for kind, tensors in by_kind.items()}
    # Memory that was used only during the step: gathered weights, messages in transit, and
    # gradients that the update has freed.
    temporary = max(0, memory_bytes(strategy) - storage_bytes(device_tensors(strategy)))
    freed_gradients = min(temporary, strategy.peak_gradient_bytes)
    sizes["gradients"] += freed_gradients
    sizes[default] += temporary - freed_gradients
    return sizes


def _storages(tensors: Iterable[Any]) -> set[tuple[torch.device, int]]:
    return {_storage(tensor) for tensor in tensors}


def _storage(tensor: Any) -> tuple[torch.device, int]:
    local = local_tensor(tensor)
    if local.device.type == "meta":
        return local.device, 0
    return local.device, local.untyped_storage().data_ptr()
