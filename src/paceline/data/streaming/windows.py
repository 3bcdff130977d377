"""Packed rows of a stream: the samples of a window of consecutive rows are packed together.

How many packed rows a window has is known once it has been tokenized. So a packed row is found by
going through the windows from the start, or from a place that a checkpoint has recorded. A window
is tokenized by one process of a host, ahead of the step that needs it, and stored in the cache,
from which the other processes read it. Only the last windows are kept.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.errors import ConfigError
from paceline.data.cache import build_once
from paceline.data.counts import StreamCounts
from paceline.data.order.build import rows_by_source
from paceline.data.order.rows import Rows
from paceline.data.streaming.dataset import RowEncoder, StreamedRows
from paceline.data.text.token_dataset import TokenDataset, TokenSample, TokenWriter

_META, _SOURCES = "meta.json", "sources.npy"
#: Number of windows to tokenize ahead, and number of windows that are kept.
_AHEAD, _KEPT = 3, 12
#: A stream without any sample in this number of windows in a row is an error.
_MAX_EMPTY = 1000


@dataclass
class _Window:
    """A tokenized window.

    Args:
        first_row: index of its first packed row in the stream.
        counts: counts of its rows of the data, and of windows without samples before it.
        samples: None if there are none.
        sources: int16 [samples], the source of each sample.
    """

    number: int
    first_row: int
    rows: Rows
    samples: TokenDataset | None
    sources: np.ndarray
    counts: StreamCounts


class PackedStream:
    """The packed rows of a stream, in the order of its windows.

    Args:
        number: index of the stream, for its anchors.
        folder: where windows are stored.
        window_rows: largest number of rows of a window.
    """

    num_rows: int | None = None  # known when all windows have been tokenized

    def __init__(
        self,
        number: int,
        rows: StreamedRows,
        encode: RowEncoder,
        folder: Path,
        window_rows: int,
    ) -> None:
        self.number, self.rows, self.encode = number, rows, encode
        self.args = encode.setup.config.train_args
        self.folder, self.window_rows = folder, window_rows
        self._anchor = (0, 0)
        self._reset()

    def _reset(self) -> None:
        self._windows: OrderedDict[int, _Window] = OrderedDict()
        self._build_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def __getstate__(self) -> object:
        names = ("_windows", "_build_lock", "_thread")
        return {name: value for name, value in self.__dict__.items() if name not in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def seek(self, anchor: tuple[int, int]) -> None:
        """Find rows from this window on: its number and the number of its first packed row."""
        self._anchor = anchor
        self._reset()

    def read(self, numbers: Sequence[int]) -> tuple[list[TokenSample], StreamCounts]:
        """Return the samples of packed rows with these increasing numbers, and their counts. The
        rows of the data are counted with the first packed row of their window."""
        samples: list[TokenSample] = []
        counts = StreamCounts()
        for number in numbers:
            window = self._window_of(number)
            if number == window.first_row:
                counts.add(window.counts)
            counts.anchors[self.number] = (window.number, window.first_row)
            (keys,) = window.rows.keys(window.number, np.array([number - window.first_row]))
            for key in keys.tolist():
                samples.append(self._sample(window, key, counts))
        return samples, counts

    def _sample(self, window: _Window, key: Sequence[int], counts: StreamCounts) -> TokenSample:
        assert window.samples is not None
        _, index, *span = key
        sample = window.samples.piece(index, *span) if span else window.samples[index]
        is_new = not span or span[0] == 0
        tokens = len(sample["input_ids"])
        labels = int(np.count_nonzero(sample["labels_mask"][1:]))
        counts.samples += is_new
        counts.tokens += tokens
        counts.label_tokens += labels
        if self.encode.has_sources:
            source = int(window.sources[index])
            sample["source"] = source
            of_source = counts.of_source(source, self.encode.setup.sources[source].path)
            of_source.samples += is_new
            of_source.tokens += tokens
            of_source.label_tokens += labels
        return sample

    def _window_of(self, number: int) -> _Window:
        """Return the window that has a packed row."""
        for window in reversed(self._windows.values()):
            if 0 <= number - window.first_row < window.rows.num_rows:
                return window
        start = self._anchor
        if self._windows:
            last = next(reversed(self._windows.values()))
            if last.first_row <= number:
                start = (last.number + 1, last.first_row + last.rows.num_rows)
        if start[1] > number:
            start = (0, 0)
        return self._find(number, *start)

    def _find(self, number: int, window_number: int, first_row: int) -> _Window:
        """Go through the windows from one on to that with a packed row."""
        counts, num_empty = StreamCounts(), 0
        while True:
            window = self._open(window_number, first_row)
            counts.add(window.counts)
            if window.rows.num_rows:
                window.counts, counts, num_empty = counts, StreamCounts(), 0
                self._windows[window_number] = window
                while len(self._windows) > 2:
                    self._windows.popitem(last=False)
                if number < first_row + window.rows.num_rows:
                    self._tokenize_ahead(window_number)
                    return window
            num_empty += not window.rows.num_rows
            if num_empty > _MAX_EMPTY:
                raise ConfigError(
                    "none of {num_empty} consecutive rows can be used",
                    code="no-usable-rows-in-window",
                    fix="check the rows with `paceline data preview`",
                    num_empty=f"{num_empty * self.window_rows:,}",
                )
            window_number, first_row = window_number + 1, first_row + window.rows.num_rows

    def _open(self, number: int, first_row: int) -> _Window:
        folder = self.folder / str(number)
        if not (folder / _META).is_file():
            if self._pid != os.getpid():
                self._reset()  # a copy of a process that may hold the lock
            with self._build_lock:
                build_once(folder, _META, partial(self._build, number))
        try:
            meta = json.loads((folder / _META).read_text(encoding="utf-8"))
            sources = np.load(folder / _SOURCES)
            samples = TokenDataset(folder, None, self.encode.columns) if len(sources) else None
        except FileNotFoundError:  # removed by another run with the same data
            return self._open(number, first_row)
        lengths = sources[:0] if samples is None else samples.lengths
        (rows,) = rows_by_source(self.args, lengths, [len(lengths)])
        # The window may have been stored when the files of the sources were at other paths.
        names = [source.path for source in self.encode.setup.sources]
        counts = StreamCounts.from_state(meta["counts"], names)
        return _Window(number, first_row, rows, samples, sources, counts)

    def _tokenize_ahead(self, number: int) -> None:
        def run() -> None:
            for following in range(number + 1, number + 1 + _AHEAD):
                with suppress(Exception), self._build_lock:  # raised again when it is needed
                    folder = self.folder / str(following)
                    build_once(folder, _META, partial(self._build, following), waits=False)

        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=run, daemon=True)
            self._thread.start()

    def _positions(self, number: int) -> np.ndarray:
        """Return the positions of the rows of a window. If the number of rows is known, the last
        window of an epoch ends with it."""
        size, num_rows = self.window_rows, self.rows.num_rows
        if num_rows is None:
            return np.arange(number * size, (number + 1) * size)
        epoch, window = divmod(number, -(-num_rows // size))
        positions: np.ndarray = epoch * num_rows + np.arange(
            window * size, min((window + 1) * size, num_rows)
        )
        return positions

    def _build(self, number: int, folder: Path) -> None:
        """Tokenize a window into an empty folder."""
        indices = self.rows.indices(self._positions(number))
        counts, sources = StreamCounts(), []
        writer = TokenWriter(folder, self.encode.columns)
        chunks = self.encode(self.rows, indices.tolist(), by_source=self.args.shuffle)
        for chunk in chunks:
            writer.extend(chunk.columns, chunk.lengths, chunk.label_counts)
            sources += [chunk.source] * len(chunk.lengths)
            counts.add(self.encode.counts_of(chunk))
        writer.close()
        np.save(folder / _SOURCES, np.array(sources, dtype=np.int16))
        # Samples and tokens are counted when they are used.
        counts.samples = counts.tokens = counts.label_tokens = 0
        for of_source in counts.sources.values():
            of_source.samples = of_source.tokens = of_source.label_tokens = 0
        meta = {"counts": counts.state()}
        (folder / _META).write_text(json.dumps(meta), encoding="utf-8")
        old = self.folder / str(number - _KEPT)
        # A window that is being removed is no window, or `_open` would look for its files until
        # the last one is removed.
        (old / _META).unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)
