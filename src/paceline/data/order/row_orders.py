"""Orders of rows: of all sources together, and of a mixture of sources."""

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from paceline.data.order.base import Keys, Order, split_even
from paceline.data.order.mixture import Mixture
from paceline.data.order.rows import Rows


class _RowOrder(Order):
    """Global batches of rows."""

    @abstractmethod
    def rows(self, step: int) -> list[Keys]:
        """Return the keys of the samples of each row of a step."""

    def global_batch(self, step: int) -> Keys:
        return np.concatenate(self.rows(step))

    def micro_batches(self, step: int, parts: int) -> list[Keys]:
        if self.lengths is not None:
            return super().micro_batches(step, parts)
        rows = self.rows(step)
        none = rows[0][:0]
        return [
            np.concatenate([none, *(rows[number] for number in part)])
            for part in split_even(np.arange(len(rows)), parts)
        ]


class RowOrder(_RowOrder):
    """The order in which each epoch has each row of all sources once. The last global batch of an
    epoch may be short.

    Args:
        rows: the rows of all sources.
        is_endless: whether the positions of rows are counted over all epochs.
    """

    def __init__(
        self,
        rows: Rows,
        num_samples: int,
        batch_size: int,
        seed: int,
        *,
        is_endless: bool = False,
    ) -> None:
        steps_per_epoch = None if is_endless else -(-rows.num_rows // batch_size)
        super().__init__(num_samples, batch_size, seed, steps_per_epoch)
        self._rows = rows

    def rows(self, step: int) -> list[Keys]:
        epoch, start = self.position(step)
        stop = min(start + self.batch_size, self._rows.num_rows)
        return self._rows.keys(epoch, np.arange(start, stop))

    def rows_read(self, step: int) -> int:
        epoch, position = self.position(step)
        return epoch * self._rows.num_rows + position

    def times_read(self, step: int) -> np.ndarray:
        times = np.zeros(self.num_samples)
        self._rows.add_times(times, *self.position(step))
        return times


class MixedOrder(_RowOrder):
    """The order of a mixture of sources. Its epochs do not interrupt the epochs of the sources,
    and every global batch is full.

    Args:
        sources: the rows of each source.
        mixture: the source of each position.
        steps_per_epoch: number of steps in which the mixture reads the rows of an epoch, or None
            if it is unknown.
    """

    def __init__(
        self,
        sources: Sequence[Rows],
        mixture: Mixture,
        num_samples: int,
        steps_per_epoch: int | None,
        lengths: np.ndarray | None,
    ) -> None:
        super().__init__(num_samples, mixture.batch_size, mixture.seed, steps_per_epoch, lengths)
        self.sources, self.mixture = sources, mixture

    def rows(self, step: int) -> list[Keys]:
        start = step * self.batch_size
        sources, ordinals = self.mixture.read(start, start + self.batch_size)
        result: dict[int, Keys] = {}
        for number, source in enumerate(self.sources):
            places = np.flatnonzero(sources == number)
            epochs, positions = np.divmod(ordinals[places], source.num_rows)
            for epoch in np.unique(epochs).tolist():
                is_in_epoch = epochs == epoch
                keys = source.keys(epoch, positions[is_in_epoch])
                result |= zip(places[is_in_epoch].tolist(), keys, strict=True)
        return [result[place] for place in range(self.batch_size)]

    def rows_read(self, step: int) -> int:
        return step * self.batch_size

    def times_read(self, step: int) -> np.ndarray:
        times = np.zeros(self.num_samples)
        counts = self.mixture.counts(step * self.batch_size).tolist()
        for source, count in zip(self.sources, counts, strict=True):
            source.add_times(times, *divmod(count, source.num_rows))
        return times
