"""Text whose samples are found by their position in one stream or in several that are mixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from paceline.data.counts import StreamCounts
from paceline.data.order.base import Order
from paceline.data.order.mixture import Mixture, Stopping, WeightSchedule
from paceline.data.order.row_orders import MixedOrder, RowOrder
from paceline.data.streaming.base import Key, StreamedDataset
from paceline.data.streaming.dataset import RowEncoder, StreamedRows
from paceline.data.streaming.order import MAX_POSITIONS, PositionRows
from paceline.data.text.token_dataset import TokenSample


class Stream(Protocol):
    """Rows that are counted over all epochs.

    Attributes:
        num_rows: number of rows of an epoch, or None if it is unknown.
    """

    num_rows: int | None

    def read(self, numbers: Sequence[int]) -> tuple[list[TokenSample], StreamCounts]:
        """Return the samples of the rows with these increasing numbers, and their counts."""

    def seek(self, anchor: tuple[int, int]) -> None:
        """Find rows from this place on; see :attr:`StreamCounts.anchors`."""


class SampleStream:
    """Rows of the data; each row is one sample."""

    def __init__(self, rows: StreamedRows, encode: RowEncoder) -> None:
        self.rows, self.encode = rows, encode
        self.num_rows = rows.num_rows

    def read(self, numbers: Sequence[int]) -> tuple[list[TokenSample], StreamCounts]:
        """Return the samples of the rows with these numbers, and their counts."""
        indices = self.rows.indices(np.array(numbers, dtype=np.int64))
        return self.encode.read(self.rows, indices.tolist())

    def seek(self, anchor: tuple[int, int]) -> None:
        """Do nothing: any row is found without the ones before it."""


class TextStreams(StreamedDataset):
    """The rows of one stream, or of several in stated proportions.

    Args:
        schedule: weights of the streams that are mixed; None for a single stream.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        schedule: WeightSchedule | None,
        stopping: Stopping,
        seed: int,
        filler: TokenSample,
    ) -> None:
        self.streams, self.schedule, self.stopping = streams, schedule, stopping
        self.seed, self.filler = seed, filler

    def order(self, batch_size: int) -> Order:
        """Return the order of the rows."""
        numbers = [stream.num_rows for stream in self.streams]
        if self.schedule is None:
            rows = PositionRows(numbers[0] or MAX_POSITIONS)
            is_endless = not numbers[0]
            return RowOrder(rows, numbers[0] or 0, batch_size, self.seed, is_endless=is_endless)
        sizes = tuple(MAX_POSITIONS if number is None else number for number in numbers)
        mixture = Mixture(sizes, self.schedule, self.stopping, batch_size, self.seed)
        steps = None if None in numbers else -(-mixture.epoch_rows() // batch_size)
        sources = [PositionRows(first=number * MAX_POSITIONS) for number in range(len(numbers))]
        return MixedOrder(sources, mixture, 0, steps, None)

    def seek(self, anchors: Mapping[int, tuple[int, int]]) -> None:
        """Find rows from these places on."""
        for number, stream in enumerate(self.streams):
            stream.seek(anchors.get(number, (0, 0)))

    def read(self, keys: Sequence[Key]) -> tuple[list[TokenSample], StreamCounts]:
        """Return the samples of rows, grouped by stream, and their counts."""
        # An index is the index of the stream times the limit, plus the number of the row.
        numbers: dict[int, list[int]] = {}
        for _, index in keys:
            numbers.setdefault(index // MAX_POSITIONS, []).append(index % MAX_POSITIONS)
        samples: list[TokenSample] = []
        counts = StreamCounts()
        for number in sorted(numbers):
            read, counts_of_stream = self.streams[number].read(sorted(numbers[number]))
            samples += read
            counts.add(counts_of_stream)
        return samples, counts

    def __getitem__(self, index: int) -> TokenSample:
        """Return a sample of a row, or a filler if it has none."""
        samples, _ = self.read([(0, index)])
        return samples[0] if samples else self.filler
