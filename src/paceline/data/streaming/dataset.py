"""Tokenize rows when a micro-batch needs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from paceline.core.errors import ConfigError
from paceline.data.counts import StreamCounts
from paceline.data.encoding.chunks import Chunk, ChunkEncoder, EncodedChunk
from paceline.data.kinds.base import KindSetup, RowCounts, SampleKind
from paceline.data.kinds.registry import load_kind
from paceline.data.sources.readers import LineBlock
from paceline.data.sources.resolve import Place, rows_of_block
from paceline.data.sources.rows import RepeatedKey
from paceline.data.streaming.shards import ShardRows
from paceline.data.streaming.tables import RawRow, TableRows
from paceline.data.text.token_columns import Column
from paceline.data.text.token_dataset import TokenSample

MALFORMED = "malformed line"
_REPEATED_KEY = "a key occurs twice"


#: Rows that are read on demand.
StreamedRows = TableRows | ShardRows


class RowEncoder:
    """Tokenize rows on demand. Each process loads the tokenizer on first use.

    Args:
        setup: how rows are encoded.
    """

    def __init__(self, setup: KindSetup) -> None:
        self.setup = setup
        self._chunk_encoder: ChunkEncoder | None = None
        #: The error of the first line that is not a row.
        self.first_error: ConfigError | None = None

    def __getstate__(self) -> object:
        return {**self.__dict__, "_chunk_encoder": None}

    def __call__(
        self,
        rows: StreamedRows,
        indices: Iterable[int],
        *,
        by_source: bool = False,
        is_start: bool = False,
    ) -> list[EncodedChunk]:
        """Return the encoded rows, in chunks of consecutive rows of one source.

        Args:
            by_source: whether to return one chunk for each source, which is faster if the sources
                alternate.
            is_start: whether training has not started, so that a row whose values are ambiguous
                is an error; later, it is dropped and counted.

        Raises:
            ConfigError: at the start, a key occurs twice in a row.
        """
        chunks: list[tuple[Chunk, RowCounts]] = []
        of_source: dict[int, tuple[Chunk, RowCounts]] = {}
        for index in indices:
            source, row = rows.row(index)
            if source not in of_source or (not by_source and chunks[-1][0].source != source):
                of_source[source] = (Chunk(source), RowCounts())
                chunks.append(of_source[source])
            error = _add(row, *of_source[source], is_start)
            self.first_error = self.first_error or error
        encoded = []
        for chunk, malformed in chunks:
            result = self._encode(chunk)
            result.counts.add(malformed)
            encoded.append(result)
        return encoded

    def read(
        self, rows: StreamedRows, indices: Iterable[int]
    ) -> tuple[list[TokenSample], StreamCounts]:
        """Return the samples of rows, without those that cannot be used, and their counts.

        Raises:
            ConfigError: a row needs a kind of training that Paceline does not have.
        """
        samples: list[TokenSample] = []
        counts = StreamCounts()
        for chunk in self(rows, indices):
            samples += self._samples(chunk)
            counts.add(self.counts_of(chunk))
        return samples, counts

    def _samples(self, chunk: EncodedChunk) -> list[TokenSample]:
        samples: list[TokenSample] = []
        columns, has_sources = self.columns, self.has_sources
        for number in range(len(chunk.lengths)):
            sample: Any = {
                "input_ids": np.frombuffer(chunk.columns["input_ids"][number], dtype=np.int32),
                "labels_mask": np.frombuffer(chunk.columns["labels_mask"][number], dtype=np.bool_),
            }
            for column in columns:
                if (value := chunk.columns[column.name][number]) is not None:
                    sample[column.name] = column.as_stored(value)
            if has_sources:
                sample["source"] = chunk.source
            samples.append(sample)
        return samples

    @property
    def has_sources(self) -> bool:
        """Whether rows are counted by source, because there are several."""
        return len(self.setup.sources) > 1

    def counts_of(self, chunk: EncodedChunk) -> StreamCounts:
        """Return the counts of the rows of a chunk, and of their samples and tokens."""
        counts = StreamCounts()
        counts.add(chunk.counts)
        counts.first = dict(chunk.counts.first)
        counts.samples = len(chunk.lengths)
        counts.tokens, counts.label_tokens = sum(chunk.lengths), sum(chunk.label_counts)
        if self.has_sources:
            of_source = counts.of_source(chunk.source, self.setup.sources[chunk.source].path)
            of_source.read, of_source.kept = counts.read, counts.kept
            of_source.dropped = sum(counts.dropped.values())
            of_source.samples, of_source.tokens = counts.samples, counts.tokens
            of_source.label_tokens = counts.label_tokens
        return counts

    @property
    def columns(self) -> Sequence[Column]:
        """The columns of the samples besides the tokens."""
        return load_kind(self.setup.kind).columns

    @property
    def filler(self) -> TokenSample:
        """The only sample of a micro-batch without usable rows."""
        filler: TokenSample = load_kind(self.setup.kind).filler
        return filler

    def kind(self, source: int) -> SampleKind:
        """Return the kind of samples of a source in this process."""
        return self._encode.kinds[source]

    @property
    def _encode(self) -> ChunkEncoder:
        if self._chunk_encoder is None:
            self._chunk_encoder = ChunkEncoder.from_setup(self.setup)
        return self._chunk_encoder


def _add(row: RawRow, chunk: Chunk, malformed: RowCounts, is_start: bool) -> ConfigError | None:
    """Add a parsed row to the chunk, or count it as malformed and return the error."""
    try:
        rows = rows_of_block(row) if isinstance(row, LineBlock) else [row]
        for parsed in rows:
            chunk.take(parsed)
    except ConfigError as error:
        is_repeated = isinstance(error.__cause__, RepeatedKey)
        if is_start and is_repeated:
            raise
        malformed.read += 1
        malformed.drop(_REPEATED_KEY if is_repeated else MALFORMED, _place(row))
        return error
    return None


def _place(row: RawRow) -> Place:
    return f"line {row.first_number} of {row.path}" if isinstance(row, LineBlock) else row[0]
