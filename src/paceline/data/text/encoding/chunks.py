"""Split the rows of sources into chunks, and encode a chunk.

Chunks are encoded independently of each other, so the number of workers and their speed affect
neither tokens nor counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.log import Notice
from paceline.data.counts import DataCounts
from paceline.data.preference.encode import PreferenceEncoder
from paceline.data.preference.rows import AnswerConverter, MarginConverter, PairConverter
from paceline.data.sources.readers import DOCUMENT, LineBlock
from paceline.data.sources.resolve import Place, ResolvedSource, rows_of_block
from paceline.data.sources.rows import BrokenRow, MalformedRow, Unsupported
from paceline.data.text.chat_template import ChatTemplate
from paceline.data.text.encoding.encoder import Encoded, Encoder
from paceline.data.text.formats import RowConverter
from paceline.data.text.labels import LabelConverter, LabelEncoder
from paceline.data.text.sample import Sample
from paceline.data.text.templates import TemplateChoice
from paceline.data.text.token_dataset import Label
from paceline.data.text.tokenizer import LoadedTokenizer, load_tokenizer
from paceline.data.vision_language.encode import ImageChatTemplate, ImageEncoder
from paceline.data.vision_language.images import ImageProcessor
from paceline.data.vision_language.rows import ImageRowConverter, with_paths

TOO_LONG, NO_ANSWER = "longer than max_length", "no answer left after truncation"
NO_LABELS = "no trainable tokens"
_CHUNK_ROWS, _CHUNK_CHARS = 256, 2 << 20

AnyEncoder = Encoder | LabelEncoder
AnyConverter = RowConverter | LabelConverter | PairConverter | AnswerConverter


@dataclass
class RowCounts(DataCounts):
    """Row counts, with the place of the first dropped row for each reason, and of the first of the
    ``equal_pairs``, whose answers have the same tokens."""

    documents_cut: int = 0
    lone_tokens: int = 0
    equal_pairs: int = 0
    first_equal_pair: Place | None = None
    shortest_overlong: int | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    first: dict[str, Place] = field(default_factory=dict)

    def add(self, other: DataCounts) -> None:
        super().add(other)
        self.dropped = Counter(self.dropped)
        if isinstance(other, RowCounts):
            self.documents_cut += other.documents_cut
            self.lone_tokens += other.lone_tokens
            self.equal_pairs += other.equal_pairs
            self.first_equal_pair = self.first_equal_pair or other.first_equal_pair
            lengths = (self.shortest_overlong, other.shortest_overlong)
            self.shortest_overlong = min((length for length in lengths if length), default=None)
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
    """The samples of a chunk, with counters.

    Args:
        max_length, drops_overlong: the limit of a sample in tokens, if any, and whether longer ones
            are dropped.
        tokens, mask: int32 and bool values of each sample as bytes.
        lengths, label_counts: numbers of each sample, as in
            :class:`paceline.data.text.token_dataset.TokenDataset`.
        labels: labels of each labeled text.
        images: images of each sample.
        weights: factor of each sample's loss; None if the source has none.
        chosen_lengths, margins: values of each sample with preferences.
        converted: the counters of the :class:`RowConverter`, by name.
        facts, refusals: counters of the :class:`Encoder`.
    """

    source: int
    size_bytes: int
    max_length: int | None
    drops_overlong: bool
    tokens: list[bytes] = field(default_factory=list)
    mask: list[bytes] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    label_counts: list[int] = field(default_factory=list)
    labels: list[tuple[Label, ...]] = field(default_factory=list)
    images: list[tuple[str | bytes, ...]] = field(default_factory=list)
    weights: list[float | None] = field(default_factory=list)
    chosen_lengths: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    counts: RowCounts = field(default_factory=RowCounts)
    converted: dict[str, Counter[Any]] = field(default_factory=dict)
    facts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def add(self, encoded: Encoded, place: Place) -> None:
        """Add a sample, truncate or drop it."""
        ids, mask, counts = encoded.input_ids, encoded.labels_mask, self.counts
        if encoded.labels is not None:
            self._add_labeled(encoded, encoded.labels, place)
            return
        if encoded.chosen_length is not None:
            self._add_answers(encoded, encoded.chosen_length, place)
            return
        if not mask[1:].any():
            counts.drop(NO_LABELS, place)
            return
        if self.max_length is not None and len(ids) > self.max_length:
            counts.shortest_overlong = min(len(ids), counts.shortest_overlong or len(ids))
            if self.drops_overlong or encoded.min_length > self.max_length:
                counts.drop(TOO_LONG, place)
                return
            ids, mask = ids[: self.max_length], mask[: self.max_length]
            if not mask[1:].any():
                counts.drop(NO_ANSWER, place)
                return
            counts.truncated += 1
        counts.kept += 1
        counts.excluded_turns += encoded.excluded_turns
        self._append(ids, mask, encoded.images, encoded.weight)

    def _add_labeled(self, encoded: Encoded, labels: tuple[Label, ...], place: Place) -> None:
        length = len(encoded.input_ids)
        # The encoder truncates, unless longer texts are dropped.
        if self.max_length is not None and length > self.max_length:
            self.counts.shortest_overlong = min(length, self.counts.shortest_overlong or length)
            self.counts.drop(TOO_LONG, place)
            return
        self.counts.kept += 1
        self.counts.truncated += encoded.is_truncated
        self.labels.append(labels)
        self._append(encoded.input_ids, encoded.labels_mask)

    def _add_answers(self, encoded: Encoded, chosen_length: int, place: Place) -> None:
        """Add an answer, or a pair of them as one sample. Each is truncated on its own; a pair is
        dropped if one of them is."""
        ids, mask, counts = encoded.input_ids, encoded.labels_mask, self.counts
        longest = max(chosen_length, len(ids) - chosen_length)
        limit = self.max_length or longest
        if longest > limit:
            counts.shortest_overlong = min(longest, counts.shortest_overlong or longest)
            if self.drops_overlong:
                counts.drop(TOO_LONG, place)
                return
        ends = sorted({chosen_length, len(ids)} - {0})
        parts = [slice(start, min(end, start + limit)) for start, end in pairwise([0, *ends])]
        if not all(mask[part][1:].any() for part in parts):
            counts.drop(NO_ANSWER if longest > limit else NO_LABELS, place)
            return
        counts.kept += 1
        counts.truncated += longest > limit
        if len(parts) == 2 and np.array_equal(ids[parts[0]], ids[parts[1]]):
            counts.equal_pairs += 1
            counts.first_equal_pair = counts.first_equal_pair or place
        self.chosen_lengths.append(min(chosen_length, limit))
        self.margins.append(encoded.margin)
        self._append(
            np.concatenate([ids[part] for part in parts]),
            np.concatenate([mask[part] for part in parts]),
        )

    def cut(self, encoded: Encoded) -> None:
        """Cut a document into consecutive samples, the last one shorter. A single token is dropped,
        because it has nothing to predict."""
        self.counts.kept += 1
        limit = self.max_length or max(1, len(encoded.input_ids))
        self.counts.documents_cut += len(encoded.input_ids) > limit
        for start in range(0, len(encoded.input_ids), limit):
            ids = encoded.input_ids[start : start + limit]
            if len(ids) < 2:
                self.counts.lone_tokens += 1
                continue
            self._append(ids, encoded.labels_mask[start : start + limit], weight=encoded.weight)

    def _append(
        self,
        ids: np.ndarray,
        mask: np.ndarray,
        images: tuple[str | bytes, ...] = (),
        weight: float | None = None,
    ) -> None:
        self.images.append(images)
        self.weights.append(weight)
        self.tokens.append(np.ascontiguousarray(ids, dtype=np.int32).tobytes())
        self.mask.append(np.ascontiguousarray(mask, dtype=np.bool_).tobytes())
        self.lengths.append(len(ids))
        self.label_counts.append(int(np.count_nonzero(mask[1:])))


@dataclass(frozen=True)
class Setup:
    """The settings with which a worker process encodes chunks. Picklable.

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


