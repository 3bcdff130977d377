"""Save and load the state of a strategy, in tensors whose names, shapes and values do not depend on
the strategy."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from paceline.parallel.base import Strategy
from paceline.parallel.compression.base import dropped_state_notices
from paceline.parallel.protocols import (
    AveragesWeights,
    ConvertsStoredState,
    PlacesState,
    SavesOwnShards,
    SupportsExtraState,
    SupportsOptimizerStateMapping,
    SupportsStateCheck,
    SupportsTransientMemory,
    parts_of,
    refresh_weights,
)
from paceline.parallel.state import (
    StateReader,
    TensorShard,
    local_tensor,
    plain_tensors,
    read_part,
    storage_bytes,
)

#: Between an entry of the optimizer's state and the rank's part that it belongs to.
_OF_PART = "@"


def memory_bytes(strategy: Strategy) -> int:
    """Return the size in bytes of the training state on this rank when the memory of a step peaks:
    the distinct storages of ``memory_tensors``, and transient tensors."""
    size = storage_bytes(device_tensors(strategy))
    if isinstance(strategy, SupportsTransientMemory):
        size += strategy.transient_bytes
    return size


def device_tensors(strategy: Strategy) -> list[torch.Tensor]:
    """Return ``memory_tensors`` without those that ``cpu_offload`` keeps in host memory."""
    tensors = list(strategy.memory_tensors())
    if strategy.config.parallel.state_offload == "none":
        return tensors
    device_type = strategy.world.device.type
    return [tensor for tensor in tensors if local_tensor(tensor).device.type == device_type]


def state_shards(strategy: Strategy) -> list[TensorShard]:
    """Return the shards that this rank writes into a checkpoint: ``model/NAME``, ``buffer/NAME``
    and ``optimizer/NAME/KEY``. The tensors are detached but live. A collective for some
    strategies."""
    if isinstance(strategy, SavesOwnShards):
        return strategy.state_shards()
    return collect_shards(strategy)


def collect_shards(strategy: Strategy) -> list[TensorShard]:
    """Return the shards that this rank owns, with the optimizer's entries and extra state."""
    shards = []
    for shard in strategy.tensor_shards():
        if not shard.owned:
            continue
        shards.append(replace(shard, name=shard.state_name, tensor=shard.tensor.detach()))
        for entry, value in stored_entries(strategy, shard).items():
            name = f"optimizer/{shard.name}/{entry}"
            if value.shape == shard.tensor.shape and value.dim() > 0:
                shards.append(replace(shard, name=name, tensor=value))
            # A scalar, values of a part, or (factored moments) a tensor of another shape.
            elif _OF_PART in entry or (shard.is_start if value.dim() == 0 else shard.is_full):
                shards.append(TensorShard.full(name, value))
    for part in parts_of(strategy):
        if isinstance(part, SupportsExtraState):
            shards += part.extra_state()
    return shards


def optimizer_entries(strategy: Strategy, shard: TensorShard) -> dict[str, torch.Tensor]:
    """Return the optimizer state of a shard by key, such as ``exp_avg``."""
    if isinstance(strategy, SupportsOptimizerStateMapping):
        return strategy.optimizer_entries(shard)
    return entries_of(strategy.optimizer, shard)


def stored_entries(strategy: Strategy, shard: TensorShard) -> dict[str, torch.Tensor]:
    """Return the optimizer state of a shard by key, as a checkpoint contains it."""
    if isinstance(strategy, SupportsOptimizerStateMapping):
        return strategy.optimizer_entries(shard)
    return stored_entries_of(strategy.optimizer, shard)


def stored_entries_of(
    optimizer: torch.optim.Optimizer, shard: TensorShard
) -> dict[str, torch.Tensor]:
    """Return the state of ``optimizer`` for a shard by key, as a checkpoint contains it."""
    if not isinstance(optimizer, ConvertsStoredState) or shard.key is None:
        return entries_of(optimizer, shard)
    entries, scales = optimizer.stored_state(shard.key)
    result = {entry: shard.of_key(value) for entry, value in entries.items()}
    if _is_last_of_key(shard):
        part = _part_of(shard)
        result |= {f"{entry}{_OF_PART}{part}": value for entry, value in scales.items()}
    return result


def _is_last_of_key(shard: TensorShard) -> bool:
    """Return whether the shard is the last one of those in a rank's tensor of its parameter."""
    if shard.region is None or shard.key is None:
        return True
    ends = zip(shard.region, shard.key.shape, strict=True)
    return all(each.stop in (None, size) for each, size in ends)


def _part_of(shard: TensorShard) -> str:
    """Return the name of this rank's part of a parameter: where it begins, and its elements."""
    assert shard.key is not None
    return f"{'-'.join(map(str, shard.offset))}+{shard.key.numel()}"


