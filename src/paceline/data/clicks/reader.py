"""Read a click log of the user: a file with columns for the label, dense features and IDs."""

import hashlib
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config.schema.tasks import Recommend
from paceline.core.errors import ConfigError, did_you_mean
from paceline.data.cache import fingerprint
from paceline.data.clicks.log import ClickLog, ReadLog, cache_log, load_meta
from paceline.data.sources.opening import similar_path
from paceline.data.sources.readers import TABLE_SUFFIXES, read_file
from paceline.data.sources.rows import BrokenRow, Row

_HASH_ROWS = 100_000
_SHOWN = 12


def read_clicks(path: str, settings: Recommend, train: Path | None = None) -> Path:
    """Read a file, store its rows in the cache, and return the cache folder.

    Args:
        train: for validation data, the cache folder of the training data, whose tables and
            vocabularies are used.

    Raises:
        ConfigError: the file or a column does not exist, no row is usable, or an id exceeds its
            table.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(
            "`{path}` is a folder" if file.is_dir() else "`{path}` does not exist",
            code="missing-click-log",
            allowed="builtin:clicks, or a file ({table_suffixes}) with a column of labels",
            fix=similar_path(file),
            path=path,
            table_suffixes=", ".join(TABLE_SUFFIXES),
        )
    keys = settings.model_dump(mode="json", exclude={"embedding_dim", "bottom_mlp", "top_mlp"})
    return cache_log(
        [fingerprint(file), keys, train.name if train else None],
        lambda: _ClickReader(file, settings, train).read(),
    )


class _ClickReader:
    """Convert the rows of one file to arrays."""

    def __init__(self, file: Path, settings: Recommend, train: Path | None) -> None:
        self.file = file
        self.settings = settings
        self.known = None if train is None else load_meta(train)
        self.dropped: Counter[str] = Counter()
        self.read_rows = 0
        self.labels: list[float] = []
        self.dense: list[list[float]] = []
        self.ids: list[list[int]] = [[] for _ in settings.sparse_features]
        self.starts: list[list[int]] = [[0] for _ in settings.sparse_features]
        # The hash of each value, or its index in order of appearance.
        self.values: list[dict[str, int]] = [{} for _ in settings.sparse_features]
        self.counts: list[Counter[int]] = [Counter() for _ in settings.sparse_features]
        self.sizes = [self._table_size(name) for name in settings.sparse_features]

    def _table_size(self, name: str) -> int | None:
        if self.known is not None:
            return int(self.known["tables"][self.known["names"].index(name)])
        sizes = self.settings.table_size
        size = sizes.get(name) if isinstance(sizes, dict) else sizes
        return _HASH_ROWS if size is None and self.settings.id_mapping == "hash" else size

    def read(self) -> ReadLog:
        for number, row in read_file(self.file):
            if self.read_rows == 0 and isinstance(row, dict):
                self._check_columns(row)
            self.read_rows += 1
            reason: str | None = "not an object with columns"
            if isinstance(row, BrokenRow):
                reason = row.reason
            elif isinstance(row, dict):
                reason = self._add(row, number)
            if reason:
                self.dropped[reason] += 1
        if not self.labels:
            reasons = "; ".join(f"{reason}: {count:,}" for reason, count in self.dropped.items())
            raise ConfigError(
                "`{file}` has no usable row ({reasons})",
                code="no-usable-clicks",
                fix="check `recommend.label`",
                file=self.file,
                reasons=reasons or "the file is empty",
            )
        vocabulary = self._number_vocabulary() if self.settings.id_mapping == "vocabulary" else None
        tables = tuple(
            size or max(ids, default=0) + 1 for size, ids in zip(self.sizes, self.ids, strict=True)
        )
        has_bags = self.settings.separator is not None
        log = ClickLog(
            labels=np.array(self.labels, np.float32),
            dense=np.array(self.dense, np.float32).reshape(
                len(self.labels), len(self.settings.dense_features)
            ),
            ids=[np.array(ids, np.int64) for ids in self.ids],
            starts=[np.array(starts, np.int64) if has_bags else None for starts in self.starts],
            chance=None,
            tables=tables,
            names=tuple(self.settings.sparse_features),
        )
        return log, self.read_rows, dict(self.dropped), vocabulary

    def _check_columns(self, row: Row) -> None:
        required = [
            self.settings.label,
            *self.settings.dense_features,
            *self.settings.sparse_features,
        ]
        missing = [name for name in required if name not in row]
        if missing:
            raise ConfigError(
                "`{file}` has no column {missing}",
                code="missing-click-columns",
                allowed="its columns: {columns}{more}",
                fix=did_you_mean(
                    missing[0],
                    row,
                    "set `recommend.label`, `recommend.dense_features`,"
                    " `recommend.sparse_features`",
                ),
                file=self.file,
                missing=", ".join(f"`{name}`" for name in missing),
                columns=", ".join(list(row)[:_SHOWN]),
                more=", …" if len(row) > _SHOWN else "",
            )

    def _add(self, row: Row, number: int) -> str | None:
        """Add a row, or return why it is dropped."""
        label = _number(row[self.settings.label])
        if label not in (0.0, 1.0) or row[self.settings.label] in (None, ""):
            return f"{self.settings.label} is not 0 or 1"
        dense = []
        for name in self.settings.dense_features:
            value = _number(row[name])
            if value is None:
                return f"{name} is not a number"
            dense.append(value)
        rows: list[list[int]] = []
        for column, name in enumerate(self.settings.sparse_features):
            cell = self._cell(row[name])
            ids = [self._id(column, name, value, number) for value in cell]
            rows.append([row_id for row_id in ids if row_id is not None])
            if len(rows[-1]) < len(cell):
                return f"{name} is not a row number"
        self.labels.append(label)
        self.dense.append(dense)
        for column, row_ids in enumerate(rows):
            self.ids[column] += row_ids
            self.starts[column].append(len(self.ids[column]))
            if self.settings.id_mapping == "vocabulary":
                self.counts[column].update(row_ids)
        return None

    def _cell(self, value: Any) -> list[str]:
        if self.settings.separator is None:
            return ["" if value is None else str(value)]
        parts = (
            value
            if isinstance(value, list)
            else str("" if value is None else value).split(self.settings.separator)
        )
        return [str(part).strip() for part in parts if str(part).strip()]

    def _id(self, column: int, name: str, value: str, number: int) -> int | None:
        """Return the row in the table or, with a vocabulary, the index of the value in order of
        appearance."""
        if self.settings.id_mapping == "identity":
            row_id = _number(value)
            if value == "" or row_id is None or row_id != int(row_id):
                return None
            self._check_id(column, name, int(row_id), number)
            return int(row_id)
        ids = self.values[column]
        if value not in ids:
            if self.settings.id_mapping == "hash":
                raw = hashlib.blake2b(f"{name}\0{value}".encode(), digest_size=8).digest()
                ids[value] = int.from_bytes(raw, "little") % (self.sizes[column] or _HASH_ROWS)
            else:
                ids[value] = len(ids)
        return ids[value]

    def _check_id(self, column: int, name: str, row_id: int, number: int) -> None:
        size = self.sizes[column]
        if row_id < 0 or (size is not None and row_id >= size):
            rows = "no negative rows" if size is None else f"{size:,} rows"
            raise ConfigError(
                "row {number} of `{file}`: `{name}` has the id {row_id}, but its table has {rows}",
                code="id-out-of-range",
                allowed=f"ids from 0 to {size - 1:,}" if size else "ids of at least 0",
                fix="set `recommend.table_size` to at least {next_row_id} for `{name}`, or"
                " `recommend.id_mapping: hash`",
                number=number,
                file=self.file,
                name=name,
                row_id=row_id,
                rows=rows,
                next_row_id=max(row_id, 0) + 1,
            )

    def _number_vocabulary(self) -> list[dict[str, int]]:
        """Assign a row to each value: row 0 to rare and unknown values, rows 1 and up by descending
        count, with ties in order of appearance."""
        vocabulary = []
        for column, name in enumerate(self.settings.sparse_features):
            values, counts = self.values[column], self.counts[column]
            if self.known is not None:
                rows = (self.known["vocabulary"] or [])[self.known["names"].index(name)]
            else:
                order = [
                    (-counts[first], first, value)
                    for value, first in values.items()
                    if counts[first] >= self.settings.min_count
                ]
                rows = {value: row for row, (_, _, value) in enumerate(sorted(order), 1)}
                size = self.sizes[column]
                if size is not None and len(rows) + 1 > size:
                    raise ConfigError(
                        "`{name}` of `{file}` has {num_rows} values, the last with the id"
                        " {last_id}, but its table has {size} rows (row 0 is for unknown"
                        " values)",
                        code="too-many-ids",
                        fix="set `recommend.table_size` to at least {next_num_rows} for `{name}`,"
                        " raise `recommend.min_count`, or set `recommend.id_mapping: hash`",
                        name=name,
                        file=self.file,
                        num_rows=f"{len(rows):,}",
                        last_id=len(rows),
                        size=f"{size:,}",
                        next_num_rows=len(rows) + 1,
                    )
                self.sizes[column] = size or len(rows) + 1
            new = [0] * len(values)
            for value, old in values.items():
                new[old] = int(rows.get(value, 0))
            self.ids[column] = [new[old] for old in self.ids[column]]
            vocabulary.append(rows)
        return vocabulary


def _number(value: Any) -> float | None:
    """Return a cell as a finite number: 0 if it is empty, None if it is not a number."""
    if value is None or value == "":
        return 0.0
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