def make_setup(
    config: Config,
    task: str,
    tokenizer_folder: Path,
    tokenizer: LoadedTokenizer,
    template: TemplateChoice,
    sources: Iterable[ResolvedSource],
) -> tuple[Setup, list[Notice]]:
    """Return the settings of the worker processes, and messages about the chat template."""
    text, notices = template.choose(tokenizer)
    setup = Setup(
        config,
        task,
        tokenizer_folder,
        None if tokenizer.python is not None else tokenizer,
        text,
        template.for_tools(tokenizer),
        tuple(source.spec for source in sources),
    )
    return setup, notices


def make_encoder(
    config: Config,
    task: str,
    tokenizer: LoadedTokenizer,
    template: str | None,
    for_tools: str | None = None,
    folder: Path | None = None,
) -> AnyEncoder:
    """Return the encoder for a config. ``template`` and ``for_tools`` are as in :class:`Setup`;
    ``folder``: folder of the tokenizer, with the processor of a vision-language model."""
    if task == "classify":
        truncates = config.train_args.truncation_strategy == "truncate"
        return LabelEncoder(tokenizer, config.train_args.max_length if truncates else None)
    kind: Callable[..., Encoder] = Encoder
    if task in ("pairs", "answers", "reward"):
        kind = partial(PreferenceEncoder, has_pairs=task != "answers")
    template_kind: Callable[..., ChatTemplate] = ChatTemplate
    if task == "vision":
        assert folder is not None
        images = ImageProcessor(folder, config.vision.max_pixels, config.trust_remote_code)
        kind = partial(ImageEncoder, images=images)
        template_kind = partial(ImageChatTemplate, image_token=images.token)
    chat_template = None
    if template:
        special, control = tokenizer.special_tokens, tokenizer.control_tokens
        chat_template = template_kind(template, special, for_tools, control)
    return kind(
        tokenizer,
        chat_template,
        pretrain=task == "pretrain",
        train_on_inputs=config.train_args.train_on_inputs,
        last_turn_only=config.train_args.train_on_turns == "last",
        system=config.system,
    )


