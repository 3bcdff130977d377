"""Each sample once per epoch, in a shuffled order."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from paceline.data.order.base import Keys, keys_of, split_by_length, split_even
from paceline.data.order.rows import epoch_permutation

#: All steps of an epoch use the same permutation.
_last_permutation = lru_cache(maxsize=1)(epoch_permutation)


@dataclass(frozen=True)
class SampleOrder:
    """The order in which each epoch has each sample once. The last global batch of an epoch may be
    short.

    Args:
        num_samples: size of the dataset.
        batch_size: number of samples in a global batch.
        seed: the run's seed.
        lengths: number of tokens of each sample, to balance micro-batches by tokens; None to split
            by number of samples, in order.
        shuffle: whether to shuffle each epoch; otherwise every epoch has the order of the dataset.
            In both cases, balancing by tokens moves samples between the micro-batches of a global
            batch.
    """

    num_samples: int
    batch_size: int
    seed: int
    lengths: np.ndarray | None = None
    shuffle: bool = True

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def epochs(self, step: int) -> float:
        return step / self.steps_per_epoch

    def position(self, step: int) -> tuple[int, int]:
        epoch, epoch_step = divmod(step, self.steps_per_epoch)
        return epoch, epoch_step * self.batch_size

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

    def micro_batches(self, step: int, parts: int) -> list[Keys]:
        batch = self.global_batch(step)
        if self.lengths is None:
            return split_even(batch, parts)
        return split_by_length(batch, self.lengths[batch[:, 1]], parts)

    def rows_read(self, step: int) -> int:
        epoch, position = self.position(step)
        return epoch * self.num_samples + position

    def times_read(self, step: int) -> np.ndarray:
        epoch, position = self.position(step)
        times = np.full(self.num_samples, epoch, dtype=np.int64)
        times[self.epoch_order(epoch)[:position]] += 1
        return times
