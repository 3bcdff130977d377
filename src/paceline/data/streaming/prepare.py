"""Prepare a run whose data is streamed: find the rows, check some of them, and tokenize nothing but
the validation data."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from paceline.config.schema import Config
from paceline.config.schema.data import DatasetSource
from paceline.core.errors import ConfigError
from paceline.core.formatting import counted
from paceline.core.log import Notice
from paceline.data.cache import fingerprint, key_of
from paceline.data.sources.opening import data_suffix
from paceline.data.sources.readers import TEXT_SUFFIXES
from paceline.data.sources.resolve import ResolvedSource, open_source
from paceline.data.streaming.dataset import StreamedText
from paceline.data.streaming.line_index import HASHED_BYTES
from paceline.data.streaming.remote import identity, is_url, list_files
from paceline.data.streaming.shards import Shard, ShardRows
from paceline.data.streaming.tables import RowTable, TableRows, open_table
from paceline.data.text.prepare import ResolveModel, TextTask, TokenEntry
from paceline.data.text.templates import template_choice
from paceline.data.text.tokenizer import find_tokenizer, load_tokenizer, tokenizer_fingerprint

#: `streaming: auto` streams more text than this.
AUTO_BYTES = 1 << 30
#: Number of rows that are encoded before the start, to report what is wrong with all of them and to
#: estimate lengths.
_CHECKED_ROWS = 256


@dataclass
class PreparedStream:
    """The rows of a run that streams them. Picklable.

    Args:
        dataset: the training rows.
        eval_folder, eval_indices: as in :class:`paceline.data.text.prepare.PreparedTokens`.
        sample_lengths, sample_labels: numbers of tokens, and of those with loss, of some rows:
            int64 [rows].
    """

    dataset: StreamedText
    sample_lengths: np.ndarray
    sample_labels: np.ndarray
    fingerprint: str
    tokenizer_path: str
    pad_token_id: int
    eval_folder: Path | None = None
    eval_indices: np.ndarray | None = None
    num_eval: int = 0
    notices: list[Notice] = field(default_factory=list)

    @property
    def num_train(self) -> int | None:
        """Number of training rows, or None if it is unknown."""
        return self.dataset.rows.num_rows


def is_streamed(config: Config) -> bool:
    """Return whether the run streams its training data.

    With ``streaming: auto`` this depends on the size of the data only, so that the order of samples
    is the same on every host and at every start.
    """
    if config.streaming != "auto":
        return config.streaming
    if config.task not in ("sft", "pretrain") or config.split_dataset_ratio > 0:
        return False
    if config.mixing != "concat" or config.train_args.packs_rows:
        return False
    sources = [open_source(spec) for spec in config.sources()]
    sizes = [source.text_bytes() for source in sources]
    if any(size is None or source.take for size, source in zip(sizes, sources, strict=True)):
        return False
    return sum(size or 0 for size in sizes) > AUTO_BYTES and all(
        data_suffix(path) in (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
        for source in sources
        for path in source.files
    )


def prepare_stream(config: Config, task: TextTask, resolve_model: ResolveModel) -> PreparedStream:
    """Find the rows of the training data and check some of them. Tokenize the validation data, or
    find it in the token cache.

    Raises:
        ConfigError: the data, the tokenizer or the chat template is invalid, or the data cannot be
            streamed.
    """
    from paceline.data.text.chunks import make_setup

    started = time.perf_counter()
    sources = [_open_source(spec) for spec in config.sources()]
    folder = find_tokenizer(
        resolve_model(config.tokenizer or config.model), config.trust_remote_code
    )
    tokenizer, template = load_tokenizer(folder, config.trust_remote_code), template_choice(config)
    setup, notices = make_setup(config, task, folder, tokenizer, template, sources)
    files = [
        (number, location)
        for number, source in enumerate(sources)
        for location in _locations(source)
    ]
    data_key = key_of([[_file_key(location), _source_key(sources[n])] for n, location in files])
    rows = _open_rows(files, sources, config, data_key)
    # Each process loads the tokenizer, because the dataset is sent to every rank.
    dataset = StreamedText(rows, replace(setup, tokenizer=None))
    prepared = PreparedStream(
        dataset,
        *_check_rows(dataset, sources, config, notices),
        fingerprint=key_of([data_key, tokenizer_fingerprint(folder), template.key]),
        tokenizer_path=str(folder),
        pad_token_id=tokenizer.pad_token_id,
    )
    number = "an unknown number of" if rows.num_rows is None else f"{rows.num_rows:,}"
    order = "all rows are shuffled"
    if not config.train_args.shuffle:
        order = "in the order of the files"
    elif not rows.has_fast_rows:
        order = f"shuffled in windows of {config.train_args.shuffle_buffer_size:,} rows"
    notices.append(
        Notice(
            "info",
            f"data: {number} rows in {counted(len(files), 'file')} are tokenized while training"
            f" runs; {order}; ready in {time.perf_counter() - started:.1f} s",
        )
    )
    if config.val_dataset is not None:
        evaluation = TokenEntry(config, task, folder, validation=True)
        evaluation.build(None)
        prepared.eval_folder, prepared.num_eval = evaluation.folder, evaluation.samples
        notices += evaluation.notices
    prepared.notices = list(dict.fromkeys(notices))
    return prepared


def _open_source(spec: DatasetSource) -> ResolvedSource:
    if is_url(spec.path):
        return ResolvedSource(spec)
    source = open_source(spec)
    if source.take is not None:
        raise _unsupported(f"`{source.label}`, a part of the rows", "remove `#N`")
    if source.hub is not None:
        raise _unsupported(
            f"`{source.label}`, the name of a dataset",
            f"write the URL of its files, such as `hf://datasets/{source.hub.repo}/**/*.parquet`",
        )
    return source


def _locations(source: ResolvedSource) -> list[str]:
    if is_url(source.label):
        return list_files(source.label)
    return [str(path) for path in source.files]


def _open_rows(
    files: list[tuple[int, str]], sources: list[ResolvedSource], config: Config, key: str
) -> TableRows | ShardRows:
    """Return the rows of the files: by their number, if that is possible for all of them."""
    for _, location in files:
        if data_suffix(Path(location)) in TEXT_SUFFIXES:
            raise _unsupported(f"`{location}`")
    tables: list[tuple[int, RowTable]] = []
    for number, location in files:
        table = None if is_url(location) else open_table(Path(location))
        if table is None:
            return _open_shards(files, sources, config, key)
        if table.num_rows:
            tables.append((number, table))
    for number, source in enumerate(sources):
        if number not in [owner for owner, _ in tables]:
            raise ConfigError(f"the dataset `{source.label}` has no rows", fix="check the file")
    return TableRows([table for _, table in tables], [number for number, _ in tables])


def _open_shards(
    files: list[tuple[int, str]], sources: list[ResolvedSource], config: Config, key: str
) -> ShardRows:
    args = config.train_args
    if args.max_steps is None:
        raise ConfigError(
            "`max_steps` is required: the number of rows is unknown until compressed and remote"
            " files have been read, so `num_train_epochs` cannot be converted to steps",
            fix="set `train_args.max_steps`, or `streaming: false`",
        )
    shards = [Shard(location, number, sources[number].spec) for number, location in files]
    return ShardRows(shards, key, args.seed, args.shuffle, args.shuffle_buffer_size)


def _check_rows(
    dataset: StreamedText, sources: list[ResolvedSource], config: Config, notices: list[Notice]
) -> tuple[np.ndarray, np.ndarray]:
    """Encode some rows of each source. Add messages about their
    formats, and return the numbers of tokens and of label tokens of the samples.

    Raises:
        ConfigError: none of the rows can be used.
    """
    from paceline.data.text.build import column_notices, nothing_kept
    from paceline.data.text.chunks import COUNTERS, RowCounts, make_converter

    lengths: list[int] = []
    labels: list[int] = []
    rows = dataset.rows.checked_rows(_CHECKED_ROWS)
    chunks = dataset.encode([(0, row) for row in rows])
    encoder = dataset.encoder
    for number in dict.fromkeys(chunk.source for chunk in chunks):
        source = sources[number]
        converter, counts = make_converter(source, encoder, config), RowCounts()
        encoder.refusals = Counter()
        for chunk in [chunk for chunk in chunks if chunk.source == number]:
            counts.add(chunk.counts)
            lengths += chunk.lengths
            labels += chunk.label_counts
            encoder.refusals.update(chunk.refusals)
            for name in COUNTERS:
                getattr(converter, name).update(chunk.converted[name])
        if counts.kept == 0:
            raise nothing_kept(source, converter, encoder, counts, config)
        notices += source.notices + column_notices(source, converter)
        if dropped := counts.dropped.total():
            text = f"{source.label}: {dropped} of {counts.read} rows that were checked are dropped"
            notices.append(Notice("warning", text))
    return np.array(lengths, dtype=np.int64), np.array(labels, dtype=np.int64)


def _file_key(location: str) -> list[object]:
    if is_url(location):
        return identity(location)
    # Without the modification time, which differs between copies on several hosts.
    return [data_suffix(Path(location)), *fingerprint(Path(location), HASHED_BYTES)[:2]]


def _source_key(source: ResolvedSource) -> list[object]:
    spec = source.spec
    return [spec.split, spec.format, spec.columns, spec.ignore_columns, spec.roles]


def _unsupported(what: str, fix: str = "convert it to JSON lines") -> ConfigError:
    return ConfigError(
        f"`streaming: true` is not supported with {what}",
        allowed=(
            "files of rows (JSON, CSV, Parquet, Arrow), also compressed, or URLs of such files"
        ),
        fix=f"{fix}, or set `streaming: false`",
    )
