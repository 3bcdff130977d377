"""Chunks of rows to token ids. A chunk is encoded by itself: nothing that is counted or found in
one chunk changes how another one is encoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.events import DataFigures
from paceline.data.sources.readers import DOCUMENT, LineBlock
from paceline.data.sources.resolve import Place, ResolvedSource, rows_of_block
from paceline.data.sources.rows import MalformedRow, Unsupported
from paceline.data.text.chat_template import ChatTemplate
from paceline.data.text.encode import Encoded, Encoder
from paceline.data.text.formats import RowConverter, Sample
from paceline.data.text.tokenizer import LoadedTokenizer, load_tokenizer

TOO_LONG, NO_ANSWER = "longer than max_length", "no answer left after truncation"
_CHUNK_ROWS, _CHUNK_CHARS = 256, 2 << 20


@dataclass
class RowCounts:
    """What became of rows, and where the first of each kind of dropped row is."""

    read: int = 0
    kept: int = 0
    truncated: int = 0
    documents_cut: int = 0
    lone_tokens: int = 0
    excluded_turns: int = 0
    shortest_overlong: int | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    first: dict[str, Place] = field(default_factory=dict)

    def add(self, other: RowCounts) -> None:
        """Add the account of later rows."""
        for name in ("read", "kept", "truncated", "documents_cut", "lone_tokens", "excluded_turns"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        lengths = [
            counts.shortest_overlong
            for counts in (self, other)
            if counts.shortest_overlong is not None
        ]
        self.shortest_overlong = min(lengths) if lengths else None
        self.dropped.update(other.dropped)
        self.first = {**other.first, **self.first}

    def drop(self, reason: str, place: Place) -> None:
        self.dropped[reason] += 1
        self.first.setdefault(reason, place)

    def counts(self) -> DataFigures:
        return {
            "read": self.read,
            "kept": self.kept,
            "truncated": self.truncated,
            "dropped": dict(self.dropped),
            "excluded_turns": self.excluded_turns,
        }


@dataclass
class Chunk:
    """Consecutive rows of the source number ``source``.

    Args:
        parts: rows with their places, and lines that are parsed where the chunk is encoded.
        num_rows: rows and lines, blank ones included.
        num_chars: about how much text they hold.
        size_bytes: about what share of :meth:`ResolvedSource.text_bytes` they are, in bytes.
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
        """Add ``part``, and return what there was no room for."""
        if isinstance(part, LineBlock):
            room = _CHUNK_ROWS - self.num_rows
            lines, rest = part.part(0, room), part.part(room, len(part.lines))
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
        """The rows, without blank lines.

        Raises:
            ConfigError: a line that is not UTF-8 or not JSON.
        """
        for part in self.parts:
            if isinstance(part, LineBlock):
                yield from rows_of_block(part)
            else:
                yield part


