"""Prepare a run whose data is streamed: find the rows, check some of them, and tokenize nothing but
the validation data."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.config.schema import Config
from paceline.config.schema.train_args import TrainArgs
from paceline.core.errors import ConfigError
from paceline.core.files import cache_dir
from paceline.core.log import Notice
from paceline.core.texts import UserText
from paceline.data.cache import build_once, key_of
from paceline.data.counts import StreamCounts
from paceline.data.encoding.chunks import make_setup
from paceline.data.encoding.notices import column_notices, drop_reasons, nothing_kept
from paceline.data.encoding.prepare import TokenEntry, split_indices, split_notice
from paceline.data.kinds.base import KindSetup, RowCounts
from paceline.data.kinds.registry import KINDS, kind_key
from paceline.data.streaming.build import (
    CheckedRows,
    StreamRows,
    Streams,
    make_dataset,
    open_streams,
    uses_windows,
)
from paceline.data.streaming.dataset import MALFORMED, RowEncoder, StreamedRows
from paceline.data.streaming.sources import StreamSource, find_sources, without_rows
from paceline.data.streaming.streams import TextStreams
from paceline.data.streaming.tables import TableRows
from paceline.data.text.columns import Tally
from paceline.data.text.new_tokens import ResolveModel, config_tokenizer
from paceline.data.text.templates import template_key
from paceline.data.text.token_dataset import TokenWriter
from paceline.data.text.tokenizer import tokenizer_fingerprint

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
        rows: the sizes of the rows of each stream: one, or one for each source that is mixed.
        eval_folder: as in :class:`paceline.data.encoding.prepare.PreparedTokens`.
        eval_indices: None, because validation uses all samples of the folder.
    """

    dataset: TextStreams
    rows: tuple[StreamRows, ...]
    fingerprint: str
    tokenizer_path: str
    pad_token_id: int
    eval_folder: Path | None = None
    eval_indices: None = None
    num_eval: int = 0
    notices: list[Notice] = field(default_factory=list)


def prepare_stream(config: Config, kind: str, resolve_model: ResolveModel) -> PreparedStream:
    """Find the rows of the training data and check some of them. Tokenize the validation data, or
    find it in the token cache.

    Raises:
        ConfigError: the data, the tokenizer or the chat template is invalid.
        NotStreamable: the data cannot be streamed.
    """
    started, args = time.perf_counter(), config.train_args
    sources = find_sources(config)
    is_windowed = uses_windows(config, sources)
    folder = config_tokenizer(config, resolve_model)
    resolved = [source.resolved for source in sources]
    setup, notices = make_setup(config, kind, folder, resolved)
    assert setup.tokenizer is not None
    # Each process loads the tokenizer, because the dataset is sent to every rank.
    encode = RowEncoder(replace(setup, tokenizer=None, cuts_documents=is_windowed))
    streams = open_streams(sources, config)
    data_key = key_of([source.key() for source in sources])
    own = [] if kind in KINDS else [kind_key(kind)]
    key = key_of([data_key, tokenizer_fingerprint(folder), template_key(config, folder), *own])
    eval_folder, num_eval = None, 0
    if config.split_dataset_ratio > 0:
        eval_folder, num_eval, streams = _hold_out(streams, encode.setup, key, notices)
    checked = [_check_rows(rows, encode, sources, notices) for rows in streams]
    marks = [["windows"]] if is_windowed else []
    marks += [[eval_folder.name]] if eval_folder is not None else []
    dataset, sizes = make_dataset(streams, encode, checked, key, is_windowed)
    prepared = PreparedStream(
        dataset,
        sizes,
        fingerprint=key_of([key, *marks]) if marks else key,
        tokenizer_path=str(folder),
        pad_token_id=setup.tokenizer.pad_token_id,
        eval_folder=eval_folder,
        num_eval=num_eval,
    )
    notices.append(_summary(streams, sources, args, time.perf_counter() - started))
    if config.val_dataset is not None:
        entry = TokenEntry(config, kind, folder, validation=True)
        entry.build(None)
        notices += entry.notices
        prepared.eval_folder, prepared.num_eval = entry.folder, entry.samples
    prepared.notices = list(dict.fromkeys(notices))
    return prepared


