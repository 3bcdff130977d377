"""Values that the model computes for each sample before it is trained, such as the
log-probabilities of the reference model of DPO. They are computed once, by all ranks, and stored in
the cache."""

import contextlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.config.schema import Config
from paceline.core.files import cache_dir
from paceline.core.log import Notice
from paceline.core.texts import UserText
from paceline.data.cache import build_once
from paceline.data.pipeline import DataPipeline
from paceline.distributed.rank_zero import rank_zero_phase
from paceline.distributed.timing.progress import PROGRESS
from paceline.distributed.traffic import uncounted
from paceline.tasks.base import Task
from paceline.train.evaluation import gather, run_batches
from paceline.train.state import TrainComponents

_FILE = "values.npy"


def add_reference_values(
    task: Task, components: TrainComponents, data: DataPipeline, config: Config
) -> list[Notice]:
    """Set the attribute ``reference`` of the datasets: float32 [num_samples, values]. Called while
    the model has its initial weights. A collective."""
    notices = []
    datasets = (("training data", data.train_dataset), ("validation data", data.eval_dataset))
    for name, dataset in datasets:
        if dataset is None:
            continue
        started = time.perf_counter()
        comm = components.strategy.world
        key = task.reference_key(dataset)
        folder = None if key is None else cache_dir() / "reference" / key
        stored = None
        with rank_zero_phase(comm, "reading the values of the reference model"):
            if comm.is_rank_zero:
                stored = _load(folder)
        stored = comm.broadcast_object(stored)
        origin = "read from the cache"
        if stored is None:
            with PROGRESS.during("evaluation"), uncounted():
                stored = _compute(task, components, dataset, config, data)
            if comm.is_rank_zero and folder is not None:
                _store(folder, stored)
            origin = f"computed in {time.perf_counter() - started:.1f} s"
        dataset.reference = stored
        text = UserText(
            "reference log-probabilities of the {name}: {samples:sample}; {origin}",
            code="reference-log-probabilities",
            name=name,
            samples=len(dataset),
            origin=origin,
        )
        notices.append(Notice("info", text))
    return notices


def _compute(
    task: Task,
    components: TrainComponents,
    dataset: Any,
    config: Config,
    data: DataPipeline,
) -> np.ndarray:
    """Return the values of all samples, on every rank. A collective."""
    strategy, width = components.strategy, task.num_reference_values
    rows: list[torch.Tensor] = []
    batches = run_batches(
        task.reference_values,
        components.task,
        components.model,
        strategy,
        dataset,
        config,
        components.precision,
        data.options,
        PROGRESS,
    )
    for _, results in batches:
        index = results["index"].to(strategy.world.wide_dtype).unsqueeze(1)
        rows.append(torch.cat([index, results["values"].to(index.dtype)], dim=1).flatten())
    gathered = gather(rows, strategy.world).view(-1, 1 + width).numpy()
    values = np.empty((len(dataset), width), dtype=np.float32)
    values[gathered[:, 0].astype(np.int64)] = gathered[:, 1:]
    return values


def _load(folder: Path | None) -> np.ndarray | None:
    if folder is None:
        return None
    try:
        values: np.ndarray = np.load(folder / _FILE, allow_pickle=False)
    except (OSError, ValueError):
        return None
    return values


def _store(folder: Path, values: np.ndarray) -> None:
    # A cache that is not writable was reported when the data was tokenized.
    with contextlib.suppress(OSError):
        build_once(folder, _FILE, lambda staging: np.save(staging / _FILE, values))
