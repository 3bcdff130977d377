"""Named tensor shards: the unit of checkpoint I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.core.texts import UserText
from paceline.models.adapters.quantize import scale_tensors

#: Prefix of the state of gradient compression in a checkpoint.
COMPRESSION_PREFIX = "compression/"
#: Kinds of compression state that replace moments of the optimizer: Adam's second moment of a
#: rank's local gradient, and its momentum.
SECOND_MOMENT, MOMENTUM = "exp_avg_sq", "momentum"


@dataclass(frozen=True)
class TensorShard:
    """This rank's part of a named tensor.

    Args:
        name: name of the parameter or buffer in the task's model; in a checkpoint ``model/…`` or
            ``optimizer/…/KEY``.
        tensor: this rank's values. The tensor is live: writing to it changes the training. 1-D if
            ``flat``.
        shape: shape of the full tensor.
        offset: start of the part in the full tensor, one number per dimension. If ``flat``, one
            index into the elements of the full tensor in row-major order.
        key: the parameter in the optimizer, or None for tensors that are not trained (buffers).
        owned: whether this rank writes the part into checkpoints. Of the ranks that have an
            element, exactly one owns it.
        flat: whether the part is a range of the flattened full tensor instead of a box.
        region: region of the part in this rank's tensor of the parameter ``key``, if that tensor
            consists of several parts.
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
    def full(
        cls, name: str, tensor: torch.Tensor, key: torch.Tensor | None = None, owned: bool = True
    ) -> TensorShard:
        return cls(name, tensor, tuple(tensor.shape), (0,) * tensor.dim(), key, owned)

    def of_key(self, value: torch.Tensor) -> torch.Tensor:
        """Return this part's region of an optimizer value for ``key``."""
        if self.region is None or self.key is None or value.shape != self.key.shape:
            return value
        return value[self.region]

    @property
    def state_name(self) -> str:
        """Name of the tensor in a checkpoint."""
        return f"{'buffer' if self.key is None else 'model'}/{self.name}"

    @property
    def is_full(self) -> bool:
        return self.tensor.numel() == math.prod(self.shape)

    @property
    def is_start(self) -> bool:
        """Whether the part contains the first element. Its rank writes values that exist once per
        parameter, such as step counts."""
        return not any(self.offset) and (self.tensor.numel() > 0 or math.prod(self.shape) == 0)


class StateReader(Protocol):
    """Reads tensors from a checkpoint. Every rank reads only its parts."""

    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return the dtype and shape of each full tensor, by name."""

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Read a box of a tensor into host memory."""

    def read_flat(self, name: str, start: int, count: int) -> torch.Tensor:
        """Read ``count`` elements of the flattened tensor from ``start`` into host memory."""


def read_part(source: StateReader, name: str, part: TensorShard) -> torch.Tensor:
    """Read the values of ``part`` from the tensor ``name`` of a checkpoint, in the part's shape."""
    if part.flat:
        return source.read_flat(name, part.offset[0], part.tensor.numel()).view(part.tensor.shape)
    return source.read(name, part.offset, part.tensor.shape)


def low_dtype(config: Config) -> torch.dtype | None:
    """Return the 16-bit dtype of mixed precision, or None in float32."""
    name = config.train_args.mixed_dtype
    return None if name is None else getattr(torch, name)


def local_tensor(value: Any) -> Any:
    """Return the local tensor of a DTensor, and any other value unchanged."""
    to_local = getattr(value, "to_local", None)
    return to_local() if callable(to_local) else value


def plain_tensors(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of the tensors that a tensor subclass consists of, such as the codes and
    scales of a quantized tensor; any other value is yielded unchanged."""
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is None or callable(getattr(value, "to_local", None)):
        yield name, value
        return
    for attribute in flatten()[0]:
        yield f"{name}.{attribute}", getattr(value, attribute)


def frozen_parts(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, this rank's part) of the parameters that are not trained."""
    return (
        (name, local_tensor(parameter.detach()))
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    )


def storage_bytes(tensors: Sequence[Any]) -> int:
    """Return the total size in bytes of the distinct storages of the tensors (for DTensors, of
    their local tensors)."""
    seen: dict[tuple[torch.device, int], int] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            local = local_tensor(tensor)
            if local.device.type == "meta":
                continue
            storage = local.untyped_storage()
            seen[(local.device, storage.data_ptr())] = storage.nbytes()
    return sum(seen.values())


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def full_shards(
    trained: Mapping[str, nn.Parameter], model: nn.Module, owned: bool = True
) -> Iterator[TensorShard]:
    """Yield the trained parameters and persistent buffers of a model that is not sharded."""
    for name, parameter in trained.items():
        yield TensorShard.full(name, parameter, key=parameter, owned=owned)
    for name, buffer in persistent_buffers(model).items():
        yield TensorShard.full(name, buffer, owned=owned)


def load_full(model: nn.Module, source: StateReader) -> None:
    """Load the trained parameters and persistent buffers from a checkpoint into an unsharded
    model."""
    with torch.no_grad():
        for shard in full_shards(trained_parameters(model), model):
            shard.tensor.copy_(read_part(source, shard.state_name, shard))


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are in the state dict, by name."""
    in_state = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in in_state}


def all_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Return the buffers of a model and the scales of its quantized weights."""
    return [*model.buffers(), *(scales for _, scales in scale_tensors(model))]


def dropped_state_notices(source: StateReader) -> list[tuple[str, str]]:
    """Return a notice if a checkpoint has compression state, for a run that does not use it."""
    names = [
        name
        for name in source.tensors()
        if name.startswith(COMPRESSION_PREFIX) and "/rank-" in name
    ]
    if not names:
        return []
    has_moments = any(name.rpartition("/")[2] in (SECOND_MOMENT, MOMENTUM) for name in names)
    text = UserText(
        "the gradient compression state of the checkpoint is dropped: it is from a different number"
        " of ranks or another method{moments}",
        code="compression-state-and-moments-dropped"
        if has_moments
        else "compression-state-dropped",
        moments="; the optimizer's moments, which were local to each rank, start from zero"
        if has_moments
        else "",
    )
    return [("warning", text)]
