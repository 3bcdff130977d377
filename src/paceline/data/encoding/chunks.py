"""Split the rows of sources into chunks, and encode a chunk.

Chunks are encoded independently of each other, so the number of workers and their speed affect
neither tokens nor counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config.schema import Config
from paceline.core.log import Notice
from paceline.data.kinds.base import Encoded, KindSetup, RowCounts, SampleKind
from paceline.data.kinds.registry import load_kind
from paceline.data.sources.readers import DOCUMENT, LineBlock
from paceline.data.sources.resolve import Place, ResolvedSource, rows_of_block
from paceline.data.sources.rows import MalformedRow
from paceline.data.text.chats.environment_tools import tools_of
from paceline.data.text.columns import Tally
from paceline.data.text.templates import template_choice
from paceline.data.text.tokenizer import load_tokenizer

_CHUNK_ROWS, _CHUNK_CHARS = 256, 2 << 20


@dataclass
class Chunk:
    """Consecutive rows of the source with the index ``source``.

    Args:
        parts: rows with their places, and unparsed lines.
        num_rows: number of rows and lines, including blank lines.
        num_chars: approximate number of characters of text.
        size_bytes: their approximate part of :meth:`ResolvedSource.text_bytes`, in bytes.
    """

    source: int
    parts: list[LineBlock | tuple[Place, Any]] = field(default_factory=list)
    num_rows: int = 0
    num_chars: int = 0
    size_bytes: int = 0

    @property
    def is_full(self) -> bool:
        return self.num_rows >= _CHUNK_ROWS or self.num_chars >= _CHUNK_CHARS

    def take(self, part: LineBlock | tuple[Place, Any]) -> LineBlock | None:
        """Add ``part``, and return the lines that did not fit."""
        if isinstance(part, LineBlock):
            capacity = _CHUNK_ROWS - self.num_rows
            lines, rest = part.part(0, capacity), part.part(capacity, len(part.lines))
            self.parts.append(lines)
            self.num_rows += len(lines.lines)
            self.num_chars += sum(map(len, lines.lines))
            return rest if rest.lines else None
        self.parts.append(part)
        self.num_rows += 1
        if isinstance(row := part[1], dict):
            text = row.get(DOCUMENT) or row.get("text")
            self.num_chars += len(text) if isinstance(text, str) else 0
        return None

    def rows(self) -> Iterator[tuple[Place, Any]]:
        """Yield the rows, without blank lines.

        Raises:
            ConfigError: a line is not UTF-8 or not JSON.
        """
        for part in self.parts:
            if isinstance(part, LineBlock):
                yield from rows_of_block(part)
            else:
                yield part


@dataclass
class EncodedChunk:
    """The samples of a chunk, with counters.

    Args:
        columns: the values of the kind's columns. ``input_ids`` and ``labels_mask`` are the int32
            and bool values of each sample as bytes.
        lengths, label_counts: numbers of each sample, as in
            :class:`paceline.data.text.token_dataset.TokenDataset`.
        tally: the counters of the kind.
    """

    source: int
    size_bytes: int
    columns: dict[str, list[Any]]
    lengths: list[int] = field(default_factory=list)
    label_counts: list[int] = field(default_factory=list)
    counts: RowCounts = field(default_factory=RowCounts)
    tally: Tally = field(default_factory=Tally)

    def append(self, encoded: Encoded) -> None:
        """Append a sample."""
        ids, mask = encoded.input_ids, encoded.labels_mask
        for name, values in self.columns.items():
            values.append(encoded.values.get(name))
        self.columns["input_ids"][-1] = np.ascontiguousarray(ids, dtype=np.int32).tobytes()
        self.columns["labels_mask"][-1] = np.ascontiguousarray(mask, dtype=np.bool_).tobytes()
        self.lengths.append(len(ids))
        self.label_counts.append(int(np.count_nonzero(mask[1:])))


def make_setup(
    config: Config, kind: str, folder: Path, sources: Iterable[ResolvedSource]
) -> tuple[KindSetup, list[Notice]]:
    """Return what processes encode samples with, and messages about the chat template.

    Args:
        folder: the folder of the tokenizer.
    """
    tokenizer, template = load_tokenizer(folder, config.trust_remote_code), template_choice(config)
    text, notices = template.choose(tokenizer)
    for_tools, specs = template.for_tools(tokenizer), tuple(source.spec for source in sources)
    setup = KindSetup(
        config,
        kind,
        folder,
        tokenizer,
        text,
        for_tools,
        template.arguments,
        sources=specs,
        tools=tools_of(config) if kind == "prompts" else (),
    )
    return setup, notices


def make_chunks(index: int, source: ResolvedSource, seed: int) -> Iterator[Chunk]:
    """Split the rows of the source with this index into chunks. Lines of JSON are not parsed."""
    chunk, total, done = Chunk(index), source.text_bytes() or 0, 0
    for part in source.parts(seed):
        rest: LineBlock | tuple[Place, Any] | None = part
        while rest is not None:
            rest = chunk.take(rest)
            if chunk.is_full:
                chunk.size_bytes = int(total * source.position.share) - done
                done += chunk.size_bytes
                yield chunk
                chunk = Chunk(index)
    if chunk.parts:
        chunk.size_bytes = total - done
        yield chunk


class ChunkEncoder:
    """Encode chunks.

    Args:
        kinds: the kind of samples for each source.
    """

    def __init__(self, kinds: list[SampleKind]) -> None:
        self.kinds = kinds

    @classmethod
    def from_setup(cls, setup: KindSetup) -> ChunkEncoder:
        """Return the encoder of a process."""
        kind = load_kind(setup.kind)(setup)
        return cls([kind.for_source(ResolvedSource(spec)) for spec in setup.sources])

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        kind = self.kinds[chunk.source]
        names = ("input_ids", "labels_mask", *(column.name for column in kind.columns))
        result = EncodedChunk(chunk.source, chunk.size_bytes, {name: [] for name in names})
        counts = result.counts
        places: list[Place] = []
        samples: list[Any] = []
        for place, row in chunk.rows():
            counts.read += 1
            try:
                samples.append(kind.read(row, place))
                places.append(place)
            except MalformedRow as reason:
                counts.drop(str(reason), place)
        for place, encoded in zip(places, kind.encode(samples), strict=True):
            if isinstance(encoded, str):
                counts.drop(encoded, place)
                continue
            for part in kind.fit(encoded, counts, place):
                result.append(part)
        result.tally = kind.tally.take()
        return result
