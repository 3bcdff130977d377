"""The order of streamed rows: a pure function of (seed, epoch, position)."""

from dataclasses import dataclass

import numpy as np

from paceline.data.order.base import Keys, keys_of
from paceline.data.streaming.permutation import permute
from paceline.distributed.seeds import derive_seed

#: Limit of the positions of a stream whose number of rows is unknown.
MAX_POSITIONS = 1 << 44


@dataclass(frozen=True)
class StreamShuffle:
    """How streamed rows are shuffled.

    Args:
        window: number of positions within which rows are shuffled that have to be read together.
    """

    seed: int
    enabled: bool
    window: int


@dataclass(frozen=True)
class PermutedRows:
    """Rows of streamed data, in an order that needs no memory for all of them.

    Rows that turn out to be unusable make a batch smaller, so that the rows of every step are known
    without reading any.

    Args:
        block_sizes: numbers of consecutive rows that should be read together, int64 [num_blocks];
            then blocks are shuffled, and rows only within ``window`` positions. None to shuffle all
            rows.
        window: number of positions.
    """

    num_rows: int
    seed: int
    shuffle: bool = True
    block_sizes: np.ndarray | None = None
    window: int = 1

    def indices(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the rows at these positions of an epoch: int64 [len(positions)]."""
        if not self.shuffle:
            return positions
        if self.block_sizes is None:
            return permute(positions, self.num_rows, self.seed, epoch)
        return self._in_blocks(epoch, self.block_sizes, self._in_windows(epoch, positions))

    def _in_windows(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the positions after each window of positions has been shuffled."""
        shuffled = np.empty(len(positions), dtype=np.int64)
        windows = positions // self.window
        for window in np.unique(windows):
            start = int(window) * self.window
            size = min(self.window, self.num_rows - start)
            inside = windows == window
            offsets = permute(positions[inside] - start, size, self.seed, epoch, int(window))
            shuffled[inside] = start + offsets
        return shuffled

    def _in_blocks(self, epoch: int, sizes: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the rows at positions of the concatenation of the shuffled blocks."""
        generator = np.random.Generator(np.random.PCG64(derive_seed(self.seed, "blocks", epoch)))
        blocks = generator.permutation(len(sizes))
        ends = np.cumsum(sizes[blocks])
        place = np.searchsorted(ends, positions, side="right")
        first_rows = np.cumsum(sizes) - sizes
        block = blocks[place]
        rows: np.ndarray = first_rows[block] + positions - (ends[place] - sizes[block])
        return rows


@dataclass(frozen=True)
class PositionRows:
    """Rows that the order finds by their position, which is counted over all epochs; the stream
    finds the row at a position.

    Args:
        num_rows: number of rows of an epoch, or the limit if only the stream knows it.
        first: the index of the first position.
    """

    num_rows: int = MAX_POSITIONS
    first: int = 0

    def keys(self, epoch: int, positions: np.ndarray) -> list[Keys]:
        indices = self.first + epoch * self.num_rows + positions
        return np.split(keys_of(epoch, indices), len(positions))

    def add_times(self, times: np.ndarray, epoch: int, position: int) -> None:
        raise NotImplementedError("the samples of streamed rows have no index")
