"""Build the dataset of a stream from its rows: plain, packed, mixed, or packed and mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.config.schema import Config
from paceline.core.errors import NotStreamable
from paceline.core.files import cache_dir
from paceline.data.cache import key_of
from paceline.data.order.build import rows_by_source, weight_schedule
from paceline.data.streaming.dataset import RowEncoder, StreamedRows
from paceline.data.streaming.order import StreamShuffle
from paceline.data.streaming.sources import StreamSource, has_text, open_rows
from paceline.data.streaming.streams import SampleStream, Stream, TextStreams
from paceline.data.streaming.windows import PackedStream
from paceline.distributed.seeds import derive_seed

Streams = Sequence[StreamedRows]

#: Approximate number of tokens of a window, and limits of its number of rows. More tokens fill
#: packed rows better; fewer are ready sooner.
_WINDOW_TOKENS = 1 << 19
_MIN_WINDOW, _MAX_WINDOW = 16, 2048


@dataclass
class CheckedRows:
    """The numbers of tokens and of label tokens of the samples of some rows."""

    num_rows: int = 0
    lengths: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class StreamRows:
    """The rows of a stream that the batch size counts.

    Args:
        num_rows: per epoch, or None if it is unknown.
        mean_tokens, mean_labels: estimates from the rows that were checked.
        share: share of the rows at the first step.
    """

    num_rows: int | None
    mean_tokens: float
    mean_labels: float
    share: float


def uses_windows(config: Config, sources: Sequence[StreamSource]) -> bool:
    """Return whether rows are tokenized in windows: to pack them, or to cut documents into samples.

    Raises:
        NotStreamable: this requires ``max_steps``.
    """
    args = config.train_args
    texts = [source.label for source in sources if has_text(source.locations)]
    if args.packs_rows or texts:
        what = f"with `train_args.packing_strategy: {args.packing_strategy}`"
        if not args.packs_rows:
            what = f"with `{texts[0]}`, whose documents are cut into samples"
        if args.max_steps is None:
            raise NotStreamable(
                "`max_steps` is required {subject}: the number of rows of an epoch is unknown"
                " until all of them have been tokenized",
                code="missing-max-steps",
                fix="set `train_args.max_steps`, or `streaming: false`",
                subject=what,
            )
        return True
    return config.task == "pretrain" and args.max_steps is not None


def open_streams(sources: list[StreamSource], config: Config) -> Streams:
    """Return the rows of all sources together, or of each if they are mixed.

    Raises:
        NotStreamable: the mixture needs the number of rows.
    """
    args = config.train_args
    if config.mixing == "concat":
        shuffle = StreamShuffle(args.seed, args.shuffle, args.shuffle_buffer_size)
        return [open_rows(sources, config, shuffle)]
    streams = []
    for source in sources:
        seed = derive_seed(args.seed, "source", source.number)
        shuffle = StreamShuffle(seed, args.shuffle, args.shuffle_buffer_size)
        rows = open_rows([source], config, shuffle)
        if rows.num_rows is None and config.mixing == "temperature":
            raise NotStreamable(
                "`mixing: temperature` is not supported with `{source}`: the number of its rows is"
                " unknown until it has been read",
                code="temperature-with-streaming",
                fix="set `mixing: weights`, or `streaming: false`",
                source=source.label,
            )
        streams.append(rows)
    return streams


def make_dataset(
    streams: Streams,
    encode: RowEncoder,
    checked: Sequence[CheckedRows],
    key: str,
    is_windowed: bool,
) -> tuple[TextStreams, tuple[StreamRows, ...]]:
    """Return the dataset, and the sizes of its streams.

    Args:
        checked: some rows of each stream.
        key: identifies the rows and the tokenizer.
        is_windowed: the result of :func:`uses_windows`.
    """
    config = encode.setup.config
    is_mixed, args = config.mixing != "concat", config.train_args
    numbers = [None if is_windowed else rows.num_rows for rows in streams]
    is_exact = config.stopping_strategy == "all_exhausted_without_replacement"
    if is_mixed and is_exact and None in numbers:
        raise NotStreamable(
            "`stopping_strategy: all_exhausted_without_replacement` is not supported with these"
            " sources: the numbers of their rows are unknown until they have been read",
            code="stopping-strategy-with-streaming",
            fix="set `stopping_strategy: all_exhausted`, or `streaming: false`",
        )
    schedule, shares = None, [1.0]
    if is_mixed:
        schedule = weight_schedule(config, [rows.num_rows or 1 for rows in streams])
        shares = schedule.first_shares()
    sizes = tuple(
        _sizes(config, number, rows, share)
        for number, rows, share in zip(numbers, checked, shares, strict=True)
    )
    parts: list[Stream] = []
    for number, (rows, checked_rows) in enumerate(zip(streams, checked, strict=True)):
        if not is_windowed:
            parts.append(SampleStream(rows, encode))
            continue
        window_rows = _window_rows(checked_rows)
        folder = cache_dir() / "windows" / _window_key(config, key, number, window_rows)
        parts.append(PackedStream(number, rows, encode, folder, window_rows))
    return (
        TextStreams(parts, schedule, config.stopping_strategy, args.seed, encode.filler),
        sizes,
    )


def _sizes(config: Config, num_rows: int | None, checked: CheckedRows, share: float) -> StreamRows:
    """Return the sizes of the rows of a stream, from the sizes of the rows that were checked."""
    lengths = np.array(checked.lengths, dtype=np.int64)
    (rows,) = rows_by_source(config.train_args, lengths, [len(lengths)])
    number = max(1, rows.num_rows)
    return StreamRows(num_rows, sum(checked.lengths) / number, sum(checked.labels) / number, share)


def _window_rows(checked: CheckedRows) -> int:
    """Return the number of rows of a window: a power of two."""
    mean = max(1.0, sum(checked.lengths) / max(1, checked.num_rows))
    number = min(_MAX_WINDOW, max(_MIN_WINDOW, round(_WINDOW_TOKENS / mean)))
    return 1 << (number.bit_length() - 1)


def _window_key(config: Config, key: str, number: int, window_rows: int) -> str:
    """Return a key of everything on which the tokens of windows depend."""
    args = config.train_args
    return key_of(
        [
            *(key, number, window_rows, config.mixing != "concat", config.task, config.system),
            *(config.split_dataset_ratio, args.seed, args.shuffle, args.shuffle_buffer_size),
            *(args.max_sample_length, args.truncation_strategy, args.train_on_inputs),
            args.train_on_turns,
        ]
    )
