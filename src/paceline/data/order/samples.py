"""Each sample once per epoch, in a shuffled order."""

from functools import lru_cache

import numpy as np

from paceline.data.order.base import Keys, Order, keys_of
from paceline.data.order.rows import epoch_permutation

#: All steps of an epoch use the same permutation.
_last_permutation = lru_cache(maxsize=1)(epoch_permutation)


class SampleOrder(Order):
    """The order in which each epoch has each sample once. The last global batch of an epoch may be
    short.

    Args:
        shuffle: whether to shuffle each epoch; otherwise every epoch has the order of the dataset.
            In both cases, balancing by tokens moves samples between the micro-batches of a global
            batch.
    """

    steps_per_epoch: int

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        seed: int,
        lengths: np.ndarray | None = None,
        shuffle: bool = True,
    ) -> None:
        super().__init__(num_samples, batch_size, seed, -(-num_samples // batch_size), lengths)
        self.shuffle = shuffle

    def epoch_order(self, epoch: int) -> np.ndarray:
        """Return the order of the samples in an epoch: int64 [num_samples], each index once."""
        if not self.shuffle:
            return np.arange(self.num_samples)
        return _last_permutation(self.num_samples, self.seed, epoch)

    def global_batch(self, step: int) -> Keys:
        epoch, start = self.position(step)
        end = start + self.batch_size
        if not self.shuffle:
            return keys_of(epoch, np.arange(start, min(end, self.num_samples)))
        return keys_of(epoch, self.epoch_order(epoch)[start:end])

    def rows_read(self, step: int) -> int:
        epoch, position = self.position(step)
        return epoch * self.num_samples + position

    def times_read(self, step: int) -> np.ndarray:
        epoch, position = self.position(step)
        times = np.full(self.num_samples, epoch, dtype=np.int64)
        times[self.epoch_order(epoch)[:position]] += 1
        return times
