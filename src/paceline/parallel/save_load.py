"""Save and load the state of a strategy, in tensors whose names, shapes and values do not depend on
the strategy."""

from collections.abc import Iterator, Mapping

import torch

from paceline.core.texts import UserText
from paceline.parallel.optimizer_state import (
    OF_PART,
    AveragesWeights,
    ConvertsStoredState,
    entry_shapes,
    is_last_of_key,
    part_of,
    set_entry,
)
from paceline.parallel.state import (
    StateReader,
    TensorShard,
    local_tensor,
    read_part,
    storage_bytes,
)
from paceline.parallel.strategy import Strategy


def memory_bytes(strategy: Strategy) -> int:
    """Return the size in bytes of the training state on this rank when the memory of a step peaks:
    the distinct storages of ``memory_tensors``, and transient tensors."""
    return storage_bytes(device_tensors(strategy)) + strategy.transient_bytes


def device_tensors(strategy: Strategy) -> list[torch.Tensor]:
    """Return ``memory_tensors`` without those that ``cpu_offload`` keeps in host memory."""
    tensors = list(strategy.memory_tensors())
    if strategy.config.parallel.state_offload == "none":
        return tensors
    device_type = strategy.world.device.type
    return [tensor for tensor in tensors if local_tensor(tensor).device.type == device_type]


def trained_state(strategy: Strategy) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, this rank's part) of the trained parameters and their optimizer state, in the
    same order on every rank."""
    for shard in strategy.tensor_shards():
        if shard.key is not None:
            yield shard.name, shard.tensor
            for entry, value in strategy.optimizer_entries(shard).items():
                yield f"{shard.name}/{entry}", value


def load_state(strategy: Strategy, source: StateReader) -> None:
    """Load a checkpoint of any strategy, on every rank. State that this strategy cannot use is
    dropped with a notice."""
    strategy.check_state(source)
    entries, requantized = entry_shapes(source, "optimizer/"), False
    with torch.no_grad():
        for shard in strategy.tensor_shards():
            shard.tensor.copy_(read_part(source, shard.state_name, shard))
            if shard.key is not None:
                shapes = entries.get(shard.name, {})
                load_entries(strategy, source, "optimizer/", shapes, shard)
                parts = {entry.rpartition(OF_PART)[2] for entry in shapes if OF_PART in entry}
                is_other = bool(parts) and part_of(shard) not in parts
                requantized |= is_other and is_last_of_key(shard)
        if requantized and isinstance(strategy.optimizer, ConvertsStoredState):
            text = UserText(
                "the checkpoint was written with another division of the tensors: the"
                " optimizer's 8-bit state is quantized again, so losses agree approximately",
                code="state-quantized-again",
            )
            strategy.notices.append(("info", text))
        if isinstance(strategy.optimizer, AveragesWeights):
            strategy.optimizer.train()
        strategy.notices += strategy.load_extra_state(source)
    strategy.after_load()


def load_entries(
    strategy: Strategy,
    source: StateReader,
    prefix: str,
    shapes: Mapping[str, tuple[int, ...]],
    shard: TensorShard,
) -> None:
    """Load the stored entries of a shard, named ``PREFIX PARAMETER/ENTRY``, into the optimizer."""
    scales = {}
    for entry, shape in shapes.items():
        name = f"{prefix}{shard.name}/{entry}"
        moment, is_of_part, part = entry.partition(OF_PART)
        if is_of_part:
            if part == part_of(shard):
                scales[moment] = source.read(name, (0,), shape).to(shard.tensor.device)
            continue
        value = strategy.load_optimizer_entry(source, name, shape, shard)
        set_entry(strategy.optimizer, shard, entry, value)
    if isinstance(strategy.optimizer, ConvertsStoredState) and is_last_of_key(shard):
        assert shard.key is not None
        strategy.optimizer.load_stored(shard.key, scales)
