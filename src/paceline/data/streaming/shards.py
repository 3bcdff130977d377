"""Rows of files that can only be read from their start: compressed files, and files at a URL or on
the Hugging Face hub."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from paceline.config.schema.data import DatasetSource
from paceline.core.errors import ConfigError
from paceline.core.files import cache_dir, write_atomic
from paceline.data.sources.readers import LineBlock
from paceline.data.sources.resolve import ResolvedSource
from paceline.data.streaming.order import StreamShuffle
from paceline.data.streaming.remote import fetch
from paceline.data.streaming.tables import RawRow


@dataclass(frozen=True)
class Shard:
    """A file of rows.

    Args:
        location: its path, or its URL.
        source: index of its source.
    """

    location: str
    source: int
    spec: DatasetSource

    @property
    def is_remote(self) -> bool:
        return "://" in self.location

    def path(self) -> Path:
        """Return the local file. A remote file is downloaded on first use, once per host."""
        return fetch(self.location) if self.is_remote else Path(self.location)

    def rows(self) -> Iterator[RawRow]:
        """Yield the rows in order, unparsed if they are lines."""
        for part in ResolvedSource(self.spec, files=[self.path()]).parts(0):
            if not isinstance(part, LineBlock):
                yield part
                continue
            for number, line in enumerate(part.lines):
                if not line.isspace():
                    yield part.part(number, number + 1)


@dataclass
class ShardRows:
    """The rows of shards, by their position in the order.

    In each epoch, the shards are shuffled, and then the rows within windows of consecutive rows. A
    process holds the unparsed rows of one window. Numbers of rows are unknown until a shard has
    been read; then they are stored in the cache, which makes resuming faster and does not change
    the order.

    ``num_rows`` is always None, so that a run does not depend on the cache.

    Args:
        shards: files, in the order of the config.
        key: identifies the content of the shards.
    """

    shards: Sequence[Shard]
    key: str
    shuffle: StreamShuffle
    has_fast_rows = False
    num_rows: None = field(default=None, init=False)
    _num_rows: int | None = field(default=None, init=False, repr=False)
    _counts: dict[int, int] = field(default_factory=dict, repr=False)
    _epoch: int = field(default=0, repr=False)
    #: The window that the iterator yields next.
    _next_window: int = field(default=0, repr=False)
    _iterator: Iterator[tuple[int, RawRow]] | None = field(default=None, repr=False)
    _loaded: tuple[int, int] | None = field(default=None, repr=False)
    _rows: list[tuple[int, RawRow]] = field(default_factory=list, repr=False)

    def __getstate__(self) -> object:
        return {**self.__dict__, "_iterator": None, "_loaded": None, "_rows": []}

    def checked_rows(self, num_rows: int) -> list[int]:
        """Return positions of rows to check before the start: the first of the order."""
        return list(range(num_rows))

    def indices(self, positions: np.ndarray) -> np.ndarray:
        """Return the indices of the rows at positions that are counted over all epochs: the
        positions."""
        return positions

    def row(self, position: int) -> tuple[int, RawRow]:
        """Return the index of the source, and the row, at a position counted over all epochs."""
        total = self._total()
        epoch, number = (0, position) if total is None else divmod(position, total)
        window, offset = divmod(number, self.shuffle.window)
        if self._loaded != (epoch, window):
            self._load(epoch, window)
        if offset < len(self._rows):
            return self._rows[offset]
        # The first epoch ended before this position, so the number of rows is known now.
        if not self._total():
            raise ConfigError(
                "the dataset has no rows", code="no-rows-in-files", fix="check the files"
            )
        return self.row(position)

    def _load(self, epoch: int, window: int) -> None:
        if self._iterator is None or epoch != self._epoch or window < self._next_window:
            self._iterator = self._read(epoch, window * self.shuffle.window)
            self._epoch, self._next_window = epoch, window
        for _ in islice(self._iterator, (window - self._next_window) * self.shuffle.window):
            pass
        self._rows = list(islice(self._iterator, self.shuffle.window))
        self._loaded, self._next_window = (epoch, window), window + 1
        size = len(self._rows)
        numbers = self.shuffle.in_window(epoch, window, size, np.arange(size))
        self._rows = [self._rows[number] for number in numbers.tolist()]

    def _read(self, epoch: int, first: int) -> Iterator[tuple[int, RawRow]]:
        """Yield the rows of an epoch from number ``first`` on, with the indices of their sources.
        The numbers of rows of shards that were read before are known, so they are skipped."""
        order = self.shuffle.blocks(epoch, len(self.shards)).tolist()
        for place, number in enumerate(order):
            count = self._counts.get(number)
            if count is not None and count <= first:
                first -= count
                continue
            for following in order[place + 1 : place + 2]:
                self._fetch_ahead(self.shards[following])
            num_rows = 0
            for row in self.shards[number].rows():
                num_rows += 1
                if num_rows > first:
                    yield self.shards[number].source, row
            first = max(0, first - num_rows)
            self._store_count(number, num_rows)

    def _fetch_ahead(self, shard: Shard) -> None:
        def run() -> None:
            with suppress(Exception):  # raised again when the shard is read
                shard.path()

        if shard.is_remote:
            threading.Thread(target=run, daemon=True).start()

    def _total(self) -> int | None:
        """Return the number of rows of an epoch, or None if it is not known yet."""
        if not self._counts:
            self._counts = {
                int(path.name): int(path.read_text()) for path in self._folder.glob("[0-9]*")
            }
        if self._num_rows is None and len(self._counts) == len(self.shards):
            self._num_rows = sum(self._counts.values())
        return self._num_rows

    @property
    def _folder(self) -> Path:
        return cache_dir() / "rows" / self.key

    def _store_count(self, number: int, num_rows: int) -> None:
        if number in self._counts:
            return
        self._counts[number] = num_rows
        with suppress(OSError):  # only makes the next start slower
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self._folder / str(number), str(num_rows))
