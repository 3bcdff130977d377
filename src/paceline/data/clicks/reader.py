"""The user's own click logs: a file with columns of labels, numbers and ids."""

import hashlib
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config.schema.tasks import Recommend
from paceline.core.errors import ConfigError, did_you_mean
from paceline.data.cache import fingerprint
from paceline.data.clicks.log import ClickLog, ReadLog, stored, stored_meta
from paceline.data.sources.readers import TABLE_SUFFIXES, read_file
from paceline.data.sources.rows import Row

_HASH_ROWS = 100_000
_SHOWN = 12


def read_clicks(given: str, settings: Recommend, train: Path | None = None) -> Path:
    """Read a file into the cache; returns its folder there.

    Args:
        train: folder of the training data in the cache, where this file is validation data: its
            tables and vocabularies hold.

    Raises:
        ConfigError: no such file or column, no usable row, or ids that a table has no row for
            (named with the column, the id and the table's size).
    """
    file = Path(given).expanduser()
    if not file.is_file():
        is_folder = file.parent.is_dir()
        siblings = [path.name for path in file.parent.iterdir()] if is_folder else []
        raise ConfigError(
            f"`{given}` is {'a folder' if file.is_dir() else 'not there'}",
            allowed=(
                f"builtin:clicks, or a file ({', '.join(TABLE_SUFFIXES)}) with a column of labels"
            ),
            fix=did_you_mean(file.name, siblings, form=f"`{file.parent / '{}'}`"),
        )
    keys = settings.model_dump(mode="json", exclude={"embedding_dim", "bottom_mlp", "top_mlp"})
    return stored(
        [fingerprint(file), keys, train.name if train else None],
        lambda: _Reader(file, settings, train).read(),
    )