def _hold_out(
    streams: Streams, setup: KindSetup, key: str, notices: list[Notice]
) -> tuple[Path | None, int, Streams]:
    """Tokenize the rows that are held out for validation. Return their folder, the number of their
    samples, and the other rows."""
    args, ratio = setup.config.train_args, setup.config.split_dataset_ratio
    tables = [rows for rows in streams if isinstance(rows, TableRows)]
    assert len(tables) == len(streams)  # others are refused
    joined = TableRows(
        [table for rows in tables for table in rows.tables],
        [source for rows in tables for source in rows.sources],
        tables[0].shuffle,
    )
    total = sum(table.num_rows for table in joined.tables)
    _, indices = split_indices(total, ratio, args.seed)
    notices.append(split_notice(len(indices), total, ratio, "row"))
    if not len(indices):
        return None, 0, streams
    settings = [
        *(setup.kind, setup.config.system, ratio, args.seed, args.max_sample_length),
        *(args.truncation_strategy, args.train_on_inputs, args.train_on_turns),
    ]
    folder = cache_dir() / "tokens" / key_of(["held out", key, settings])
    encode = RowEncoder(replace(setup, cuts_documents=True))

    def build(staging: Path) -> None:
        writer, counts = TokenWriter(staging, encode.columns), StreamCounts()
        for start in range(0, len(indices), _ENCODED_ROWS):
            part = indices[start : start + _ENCODED_ROWS].tolist()
            for chunk in encode(joined, part, is_start=True):
                writer.extend(chunk.columns, chunk.lengths, chunk.label_counts)
                counts.add(encode.counts_of(chunk))
        writer.close()
        meta = {"samples": len(writer.lengths), "counts": counts.as_dict()}
        (staging / _META).write_text(json.dumps(meta))

    build_once(folder, _META, build)
    meta = json.loads((folder / _META).read_text())
    if dropped := sum(meta["counts"]["dropped"].values()):
        text = UserText(
            "validation: {dropped} of the rows that are held out are dropped",
            code="validation-rows-dropped",
            dropped=f"{dropped:,}",
        )
        notices.append(Notice("warning", text))
    if not meta["samples"]:
        raise ConfigError(
            "no row that `split_dataset_ratio` holds out can be used",
            code="no-validation-rows",
            fix="raise `split_dataset_ratio`, or set `val_dataset`",
        )
    return folder, meta["samples"], without_rows(tables, indices)


def _check_rows(
    rows: StreamedRows, encode: RowEncoder, sources: list[StreamSource], notices: list[Notice]
) -> CheckedRows:
    """Encode some rows of each source. Add messages about their formats, and return the sizes of
    the samples.

    Raises:
        ConfigError: none of the rows can be used.
    """
    config, checked = encode.setup.config, CheckedRows()
    chunks = encode(rows, rows.checked_rows(_CHECKED_ROWS), is_start=True)
    truncated = 0
    for number in dict.fromkeys(chunk.source for chunk in chunks):
        source = sources[number].resolved
        tally, counts = Tally(), RowCounts()
        for chunk in [chunk for chunk in chunks if chunk.source == number]:
            counts.add(chunk.counts)
            checked.lengths += chunk.lengths
            checked.labels += chunk.label_counts
            tally.add(chunk.tally)
        if counts.kept == 0:
            if set(counts.dropped) == {MALFORMED} and encode.first_error is not None:
                raise encode.first_error
            raise nothing_kept(source, encode.kind(number), tally, counts)
        notices += source.notices + column_notices(source, tally, "checked row")
        if dropped := counts.dropped.total():
            text = UserText(
                "{source}: {dropped} of {read} rows that were checked are dropped. {reasons}",
                code="checked-rows-dropped",
                source=source.label,
                dropped=dropped,
                read=counts.read,
                reasons=drop_reasons(counts),
            )
            notices.append(Notice("warning", text))
        checked.num_rows += counts.read
        truncated += counts.truncated
    if truncated and config.task == "pretrain":
        text = UserText(
            "{truncated} of {read} documents that were checked are longer than max_length {limit}:"
            " the rest of each is not used. With `train_args.max_steps`, streamed documents are"
            " cut into samples",
            code="checked-documents-truncated",
            truncated=truncated,
            read=checked.num_rows,
            limit=f"{config.train_args.max_length:,}",
        )
        notices.append(Notice("warning", text))
    return checked


def _summary(
    streams: Streams, sources: list[StreamSource], args: TrainArgs, elapsed_s: float
) -> Notice:
    numbers = [rows.num_rows for rows in streams]
    known = [number for number in numbers if number is not None]
    number = f"{sum(known):,}" if len(known) == len(numbers) else "an unknown number of"
    order = "all rows are shuffled"
    if not args.shuffle:
        order = "in the order of the files"
    elif not all(rows.has_fast_rows for rows in streams):
        order = f"shuffled in windows of {args.shuffle_buffer_size:,} rows"
    num_files = sum(len(source.locations) for source in sources)
    return Notice(
        "info",
        UserText(
            "data: {number} rows in {num_files:file} are tokenized while training runs; {order};"
            " ready in {elapsed_s} s",
            code="streaming-ready",
            number=number,
            num_files=num_files,
            order=order,
            elapsed_s=f"{elapsed_s:.1f}",
        ),
    )
