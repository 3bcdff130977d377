"""Find the files of streamed sources, and open their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.config.schema import Config
from paceline.config.schema.data import DatasetSource
from paceline.core.errors import ConfigError, NotStreamable
from paceline.core.log import Notice
from paceline.core.texts import UserText
from paceline.data.cache import fingerprint, key_of
from paceline.data.sources.folder import find_files
from paceline.data.sources.opening import (
    Take,
    data_suffix,
    expand_braces,
    is_url,
    number_to_take,
    take_count,
)
from paceline.data.sources.readers import TEXT_SUFFIXES, is_table
from paceline.data.sources.resolve import ResolvedSource, open_source, unused_settings
from paceline.data.sources.splits import check_split
from paceline.data.streaming.line_index import HASHED_BYTES
from paceline.data.streaming.order import StreamShuffle
from paceline.data.streaming.remote import RemoteFolder, fetch, find_remote, identity, name_of
from paceline.data.streaming.shards import Shard, ShardRows
from paceline.data.streaming.tables import (
    RemainingTable,
    RowTable,
    SelectedTable,
    TableRows,
    open_table,
    split_by_table,
)


@dataclass
class StreamSource:
    """A source and its files.

    Args:
        number: its index in the config.
        locations: paths or URLs.
        take: N of `path#N`, the share of `path#P%`, or None for all rows.
    """

    number: int
    resolved: ResolvedSource
    locations: list[str]
    take: Take | None

    @property
    def label(self) -> str:
        return self.resolved.label

    def key(self) -> str:
        """Return a key of the rows and of how they are converted to samples."""
        spec = self.resolved.spec
        settings = [spec.split, spec.format, spec.columns, spec.ignore_columns, spec.roles]
        take = [] if self.take is None else [self.take]
        return key_of([[_file_key(location) for location in self.locations], settings, *take])


def find_sources(config: Config) -> list[StreamSource]:
    """Return the sources of the training data. Reads no rows.

    Raises:
        ConfigError: a source does not exist.
        NotStreamable: its rows cannot be streamed.
    """
    return [_find(number, spec) for number, spec in enumerate(config.sources())]


def _find(number: int, spec: DatasetSource) -> StreamSource:
    name, take = take_count(spec.path)
    if is_url(name):
        check_split(spec)
        remote = ResolvedSource(spec)
        locations: list[str] = []
        named: list[Path] = []
        for part in expand_braces(name):
            urls = find_remote(part, is_table)
            if isinstance(urls, RemoteFolder):
                names, notices = find_files(urls, spec)
                locations += map(urls.url, names)
                remote.notices += notices
            else:
                locations += urls
                named += [Path(name_of(url)) for url in urls]
        remote.notices += unused_settings(spec, named) if named else []
        return StreamSource(number, remote, locations, take)
    resolved = open_source(spec)
    locations = [str(path) for path in resolved.files]
    if (dataset := resolved.hub) is not None:
        if dataset.offline:
            raise NotStreamable(
                "the hub cannot be reached, so the files of `{resolved}` cannot be streamed",
                code="hub-unreachable-for-streaming",
                fix="connect to a network, or set `streaming: false` to use the downloaded copy",
                resolved=resolved.label,
            )
        locations = dataset.files()
        text = UserText(
            "{resolved}: {num_locations:file} on the hub, read when needed",
            code="hub-files",
            resolved=resolved.label,
            num_locations=len(locations),
        )
        resolved.notices.append(Notice("info", text))
    return StreamSource(number, resolved, locations, resolved.take)


def open_first_file(spec: DatasetSource) -> ResolvedSource:
    """Return a source for a preview of its rows: of a URL, only the first file is downloaded.

    Raises:
        ConfigError: the source does not exist.
        RunError: the file cannot be downloaded.
    """
    if not is_url(take_count(spec.path)[0]):
        return open_source(spec)
    source = _find(0, spec)
    first, *others = source.locations
    source.resolved.files = [fetch(first)]
    if others:
        text = UserText(
            "{source}: rows of the first of {num_locations:file}",
            code="rows-of-first-files",
            source=source.label,
            num_locations=len(source.locations),
        )
        source.resolved.notices.append(Notice("info", text))
    return source.resolved


def open_rows(
    sources: Sequence[StreamSource], config: Config, shuffle: StreamShuffle
) -> TableRows | ShardRows:
    """Return the rows of sources: by their number, if that is possible for all files.

    Raises:
        ConfigError: a source has no rows.
        NotStreamable: the rows cannot be streamed with these settings.
    """
    tables: list[RowTable] = []
    owners: list[int] = []
    for source in sources:
        of_source = _tables(source)
        if of_source is None:
            return _open_shards(sources, config, shuffle)
        if not of_source:
            raise ConfigError(
                "the dataset `{source}` has no rows",
                code="no-rows-in-source",
                fix="check the file",
                source=source.label,
            )
        if source.take is not None:
            of_source = _take(source, source.take, of_source, config.train_args.seed)
        tables += of_source
        owners += [source.number] * len(of_source)
    return TableRows(tables, owners, shuffle)


def _tables(source: StreamSource) -> list[RowTable] | None:
    """Return the tables of a source that have rows, or None if a file cannot be read by the number
    of a row."""
    tables = []
    for location in source.locations:
        table = None if is_url(location) else open_table(Path(location))
        if table is None:
            if is_url(location) and has_text([location]):
                raise ConfigError(
                    "`{location}` is plain text at a URL, which is not supported",
                    code="text-at-url",
                    allowed="tables at a URL (JSON, CSV, Parquet, Arrow, tar), or a local text",
                    fix="copy the text to a local file",
                    location=location,
                )
            if has_text([location]):
                raise NotStreamable(
                    "`{location}` cannot be streamed: it is compressed or not UTF-8",
                    code="text-not-streamable",
                    fix="convert it to UTF-8 text, or set `streaming: false`",
                    location=location,
                )
            return None
        tables.append(table)
    return [table for table in tables if table.num_rows]


def has_text(locations: Sequence[str]) -> bool:
    """Return whether some of the files are plain text."""
    return any(data_suffix(Path(name_of(name))) in TEXT_SUFFIXES for name in locations)


def _take(source: StreamSource, take: Take, tables: list[RowTable], seed: int) -> list[RowTable]:
    """Return some rows of the tables, those that a run without streaming selects."""
    total = sum(table.num_rows for table in tables)
    number = number_to_take(take, total)
    if number >= total:
        if number > total:
            text = UserText(
                "{source}: the dataset has only {total} rows; using all of them",
                code="dataset-smaller-than-selection",
                source=source.label,
                total=f"{total:,}",
            )
            source.resolved.notices.append(Notice("warning", text))
        return tables
    numbers = np.sort(np.random.default_rng(seed).permutation(total)[:number])
    parts = split_by_table(numbers, tables)
    return [SelectedTable(*pair) for pair in zip(tables, parts, strict=True) if len(pair[1])]


def without_rows(streams: Sequence[TableRows], excluded: np.ndarray) -> list[TableRows]:
    """Return the rows without those with these increasing indices, counted through all streams.

    Raises:
        ConfigError: a source has no row left.
    """
    parts = split_by_table(excluded, [table for rows in streams for table in rows.tables])
    remaining = []
    for rows in streams:
        of_stream, parts = parts[: len(rows.tables)], parts[len(rows.tables) :]
        tables = [RemainingTable(*pair) for pair in zip(rows.tables, of_stream, strict=True)]
        pairs = [pair for pair in zip(tables, rows.sources, strict=True) if pair[0].num_rows]
        if {source for _, source in pairs} != set(rows.sources):
            raise ConfigError(
                "`split_dataset_ratio` leaves no row of a source for training",
                code="split-leaves-no-rows",
                fix="add rows to it, or set `val_dataset` instead of `split_dataset_ratio`",
            )
        part = TableRows([table for table, _ in pairs], [n for _, n in pairs], rows.shuffle)
        remaining.append(part)
    return remaining


def _open_shards(
    sources: Sequence[StreamSource], config: Config, shuffle: StreamShuffle
) -> ShardRows:
    reason = (
        "the number of rows is unknown until files that are compressed, remote, or JSON without a"
        " row in each line have been read"
    )
    if config.train_args.max_steps is None:
        raise NotStreamable(
            "`max_steps` is required: {reason}, so `num_train_epochs` cannot be converted to steps",
            code="missing-max-steps-for-epochs",
            fix="set `train_args.max_steps`, or `streaming: false`",
            reason=reason,
        )
    if config.split_dataset_ratio > 0:
        raise NotStreamable(
            "`split_dataset_ratio` is not supported with these files: {reason}",
            code="split-with-streaming",
            fix="set `val_dataset`, or `streaming: false`",
            reason=reason,
        )
    for source in sources:
        if source.take is not None:
            raise NotStreamable(
                "`{source}` selects among all rows, but {reason}",
                code="selection-with-streaming",
                fix="remove `#{selection}`, or set `streaming: false`",
                source=source.label,
                reason=reason,
                selection=source.label.rpartition("#")[2],
            )
    shards = [
        Shard(location, source.number, source.resolved.spec)
        for source in sources
        for location in source.locations
    ]
    return ShardRows(shards, key_of([source.key() for source in sources]), shuffle)


def _file_key(location: str) -> list[object]:
    if is_url(location):
        return identity(location)
    # Without the modification time, which differs between copies on several hosts.
    return [data_suffix(Path(location)), *fingerprint(Path(location), HASHED_BYTES)[:2]]
