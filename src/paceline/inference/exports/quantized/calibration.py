"""Rows of a run's own training data, with which an export is calibrated."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.config.schema import Config
from paceline.data.encoding.chunks import make_setup
from paceline.data.encoding.prepare import text_kind
from paceline.data.kinds.registry import load_kind
from paceline.data.order.build import build_order
from paceline.data.sources.rows import MalformedRow
from paceline.data.streaming.base import StreamedDataset
from paceline.data.streaming.sources import open_first_file
from paceline.data.text.new_tokens import config_tokenizer
from paceline.models.builtin import resolve_model
from paceline.models.kinds import reads_images
from paceline.tasks import load_task

if TYPE_CHECKING:
    from paceline.tasks.base import Task

#: How many rows are read, and the length of the sequences that they are joined to.
NUM_ROWS = 128
MAX_LENGTH = 2048
_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id")


@dataclass(frozen=True)
class CalibrationRows:
    """Token sequences of equal length.

    Args:
        num_rows: number of rows that they were joined from.
        tokens: int64 [sequences, length].
    """

    num_rows: int
    tokens: np.ndarray


def read_calibration(config: Config, model_config: Any) -> CalibrationRows:
    """Return the first rows that the run has trained on, tokenized as the training did, and joined
    to sequences of at most 2,048 tokens. Places of images are left out.

    Args:
        model_config: config of the model.

    Raises:
        ConfigError: the data cannot be read.
    """
    rows = _training_rows(config)
    ids = [getattr(model_config, name, None) for name in _PLACEHOLDERS]
    left_out = np.array([number for number in ids if isinstance(number, int)], dtype=np.int64)
    rows = [row[~np.isin(row, left_out)] for row in rows]
    text = model_config.get_text_config()
    length = min(MAX_LENGTH, getattr(text, "max_position_embeddings", None) or MAX_LENGTH)
    return CalibrationRows(len(rows), joined(rows, length))


def joined(rows: list[np.ndarray], max_length: int) -> np.ndarray:
    """Join rows to sequences of ``max_length`` tokens, int64 [sequences, max_length]: at most as
    many as there are rows. The rest is left out; fewer tokens in all make one shorter sequence."""
    tokens = np.concatenate([np.zeros(0, dtype=np.int64), *rows]).astype(np.int64)
    length = min(max_length, len(tokens))
    if length == 0:
        return tokens.reshape(0, 0)
    count = min(len(tokens) // length, len(rows))
    return tokens[: count * length].reshape(count, length)


def _training_rows(config: Config) -> list[np.ndarray]:
    """Return the token IDs of the first rows, in the order of the run."""
    task = load_task(config)
    task.prepared = task.prepare()
    dataset = task.build_datasets()[0]
    if isinstance(dataset, StreamedDataset):
        return _streamed_rows(config)
    return _ordered_rows(config, task, dataset)


def _ordered_rows(config: Config, task: Task, dataset: Any) -> list[np.ndarray]:
    assert task.prepared is not None
    order = build_order(
        config,
        task.prepared.sources,
        NUM_ROWS,
        1,
        dataset.lengths,
        len(dataset),
        is_packed=getattr(task, "packed", True),
    )
    rows = []
    for _, index, *part in order.global_batch(0)[:NUM_ROWS].tolist():
        start, stop = part or (0, int(dataset.lengths[index]))
        rows.append(dataset.piece(index, start, stop)["input_ids"].astype(np.int64))
    return rows


def _streamed_rows(config: Config) -> list[np.ndarray]:
    """Return the token IDs of the first usable rows of each source."""
    folder = config_tokenizer(config, resolve_model)
    name = "vision" if reads_images(config) else text_kind(config)
    setup, _ = make_setup(config, name, folder, ())
    kind, max_length = load_kind(name)(setup), config.train_args.max_length
    sources = [open_first_file(source) for source in config.sources()]
    share = -(-NUM_ROWS // len(sources))
    rows: list[np.ndarray] = []
    for source in sources:
        of_source = kind.for_source(source)
        for place, raw_row in islice(source.rows(config.train_args.seed), share):
            try:
                encoded = of_source.encode([of_source.read(raw_row, place)])[0]
            except MalformedRow:
                continue
            if not isinstance(encoded, str):
                rows += [
                    sequence.input_ids[:max_length].astype(np.int64)
                    for _, sequence in of_source.sequences(encoded)
                ]
    return rows[:NUM_ROWS]
