"""Tokenize sources into one entry of the token cache, and account for every row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NotRequired, TypedDict

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.log import Notice
from paceline.core.report import DataFigures
from paceline.core.texts import UserText
from paceline.data.encoding.chunks import (
    ChunkEncoder,
    EncodedChunk,
    make_chunks,
    make_setup,
)
from paceline.data.encoding.notices import column_notices, nothing_kept, row_notices
from paceline.data.encoding.workers import encode_chunks, start_workers
from paceline.data.kinds.base import RowCounts, SampleKind
from paceline.data.kinds.label import SIGNED_CLASSES, have_sign_only
from paceline.data.kinds.registry import load_kind
from paceline.data.progress import RowProgress
from paceline.data.sources.readers import is_text
from paceline.data.sources.resolve import ResolvedSource
from paceline.data.text.columns import Tally
from paceline.data.text.token_dataset import TokenWriter
from paceline.distributed.devices import cpu_cores

#: For less text, starting worker processes takes longer than encoding.
_PARALLEL_BYTES = 16 << 20
_MAX_WORKERS = 32


class SourceMeta(TypedDict):
    """The samples of a source. The samples of an entry are in the order of its sources."""

    dataset: str
    samples: int
    tokens: int
    label_tokens: int


class EntryMeta(TypedDict):
    """The content of an entry's meta file."""

    samples: int
    tokens: int
    label_tokens: int
    pad_token_id: int
    counts: DataFigures
    notices: list[Notice]
    #: Missing in entries of earlier versions.
    sources: NotRequired[list[SourceMeta]]
    #: The names of the sources in ``notices``; missing in entries of earlier versions.
    names: NotRequired[list[list[str]]]


def build_entry(
    folder: Path,
    sources: list[ResolvedSource],
    config: Config,
    kind: str,
    tokenizer_folder: Path,
    workers: int | None = None,
) -> EntryMeta:
    """Tokenize ``sources`` into ``folder``.

    Args:
        kind: name of the kind of samples.
        workers: number of processes that encode; None to choose it by the amount of text. It does
            not affect the result.

    Raises:
        ConfigError: no row could be used; the message explains why.
    """
    if kind == "classify" and "-1" not in config.classify.labels:
        # Labels of -1 are a class as long as no other label than 1 occurs.
        classify = config.classify.model_copy(update={"labels": list(SIGNED_CLASSES)})
        signed = config.model_copy(update={"classify": classify})
        with suppress(_OtherLabels):
            return _build(folder, sources, signed, kind, tokenizer_folder, workers, is_signed=True)
    return _build(folder, sources, config, kind, tokenizer_folder, workers)


class _OtherLabels(Exception):
    """Labels of -1 occur among others than 1, so that they stand for missing labels."""


def _build(
    folder: Path,
    sources: list[ResolvedSource],
    config: Config,
    kind_name: str,
    tokenizer_folder: Path,
    workers: int | None,
    *,
    is_signed: bool = False,
) -> EntryMeta:
    """Tokenize ``sources``, as :func:`build_entry` describes it.

    Args:
        is_signed: whether -1 is a class of labeled texts only beside 1.

    Raises:
        _OtherLabels: the labels are signed, and there are others than -1 and 1.
    """
    num_workers = _num_workers(sources) if workers is None else workers
    with start_workers(num_workers) as pool:
        setup, notices = make_setup(config, kind_name, tokenizer_folder, sources)
        kind = load_kind(kind_name)(setup)
        encode = ChunkEncoder([kind.for_source(source) for source in sources])
        results = [_SourceResult(source, kind) for source in sources]
        chunks = (
            chunk
            for index, source in enumerate(sources)
            for chunk in make_chunks(index, source, config.train_args.seed)
        )
        encoded = encode_chunks(chunks, setup, encode, pool, num_workers, folder / "setup.pickle")
        writer = TokenWriter(folder, kind.columns)
        progress = RowProgress(_text_bytes(sources))
        try:
            chunks_to_write = _checked(encoded) if is_signed else encoded
            _write_all(chunks_to_write, results, writer, progress)
        finally:
            progress.close()
            writer.close()
    return _entry_meta(results, notices, writer, kind)