class _Reader:
    """One file's rows into arrays."""

    def __init__(self, file: Path, settings: Recommend, train: Path | None) -> None:
        self.file = file
        self.settings = settings
        self.known = None if train is None else stored_meta(train)
        self.dropped: Counter[str] = Counter()
        self.read_rows = 0
        self.labels: list[float] = []
        self.dense: list[list[float]] = []
        self.ids: list[list[int]] = [[] for _ in settings.sparse_features]
        self.starts: list[list[int]] = [[0] for _ in settings.sparse_features]
        self.values: list[dict[str, int]] = [
            {} for _ in settings.sparse_features
        ]  # a value's hash, or its place in order of coming
        self.counts: list[Counter[int]] = [Counter() for _ in settings.sparse_features]
        self.sizes = [self._given_size(name) for name in settings.sparse_features]

    def _given_size(self, name: str) -> int | None:
        if self.known is not None:
            return int(self.known["tables"][self.known["names"].index(name)])
        given = self.settings.table_size
        size = given.get(name) if isinstance(given, dict) else given
        return _HASH_ROWS if size is None and self.settings.id_mapping == "hash" else size

    def read(self) -> ReadLog:
        for number, row in read_file(self.file):
            if self.read_rows == 0 and row is not None:
                self._check_columns(row)
            self.read_rows += 1
            reason = (
                "fields do not match the header"
                if not isinstance(row, dict)
                else self._take(row, number)
            )
            if reason:
                self.dropped[reason] += 1
        if not self.labels:
            each = "; ".join(f"{reason}: {number:,}" for reason, number in self.dropped.items())
            raise ConfigError(
                f"`{self.file}` has no usable row ({each or 'it is empty'})",
                fix="check `recommend.label`",
            )
        vocabulary = self._number_vocabulary() if self.settings.id_mapping == "vocabulary" else None
        tables = tuple(
            size or max(ids, default=0) + 1 for size, ids in zip(self.sizes, self.ids, strict=True)
        )
        bags = self.settings.separator is not None
        log = ClickLog(
            labels=np.array(self.labels, np.float32),
            dense=np.array(self.dense, np.float32).reshape(
                len(self.labels), len(self.settings.dense_features)
            ),
            ids=[np.array(ids, np.int64) for ids in self.ids],
            starts=[np.array(starts, np.int64) if bags else None for starts in self.starts],
            chance=None,
            tables=tables,
            names=tuple(self.settings.sparse_features),
        )
        return ReadLog(log, self.read_rows, dict(self.dropped), vocabulary)

    def _check_columns(self, row: Row) -> None:
        wanted = [
            self.settings.label,
            *self.settings.dense_features,
            *self.settings.sparse_features,
        ]
        missing = [name for name in wanted if name not in row]
        if missing:
            raise ConfigError(
                f"`{self.file}` has no column {', '.join(f'`{name}`' for name in missing)}",
                allowed=(
                    "its columns:"
                    f" {', '.join(list(row)[:_SHOWN])}{', …' if len(row) > _SHOWN else ''}"
                ),
                fix=did_you_mean(
                    missing[0],
                    row,
                    "set `recommend.label`, `recommend.dense_features`,"
                    " `recommend.sparse_features`",
                ),
            )

    def _take(self, row: Row, number: int) -> str | None:
        """Take a row in; returns why it is left out, where it is."""
        label = _number(row[self.settings.label])
        if label not in (0.0, 1.0) or row[self.settings.label] in (None, ""):
            return f"{self.settings.label} is not 0 or 1"
        dense = []
        for name in self.settings.dense_features:
            value = _number(row[name])
            if value is None:
                return f"{name} is no number"
            dense.append(value)
        rows: list[list[int]] = []
        for place, name in enumerate(self.settings.sparse_features):
            cell = self._cell(row[name])
            ids = [self._id(place, name, value, number) for value in cell]
            rows.append([row_id for row_id in ids if row_id is not None])
            if len(rows[-1]) < len(cell):
                return f"{name} is no row number"
        self.labels.append(label)
        self.dense.append(dense)
        for place, row_ids in enumerate(rows):
            self.ids[place] += row_ids
            self.starts[place].append(len(self.ids[place]))
            if self.settings.id_mapping == "vocabulary":
                self.counts[place].update(row_ids)
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

    def _id(self, place: int, name: str, value: str, number: int) -> int | None:
        """The row of the table (with a vocabulary: the value's place in order of coming)."""
        if self.settings.id_mapping == "identity":
            as_number = _number(value)
            if value == "" or as_number is None or as_number != int(as_number):
                return None
            self._check_fits(place, name, int(as_number), number)
            return int(as_number)
        seen = self.values[place]
        if value not in seen:
            if self.settings.id_mapping == "hash":
                raw = hashlib.blake2b(f"{name}\0{value}".encode(), digest_size=8).digest()
                seen[value] = int.from_bytes(raw, "little") % (self.sizes[place] or _HASH_ROWS)
            else:
                seen[value] = len(seen)
        return seen[value]

    def _check_fits(self, place: int, name: str, row_id: int, number: int) -> None:
        size = self.sizes[place]
        if row_id < 0 or (size is not None and row_id >= size):
            raise ConfigError(
                f"row {number} of `{self.file}`: `{name}` has the id {row_id}, and its table has "
                + (f"{size:,} rows" if size is not None else "no row below 0"),
                allowed=f"ids from 0 to {size - 1:,}" if size else "ids from 0 on",
                fix=(
                    f"set `recommend.table_size` to more than {max(row_id, 0)} for `{name}`, or"
                    " `recommend.id_mapping: hash`"
                ),
            )

    def _number_vocabulary(self) -> list[dict[str, int]]:
        """Give the values their rows: 0 for the rare and unknown, from 1 on by their counts, ties
        in order of coming."""
        vocabulary = []
        for place, name in enumerate(self.settings.sparse_features):
            values, counts = self.values[place], self.counts[place]
            if self.known is not None:
                rows = (self.known["vocabulary"] or [])[self.known["names"].index(name)]
            else:
                order = [
                    (-counts[first], first, value)
                    for value, first in values.items()
                    if counts[first] >= self.settings.min_count
                ]
                kept = [value for _, _, value in sorted(order)]
                rows = {value: number for number, value in enumerate(kept, 1)}
                size = self.sizes[place]
                if size is not None and len(rows) + 1 > size:
                    raise ConfigError(
                        f"`{name}` of `{self.file}` has {len(rows):,} values, the last with the id"
                        f" {len(rows)}, and its table has {size:,} rows (row 0 is for unknown"
                        " values)",
                        fix=(
                            f"set `recommend.table_size` to at least {len(rows) + 1} for `{name}`,"
                            " raise `recommend.min_count`, or set `recommend.id_mapping: hash`"
                        ),
                    )
                self.sizes[place] = size or len(rows) + 1
            new = [0] * len(values)
            for value, old in values.items():
                new[old] = int(rows.get(value, 0))
            self.ids[place] = [new[old] for old in self.ids[place]]
            vocabulary.append(rows)
        return vocabulary


def _number(value: Any) -> float | None:
    """A cell as a finite number; 0 where it is empty, None where it is no number."""
    if value is None or value == "":
        return 0.0
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
