"""A dataset whose rows are read and tokenized when a micro-batch needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from paceline.config.schema.train_args import TrainArgs
from paceline.core.errors import ConfigError
from paceline.data.counts import StreamCounts
from paceline.data.order.base import Order
from paceline.data.sources.readers import LineBlock
from paceline.data.sources.resolve import Place, rows_of_block
from paceline.data.streaming.tables import RawRow
from paceline.data.text.chunks import (
    AnyEncoder,
    Chunk,
    ChunkEncoder,
    EncodedChunk,
    RowCounts,
    Setup,
)
from paceline.data.text.token_dataset import TokenSample

if TYPE_CHECKING:
    from paceline.data.loader import Key

MALFORMED = "malformed line"


class StreamedRows(Protocol):
    """Rows that are read on demand.

    Attributes:
        has_fast_rows: whether rows can be read in any order.
    """

    has_fast_rows: bool

    @property
    def num_rows(self) -> int | None:
        """Number of rows of an epoch, or None if it is unknown."""

    def order(self, batch_size: int, args: TrainArgs) -> Order:
        """Return the order of the rows."""

    def row(self, index: int) -> tuple[int, RawRow]:
        """Return the index of the source of a row, and the row. ``index`` is that of the order's
        keys."""

    def checked_rows(self, num_rows: int) -> list[int]:
        """Return the indices of rows to check before the start, ``num_rows`` for each source if
        they can be found."""


class StreamedText:
    """Tokenize rows of text on demand.

    Each process that reads from it loads the tokenizer on first use.

    Args:
        setup: how rows are encoded.
    """

    # Samples do not depend on random state, so the loader does not need to set it.
    deterministic = True

    def __init__(self, rows: StreamedRows, setup: Setup) -> None:
        self.rows, self.setup = rows, setup
        self.filler: TokenSample = {
            "input_ids": np.zeros(2, dtype=np.int32),
            "labels_mask": np.ones(2, dtype=np.bool_),
        }
        self._chunk_encoder: ChunkEncoder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_chunk_encoder": None}

    def order(self, batch_size: int, args: TrainArgs) -> Order:
        """Return the order of the rows."""
        return self.rows.order(batch_size, args)

    def __getitem__(self, index: int) -> TokenSample:
        """Return a row, or a filler if it cannot be used."""
        samples, _ = self.read([(0, index)])
        return samples[0] if samples else self.filler

    def read(self, keys: Sequence[Key]) -> tuple[list[TokenSample], StreamCounts]:
        """Return the samples of these rows and the counts of the rows. Rows that cannot be used
        have no sample.

        Raises:
            ConfigError: a row needs a kind of training that Paceline does not have.
        """
        samples: list[TokenSample] = []
        counts = StreamCounts()
        for chunk in self.encode(keys):
            samples += _samples(chunk)
            counts.add(chunk.counts)
            counts.first = {**chunk.counts.first, **counts.first}
            counts.tokens += sum(chunk.lengths)
            counts.label_tokens += sum(chunk.label_counts)
        return samples, counts

    def encode(self, keys: Sequence[Key]) -> list[EncodedChunk]:
        """Return the encoded rows, in chunks of consecutive rows of one source."""
        chunks: list[tuple[Chunk, RowCounts]] = []
        for _, index in keys:
            source, row = self.rows.row(index)
            if not chunks or chunks[-1][0].source != source:
                chunks.append((Chunk(source), RowCounts()))
            _add(row, *chunks[-1])
        encoded = []
        for chunk, malformed in chunks:
            result = self._encode(chunk)
            result.counts.add(malformed)
            encoded.append(result)
        return encoded

    @property
    def encoder(self) -> AnyEncoder:
        """The encoder of this process."""
        return self._encode.encoder

    @property
    def _encode(self) -> ChunkEncoder:
        if self._chunk_encoder is None:
            self._chunk_encoder = ChunkEncoder(self.setup, cuts_documents=False)
        return self._chunk_encoder


def _add(row: RawRow, chunk: Chunk, malformed: RowCounts) -> None:
    """Add a parsed row to the chunk, or count it as malformed."""
    try:
        rows = rows_of_block(row) if isinstance(row, LineBlock) else [row]
        for parsed in rows:
            chunk.take(parsed)
    except ConfigError:
        malformed.read += 1
        malformed.drop(MALFORMED, _place(row))


def _place(row: RawRow) -> Place:
    return f"line {row.first_number} of {row.path}" if isinstance(row, LineBlock) else row[0]


def _samples(chunk: EncodedChunk) -> list[TokenSample]:
    return [
        {
            "input_ids": np.frombuffer(tokens, dtype=np.int32),
            "labels_mask": np.frombuffer(mask, dtype=np.bool_),
        }
        for tokens, mask in zip(chunk.tokens, chunk.mask, strict=True)
    ]
