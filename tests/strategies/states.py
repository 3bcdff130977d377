"""In-memory training states, which replace checkpoint files in the tests of strategies."""

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
        block = self.full[name][
            tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        ]
        assert tuple(block.shape) == tuple(shape), name
        return block.clone()

    def read_flat(self, name: str, start: int, count: int):
        assert 0 <= start <= start + count <= self.full[name].numel(), name
        return self.full[name].reshape(-1)[start : start + count].clone()


def copy_shards(shards: list[TensorShard]) -> list[TensorShard]:
    """Return copies of the shards on the CPU, which can be sent to another process."""
    return [
        replace(shard, tensor=shard.tensor.detach().cpu().clone(), key=None) for shard in shards
    ]


def assemble(shards_by_rank: list[list[TensorShard]]) -> MemorySource:
    """Assemble the full tensors from the shards of all ranks. Check that each element is written
    exactly once."""
    full: dict[str, torch.Tensor] = {}
    written: dict[str, torch.Tensor] = {}
    for shard in (shard for shards in shards_by_rank for shard in shards):
        if shard.name not in full:
            full[shard.name] = torch.zeros(shard.shape, dtype=shard.tensor.dtype)
            written[shard.name] = torch.zeros(shard.shape, dtype=torch.int32)
        assert (tuple(full[shard.name].shape), full[shard.name].dtype) == (
            shard.shape,
            shard.tensor.dtype,
        ), shard.name
        for target, values in (
            (full[shard.name], shard.tensor),
            (written[shard.name], torch.ones_like(shard.tensor)),
        ):
            if shard.flat:
                target.view(-1)[shard.offset[0] : shard.offset[0] + values.numel()] += (
                    values.reshape(-1).to(target.dtype)
                )
            else:
                ends = zip(shard.offset, values.shape, strict=True)
                target[tuple(slice(start, start + size) for start, size in ends)] += values.to(
                    target.dtype
                )
    for name, write_counts in written.items():
        assert prod(write_counts.shape) == 0 or (
            int(write_counts.min()),
            int(write_counts.max()),
        ) == (1, 1), name
    return MemorySource(full)
