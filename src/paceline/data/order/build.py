"""Choose the order of samples for a config, and compute the length of an epoch before any rank
exists."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.config.schema import Config
from paceline.config.schema.train_args import TrainArgs
from paceline.data.order.base import Order
from paceline.data.order.mixture import Mixture, WeightSchedule
from paceline.data.order.packed import PackedRows, WrappedRows
from paceline.data.order.row_orders import MixedOrder, RowOrder
from paceline.data.order.rows import Rows, SampleRows
from paceline.data.order.samples import SampleOrder


@dataclass(frozen=True)
class SourceSize:
    """A source of a mixture, or all sources together if they are not mixed.

    Args:
        num_samples: number of training samples.
        num_rows: number of rows that the batch size counts, per epoch.
        tokens, label_tokens: tokens of the samples, and those that carry loss.
    """

    name: str
    num_samples: int
    num_rows: int
    tokens: int
    label_tokens: int


def source_sizes(
    config: Config, names: Sequence[str], lengths: np.ndarray, labels: np.ndarray, ends: np.ndarray
) -> tuple[SourceSize, ...]:
    """Return the sizes of the sources.

    Args:
        names: the names of the sources.
        lengths, labels: number of tokens and of label tokens of each training sample.
        ends: index of the first sample after each source.
    """
    if config.mixing == "concat":
        names, ends = [", ".join(names)], ends[-1:]
    starts = [0, *ends[:-1].tolist()]
    rows = rows_by_source(config.train_args, lengths, ends.tolist())
    return tuple(
        SourceSize(
            name,
            int(end) - start,
            source.num_rows,
            int(lengths[start:end].sum()),
            int(labels[start:end].sum()),
        )
        for name, start, end, source in zip(names, starts, ends, rows, strict=True)
    )


def rows_per_epoch(config: Config, sources: Sequence[SourceSize], batch_size: int) -> int:
    """Return the number of rows of an epoch.

    Raises:
        ConfigError: an epoch of a mixture does not end.
    """
    if config.mixing == "concat":
        return sources[0].num_rows
    return _mixture(config, sources, batch_size).epoch_rows()


def tokens_per_row(config: Config, sources: Sequence[SourceSize]) -> float:
    """Return the mean number of tokens of a row; at the first step, if weights change."""
    means = [source.tokens / max(1, source.num_rows) for source in sources]
    if config.mixing == "concat":
        return means[0]
    shares = first_shares(config, sources)
    return sum(share * mean for share, mean in zip(shares, means, strict=True))


def first_shares(config: Config, sources: Sequence[SourceSize]) -> list[float]:
    """Return the share of the rows that each source of a mixture has at the first step."""
    return _schedule(config, sources).first_shares()


def build_order(
    config: Config,
    sources: Sequence[SourceSize],
    batch_size: int,
    steps_per_epoch: int,
    lengths: np.ndarray | None,
    num_samples: int,
    is_packed: bool,
) -> Order:
    """Return the order of a run.

    Args:
        sources: the result of :func:`source_sizes`; empty for data without tokens.
        lengths: number of tokens of each sample, or None if samples have no tokens.
        is_packed: whether the samples of a micro-batch share a row.
    """
    args = config.train_args
    # Padded rows need equal counts per rank; packed rows need equal tokens.
    balanced = lengths if is_packed else None
    is_mixed = config.mixing != "concat"
    if not sources or lengths is None or not (is_mixed or args.packs_rows):
        return SampleOrder(num_samples, batch_size, args.seed, balanced, args.shuffle)
    ends = np.cumsum([source.num_samples for source in sources]).tolist()
    rows = rows_by_source(args, lengths, ends)
    if not is_mixed:
        return RowOrder(rows[0], num_samples, batch_size, args.seed)
    mixture = _mixture(config, sources, batch_size)
    balanced = None if args.packs_rows else balanced
    return MixedOrder(rows, mixture, num_samples, steps_per_epoch, balanced)


def rows_by_source(args: TrainArgs, lengths: np.ndarray, ends: Sequence[int]) -> list[Rows]:
    """Return the rows of each source; ``ends`` as in :func:`source_sizes`."""
    rows: list[Rows] = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        if args.packs_rows:
            kind = PackedRows if args.packing_strategy == "bfd" else WrappedRows
            rows.append(kind(lengths[start:end], args.max_length, start, args.seed, args.shuffle))
        else:
            rows.append(SampleRows(start, end - start, args.seed, args.shuffle))
    return rows


def _mixture(config: Config, sources: Sequence[SourceSize], batch_size: int) -> Mixture:
    num_rows = tuple(source.num_rows for source in sources)
    schedule = _schedule(config, sources)
    return Mixture(num_rows, schedule, config.stopping_strategy, batch_size, config.train_args.seed)


def _schedule(config: Config, sources: Sequence[SourceSize]) -> WeightSchedule:
    return weight_schedule(config, [source.num_rows for source in sources])


def weight_schedule(config: Config, num_rows: Sequence[int]) -> WeightSchedule:
    """Return the weights of the sources of a mixture.

    Args:
        num_rows: number of rows of each source, for ``mixing: temperature``.
    """
    weights: list[float | Mapping[int, float]]
    if config.mixing == "temperature":
        weights = [number ** (1 / config.mixing_temperature) for number in num_rows]
    else:
        weights = [source.weight for source in config.sources()]
    return WeightSchedule.of(weights)
