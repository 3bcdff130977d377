"""Click logs: a label, numbers and ids a row; kept in the cache as plain arrays that every rank
maps into its memory.

`builtin:clicks` is made by a model that is known, so that the best AUC which any click model can
reach is known too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np

from paceline.core.errors import ConfigError, did_you_mean
from paceline.core.files import cache_dir
from paceline.data.cache import build_once, key_of
from paceline.distributed.seeds import derive_seed

CLICKS = "builtin:clicks"
_MARK = "meta.json"

# The generative model of `builtin:clicks`.
BUILTIN_TABLES = (1000, 500, 200, 100, 50, 10)
_NUM_DENSE = 4
_NUM_ROWS = 400_000
_POWER = 1.2  # the id of rank r is drawn in proportion to r^-1.2
_FACTORS = 3
_VERSION = 1


@dataclass(frozen=True)
class ClickLog:
    """Rows of a click log.

    Args:
        labels: float32 [num_rows], 0 or 1.
        dense: float32 [num_rows, num_dense].
        ids: for each categorical column int64 [num_ids], the rows' ids one after the other.
        starts: for each categorical column int64 [num_rows + 1], where a row's ids begin; None: one
            id a row.
        chance: float32 [num_rows], the true probability of a click, where it is known.
        tables: rows of each column's table.
        names: of the categorical columns.
        rows: which rows of the arrays belong to this log; None: all.
        mean, std: float32 [num_dense], what the dense numbers are brought to 0 and 1 by.
    """

    labels: np.ndarray
    dense: np.ndarray
    ids: list[np.ndarray]
    starts: list[np.ndarray | None]
    chance: np.ndarray | None
    tables: tuple[int, ...]
    names: tuple[str, ...]
    rows: np.ndarray | None = None
    mean: np.ndarray | None = None
    std: np.ndarray | None = None

    deterministic = True  # no chance in looking at a row

    def __len__(self) -> int:
        return len(self.labels) if self.rows is None else len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return Row(self, index if self.rows is None else int(self.rows[index]))

    def take(self, rows: np.ndarray) -> ClickLog:
        """The rows at ``rows`` (int64), by their places in this log."""
        return replace(self, rows=rows if self.rows is None else self.rows[rows])

    def column(self, values: np.ndarray) -> np.ndarray:
        """``values``, one for each row of the arrays, for this log's rows."""
        return np.asarray(values if self.rows is None else values[self.rows])

    def distinct_ids(self, rows: np.ndarray) -> list[np.ndarray]:
        """The ids of some of this log's rows, each once: int64 for each categorical column."""
        places = rows if self.rows is None else self.rows[rows]
        return [np.unique(ids) for ids in self.batch(places).ids]

    def scale(self) -> tuple[np.ndarray, np.ndarray]:
        """(mean, standard deviation) of the dense columns, float32 [num_dense]; 1 for a column that
        never changes."""
        dense = self.column(self.dense).astype(np.float64)
        if dense.size == 0:
            return np.zeros(dense.shape[1], np.float32), np.ones(dense.shape[1], np.float32)
        std = dense.std(axis=0)
        return dense.mean(axis=0).astype(np.float32), np.where(std > 0, std, 1.0).astype(np.float32)

    def batch(self, rows: np.ndarray) -> ClickBatch:
        """The rows at ``rows`` (places in the arrays)."""
        dense = self.dense[rows]
        if self.mean is not None and self.std is not None:
            dense = (dense - self.mean) / self.std
        batch_ids, batch_starts = [], []
        for ids, starts in zip(self.ids, self.starts, strict=True):
            if starts is None:
                batch_ids.append(ids[rows])
                batch_starts.append(np.arange(len(rows) + 1, dtype=np.int64))
                continue
            sizes = starts[rows + 1] - starts[rows]
            begin = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
            places = np.arange(begin[-1]) - np.repeat(begin[:-1] - starts[rows], sizes)
            batch_ids.append(ids[places])
            batch_starts.append(begin)
        chance = None if self.chance is None else self.chance[rows]
        return ClickBatch(
            self.labels[rows], dense.astype(np.float32), batch_ids, batch_starts, chance
        )


class ClickBatch(NamedTuple):
    """Rows as NumPy arrays: ``label`` [N], ``dense`` [N, D], for each categorical column ``ids``
    [n] and ``starts`` [N + 1], and ``chance`` [N] where it is known."""

    label: np.ndarray
    dense: np.ndarray
    ids: list[np.ndarray]
    starts: list[np.ndarray]
    chance: np.ndarray | None


class Row(NamedTuple):
    """A row by its place, so that a batch is put together by one look-up instead of one a row."""

    log: ClickLog
    place: int


# -- the cache
class LogMeta(TypedDict):
    """What is stored beside the arrays of a log: ``bags`` and ``chance`` say which arrays there
    are, ``vocabulary`` is the row of each value in each column's table."""

    tables: list[int]
    names: list[str]
    bags: list[bool]
    chance: bool
    read: int
    dropped: dict[str, int]
    vocabulary: list[dict[str, int]] | None


class ReadLog(NamedTuple):
    """A log that was read, with what became of the file's rows."""

    log: ClickLog
    num_rows: int
    dropped: dict[str, int]
    vocabulary: list[dict[str, int]] | None = None


