"""What counts as one sample of the batch size: a sample, or a packed row of several samples."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from paceline.data.order.base import Keys, keys_of
from paceline.distributed.seeds import derive_seed


class Rows(Protocol):
    """The rows of a source, or of all sources together. Every epoch has the same number of rows, in
    an order that is a pure function of the seed and the epoch."""

    @property
    def num_rows(self) -> int:
        """Number of rows of an epoch."""

    def keys(self, epoch: int, positions: np.ndarray) -> list[Keys]:
        """Return the keys of the samples in the rows at these positions of an epoch."""

    def add_times(self, times: np.ndarray, epoch: int, position: int) -> None:
        """Add to ``times`` [num_samples] how often each sample occurs in ``epoch`` complete epochs
        and the first ``position`` rows of the next."""


def epoch_permutation(number: int, seed: int, epoch: int, *counters: int) -> np.ndarray:
    """Return a shuffled order of an epoch: int64 [number].

    Args:
        counters: further numbers that distinguish orders of the same epoch.
    """
    generator = np.random.Generator(np.random.PCG64(derive_seed(seed, "order", epoch, *counters)))
    return generator.permutation(number)


@dataclass
class Shuffle:
    """The orders of the epochs. The last two are kept, because a global batch may have rows of
    both.

    Args:
        counters: as in :func:`epoch_permutation`.
        enabled: whether to shuffle; otherwise every epoch has the same order.
    """

    number: int
    seed: int
    counters: tuple[int, ...] = ()
    enabled: bool = True
    _orders: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False)

    def order(self, epoch: int) -> np.ndarray:
        """Return the order of an epoch: int64 [number]."""
        if not self.enabled:
            return np.arange(self.number)
        if epoch not in self._orders:
            while len(self._orders) > 1:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = epoch_permutation(self.number, self.seed, epoch, *self.counters)
        return self._orders[epoch]


class SampleRows:
    """Rows of one sample each.

    Args:
        first, num_rows: the samples of the source: consecutive indices in the dataset.
    """

    def __init__(self, first: int, num_rows: int, seed: int, shuffle: bool) -> None:
        self.first = first
        self.num_rows = num_rows
        self._shuffle = Shuffle(num_rows, seed, (first,), shuffle)

    def keys(self, epoch: int, positions: np.ndarray) -> list[Keys]:
        indices = self.first + self._shuffle.order(epoch)[positions]
        return np.split(keys_of(epoch, indices), len(indices))

    def add_times(self, times: np.ndarray, epoch: int, position: int) -> None:
        times[self.first : self.first + self.num_rows] += epoch
        times[self.first + self._shuffle.order(epoch)[:position]] += 1
