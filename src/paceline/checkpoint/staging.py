"""Where a save in the background writes from: a copy of what a rank owns, in the host's memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from paceline.parallel.state import TensorShard

_BLOCK_BYTES = 64 << 20


@dataclass
class _Block:
    memory: torch.Tensor
    used: int = 0


class StagingBuffer:
    """Copies of parts in the host's memory, pinned where there is an accelerator. The memory is
    kept for the next save.

    Attributes:
        unpinned: why the rest of the memory is not pinned, where no more could be; else None.
    """

    def __init__(self, device: torch.device) -> None:
        self.pinned = device.type != "cpu"
        self.unpinned: str | None = None
        self._blocks: list[_Block] = []

    def take(self, parts: Sequence[TensorShard]) -> list[TensorShard]:
        """The parts with copies of their tensors, good until the next call."""
        for block in self._blocks:
            block.used = 0
        place = 0
        copies = []
        for part in parts:
            place, memory = self._room(place, part.tensor.numel() * part.tensor.element_size())
            copy = memory.view(part.tensor.dtype).view(part.tensor.shape)
            copy.copy_(part.tensor, non_blocking=self.pinned)
            copies.append(replace(part, tensor=copy, key=None))
        if self.pinned:
            torch.accelerator.synchronize()
        return copies

    def _new(self, size_bytes: int) -> torch.Tensor:
        if self.pinned:
            try:
                return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
            except (
                RuntimeError
            ) as error:  # the device or the system pins no more: the copy is slower, and as good
                self.pinned, self.unpinned = False, str(error).partition("\n")[0]
        return torch.empty(size_bytes, dtype=torch.uint8)

    def _room(self, place: int, size_bytes: int) -> tuple[int, torch.Tensor]:
        # Blocks in order: the same parts find the same room at every save.
        while True:
            if place == len(self._blocks):
                size = max(_BLOCK_BYTES if self.pinned else size_bytes, size_bytes)
                self._blocks.append(_Block(self._new(size)))
            block = self._blocks[place]
            if block.used + size_bytes <= block.memory.numel():
                room = block.memory[block.used : block.used + size_bytes]
                # so that each tensor lies at a multiple of its item
                block.used += -(-size_bytes // 16) * 16
                return place, room
            place += 1
