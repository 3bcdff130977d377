"""Tokenize sources into one entry of the token cache, and account for every row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NotRequired, TypedDict

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.events import DataFigures
from paceline.core.formatting import counted
from paceline.core.log import Notice
from paceline.data.preference.dataset import PreferenceWriter
from paceline.data.progress import Progress
from paceline.data.sources.readers import is_text
from paceline.data.sources.resolve import ResolvedSource
from paceline.data.text.columns import matching_formats
from paceline.data.text.encoding.chunks import (
    NO_ANSWER,
    TOO_LONG,
    AnyConverter,
    AnyEncoder,
    EncodedChunk,
    RowCounts,
    make_chunks,
    make_converter,
    make_encoder,
    make_setup,
)
from paceline.data.text.encoding.workers import encode_chunks, start_workers
from paceline.data.text.labels import LABEL_LISTS, SIGNED_CLASSES, have_sign_only
from paceline.data.text.refused_rows import MEDIA
from paceline.data.text.templates import TemplateChoice
from paceline.data.text.token_dataset import LabelWriter, TokenWriter
from paceline.data.text.tokenizer import load_tokenizer
from paceline.data.vision_language.dataset import ImageWriter
from paceline.distributed.devices import cpu_cores

#: For less text, starting worker processes takes longer than encoding.
_PARALLEL_BYTES = 16 << 20
_MAX_WORKERS = 32


class SourceMeta(TypedDict):
    """The samples of a source. Those of an entry are in the order of its sources."""

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
    task: str,
    tokenizer_folder: Path,
    template: TemplateChoice,
    workers: int | None = None,
) -> EntryMeta:
    """Tokenize ``sources`` into ``folder``.

    Args:
        workers: number of processes that encode; None to choose it by the amount of text. It does
            not affect the result.

    Raises:
        ConfigError: no row could be used; the message explains why.
    """
    if task == "classify" and "-1" not in config.classify.labels:
        # Labels of -1 are a class as long as no other label than 1 occurs.
        classify = config.classify.model_copy(update={"labels": list(SIGNED_CLASSES)})
        signed = config.model_copy(update={"classify": classify})
        with suppress(_OtherLabels):
            return _build(
                folder, sources, signed, task, tokenizer_folder, template, workers, is_signed=True
            )
    return _build(folder, sources, config, task, tokenizer_folder, template, workers)


class _OtherLabels(Exception):
    """Labels of -1 occur among others than 1, so that they stand for missing labels."""


def _build(
    folder: Path,
    sources: list[ResolvedSource],
    config: Config,
    task: str,
    tokenizer_folder: Path,
    template: TemplateChoice,
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
        tokenizer = load_tokenizer(tokenizer_folder, config.trust_remote_code)
        setup, notices = make_setup(config, task, tokenizer_folder, tokenizer, template, sources)
        encoder = make_encoder(
            config, task, tokenizer, setup.template, setup.for_tools, tokenizer_folder
        )
        results = [
            _SourceResult(source, make_converter(source, encoder, config)) for source in sources
        ]
        chunks = (
            chunk
            for index, source in enumerate(sources)
            for chunk in make_chunks(index, source, config.train_args.seed)
        )
        encoded = encode_chunks(chunks, setup, encoder, pool, num_workers, folder / "setup.pickle")
        writers = _Writers(
            TokenWriter(folder),
            LabelWriter(folder) if task == "classify" else None,
            ImageWriter(folder) if task == "vision" else None,
            PreferenceWriter(folder) if task in ("pairs", "answers", "reward") else None,
        )
        progress = Progress(_text_bytes(sources))
        try:
            _write_all(
                _checked(encoded) if is_signed else encoded,
                results,
                encoder,
                config,
                writers,
                progress,
            )
        finally:
            progress.close()
            writers.close(has_lists=encoder.facts[LABEL_LISTS] > 0)
    return _entry_meta(results, notices, writers.tokens, encoder, config, tokenizer.pad_token_id)


def _checked(chunks: Iterable[EncodedChunk]) -> Iterator[EncodedChunk]:
    """Yield the chunks of labeled texts.

    Raises:
        _OtherLabels: some labels are -1, and others are neither -1 nor 1.
    """
    labels: set[str] = set()
    for chunk in chunks:
        labels.update(str(label) for of_sample in chunk.labels for label in of_sample)
        if "-1" in labels and not have_sign_only(labels):
            raise _OtherLabels
        yield chunk


@dataclass
class _Writers:
    """The writers of an entry's files: tokens, and those that only some tasks have."""

    tokens: TokenWriter
    labels: LabelWriter | None
    images: ImageWriter | None
    preferences: PreferenceWriter | None

    def add(self, encoded: EncodedChunk) -> None:
        """Append the samples of a chunk."""
        self.tokens.extend(
            encoded.tokens,
            encoded.mask,
            encoded.lengths,
            encoded.label_counts,
            encoded.weights,
        )
        if self.labels is not None:
            self.labels.extend(encoded.labels)
        if self.images is not None:
            self.images.extend(encoded.images)
        if self.preferences is not None:
            self.preferences.extend(encoded.chosen_lengths, encoded.margins)

    def close(self, has_lists: bool) -> None:
        """Write the files. ``has_lists`` states whether a label is a list."""
        self.tokens.close()
        if self.labels is not None:
            self.labels.close(is_multi=has_lists)
        if self.images is not None:
            self.images.close()
        if self.preferences is not None:
            self.preferences.close()