def entries_of(optimizer: torch.optim.Optimizer, shard: TensorShard) -> dict[str, torch.Tensor]:
    """Return the state of ``optimizer`` for a shard by key, such as ``exp_avg``."""
    if shard.key is None:
        return {}
    return {
        str(key): shard.of_key(torch.as_tensor(local_tensor(value)).detach())
        for name, entry in optimizer.state.get(shard.key, {}).items()
        for key, value in plain_tensors(name, entry)
        if value is not None
    }


def trained_state(strategy: Strategy) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, this rank's part) of the trained parameters and their optimizer state, in the
    same order on every rank."""
    for shard in strategy.tensor_shards():
        if shard.key is not None:
            yield shard.name, shard.tensor
            for entry, value in optimizer_entries(strategy, shard).items():
                yield f"{shard.name}/{entry}", value


def load_state(strategy: Strategy, source: StateReader) -> None:
    """Load a checkpoint of any strategy, on every rank. State that this strategy cannot use is
    dropped with a notice."""
    if isinstance(strategy, SupportsStateCheck):
        strategy.check_state(source)
    entries, requantized = entry_shapes(source, "optimizer/"), False
    with torch.no_grad():
        for shard in strategy.tensor_shards():
            shard.tensor.copy_(read_part(source, shard.state_name, shard))
            if shard.key is not None:
                shapes = entries.get(shard.name, {})
                load_entries(strategy, source, "optimizer/", shapes, shard)
                parts = {entry.rpartition(_OF_PART)[2] for entry in shapes if _OF_PART in entry}
                is_other = bool(parts) and _part_of(shard) not in parts
                requantized |= is_other and _is_last_of_key(shard)
        if requantized and isinstance(strategy.optimizer, ConvertsStoredState):
            text = (
                "the checkpoint was written with another division of the tensors: the optimizer's"
                " 8-bit state is quantized again, so losses agree approximately"
            )
            strategy.notices.append(("info", text))
        if isinstance(strategy.optimizer, AveragesWeights):
            strategy.optimizer.train()
        extra = [part for part in parts_of(strategy) if isinstance(part, SupportsExtraState)]
        for part in extra:
            strategy.notices += part.load_extra_state(source)
        if not extra:
            strategy.notices += dropped_state_notices(source)
    refresh_weights(strategy)


def entry_shapes(source: StateReader, prefix: str) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return parameter → entry of its optimizer state → shape, for the tensors named
    ``PREFIX PARAMETER/ENTRY``."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, (_, shape) in source.tensors().items():
        if name.startswith(prefix):
            parameter, _, entry = name.removeprefix(prefix).rpartition("/")
            shapes.setdefault(parameter, {})[entry] = shape
    return shapes


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
        moment, is_of_part, part = entry.partition(_OF_PART)
        if is_of_part:
            if part == _part_of(shard):
                scales[moment] = source.read(name, (0,), shape).to(shard.tensor.device)
            continue
        if isinstance(strategy, SupportsOptimizerStateMapping):
            value = strategy.load_optimizer_entry(source, name, shape, shard)
        else:
            value = read_entry(strategy.optimizer, source, name, shape, shard)
        _set_entry(strategy.optimizer, shard, entry, value)
    if isinstance(strategy.optimizer, ConvertsStoredState) and _is_last_of_key(shard):
        assert shard.key is not None
        strategy.optimizer.load_stored(shard.key, scales)


def read_entry(
    optimizer: torch.optim.Optimizer,
    source: StateReader,
    name: str,
    shape: tuple[int, ...],
    shard: TensorShard,
) -> torch.Tensor:
    """Read one entry of the optimizer's state for a shard, onto its device.

    Args:
        shape: shape of the stored tensor.
    """
    device = shard.tensor.device
    placed = optimizer.state_device if isinstance(optimizer, PlacesState) else device
    if shape == () and (shard.shape != () or name.endswith("/step")):
        # Scalars such as Adam's step are on the parameter's device only if the optimizer is fused.
        on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
        return source.read(name, (), ()).to(device if on_device else "cpu")
    if shape != shard.shape:
        return source.read(name, (0,) * len(shape), shape).to(placed)
    return read_part(source, name, shard).to(placed)


def _set_entry(
    optimizer: torch.optim.Optimizer, shard: TensorShard, entry: str, value: torch.Tensor
) -> None:
    assert shard.key is not None
    entries = optimizer.state.setdefault(shard.key, {})
    if shard.region is None or value.shape != shard.tensor.shape or value.dim() == 0:
        entries[entry] = value
        return
    if entry not in entries or entries[entry].shape != shard.key.shape:
        entries[entry] = torch.zeros(shard.key.shape, dtype=value.dtype, device=value.device)
    entries[entry][shard.region] = value
