"""What the rest of the code needs of an order of samples, and how a global batch is split."""

from abc import ABC, abstractmethod

import numpy as np

from paceline.core.formatting import edges

#: The keys of samples, int64 [samples, 2]: the epoch and the index in the dataset. The epoch seeds
#: the random numbers with which a sample is read. For parts of samples, int64 [parts, 4]: also the
#: first token and the end of the part.
Keys = np.ndarray


class Order(ABC):
    """The samples of each micro-batch of each step, which are counted from 0 over all epochs.

    A pure function of the seed and the step. It does not depend on the world size, the strategy,
    the loader's workers or the number of times the run was resumed.

    Args:
        num_samples: size of the dataset.
        batch_size: number of rows of a global batch: samples, or packed rows.
        seed: the run's seed.
        steps_per_epoch: number of steps of an epoch, or None if it is unknown.
        lengths: number of tokens of each sample, to balance micro-batches of single samples by
            tokens; None to split by number of rows, in order.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        seed: int,
        steps_per_epoch: int | None,
        lengths: np.ndarray | None = None,
    ) -> None:
        self.num_samples, self.batch_size, self.seed = num_samples, batch_size, seed
        self.steps_per_epoch, self.lengths = steps_per_epoch, lengths

    def epochs(self, step: int) -> float | None:
        """Return the number of passes over the data up to ``step``; None if the size of the data is
        unknown."""
        return None if self.steps_per_epoch is None else step / self.steps_per_epoch

    def position(self, step: int) -> tuple[int, int]:
        """Return (epoch, number of rows of this epoch in earlier steps): the position in the data
        that a checkpoint records."""
        if self.steps_per_epoch is None:
            return 0, step * self.batch_size
        epoch, epoch_step = divmod(step, self.steps_per_epoch)
        return epoch, epoch_step * self.batch_size

    @abstractmethod
    def global_batch(self, step: int) -> Keys:
        """Return the keys of the samples of a step."""

    def micro_batches(self, step: int, parts: int) -> list[Keys]:
        """Split the global batch of a step into ``parts`` micro-batches. Some are empty if the
        batch has fewer samples than parts."""
        batch = self.global_batch(step)
        if self.lengths is None:
            return split_even(batch, parts)
        return split_by_length(batch, self.lengths[batch[:, 1]], parts)

    @abstractmethod
    def rows_read(self, step: int) -> int:
        """Return the number of rows up to ``step``, as the batch size counts them: samples, or
        packed rows."""

    @abstractmethod
    def times_read(self, step: int) -> np.ndarray:
        """Return how often each sample occurs up to ``step``, [num_samples]. A part of a sample
        counts as a fraction."""


def keys_of(epoch: int, indices: np.ndarray) -> Keys:
    """Return the keys of samples of the same epoch."""
    return np.stack([np.full_like(indices, epoch), indices], axis=1)


def sample_shares(keys: Keys, lengths: np.ndarray) -> np.ndarray:
    """Return which share of its sample each key stands for, [keys]. ``lengths`` is the number of
    tokens of each sample."""
    if keys.shape[1] == 2:
        return np.ones(len(keys), dtype=np.int64)
    shares: np.ndarray = (keys[:, 3] - keys[:, 2]) / lengths[keys[:, 1]]
    return shares


def split_even(rows: np.ndarray, parts: int) -> list[np.ndarray]:
    """Split into ``parts`` consecutive pieces whose sizes differ by at most one. If there are fewer
    rows than parts, some pieces are empty. The larger pieces are spread evenly (see
    :func:`~paceline.core.formatting.edges`), so that ranks with several pieces get equal sums."""
    return np.split(rows, edges(len(rows), parts)[1:-1])


def split_by_length(rows: np.ndarray, lengths: np.ndarray, parts: int) -> list[np.ndarray]:
    """Distribute rows over ``parts`` so that the token sums are nearly equal.

    Assigns the longest rows first, each to the part with the fewest tokens so far (LPT; Graham
    1969: at most 4/3 of the optimal maximum). Ties go to the part with the lower index, so the
    result is deterministic. Within a part the rows keep their order.

    Args:
        rows: indices or keys of samples [rows, …].
        lengths: number of tokens of each of them, int64 [rows].
        parts: number of micro-batches.
    """
    loads = np.zeros(parts, dtype=np.int64)
    owner = np.empty(len(rows), dtype=np.int64)
    for position in np.argsort(-lengths, kind="stable"):
        part = int(np.argmin(loads))
        owner[position] = part
        loads[part] += max(1, int(lengths[position]))
    return [rows[owner == part] for part in range(parts)]