@dataclass
class _SourceResult:
    """The counts of a source's rows. The converter has further counters."""

    source: ResolvedSource
    converter: AnyConverter
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
        for name, counter in encoded.converted.items():
            getattr(self.converter, name).update(counter)

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
    encoder: AnyEncoder,
    config: Config,
    writers: _Writers,
    progress: Progress,
) -> None:
    """Write all samples, sum the counts, and check after each source that some of its rows were
    kept."""
    facts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()

    def finish(result: _SourceResult) -> None:
        encoder.facts, encoder.refusals = facts, refusals
        if result.counts.read == 0:
            raise ConfigError(
                f"the dataset `{result.source.label}` has no rows",
                fix="check the file",
            )
        if result.counts.kept == 0:
            raise nothing_kept(result.source, result.converter, encoder, result.counts, config)

    current = 0
    for encoded in chunks:
        for result in results[current : encoded.source]:
            finish(result)
        current = encoded.source
        result = results[current]
        writers.add(encoded)
        result.add(encoded)
        facts.update(encoded.facts)
        refusals.update(encoded.refusals)
        progress.add(encoded.counts.read, encoded.size_bytes)
    for result in results[current:]:
        finish(result)


def _entry_meta(
    results: list[_SourceResult],
    notices: list[Notice],
    writer: TokenWriter,
    encoder: AnyEncoder,
    config: Config,
    pad_token_id: int,
) -> EntryMeta:
    total = RowCounts()
    formats: Counter[str] = Counter()
    for result in results:
        if len(results) > 1:
            counts = result.counts
            text = f"{result.source.label}: {counts.read:,} rows read, {counts.kept:,} kept"
            notices.append(Notice("info", text))
        total.add(result.counts)
        notices += column_notices(result.source, result.converter)
        formats.update(result.converter.seen)
    notices += _row_notices(total, encoder, formats, config)
    return {
        "samples": len(writer.lengths),
        "tokens": sum(writer.lengths),
        "label_tokens": sum(writer.label_counts),
        "pad_token_id": pad_token_id,
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


def _drop_reasons(counts: RowCounts) -> str:
    return "; ".join(
        f"{reason}: {num_rows:,} (first: {counts.first[reason]})"
        for reason, num_rows in counts.dropped.most_common()
    )


def nothing_kept(
    source: ResolvedSource,
    converter: AnyConverter,
    encoder: AnyEncoder,
    counts: RowCounts,
    config: Config,
) -> ConfigError:
    """Return the error for a source of which no row can be used."""
    dropped = counts.dropped
    formats = "; ".join(f"{name}: {columns}" for name, columns in converter.formats.items())
    if converter.unmatched and converter.unmatched.total() == dropped.total():
        columns = next(iter(converter.unmatched))
        shown = f"`{source.label}` ({', '.join(columns) or 'none'})"
        if converter.format == "auto":
            what, fix = f"the columns of {shown} match no format", converter.fix
        else:
            what = f"the columns of {shown} do not match the format `{converter.format}`"
            matches = matching_formats({key: [{}] for key in columns})
            fix = f"set `format: {matches[0]}` or remove it; " if matches else ""
            fix += converter.fix
        return ConfigError(what, allowed=formats, fix=fix)
    if dropped and set(dropped) <= {TOO_LONG, NO_ANSWER}:
        what = (
            f"every sample of `{source.label}` is too long: the shortest has"
            f" {counts.shortest_overlong:,} tokens, train_args.max_length is"
            f" {config.train_args.max_length:,}"
        )
        fix = f"set `train_args.max_length` to at least {counts.shortest_overlong}"
        if TOO_LONG in dropped:
            return ConfigError(what, fix=f"{fix}, or `train_args.truncation_strategy: truncate`")
        return ConfigError(f"{what}, and no answer starts before that", fix=fix)
    refusals = encoder.refusals.most_common(1)
    refusal = f". Error of the chat template: {refusals[0][0]}" if refusals else ""
    return ConfigError(
        f"no row of `{source.label}` can be used. {_drop_reasons(counts)}{refusal}",
        allowed=formats,
        fix=f"correct the rows, or {converter.fix}",
    )


def column_notices(source: ResolvedSource, converter: AnyConverter) -> list[Notice]:
    """Return messages about the format of a source and its unused columns."""
    infos = []
    if len(converter.seen) > 1:
        counts = (f"{name} ({num_rows:,} rows)" for name, num_rows in converter.seen.most_common())
        infos.append(f"several formats: {', '.join(counts)}")
    elif converter.format == "auto" and converter.seen:
        infos.append(f"format {next(iter(converter.seen))}, detected from the columns")
    if converter.unused:
        infos.append(f"unused columns: {_names(converter.unused)}")
    if converter.ignored:
        infos.append(f"ignored by `ignore_columns`: {_names(converter.ignored)}")
    warnings = []
    missing = [
        name
        for name in converter.ignore_columns
        if name not in converter.ignored and name not in MEDIA
    ]
    if missing:
        warnings.append(f"no row has the columns {_names(missing)} of `ignore_columns`")
    if set(converter.binary_labels) & {"0", "1"} and "other" not in converter.binary_labels:
        warnings.append(
            "`label` has only the values 0 and 1 and is not used. If it marks good and bad"
            " answers, the model also learns the bad ones"
        )
    return [
        *(Notice("info", f"{source.label}: {text}") for text in infos),
        *(Notice("warning", f"{source.label}: {text}") for text in warnings),
    ]


def _names(names: Iterable[str]) -> str:
    # Text in parentheses after a name describes where it occurs.
    parts = (name.partition(" (") for name in names)
    return ", ".join(f"`{name}`{parenthesis}{where}" for name, parenthesis, where in parts)


def _row_notices(
    counts: RowCounts, encoder: AnyEncoder, formats: Counter[str], config: Config
) -> list[Notice]:
    limit, facts = config.train_args.max_length, encoder.facts
    has_answers = not encoder.pretrain
    num_pairs = formats["prompt_completion"] if has_answers else 0
    has_template = encoder.template is not None
    dropped = counts.dropped.total()
    reason = "disabled in the data"
    if config.train_args.train_on_turns == "last":
        reason = "`train_args.train_on_turns: last`"
    every_token = "train_on_inputs: every token carries loss, not only the answers"
    if counts.excluded_turns:
        every_token += ", except in turns whose loss the data disables"
    warnings = [
        (dropped, f"{dropped:,} of {counts.read:,} rows dropped. {_drop_reasons(counts)}"),
        (counts.truncated, f"{counts.truncated:,} samples truncated to max_length {limit:,}"),
        (
            counts.equal_pairs,
            f"{counted(counts.equal_pairs, 'pair')} of answers with the same tokens (first:"
            f" {counts.first_equal_pair}): no preference can be learned from them. If the answers"
            " differ only after `max_length`, raise it",
        ),
        (
            facts["unplaced"],
            f"{facts['unplaced']:,} assistant turns are changed by the chat template and carry no"
            " loss",
        ),
        (
            facts["no_eos"],
            "the tokenizer has no end-of-text token: the model will not learn where to stop",
        ),
        (
            facts["no_end_of_turn"],
            f"the chat template adds no end-of-turn token to {facts['no_end_of_turn']:,} chats: the"
            " model will not learn where to stop",
        ),
        (
            config.system and not has_template,
            "`system` has no effect, because there is no chat template",
        ),
    ]
    infos = [
        (
            counts.documents_cut,
            f"{counts.documents_cut:,} documents cut into samples of {limit:,} tokens",
        ),
        (
            counts.lone_tokens,
            f"{counts.lone_tokens:,} last samples with a single token dropped: nothing to predict",
        ),
        (
            counts.excluded_turns,
            f"{counts.excluded_turns:,} assistant turns carry no loss ({reason})",
        ),
        (
            facts["other_template"],
            f"{facts['other_template']:,} chats with tools or reasoning use the tokenizer's chat"
            f" template, because `{config.chat_template}` does not support them",
        ),
        (
            facts["trailing_turns"],
            f"{facts['trailing_turns']:,} chats do not end with an answer; the turns after the last"
            " answer are removed",
        ),
        (
            num_pairs and has_template,
            "prompts and completions are formatted as user and assistant turns of the chat"
            " template",
        ),
        (
            num_pairs and not has_template,
            "no chat template: prompts and completions are concatenated, followed by the"
            " end-of-text token",
        ),
        (
            formats["text"] and has_answers,
            "plain text has no answers: every token of it carries loss",
        ),
        (has_answers and config.train_args.train_on_inputs, every_token),
    ]
    return [
        *(Notice("warning", text) for applies, text in warnings if applies),
        *(Notice("info", text) for applies, text in infos if applies),
    ]