def make_converter(source: ResolvedSource, encoder: AnyEncoder, config: Config) -> AnyConverter:
    """Return the converter from rows of ``source`` to samples for ``encoder``."""
    spec = source.spec
    if isinstance(encoder, LabelEncoder):
        classes = config.classify.labels
        return LabelConverter(source.label, spec.columns, spec.ignore_columns, classes)
    kind: Callable[..., RowConverter | PairConverter | AnswerConverter] = RowConverter
    if isinstance(encoder, ImageEncoder):
        kind = partial(ImageRowConverter, max_images=config.vision.max_images)
    if isinstance(encoder, PreferenceEncoder):
        kind = PairConverter if encoder.has_pairs else AnswerConverter
        if config.task == "reward":
            kind = MarginConverter
    return kind(
        source.label, spec.format, spec.columns, config.system, encoder.pretrain,
        ignore_columns=spec.ignore_columns, roles=spec.roles, template=encoder.template,
    )  # fmt: skip


def convert_row(converter: AnyConverter, row: Any, place: Place, config: Config) -> Sample:
    """Convert a row to a sample, with the paths of its images.

    Raises:
        MalformedRow: the row cannot be used.
        Unsupported: the dataset needs another kind of training.
    """
    if isinstance(row, BrokenRow):
        raise MalformedRow(row.reason)
    sample = converter(row)
    return with_paths(sample, place, config.vision.images_folder)


def unsupported_row(error: Unsupported, place: Place) -> ConfigError:
    """Return the error for a dataset with a row for another kind of training."""
    return ConfigError(
        f"{place}: {error.what}",
        code="data-of-another-method",
        allowed=error.allowed,
        fix=error.fix,
    )


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
    """Encode chunks, each with a new converter.

    Args:
        cuts_documents: whether a document becomes several samples; otherwise it is truncated as any
            other sample.
    """

    def __init__(
        self, setup: Setup, encoder: AnyEncoder | None = None, *, cuts_documents: bool = True
    ) -> None:
        config = setup.config
        if encoder is None:
            tokenizer = setup.tokenizer or load_tokenizer(
                setup.tokenizer_folder, config.trust_remote_code
            )
            encoder = make_encoder(
                config,
                setup.task,
                tokenizer,
                setup.template,
                setup.for_tools,
                setup.tokenizer_folder,
            )
        self.config, self.encoder, self.cuts_documents = config, encoder, cuts_documents
        self.sources = [ResolvedSource(spec) for spec in setup.sources]

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        converter = make_converter(self.sources[chunk.source], self.encoder, self.config)
        self.encoder.facts, self.encoder.refusals = Counter(), Counter()
        args = self.config.train_args
        result = EncodedChunk(
            chunk.source,
            chunk.size_bytes,
            args.max_sample_length,
            args.truncation_strategy == "drop",
        )
        places: list[Place] = []
        samples: list[Sample] = []
        for place, row in chunk.rows():
            result.counts.read += 1
            try:
                samples.append(convert_row(converter, row, place, self.config))
                places.append(place)
            except MalformedRow as reason:
                result.counts.drop(str(reason), place)
            except Unsupported as error:
                raise unsupported_row(error, place) from None
        for place, encoded in zip(places, self.encoder(samples), strict=True):
            if isinstance(encoded, str):
                result.counts.drop(encoded, place)
            elif encoded.is_document and self.cuts_documents:
                result.cut(encoded)
            else:
                result.add(encoded, place)
        result.converted = {name: getattr(converter, name) for name in COUNTERS}
        result.facts, result.refusals = self.encoder.facts, self.encoder.refusals
        return result
