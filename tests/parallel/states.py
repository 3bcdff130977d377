"""States in memory: what a checkpoint does, without a disk."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

from paceline.parallel.state import TensorShard


class MemorySource:
    """A :class:`~paceline.parallel.state.StateReader` over full tensors."""

    def __init__(self, full: dict[str, torch.Tensor]):
        self.full = full

    def tensors(self):
        return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.full.items()}

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]):
        box = self.full[name][
            tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        ]
        assert tuple(box.shape) == tuple(shape), name
        return box.clone()

    def read_flat(self, name: str, start: int, count: int):
        assert 0 <= start <= start + count <= self.full[name].numel(), name
        return self.full[name].reshape(-1)[start : start + count].clone()


def copied(parts: list[TensorShard]) -> list[TensorShard]:
    """Parts as they are now, fit to be handed to another process."""
    return [replace(part, tensor=part.tensor.detach().cpu().clone(), key=None) for part in parts]


def assemble(parts_by_rank: list[list[TensorShard]]) -> MemorySource:
    """The full tensors from what each rank writes. Each element must be written exactly once."""
    full: dict[str, torch.Tensor] = {}
    written: dict[str, torch.Tensor] = {}
    for part in (part for parts in parts_by_rank for part in parts):
        if part.name not in full:
            full[part.name] = torch.zeros(part.shape, dtype=part.tensor.dtype)
            written[part.name] = torch.zeros(part.shape, dtype=torch.int32)
        assert (tuple(full[part.name].shape), full[part.name].dtype) == (
            part.shape,
            part.tensor.dtype,
        ), part.name
        for target, values in (
            (full[part.name], part.tensor),
            (written[part.name], torch.ones_like(part.tensor)),
        ):
            if part.flat:
                target.view(-1)[part.offset[0] : part.offset[0] + values.numel()] += values.reshape(
                    -1
                ).to(target.dtype)
            else:
                ends = zip(part.offset, values.shape, strict=True)
                target[tuple(slice(start, start + size) for start, size in ends)] += values.to(
                    target.dtype
                )
    for name, times in written.items():
        assert prod(times.shape) == 0 or (int(times.min()), int(times.max())) == (1, 1), name
    return MemorySource(full)
