"""The order of streamed rows: a pure function of (seed, epoch, position)."""

from dataclasses import dataclass

import numpy as np

from paceline.data.order.base import Keys, keys_of
from paceline.distributed.seeds import derive_seed

#: Limit of the positions of a stream whose number of rows is unknown.
MAX_POSITIONS = 1 << 44
_ROUNDS = 6
#: The multipliers of the finalizer of SplitMix64.
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def permute(positions: np.ndarray, size: int, seed: int, *counters: int) -> np.ndarray:
    """Return the values at ``positions`` of a random permutation of ``range(size)``, without memory
    for all of them.

    A Feistel network permutes the integers below the next power of four; a value that is not below
    the size is permuted again until it is (cycle walking; Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002). Any position is found at once, so resuming at any sample takes
    no time.

    Args:
        positions: int64 [n], each in ``range(size)``.
        seed, counters: select the permutation.

    Returns:
        int64 [n].
    """
    if size < 2:
        return np.zeros(len(positions), dtype=np.int64)
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [np.uint64(derive_seed(seed, "permute", *counters, turn)) for turn in range(_ROUNDS)]
    values = _feistel(positions.astype(np.uint64), half_bits, keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], half_bits, keys)
    return values.astype(np.int64)


def _feistel(values: np.ndarray, half_bits: int, keys: list[np.uint64]) -> np.ndarray:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """Hash each value (the finalizer of SplitMix64; Steele et al., 2014)."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


@dataclass(frozen=True)
class StreamShuffle:
    """How streamed rows are shuffled, in an order that needs no memory for all of them.

    Rows that turn out to be unusable make a batch smaller, so that the rows of every step are known
    without reading any.

    Args:
        window: number of positions within which rows are shuffled that have to be read together.
    """

    seed: int
    enabled: bool
    window: int

    def blocks(self, epoch: int, number: int) -> np.ndarray:
        """Return the order of blocks of rows in an epoch: int64 [number]."""
        if not self.enabled:
            return np.arange(number)
        generator = np.random.PCG64(derive_seed(self.seed, "blocks", epoch))
        return np.random.Generator(generator).permutation(number)

    def in_window(self, epoch: int, window: int, size: int, offsets: np.ndarray) -> np.ndarray:
        """Return the shuffled offsets in a window of this size: int64 [len(offsets)]."""
        return permute(offsets, size, self.seed, epoch, window) if self.enabled else offsets

    def rows(
        self, epoch: int, num_rows: int, positions: np.ndarray, block_sizes: np.ndarray | None
    ) -> np.ndarray:
        """Return the rows at these positions of an epoch: int64 [len(positions)].

        Args:
            block_sizes: numbers of consecutive rows that should be read together, int64
                [num_blocks]; then blocks are shuffled, and rows only within ``window`` positions.
                None to shuffle all rows.
        """
        if not self.enabled:
            return positions
        if block_sizes is None:
            return permute(positions, num_rows, self.seed, epoch)
        shuffled = np.empty(len(positions), dtype=np.int64)
        windows = positions // self.window
        for window in np.unique(windows).tolist():
            start, inside = window * self.window, windows == window
            size = min(self.window, num_rows - start)
            offsets = self.in_window(epoch, window, size, positions[inside] - start)
            shuffled[inside] = start + offsets
        return self._in_blocks(epoch, block_sizes, shuffled)

    def _in_blocks(self, epoch: int, sizes: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the rows at positions of the concatenation of the shuffled blocks."""
        blocks = self.blocks(epoch, len(sizes))
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
