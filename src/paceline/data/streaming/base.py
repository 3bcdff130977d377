"""What the loader asks of a dataset that is streamed."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.data.counts import StreamCounts
from paceline.data.order.base import Order

#: A sample's key within a micro-batch: (epoch, index), or (epoch, index, start, stop) for a part of
#: its tokens.
Key = tuple[int, ...]


class StreamedDataset(ABC):
    """A dataset that reads the rows of a micro-batch at once, and may drop some of them."""

    #: Samples do not depend on random state, so the loader does not need to set it.
    deterministic = True
    #: The only sample of a micro-batch without usable rows.
    filler: Any

    @abstractmethod
    def order(self, batch_size: int) -> Order:
        """Return the order of the rows."""

    @abstractmethod
    def read(self, keys: Sequence[Key]) -> tuple[list[Any], StreamCounts]:
        """Return the samples of these rows, without those that are dropped, and the counts."""

    @abstractmethod
    def seek(self, anchors: Mapping[int, tuple[int, int]]) -> None:
        """Find rows from these places on; see :attr:`StreamCounts.anchors`."""
