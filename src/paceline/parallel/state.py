"""Tensors by name, as a rank holds parts of them: what checkpoints are written from and read
into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from paceline.config.schema import Config


@dataclass(frozen=True)
class TensorShard:
    """A part of a named tensor, as this rank holds it.

    Args:
        name: of the parameter or buffer in the model as the task built it; in a state ``model/…``,
            ``optimizer/…/KEY``.
        tensor: this rank's values, live (writing to it changes the training). 1-D where ``flat``.
        shape: of the whole tensor.
        offset: where the part begins in the whole, one number a dimension; where ``flat``, one
            number into the whole's elements in row-major order.
        key: the parameter by which the optimizer knows it; None for what is not trained (buffers).
        owned: of all ranks that hold an element exactly one owns it; that rank writes it into
            checkpoints.
        flat: the part is a range of the flattened whole instead of a box.
        region: where the part lies in what this rank holds of the parameter ``key``, if it holds
            several parts of it.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    key: torch.Tensor | None = None
    owned: bool = True
    flat: bool = False
    region: tuple[slice, ...] | None = None

    @classmethod
    def whole(
        cls, name: str, tensor: torch.Tensor, key: torch.Tensor | None = None, owned: bool = True
    ) -> TensorShard:
        return cls(name, tensor, tuple(tensor.shape), (0,) * tensor.dim(), key, owned)

    def of_key(self, value: torch.Tensor) -> torch.Tensor:
        """What belongs to this part of a value that the optimizer keeps for the whole of
        ``key``."""
        if self.region is None or self.key is None or value.shape != self.key.shape:
            return value
        return value[self.region]

    @property
    def state_name(self) -> str:
        """Its name in a state."""
        return f"{'buffer' if self.key is None else 'model'}/{self.name}"

    @property
    def is_whole(self) -> bool:
        return self.tensor.numel() == _numel(self.shape)

    @property
    def is_start(self) -> bool:
        """True where the part holds the first element: its rank speaks for what there is once a
        parameter."""
        return not any(self.offset) and (self.tensor.numel() > 0 or _numel(self.shape) == 0)


class StateReader(Protocol):
    """Where a state is read from: a checkpoint. Every rank reads the parts it holds, and no
    more."""

    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """dtype and shape of each whole tensor, by name."""

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """A box of a tensor, on the CPU."""

    def read_flat(self, name: str, start: int, count: int) -> torch.Tensor:
        """``count`` elements from ``start`` on of the flattened tensor, on the CPU."""


def read_part(source: StateReader, name: str, part: TensorShard) -> torch.Tensor:
    """The values of ``part`` from tensor ``name`` of a state, in the part's shape."""
    if part.flat:
        return source.read_flat(name, part.offset[0], part.tensor.numel()).view(part.tensor.shape)
    return source.read(name, part.offset, part.tensor.shape)


def low_dtype(config: Config) -> torch.dtype | None:
    """bfloat16 or float16 under mixed precision, else None."""
    name = config.train_args.mixed_dtype
    return None if name is None else getattr(torch, name)


def local_tensor(value: Any) -> Any:
    """A DTensor's part on this rank; anything else as it is."""
    to_local = getattr(value, "to_local", None)
    return to_local() if callable(to_local) else value


def frozen_parts(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters that are not trained, as this rank holds them, by name."""
    return (
        (name, local_tensor(one.detach()))
        for name, one in model.named_parameters()
        if not one.requires_grad
    )


def storage_bytes(tensors: Sequence[Any]) -> int:
    """Bytes of the distinct storages behind the tensors (of DTensors, of the local part)."""
    seen: dict[tuple[torch.device, int], int] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            local = local_tensor(tensor)
            if local.device.type == "meta":
                continue
            storage = local.untyped_storage()
            seen[(local.device, storage.data_ptr())] = storage.nbytes()
    return sum(seen.values())


def _numel(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
