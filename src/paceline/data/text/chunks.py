"""Split the rows of sources into chunks and encode them. Chunks are encoded independently of each
other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.counts import DataCounts
from paceline.data.sources.readers import DOCUMENT, LineBlock
from paceline.data.sources.resolve import Place, ResolvedSource, rows_of_block
from paceline.data.sources.rows import MalformedRow, Unsupported
from paceline.data.text.chat_template import ChatTemplate
from paceline.data.text.encode import Encoded, Encoder
from paceline.data.text.formats import RowConverter, Sample
from paceline.data.text.tokenizer import LoadedTokenizer, load_tokenizer

TOO_LONG, NO_ANSWER = "longer than max_length", "no answer left after truncation"
NO_LABELS = "no trainable tokens"
_CHUNK_ROWS, _CHUNK_CHARS = 256, 2 << 20


@dataclass
class RowCounts(DataCounts):
    """The accounting of rows, with the place of the first dropped row by reason."""

    documents_cut: int = 0
    lone_tokens: int = 0
    shortest_overlong: int | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    first: dict[str, Place] = field(default_factory=dict)

    def add(self, other: RowCounts) -> None:
        """Add the counts of later rows."""
        for name in ("read", "kept", "truncated", "documents_cut", "lone_tokens", "excluded_turns"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        lengths = (self.shortest_overlong, other.shortest_overlong)
        self.shortest_overlong = min((length for length in lengths if length), default=None)
        self.dropped.update(other.dropped)
        self.first = {**other.first, **self.first}

    def drop(self, reason: str, place: Place) -> None:
        self.dropped[reason] += 1
        self.first.setdefault(reason, place)


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
    """The concatenated samples of a chunk, with counters.

    Args:
        tokens, mask: int32 and bool values as bytes.
        lengths, label_counts: of each sample, as in
            :class:`paceline.data.text.token_dataset.TokenDataset`.
        converted: the counters of the :class:`RowConverter`, by name.
        facts, refusals: those of the :class:`Encoder`.
    """

    source: int
    size_bytes: int
    tokens: bytes
    mask: bytes
    lengths: list[int]
    label_counts: list[int]
    counts: RowCounts
    converted: dict[str, Counter[Any]]
    facts: Counter[str]
    refusals: Counter[str]


@dataclass(frozen=True)
class Setup:
    """What a worker process needs to encode chunks. Picklable.

    Args:
        tokenizer: None if it cannot be pickled; then each process loads it from
            ``tokenizer_folder``.
        template: source of the chat template, or None.
        for_tools: source of the template for chats with tools, if it is a different one.
    """

    config: Config
    task: str
    tokenizer_folder: Path
    tokenizer: LoadedTokenizer | None
    template: str | None
    for_tools: str | None
    sources: tuple[Any, ...]  # DatasetSource


def make_encoder(
    config: Config,
    task: str,
    tokenizer: LoadedTokenizer,
    template: str | None,
    for_tools: str | None = None,
) -> Encoder:
    """Return the encoder for a config. ``template`` and ``for_tools`` are as in :class:`Setup`."""
    return Encoder(
        tokenizer,
        ChatTemplate(template, tokenizer.special_tokens, for_tools) if template else None,
        pretrain=task == "pretrain",
        train_on_inputs=config.train_args.train_on_inputs,
        last_turn_only=config.train_args.train_on_turns == "last",
        system=config.system,
    )


def make_converter(source: ResolvedSource, encoder: Encoder, config: Config) -> RowConverter:
    """Return the converter from rows of ``source`` to samples for ``encoder``."""
    spec = source.spec
    return RowConverter(
        source.label, spec.format, spec.columns, config.system, encoder.pretrain,
        ignore_columns=spec.ignore_columns, roles=spec.roles, template=encoder.template,
    )  # fmt: skip


def unsupported_row(error: Unsupported, place: Place) -> ConfigError:
    """Return the error for a dataset with a row for another kind of training."""
    return ConfigError(f"{place}: {error.what}", allowed=error.allowed, fix=error.fix)


#: The counters of a :class:`RowConverter` that are summed over chunks.
COUNTERS = ("seen", "unused", "unmatched", "ignored", "binary_labels")


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
    """Encode chunks, each with a new converter."""

    def __init__(self, setup: Setup, encoder: Encoder | None = None) -> None:
        config = setup.config
        if encoder is None:
            tokenizer = setup.tokenizer or load_tokenizer(
                setup.tokenizer_folder, config.trust_remote_code
            )
            encoder = make_encoder(config, setup.task, tokenizer, setup.template, setup.for_tools)
        self.config, self.encoder = config, encoder
        self.sources = [ResolvedSource(spec) for spec in setup.sources]

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        converter = make_converter(self.sources[chunk.source], self.encoder, self.config)
        self.encoder.facts, self.encoder.refusals = Counter(), Counter()
        samples = _Samples(self.config)
        places: list[Place] = []
        converted: list[Sample] = []
        for place, row in chunk.rows():
            samples.counts.read += 1
            try:
                converted.append(converter(row))
                places.append(place)
            except MalformedRow as reason:
                samples.counts.drop(str(reason), place)
            except Unsupported as error:
                raise unsupported_row(error, place) from None
        for place, encoded in zip(places, self.encoder(converted), strict=True):
            if isinstance(encoded, str):
                samples.counts.drop(encoded, place)
            elif encoded.is_document:
                samples.cut(encoded)
            else:
                samples.add(encoded, place)
        return EncodedChunk(
            chunk.source, chunk.size_bytes, b"".join(samples.tokens), b"".join(samples.mask),
            samples.lengths, samples.label_counts, samples.counts,
            {name: getattr(converter, name) for name in COUNTERS},
            self.encoder.facts, self.encoder.refusals,
        )  # fmt: skip


class _Samples:
    """Collect the samples of a chunk and count its rows."""

    def __init__(self, config: Config) -> None:
        self.limit = config.train_args.max_length
        self.drops_overlong = config.train_args.truncation_strategy == "drop"
        self.counts = RowCounts()
        self.tokens: list[bytes] = []
        self.mask: list[bytes] = []
        self.lengths: list[int] = []
        self.label_counts: list[int] = []

    def add(self, encoded: Encoded, place: Place) -> None:
        ids, mask, counts = encoded.input_ids, encoded.labels_mask, self.counts
        if not mask[1:].any():
            counts.drop(NO_LABELS, place)
            return
        if len(ids) > self.limit:
            counts.shortest_overlong = min(len(ids), counts.shortest_overlong or len(ids))
            if self.drops_overlong:
                counts.drop(TOO_LONG, place)
                return
            ids, mask = ids[: self.limit], mask[: self.limit]
            if not mask[1:].any():
                counts.drop(NO_ANSWER, place)
                return
            counts.truncated += 1
        counts.kept += 1
        counts.excluded_turns += encoded.excluded_turns
        self._append(ids, mask)

    def cut(self, encoded: Encoded) -> None:
        """Cut a document into consecutive samples, the last one shorter. A single token is dropped,
        because it has nothing to predict."""
        self.counts.kept += 1
        self.counts.documents_cut += len(encoded.input_ids) > self.limit
        for start in range(0, len(encoded.input_ids), self.limit):
            ids = encoded.input_ids[start : start + self.limit]
            if len(ids) < 2:
                self.counts.lone_tokens += 1
                continue
            self._append(ids, encoded.labels_mask[start : start + self.limit])

    def _append(self, ids: np.ndarray, mask: np.ndarray) -> None:
        self.tokens.append(np.ascontiguousarray(ids, dtype=np.int32).tobytes())
        self.mask.append(np.ascontiguousarray(mask, dtype=np.bool_).tobytes())
        self.lengths.append(len(ids))
        self.label_counts.append(int(np.count_nonzero(mask[1:])))
