"""The state of an optimizer: its tensors, and its form in a checkpoint."""

from typing import Protocol, runtime_checkable

import torch

from paceline.parallel.state import (
    StateReader,
    TensorShard,
    local_tensor,
    plain_tensors,
    read_part,
)

#: Between an entry of the optimizer's state and the rank's part that it belongs to.
OF_PART = "@"


@runtime_checkable
class ConvertsStoredState(Protocol):
    """An optimizer whose state has another form in memory than in a checkpoint."""

    def stored_state(
        self, key: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the state of a parameter in the form of a checkpoint, and values by entry that
        belong to this rank's part only, such as the scales of its quantized blocks."""

    def load_stored(self, key: torch.Tensor, scales: dict[str, torch.Tensor]) -> None:
        """Convert the state of a parameter, which was loaded in the form of a checkpoint.

        Args:
            scales: the values of this rank's part by entry; empty if the checkpoint was written
                with other parts.
        """


@runtime_checkable
class PlacesState(Protocol):
    """An optimizer whose state is not on the device of its parameters between steps."""

    state_device: torch.device


@runtime_checkable
class AveragesWeights(Protocol):
    """An optimizer that trains with other weights than the weights of the trained model."""

    def eval(self) -> None:
        """Replace the weights by the weights of the trained model."""

    def train(self) -> None:
        """Restore the weights of training."""


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all tensors of an optimizer's state."""
    return [
        local_tensor(tensor)
        for entries in optimizer.state.values()
        for name, value in entries.items()
        for _, tensor in plain_tensors(name, value)
        if isinstance(tensor, torch.Tensor)
    ]


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


def stored_entries_of(
    optimizer: torch.optim.Optimizer, shard: TensorShard
) -> dict[str, torch.Tensor]:
    """Return the state of ``optimizer`` for a shard by key, as a checkpoint contains it."""
    if not isinstance(optimizer, ConvertsStoredState) or shard.key is None:
        return entries_of(optimizer, shard)
    entries, scales = optimizer.stored_state(shard.key)
    result = {entry: shard.of_key(value) for entry, value in entries.items()}
    if is_last_of_key(shard):
        part = part_of(shard)
        result |= {f"{entry}{OF_PART}{part}": value for entry, value in scales.items()}
    return result


def is_last_of_key(shard: TensorShard) -> bool:
    """Return whether the shard is the last one of those in a rank's tensor of its parameter."""
    if shard.region is None or shard.key is None:
        return True
    ends = zip(shard.region, shard.key.shape, strict=True)
    return all(each.stop in (None, size) for each, size in ends)


def part_of(shard: TensorShard) -> str:
    """Return the name of this rank's part of a parameter: where it begins, and its elements."""
    assert shard.key is not None
    return f"{'-'.join(map(str, shard.offset))}+{shard.key.numel()}"


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


def set_entry(
    optimizer: torch.optim.Optimizer, shard: TensorShard, entry: str, value: torch.Tensor
) -> None:
    """Set an entry of the optimizer's state for a shard, or its region of the rank's tensor."""
    assert shard.key is not None
    entries = optimizer.state.setdefault(shard.key, {})
    if shard.region is None or value.shape != shard.tensor.shape or value.dim() == 0:
        entries[entry] = value
        return
    if entry not in entries or entries[entry].shape != shard.key.shape:
        entries[entry] = torch.zeros(shard.key.shape, dtype=value.dtype, device=value.device)
    entries[entry][shard.region] = value


def entry_shapes(source: StateReader, prefix: str) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return parameter → entry of its optimizer state → shape, for the tensors named
    ``PREFIX PARAMETER/ENTRY``."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, (_, shape) in source.tensors().items():
        if name.startswith(prefix):
            parameter, _, entry = name.removeprefix(prefix).rpartition("/")
            shapes.setdefault(parameter, {})[entry] = shape
    return shapes