def _checked(chunks: Iterable[EncodedChunk]) -> Iterator[EncodedChunk]:
    """Yield the chunks of labeled texts.

    Raises:
        _OtherLabels: some labels are -1, and others are neither -1 nor 1.
    """
    labels: set[str] = set()
    for chunk in chunks:
        labels.update(
            str(label)
            for value in chunk.columns["label"]
            for label in (value if isinstance(value, list) else [value])
        )
        if "-1" in labels and not have_sign_only(labels):
            raise _OtherLabels
        yield chunk


@dataclass
class _SourceResult:
    """The counts of a source's rows."""

    source: ResolvedSource
    kind: SampleKind
    tally: Tally = field(default_factory=Tally)
    counts: RowCounts = field(default_factory=RowCounts)
    samples: int = 0
    tokens: int = 0
    label_tokens: int = 0

    def add(self, encoded: EncodedChunk) -> None:
        """Add the counts of a chunk."""
        self.samples += len(encoded.lengths)
        self.tokens += sum(encoded.lengths)
        self.label_tokens += sum(encoded.label_counts)
        self.counts.add(encoded.counts)
        self.tally.add(encoded.tally)

    def meta(self) -> SourceMeta:
        return {
            "dataset": self.source.label,
            "samples": self.samples,
            "tokens": self.tokens,
            "label_tokens": self.label_tokens,
        }


def _write_all(
    chunks: Iterable[EncodedChunk],
    results: list[_SourceResult],
    writer: TokenWriter,
    progress: RowProgress,
) -> None:
    """Write all samples, sum the counts, and check after each source that some of its rows were
    kept."""

    def finish(result: _SourceResult) -> None:
        if result.counts.read == 0:
            raise ConfigError(
                "the dataset `{source}` has no rows",
                code="no-rows-in-source",
                fix="check the file",
                source=result.source.label,
            )
        if result.counts.kept == 0:
            raise nothing_kept(result.source, result.kind, result.tally, result.counts)

    current = 0
    for encoded in chunks:
        for result in results[current : encoded.source]:
            finish(result)
        current = encoded.source
        writer.extend(encoded.columns, encoded.lengths, encoded.label_counts)
        results[current].add(encoded)
        progress.add(encoded.counts.read, encoded.size_bytes)
    for result in results[current:]:
        finish(result)


def _entry_meta(
    results: list[_SourceResult], notices: list[Notice], writer: TokenWriter, kind: SampleKind
) -> EntryMeta:
    total, tally = RowCounts(), Tally()
    for result in results:
        if len(results) > 1:
            counts = result.counts
            text = UserText(
                "{source}: {read} rows read, {kept} kept",
                code="rows-read",
                source=result.source.label,
                read=f"{counts.read:,}",
                kept=f"{counts.kept:,}",
            )
            notices.append(Notice("info", text))
        total.add(result.counts)
        tally.add(result.tally)
        notices += column_notices(result.source, result.tally)
    notices += row_notices(total, kind, tally)
    return {
        "samples": len(writer.lengths),
        "tokens": sum(writer.lengths),
        "label_tokens": sum(writer.label_counts),
        "pad_token_id": kind.tokenizer.pad_token_id,
        "counts": total.as_dict(),
        "notices": notices,
        "sources": [result.meta() for result in results],
    }


def _text_bytes(sources: list[ResolvedSource]) -> int | None:
    sizes = [source.text_bytes() for source in sources]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _num_workers(sources: list[ResolvedSource]) -> int:
    """Return the number of processes that encode: one for a small amount of text, else one per
    core."""
    size = _text_bytes(sources)
    # Documents are few; the tokenizer encodes the pieces of one on all cores.
    has_documents_only = all(
        source.hub is None and all(map(is_text, source.files)) for source in sources
    )
    if has_documents_only or (size is not None and size < _PARALLEL_BYTES):
        return 1
    return min(cpu_cores(), _MAX_WORKERS)
