"""The order of streamed rows: a pure function of (seed, epoch, position)."""

from dataclasses import dataclass

import numpy as np

from paceline.data.order.base import Keys, keys_of, split_even
from paceline.data.streaming.permutation import permute
from paceline.distributed.seeds import derive_seed


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
class StreamOrder:
    """The rows of each micro-batch of each step.

    A step has ``batch_size`` consecutive positions of the order. Rows that turn out to be unusable
    make its batch smaller, so that the rows of every step are known without reading any.

    Args:
        num_samples: number of rows.
        block_sizes: numbers of consecutive rows that should be read together, int64 [num_blocks];
            then blocks are shuffled, and rows only within ``window`` positions. None to shuffle all
            rows.
        window: number of positions.
    """

    num_samples: int
    batch_size: int
    seed: int
    shuffle: bool = True
    block_sizes: np.ndarray | None = None
    window: int = 1

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def epochs(self, step: int) -> float:
        return step / self.steps_per_epoch

    def position(self, step: int) -> tuple[int, int]:
        epoch, epoch_step = divmod(step, self.steps_per_epoch)
        return epoch, epoch_step * self.batch_size

    def rows_read(self, step: int) -> int:
        epoch, position = self.position(step)
        return epoch * self.num_samples + position

    def rows(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the rows at these positions of an epoch: int64 [len(positions)]."""
        if not self.shuffle:
            return positions
        if self.block_sizes is None:
            return permute(positions, self.num_samples, self.seed, epoch)
        return self._in_blocks(epoch, self.block_sizes, self._in_windows(epoch, positions))

    def _in_windows(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the positions after each window of positions has been shuffled."""
        shuffled = np.empty(len(positions), dtype=np.int64)
        windows = positions // self.window
        for window in np.unique(windows):
            start = int(window) * self.window
            size = min(self.window, self.num_samples - start)
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

    def global_batch(self, step: int) -> Keys:
        epoch, start = self.position(step)
        end = min(start + self.batch_size, self.num_samples)
        return keys_of(epoch, self.rows(epoch, np.arange(start, end)))

    def micro_batches(self, step: int, parts: int) -> list[Keys]:
        # By position, because the lengths of rows are unknown.
        return split_even(self.global_batch(step), parts)

    def times_read(self, step: int) -> np.ndarray:
        epoch, position = self.position(step)
        times = np.full(self.num_samples, epoch, dtype=np.int64)
        times[self.rows(epoch, np.arange(position))] += 1
        return times


@dataclass(frozen=True)
class PositionOrder:
    """The order of rows whose number is unknown: the index of a key is a position that is counted
    over all epochs, and the dataset finds the row (:class:`~.shards.ShardRows`)."""

    batch_size: int
    seed: int

    def epochs(self, step: int) -> None:
        return None

    def position(self, step: int) -> tuple[int, int]:
        return 0, step * self.batch_size

    def global_batch(self, step: int) -> Keys:
        return keys_of(0, np.arange(step * self.batch_size, (step + 1) * self.batch_size))

    def micro_batches(self, step: int, parts: int) -> list[Keys]:
        return split_even(self.global_batch(step), parts)

    def rows_read(self, step: int) -> int:
        return step * self.batch_size

    def times_read(self, step: int) -> np.ndarray:
        return np.ones(step * self.batch_size, dtype=np.int64)
