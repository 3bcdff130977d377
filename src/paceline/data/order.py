"""The order of samples: a pure function of (seed, epoch, position).

It does not depend on the world size, the strategy, the loader's workers or the number of times the
run was resumed. Each sample is seen exactly once per epoch. A global batch is split into world size
× accumulation micro-batches, which depend only on this product. If the product does not divide the
batch size, sizes differ by one, and so do the sums of each rank.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from paceline.core.formatting import edges
from paceline.distributed.seeds import derive_seed


def epoch_permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """Return the shuffled order of the samples in one epoch: int64 [num_samples]."""
    generator = np.random.Generator(np.random.PCG64(derive_seed(seed, "order", epoch)))
    return generator.permutation(num_samples)


#: All steps of an epoch use the same permutation.
_last_permutation = lru_cache(maxsize=1)(epoch_permutation)


def split_even(indices: np.ndarray, parts: int) -> list[np.ndarray]:
    """Split into ``parts`` consecutive pieces whose sizes differ by at most one. If there are fewer
    samples than parts, some pieces are empty. The larger pieces are spread evenly (see
    :func:`~paceline.core.formatting.edges`), so that ranks with several pieces get equal sums."""
    return np.split(indices, edges(len(indices), parts)[1:-1])


def split_by_length(indices: np.ndarray, lengths: np.ndarray, parts: int) -> list[np.ndarray]:
    """Distribute samples over ``parts`` so that the token sums are nearly equal.

    Assigns the longest samples first, each to the part with the fewest tokens so far (LPT; Graham
    1969: at most 4/3 of the optimal maximum). Ties go to the part with the lower index, so the
    result is deterministic. Within a part the samples keep their order in ``indices``.

    Args:
        indices: sample indices of a global batch, int64 [batch].
        lengths: number of tokens of every sample of the dataset, int64 [num_samples].
        parts: number of micro-batches.
    """
    loads = np.zeros(parts, dtype=np.int64)
    owner = np.empty(len(indices), dtype=np.int64)
    for position in np.argsort(-lengths[indices], kind="stable"):
        part = int(np.argmin(loads))
        owner[position] = part
        loads[part] += max(1, int(lengths[indices[position]]))
    return [indices[owner == part] for part in range(parts)]


@dataclass(frozen=True)
class SampleOrder:
    """The samples of each micro-batch of each step.

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

    def epoch_order(self, epoch: int) -> np.ndarray:
        """Return the order of the samples in an epoch: int64 [num_samples], each index once."""
        if not self.shuffle:
            return np.arange(self.num_samples)
        return _last_permutation(self.num_samples, self.seed, epoch)

    def global_batch(self, step: int) -> np.ndarray:
        """Return the samples of ``step`` (counted from 0 over all epochs): int64 [≤ batch_size]."""
        epoch, epoch_step = divmod(step, self.steps_per_epoch)
        start, end = epoch_step * self.batch_size, (epoch_step + 1) * self.batch_size
        if not self.shuffle:
            return np.arange(start, min(end, self.num_samples))
        return self.epoch_order(epoch)[start:end]

    def micro_batches(self, step: int, parts: int) -> list[np.ndarray]:
        """Split the global batch of a step into ``parts`` micro-batches. Some are empty if the
        batch has fewer samples than parts."""
        batch = self.global_batch(step)
        if self.lengths is None:
            return split_even(batch, parts)
        return split_by_length(batch, self.lengths, parts)
