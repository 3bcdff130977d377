"""What this rank's memory is filled with, measured: parameters, gradients, optimizer state,
activations.

Storages are counted once, however many tensors look into them, and of what is cut over ranks only
the part that lies here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.event_log import EventLog
from paceline.core.events import MemoryParts
from paceline.distributed.traffic import uncounted
from paceline.observe.metrics import peak_since
from paceline.parallel.base import Strategy, optimizer_tensors
from paceline.parallel.deepspeed.package import gradient_tensors
from paceline.parallel.save_load import memory_bytes
from paceline.parallel.state import local_tensor, storage_bytes

if TYPE_CHECKING:
    from torch import nn

#: Steps of this life of the run after which memory is what it will stay: the first makes the
#: optimizer's state.
STEPS_BEFORE = 2
_KINDS = ("parameters", "gradients", "optimizer", "activations", "total")
_UNKNOWN = -1.0


def emit_memory(strategy: Strategy, model: nn.Module, events: EventLog, step: int) -> None:
    """Measure, and emit the ``memory`` event; a collective."""
    comm = strategy.world
    device = comm.device
    held = split_state(strategy, model, device)
    activations, state = None, sum(held.values())
    peak = peak_since(device)
    if peak is not None:
        activations = max(0, peak - state)
    local: dict[str, int | None] = {
        **held,
        "activations": activations,
        "total": state + (activations or 0),
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
    """Bytes of ``parameters``, ``gradients`` and ``optimizer`` on ``device`` at the fullest moment
    of a step. ``model``: as the strategy has placed it. Their sum is
    :func:`~paceline.parallel.save_load.memory_bytes`, less what is kept elsewhere.

    What is neither a weight, a gradient nor in the optimizer's state goes where the strategy's
    declared cost has it: with the optimizer what waits to be sent, what is an outer optimizer's and
    DeepSpeed's float32 weights; else with the parameters (weights gathered for a while, master
    weights).
    """
    held = [
        one
        for one in strategy.memory_tensors()
        if isinstance(one, torch.Tensor) and local_tensor(one).device.type == device.type
    ]
    known = {
        "optimizer": _storages(
            tensor for one in _optimizers(strategy) for tensor in optimizer_tensors(one)
        ),
        "gradients": _storages(_gradients(strategy, model)),
        "parameters": _storages(_weights(model)),
    }
    keeps_more = strategy.replicas_diverge or any(
        getattr(strategy, name, None) is not None for name in ("reducer", "zero")
    )
    found: dict[str, list[torch.Tensor]] = {
        kind: [] for kind in ("parameters", "gradients", "optimizer")
    }
    for one in held:
        place = _storage(one)
        kind = next(
            (kind for kind, places in known.items() if place in places),
            "optimizer" if keeps_more else "parameters",
        )
        found[kind].append(one)
    sizes = {kind: storage_bytes(tensors) for kind, tensors in found.items()}
    # What was there in the step and is no more: gathered weights, messages under way, gradients
    # that an update has freed.
    passing = max(0, memory_bytes(strategy) - storage_bytes(strategy.memory_tensors()))
    freed = min(passing, getattr(strategy, "most_gradient_bytes", 0))
    sizes["gradients"] += freed
    sizes["optimizer" if keeps_more else "parameters"] += passing - freed
    return sizes


def _weights(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.buffers()
    for one in model.parameters():
        yield one.data
        # DeepSpeed's, of a parameter that is gathered only while it is used
        part = getattr(one, "ds_tensor", None)
        if part is not None:
            yield part


def _optimizers(strategy: Strategy) -> list[torch.optim.Optimizer]:
    """Its own, and the one that a server of a parameter server has beside it for what is no
    table."""
    return [
        one
        for one in (strategy.optimizer, getattr(strategy, "dense_optimizer", None))
        if one is not None
    ]


def _gradients(strategy: Strategy, model: nn.Module) -> Iterator[torch.Tensor]:
    updated = [
        one
        for optimizer in _optimizers(strategy)
        for group in optimizer.param_groups
        for one in group.get("params", ())
    ]
    for one in (*model.parameters(), *updated):
        if one.grad is not None:
            yield one.grad
    zero = getattr(strategy, "zero", None)  # DeepSpeed has places of its own for them
    if zero is not None:
        yield from gradient_tensors(zero, model)


def _storages(tensors: Iterable[Any]) -> set[tuple[torch.device, int]]:
    return {_storage(one) for one in tensors}


def _storage(tensor: Any) -> tuple[torch.device, int]:
    local = local_tensor(tensor)
    if local.device.type == "meta":
        return local.device, 0
    return local.device, local.untyped_storage().data_ptr()