@dataclass
class EncodedChunk:
    """The samples of a chunk one after the other, and what was counted.

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
    account: RowCounts
    converted: dict[str, Counter[Any]]
    facts: Counter[str]
    refusals: Counter[str]


@dataclass(frozen=True)
class Setup:
    """What a process needs to encode chunks; small enough to be sent to it.

    Args:
        tokenizer: loaded, or None if it cannot be sent; then each process loads it from
            ``tokenizer_folder``.
        template: source of the chat template, or None.
        for_tools: source of the one for chats with tools, if it is another.
    """

    config: Config
    task: str
    tokenizer_folder: Path
    tokenizer: LoadedTokenizer | None
    template: str | None
    for_tools: str | None
    sources: tuple[Any, ...]  # DatasetSource


def encoder_of(
    config: Config,
    task: str,
    tokenizer: LoadedTokenizer,
    template: str | None,
    for_tools: str | None = None,
) -> Encoder:
    """The encoder of a config's samples; ``template`` is the source of the chat template,
    ``for_tools`` that of the one for chats with tools if it is another."""
    return Encoder(
        tokenizer,
        ChatTemplate(template, tokenizer.special_tokens, for_tools) if template else None,
        pretrain=task == "pretrain",
        train_on_inputs=config.train_args.train_on_inputs,
        last_turn_only=config.train_args.train_on_turns == "last",
        system=config.system,
    )


def converter_of(source: ResolvedSource, encoder: Encoder, config: Config) -> RowConverter:
    """What turns the rows of ``source`` into samples for ``encoder``."""
    given = source.spec
    return RowConverter(
        source.label, given.format, given.columns, config.system, encoder.pretrain,
        ignore_columns=given.ignore_columns, roles=given.roles, template=encoder.template,
    )  # fmt: skip


def refusal(error: Unsupported, place: Place) -> ConfigError:
    """The error that ends the preparation of a dataset with a row for another kind of training."""
    return ConfigError(f"{place}: {error.what}", allowed=error.allowed, fix=error.fix)


#: The counters of a Converter that are added up over chunks.
COUNTERS = ("seen", "unused", "misfits", "ignored", "binary_labels")


def chunks_of(number: int, source: ResolvedSource, seed: int) -> Iterator[Chunk]:
    """Cut the rows of a source into chunks. Lines of JSON stay as they are in the file, to be
    parsed where they are encoded."""
    chunk, total, done = Chunk(number), source.text_bytes() or 0, 0
    for part in source.parts(seed):
        rest: LineBlock | tuple[Place, Any] | None = part
        while rest is not None:
            rest = chunk.take(rest)
            if chunk.is_full:
                chunk.size_bytes = int(total * source.position.share) - done
                done += chunk.size_bytes
                yield chunk
                chunk = Chunk(number)
    if chunk.parts:
        chunk.size_bytes = total - done
        yield chunk


class ChunkEncoder:
    """Encodes chunks, each with a new converter."""

    def __init__(self, setup: Setup, encoder: Encoder | None = None) -> None:
        config = setup.config
        if encoder is None:
            tokenizer = setup.tokenizer or load_tokenizer(
                setup.tokenizer_folder, config.trust_remote_code
            )
            encoder = encoder_of(config, setup.task, tokenizer, setup.template, setup.for_tools)
        self.config, self.encoder = config, encoder
        self.sources = [ResolvedSource(given) for given in setup.sources]

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        converter = converter_of(self.sources[chunk.source], self.encoder, self.config)
        self.encoder.facts, self.encoder.refusals = Counter(), Counter()
        samples = _Samples(self.config)
        places: list[Place] = []
        converted: list[Sample] = []
        for place, row in chunk.rows():
            samples.account.read += 1
            try:
                converted.append(converter(row))
                places.append(place)
            except MalformedRow as reason:
                samples.account.drop(str(reason), place)
            except Unsupported as error:
                raise refusal(error, place) from None
        for place, encoded in zip(
            places, self.encoder(converted) if converted else [], strict=True
        ):
            if isinstance(encoded, str):
                samples.account.drop(encoded, place)
            elif encoded.is_document:
                samples.cut(encoded)
            else:
                samples.add(encoded, place)
        return EncodedChunk(
            chunk.source, chunk.size_bytes, b"".join(samples.tokens), b"".join(samples.mask),
            samples.lengths, samples.label_counts, samples.account,
            {name: getattr(converter, name) for name in COUNTERS},
            self.encoder.facts, self.encoder.refusals,
        )  # fmt: skip


class _Samples:
    """Collects the samples of a chunk, and what became of each row."""

    def __init__(self, config: Config) -> None:
        self.limit, self.drops_overlong = (
            config.train_args.max_length,
            config.train_args.truncation_strategy == "drop",
        )
        self.account = RowCounts()
        self.tokens: list[bytes] = []
        self.mask: list[bytes] = []
        self.lengths: list[int] = []
        self.label_counts: list[int] = []

    def add(self, encoded: Encoded, place: Place) -> None:
        ids, mask, account = encoded.input_ids, encoded.labels_mask, self.account
        if not mask[1:].any():
            account.drop("nothing to learn from", place)
            return
        if len(ids) > self.limit:
            account.shortest_overlong = min(len(ids), account.shortest_overlong or len(ids))
            if self.drops_overlong:
                account.drop(TOO_LONG, place)
                return
            ids, mask = ids[: self.limit], mask[: self.limit]
            if not mask[1:].any():
                account.drop(NO_ANSWER, place)
                return
            account.truncated += 1
        account.kept += 1
        account.excluded_turns += encoded.excluded_turns
        self._append(ids, mask)

    def cut(self, encoded: Encoded) -> None:
        """Cut a document into consecutive samples, the last one shorter; a lone token predicts
        nothing."""
        self.account.kept += 1
        self.account.documents_cut += len(encoded.input_ids) > self.limit
        for start in range(0, len(encoded.input_ids), self.limit):
            ids = encoded.input_ids[start : start + self.limit]
            if len(ids) < 2:
                self.account.lone_tokens += 1
                continue
            self._append(ids, encoded.labels_mask[start : start + self.limit])

    def _append(self, ids: np.ndarray, mask: np.ndarray) -> None:
        self.tokens.append(np.ascontiguousarray(ids, dtype=np.int32).tobytes())
        self.mask.append(np.ascontiguousarray(mask, dtype=np.bool_).tobytes())
        self.lengths.append(len(ids))
        self.label_counts.append(int(np.count_nonzero(mask[1:])))
