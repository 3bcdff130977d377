"""The order of samples: a pure function of (seed, epoch, position), and of nothing else.

Not of the world size, the strategy, the loader's workers, nor of how often the run was resumed.
Each sample is seen exactly once an epoch. A global batch is cut into world × accumulation
micro-batches; with the same product the micro-batches are the same however the product is made up.
Where the product does not divide the batch, sizes differ by one, and so do the sums of each rank.
"""

from dataclasses import dataclass

import numpy as np

from paceline.core.formatting import edges
from paceline.distributed.seeds import derive_seed


def epoch_permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """Shuffled order of the samples in one epoch: int64 [num_samples], each index once."""
    generator = np.random.Generator(np.random.PCG64(derive_seed(seed, "order", epoch)))
    return generator.permutation(num_samples)


def split_even(indices: np.ndarray, parts: int) -> list[np.ndarray]:
    """Cut into ``parts`` consecutive pieces whose sizes differ by at most one; pieces are empty
    where there are too few. The larger pieces are spread (see
    :func:`~paceline.core.formatting.edges`), so that ranks with several pieces get equal sums."""
    return np.split(indices, edges(len(indices), parts)[1:-1])


def split_by_length(indices: np.ndarray, lengths: np.ndarray, parts: int) -> list[np.ndarray]:
    """Share samples among ``parts`` so that the token sums come out nearly equal.

    Longest first, each to the part with the fewest tokens so far (LPT; Graham 1969: at most 4/3 of
    the best possible maximum); ties by part number, so the result is fixed. Within a part the
    samples keep their order in ``indices``.

    Args:
        indices: sample numbers of a global batch, int64 [batch].
        lengths: tokens of every sample of the dataset, int64 [num_samples].
        parts: number of micro-batches.
    """
    loads = np.zeros(parts, dtype=np.int64)
    owner = np.empty(len(indices), dtype=np.int64)
    for place in np.argsort(-lengths[indices], kind="stable"):
        part = int(np.argmin(loads))
        owner[place] = part
        loads[part] += max(1, int(lengths[indices[place]]))
    return [indices[owner == part] for part in range(parts)]


@dataclass(frozen=True)
class SampleOrder:
    """Which samples make up each micro-batch of each step.

    Args:
        num_samples: rows of the dataset.
        batch_size: samples of a global batch.
        seed: the run's seed.
        lengths: tokens of each sample, where micro-batches are to be balanced by tokens; None:
            equal counts in order.
        shuffle: whether each epoch has a shuffled order; otherwise every epoch has the order of the
            dataset. Balancing by tokens moves samples between the micro-batches of one global batch
            in both cases.
    """

    num_samples: int
    batch_size: int
    seed: int
    lengths: np.ndarray | None = None
    shuffle: bool = True

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def epoch_order(self, epoch: int) -> np.ndarray:
        """Return the order of the samples in an epoch: int64 [num_samples], each index once."""
        if not self.shuffle:
            return np.arange(self.num_samples)
        return _cached_permutation(self.num_samples, self.seed, epoch)

    def global_batch(self, step: int) -> np.ndarray:
        """Samples of the step ``step`` (counted from 0 over all epochs): int64 [≤ batch_size]."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if not self.shuffle:
            start = place * self.batch_size
            return np.arange(start, min(start + self.batch_size, self.num_samples))
        return self.epoch_order(epoch)[place * self.batch_size : (place + 1) * self.batch_size]

    def micro_batches(self, step: int, parts: int) -> list[np.ndarray]:
        """The global batch of a step cut into ``parts`` micro-batches; some are empty where it has
        fewer samples."""
        batch = self.global_batch(step)
        if self.lengths is None:
            return split_even(batch, parts)
        return split_by_length(batch, self.lengths, parts)


_last: tuple[tuple[int, int, int], np.ndarray] | None = None


def _cached_permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    global _last
    key = (num_samples, seed, epoch)
    if _last is None or _last[0] != key:
        _last = (key, epoch_permutation(num_samples, seed, epoch))
    return _last[1]
