"""Staging buffer in host memory, to which a rank's shards are copied for a background save."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from paceline.core.errors import first_line
from paceline.parallel.state import TensorShard

_BLOCK_BYTES = 64 << 20


@dataclass
class _Block:
    memory: torch.Tensor
    used_bytes: int = 0


class StagingBuffer:
    """Copies shards to host memory. The memory is pinned if the device is an accelerator, and is
    reused by the next save.

    Attributes:
        unpinned: why memory could not be pinned, or None if there was no failure.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pinned = device.type != "cpu"
        self.unpinned: str | None = None
        self._blocks: list[_Block] = []

    def copy(self, shards: Sequence[TensorShard]) -> list[TensorShard]:
        """Return the shards with copies of their tensors. The copies are valid until the next
        call."""
        for block in self._blocks:
            block.used_bytes = 0
        block_index, is_asynchronous = 0, False
        copies = []
        for shard in shards:
            size_bytes = shard.tensor.numel() * shard.tensor.element_size()
            block_index, memory = self._reserve(block_index, size_bytes)
            values = memory.view(shard.tensor.dtype).view(shard.tensor.shape)
            # Copies into blocks that were pinned before a failure to pin are asynchronous.
            values.copy_(shard.tensor, non_blocking=self.pinned)
            is_asynchronous |= self.pinned
            copies.append(replace(shard, tensor=values, key=None))
        if is_asynchronous:
            torch.accelerator.synchronize(self.device)
        return copies

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        if self.pinned:
            try:
                return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:  # pageable memory works too, but copying is slower
                self.pinned, self.unpinned = False, first_line(error)
        return torch.empty(size_bytes, dtype=torch.uint8)

    def _reserve(self, block_index: int, size_bytes: int) -> tuple[int, torch.Tensor]:
        # The blocks are filled in order, so the same shards get the same memory at every save.
        while True:
            if block_index == len(self._blocks):
                block_bytes = max(_BLOCK_BYTES if self.pinned else size_bytes, size_bytes)
                self._blocks.append(_Block(self._allocate(block_bytes)))
            block = self._blocks[block_index]
            if block.used_bytes + size_bytes <= block.memory.numel():
                memory = block.memory[block.used_bytes : block.used_bytes + size_bytes]
                # Tensors begin at multiples of 16 bytes, so that any dtype is aligned.
                block.used_bytes += -(-size_bytes // 16) * 16
                return block_index, memory
            block_index += 1
