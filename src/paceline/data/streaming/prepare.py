"""Prepare a run whose data is streamed: find the rows, check some of them, and tokenize nothing but
the validation data."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.files import cache_dir
from paceline.core.formatting import counted
from paceline.core.log import Notice
from paceline.data.cache import build_once, key_of
from paceline.data.counts import StreamCounts
from paceline.data.streaming.dataset import RowEncoder, StreamedText, counts_of
from paceline.data.streaming.order import StreamShuffle
from paceline.data.streaming.sources import StreamSource, find_sources, open_rows, without_rows
from paceline.data.streaming.tables import TableRows
from paceline.data.text.build import column_notices, nothing_kept
from paceline.data.text.chunks import COUNTERS, RowCounts, Setup, make_converter, make_setup
from paceline.data.text.new_tokens import ResolveModel, config_tokenizer
from paceline.data.text.prepare import TextTask, TokenEntry, split_indices, split_notice
from paceline.data.text.templates import template_choice
from paceline.data.text.token_dataset import TokenWriter
from paceline.data.text.tokenizer import load_tokenizer, tokenizer_fingerprint

#: Number of rows that are encoded before the start, to report what is wrong with all of them and to
#: estimate lengths.
_CHECKED_ROWS = 256
#: Number of rows that are encoded at once, for validation.
_ENCODED_ROWS = 1024
_META = "meta.json"


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
        return self.dataset.num_rows


def prepare_stream(config: Config, task: TextTask, resolve_model: ResolveModel) -> PreparedStream:
    """Find the rows of the training data and check some of them. Tokenize the validation data, or
    find it in the token cache.

    Raises:
        ConfigError: the data, the tokenizer or the chat template is invalid.
        NotStreamable: the data cannot be streamed.
    """
    started, args = time.perf_counter(), config.train_args
    sources = find_sources(config)
    rows = open_rows(
        sources, config, StreamShuffle(args.seed, args.shuffle, args.shuffle_buffer_size)
    )
    folder = config_tokenizer(config, resolve_model)
    tokenizer, template = load_tokenizer(folder, config.trust_remote_code), template_choice(config)
    resolved = [source.resolved for source in sources]
    setup, notices = make_setup(config, task, folder, tokenizer, template, resolved)
    # Each process loads the tokenizer, because the dataset is sent to every rank.
    setup = replace(setup, tokenizer=None)
    data_key = key_of([source.key() for source in sources])
    key = key_of([data_key, tokenizer_fingerprint(folder), template.key])
    evaluation = None
    if config.split_dataset_ratio > 0:
        assert isinstance(rows, TableRows)  # others are refused
        evaluation, rows = _hold_out(rows, setup, key, notices)
    dataset = StreamedText(rows, setup)
    prepared = PreparedStream(
        dataset,
        *_check_rows(dataset, sources, config, notices),
        fingerprint=key if evaluation is None else key_of([key, evaluation.folder.name]),
        tokenizer_path=str(folder),
        pad_token_id=tokenizer.pad_token_id,
    )
    number = "an unknown number of" if rows.num_rows is None else f"{rows.num_rows:,}"
    order = "all rows are shuffled"
    if not args.shuffle:
        order = "in the order of the files"
    elif not rows.has_fast_rows:
        order = f"shuffled in windows of {args.shuffle_buffer_size:,} rows"
    num_files = sum(len(source.locations) for source in sources)
    notices.append(
        Notice(
            "info",
            f"data: {number} rows in {counted(num_files, 'file')} are tokenized while training"
            f" runs; {order}; ready in {time.perf_counter() - started:.1f} s",
        )
    )
    if config.val_dataset is not None:
        entry = TokenEntry(config, task, folder, validation=True)
        entry.build(None)
        notices += entry.notices
        evaluation = _Evaluation(entry.folder, entry.samples)
    if evaluation is not None:
        prepared.eval_folder, prepared.num_eval = evaluation.folder, evaluation.num_samples
    prepared.notices = list(dict.fromkeys(notices))
    return prepared


@dataclass
class _Evaluation:
    folder: Path
    num_samples: int


def _hold_out(
    rows: TableRows, setup: Setup, key: str, notices: list[Notice]
) -> tuple[_Evaluation | None, TableRows]:
    """Tokenize the rows that are held out for validation. Return them, and the other rows."""
    args, ratio = setup.config.train_args, setup.config.split_dataset_ratio
    assert rows.num_rows is not None
    _, indices = split_indices(rows.num_rows, ratio, args.seed)
    notices.append(split_notice(len(indices), rows.num_rows, ratio, "row"))
    if not len(indices):
        return None, rows
    settings = [
        *(setup.task, setup.config.system, ratio, args.seed, args.max_sample_length),
        *(args.truncation_strategy, args.train_on_inputs, args.train_on_turns),
    ]
    folder = cache_dir() / "tokens" / key_of(["held out", key, settings])
    encode = RowEncoder(setup, cuts_documents=True)

    def build(staging: Path) -> None:
        writer, counts = TokenWriter(staging), StreamCounts()
        for start in range(0, len(indices), _ENCODED_ROWS):
            for chunk in encode(rows, indices[start : start + _ENCODED_ROWS].tolist()):
                writer.extend(
                    chunk.tokens, chunk.mask, chunk.lengths, chunk.label_counts, chunk.weights
                )
                counts.add(counts_of(chunk))
        writer.close()
        meta = {"samples": len(writer.lengths), "counts": counts.as_dict()}
        (staging / _META).write_text(json.dumps(meta))

    build_once(folder, _META, build)
    meta = json.loads((folder / _META).read_text())
    if dropped := sum(meta["counts"]["dropped"].values()):
        text = f"validation: {dropped:,} of the rows that are held out are dropped"
        notices.append(Notice("warning", text))
    if not meta["samples"]:
        raise ConfigError(
            "no row that `split_dataset_ratio` holds out can be used",
            fix="raise `split_dataset_ratio`, or set `val_dataset`",
        )
    return _Evaluation(folder, meta["samples"]), without_rows(rows, indices)


def _check_rows(
    dataset: StreamedText, sources: list[StreamSource], config: Config, notices: list[Notice]
) -> tuple[np.ndarray, np.ndarray]:
    """Encode some rows of each source. Add messages about their formats, and return the numbers of
    tokens and of label tokens of the samples.

    Raises:
        ConfigError: none of the rows can be used.
    """
    lengths: list[int] = []
    labels: list[int] = []
    rows = dataset.rows.checked_rows(_CHECKED_ROWS)
    chunks = dataset.encode(dataset.rows, rows)
    encoder = dataset.encode.encoder
    for number in dict.fromkeys(chunk.source for chunk in chunks):
        source = sources[number].resolved
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