def stored(parts: Any, make: Callable[[], ReadLog]) -> Path:
    """The folder in the cache of the log that ``parts`` (a JSON value) stands for; ``make`` gives
    it, where it is not there yet."""
    final = cache_dir() / "clicks" / key_of(["clicks", _VERSION, parts])

    def build(folder: Path) -> None:
        log, num_rows, dropped, vocabulary = make()
        arrays = {"labels": log.labels, "dense": log.dense, "chance": log.chance}
        arrays |= {f"ids-{number}": ids for number, ids in enumerate(log.ids)}
        arrays |= {f"starts-{number}": starts for number, starts in enumerate(log.starts)}
        for name, array in arrays.items():
            if array is not None:
                np.save(folder / f"{name}.npy", array)
        meta = LogMeta(
            tables=list(log.tables),
            names=list(log.names),
            bags=[starts is not None for starts in log.starts],
            read=num_rows,
            dropped=dropped,
            vocabulary=vocabulary,
            chance=log.chance is not None,
        )
        (folder / _MARK).write_text(json.dumps(meta), encoding="utf-8")

    build_once(final, _MARK, build)
    return final


def stored_meta(folder: Path) -> LogMeta:
    """What is kept beside a log in the cache."""
    meta: LogMeta = json.loads((folder / _MARK).read_text(encoding="utf-8"))
    return meta


def open_stored(folder: Path) -> ClickLog:
    """A log of the cache; its arrays are mapped, not read."""
    meta = stored_meta(folder)

    def array(name: str) -> np.ndarray:
        return np.load(folder / f"{name}.npy", mmap_mode="r")  # type: ignore[no-any-return]

    return ClickLog(
        labels=array("labels"),
        dense=array("dense"),
        ids=[array(f"ids-{number}") for number in range(len(meta["names"]))],
        starts=[
            array(f"starts-{number}") if bag else None for number, bag in enumerate(meta["bags"])
        ],
        chance=array("chance") if meta["chance"] else None,
        tables=tuple(meta["tables"]),
        names=tuple(meta["names"]),
    )


# -- builtin:clicks
def builtin_clicks(name: str) -> Path:
    """The folder of `builtin:clicks` in the cache.

    Raises:
        ConfigError: no such click log.
    """
    if name != CLICKS:
        raise ConfigError(
            f"`dataset: {name}` is no click log",
            allowed=(
                f"{CLICKS}, or a file with a column of labels (CSV, Parquet, JSON lines, Arrow)"
            ),
            fix=did_you_mean(name, [CLICKS]),
        )
    numbers = [BUILTIN_TABLES, _NUM_DENSE, _NUM_ROWS, _POWER, _FACTORS]
    return stored([CLICKS, numbers], lambda: ReadLog(generate(_NUM_ROWS), _NUM_ROWS, {}))


def generate(
    num_rows: int, tables: Sequence[int] = BUILTIN_TABLES, num_dense: int = _NUM_DENSE
) -> ClickLog:
    """Rows of the generative model behind `builtin:clicks`, always the same.

    The dense numbers x are standard normal. In each column the id of rank r is drawn in proportion
    to r^-1.2, and the ids are numbered in an order that has nothing to do with the rank. A click
    has the chance sigmoid(b + w·x + sum of a_f[id_f] + sum over pairs f < g of
    u_f[id_f]·u_g[id_g]), with a normal weight for each id and three normal factors an id. No model
    can rank the rows better than these chances do.
    """
    fixed = np.random.default_rng(derive_seed(0, "clicks model"))
    draw = np.random.default_rng(derive_seed(0, "clicks rows"))
    dense = draw.standard_normal((num_rows, num_dense)).astype(np.float32)
    logit = -1.2 + dense @ fixed.normal(0.0, 0.5, num_dense)
    ids, total, squares = [], np.zeros((num_rows, _FACTORS)), np.zeros((num_rows, _FACTORS))
    for size in tables:
        weight = np.arange(1, size + 1, dtype=np.float64) ** -_POWER
        number = fixed.permutation(size)
        chosen = number[
            np.searchsorted(
                np.cumsum(weight / weight.sum())[:-1], draw.random(num_rows), side="right"
            )
        ]
        logit = logit + fixed.normal(0.0, 0.7, size)[chosen]
        factors = fixed.normal(0.0, 0.35, (size, _FACTORS))[chosen]
        total, squares = total + factors, squares + factors**2
        ids.append(chosen.astype(np.int64))
    logit = logit + ((total**2 - squares) / 2.0).sum(axis=1)  # the sum over pairs
    chance = 1.0 / (1.0 + np.exp(-logit))
    labels = (draw.random(num_rows) < chance).astype(np.float32)
    names = tuple(f"c{number + 1}" for number in range(len(tables)))
    none: list[np.ndarray | None] = [None] * len(tables)
    return ClickLog(labels, dense, ids, none, chance.astype(np.float32), tuple(tables), names)


# -- the measure
def exact_auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """The chance that a random positive row scores above a random negative one, ties counting half:
    the rank-sum statistic of Mann and Whitney (1947) over the number of pairs; nan where one of the
    classes is missing.

    Args:
        labels: 0 or 1, [num_rows].
        scores: any real numbers, [num_rows].
    """
    positive = np.asarray(labels) > 0.5
    num_positive = int(positive.sum())
    num_negative = len(positive) - num_positive
    if num_positive == 0 or num_negative == 0:
        return float("nan")
    _, group, sizes = np.unique(np.asarray(scores), return_inverse=True, return_counts=True)
    # of each group of equal scores, the mean of its ranks from 1 on
    ranks = np.cumsum(sizes) - (sizes - 1) / 2.0
    rank_sum = float(ranks[group][positive].sum())
    return (rank_sum - num_positive * (num_positive + 1) / 2.0) / (num_positive * num_negative)
