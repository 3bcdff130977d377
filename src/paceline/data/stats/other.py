"""Statistics of data that have no tokens: images to classify, and click logs."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import TypedDict

import numpy as np

from paceline.config.schema import Config
from paceline.core.log import Notice
from paceline.core.report import DataFigures
from paceline.core.stop import poll
from paceline.core.texts import UserText
from paceline.data.clicks.log import builtin_clicks, load_log, load_meta
from paceline.data.clicks.reader import read_clicks
from paceline.data.counts import DataCounts
from paceline.data.image_shards import ImageIndex
from paceline.data.images import open_images
from paceline.data.pixels import open_image
from paceline.data.sources.opening import number_to_take, take_count
from paceline.data.sources.tar import read_tar_file
from paceline.data.stats.dataset import ClassCount

#: Number of images whose headers are read, at even intervals.
_MAX_HEADERS = 20_000


class NumberRange(TypedDict):
    """The smallest value, the mean and the largest value."""

    min: float
    mean: float
    max: float


class ImageStats(TypedDict):
    """Statistics of images. ``width``, ``height`` (in pixels) and ``modes`` (of Pillow): of the
    ``headers`` images whose headers were read. ``duplicates``: images with the same content as an
    earlier one. ``size_bytes``: None for the digits."""

    task: str
    dataset: str
    samples: int
    rows: DataFigures
    classes: list[ClassCount]
    headers: int
    width: NumberRange
    height: NumberRange
    modes: dict[str, int]
    size_bytes: NumberRange | None
    duplicates: int


class TableUse(TypedDict):
    """The embedding table of a categorical column: its rows, and how many of them occur."""

    name: str
    rows: int
    used: int


class ClickStats(TypedDict):
    """Statistics of a click log. ``clicks``: share of the rows with the label 1. ``dense``: of each
    dense column."""

    task: str
    dataset: str
    samples: int
    rows: DataFigures
    clicks: float
    dense: dict[str, NumberRange]
    tables: list[TableUse]


def image_stats(config: Config) -> tuple[ImageStats, list[Notice]]:
    """Return the statistics of the images of `dataset`, and messages about them.

    Raises:
        ConfigError: there are no usable images.
    """
    path = config.sources()[0].path
    index = open_images(path, config.train_args.seed)
    counts = np.bincount(index.labels, minlength=len(index.classes))
    order = np.argsort(-counts, kind="stable").tolist()
    classes = [
        ClassCount(
            label=index.classes[number],
            samples=int(counts[number]),
            share=float(counts[number] / len(index)),
        )
        for number in order
    ]
    numbers = np.unique(np.linspace(0, len(index) - 1, min(_MAX_HEADERS, len(index))).astype(int))
    headers = [_header(index, number) for number in numbers.tolist()]
    figures: ImageStats = {
        "task": config.task,
        "dataset": path,
        "samples": len(index),
        "rows": DataCounts(
            read=len(index) + sum(index.dropped.values()),
            kept=len(index),
            dropped=dict(index.dropped),
        ).as_dict(),
        "classes": classes,
        "headers": len(headers),
        "width": _range(np.array([width for width, _, _ in headers])),
        "height": _range(np.array([height for _, height, _ in headers])),
        "modes": dict(Counter(mode for _, _, mode in headers).most_common()),
        "size_bytes": None if index.sizes is None else _range(np.array(index.sizes)),
        "duplicates": _count_duplicates(index),
    }
    return figures, index.notices


def _header(index: ImageIndex, number: int) -> tuple[int, int, str]:
    """Return the width, the height and the mode of an image."""
    if index.names is None:
        return 8, 8, "L"  # the digits
    if number % 1000 == 0:
        poll()
    with open_image(str(Path(index.source) / index.names[number])) as image:
        return *image.size, image.mode


def _count_duplicates(index: ImageIndex) -> int:
    """Return the number of images with the same bytes as an earlier one. Only files of equal sizes
    are read."""
    if index.names is None or index.sizes is None:
        return 0
    sizes, seen, count = Counter(index.sizes), set(), 0
    for name, size in zip(index.names, index.sizes, strict=True):
        if sizes[size] == 1:
            continue
        path = Path(index.source) / name
        content = read_tar_file(str(path)) or path.read_bytes()
        digest = hashlib.blake2b(content, digest_size=16).digest()
        count += digest in seen
        seen.add(digest)
    return count


def click_stats(config: Config) -> tuple[ClickStats, list[Notice]]:
    """Return the statistics of the click log of `dataset`, and messages about it.

    Raises:
        ConfigError: there are no usable rows.
    """
    name, take = take_count(config.sources()[0].path)
    is_builtin = name.startswith("builtin:")
    folder = builtin_clicks(name) if is_builtin else read_clicks(name, config.recommend)
    log, meta = load_log(folder), load_meta(folder)
    size = len(log) if take is None else min(number_to_take(take, len(log)), len(log))
    notices = []
    if size < len(log):
        text = UserText(
            "{name}: the figures describe all {num_log} rows; {size} of them are used",
            code="statistics-of-all-rows",
            name=name,
            num_log=f"{len(log):,}",
            size=f"{size:,}",
        )
        notices.append(Notice("info", text))
    names = config.recommend.dense_features or [
        f"dense {number + 1}" for number in range(log.dense.shape[1])
    ]
    figures: ClickStats = {
        "task": config.task,
        "dataset": config.sources()[0].path,
        "samples": len(log),
        "rows": DataCounts(meta["read"], len(log), 0, dict(meta["dropped"])).as_dict(),
        "clicks": float(np.mean(log.labels)),
        "dense": {
            dense: _range(np.asarray(log.dense[:, column])) for column, dense in enumerate(names)
        },
        "tables": [
            TableUse(name=table, rows=rows, used=len(np.unique(ids)))
            for table, rows, ids in zip(log.names, log.tables, log.ids, strict=True)
        ],
    }
    return figures, notices


def _range(values: np.ndarray) -> NumberRange:
    return NumberRange(min=float(values.min()), mean=float(values.mean()), max=float(values.max()))
