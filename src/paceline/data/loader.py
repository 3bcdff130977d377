"""The loader: micro-batches of one rank, from any step on, with or without loader processes, always
the same."""

from __future__ import annotations

import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from paceline.core.processes import end_by_parent_alone, end_with_parent
from paceline.data.collate import map_tensors
from paceline.data.order import SampleOrder, split_by_length, split_even
from paceline.distributed.seeds import seed_everything

# A sample's key within a micro-batch: (epoch, index).
Key = tuple[int, int]


@dataclass
class MicroBatch:
    """A collated batch. ``weight`` is 0 for a filler that stands in where a short global batch
    leaves a rank nothing."""

    data: Any
    weight: float
    samples: int

    def to(self, device: torch.device) -> MicroBatch:
        data = map_tensors(self.data, lambda one: one.to(device, non_blocking=True))
        return MicroBatch(data, self.weight, self.samples)


class _KeyedDataset(Dataset):  # type: ignore[type-arg]
    """Looks samples up by (epoch, index) with the random state set by them, so that augmentation
    does not depend on which process draws it. Datasets that declare ``deterministic = True`` are
    spared the seeding."""

    def __init__(self, dataset: Any, seed: int, purpose: str) -> None:
        self.dataset = dataset
        self.seed = seed
        self.purpose = purpose
        self.seeded = not getattr(dataset, "deterministic", False)

    def __getitem__(self, key: Key) -> Any:
        epoch, index = key
        if self.seeded:
            seed_everything(self.seed, self.purpose, epoch, index)
        return self.dataset[index]


@dataclass
class LoaderOptions:
    """Settings of the loader processes."""

    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = False


def _loader(
    dataset: Any,
    batches: Iterator[list[Key]],
    collate: Callable[[Sequence[Any]], Any],
    options: LoaderOptions,
    seed: int,
    purpose: str,
) -> DataLoader[Any]:
    return DataLoader(
        _KeyedDataset(dataset, seed, purpose),
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=options.num_workers,
        prefetch_factor=options.prefetch_factor if options.num_workers else None,
        pin_memory=options.pin_memory,
        # Forked from the rank itself; a rank's default, the fork server, would have to import
        # everything anew.
        multiprocessing_context="fork" if options.num_workers and sys.platform == "linux" else None,
        worker_init_fn=_loader_process_start if options.num_workers else None,
    )


def _loader_process_start(_worker: int) -> None:
    # A loader process must not outlive its rank, however the rank ends; torch's own watch takes
    # seconds to notice.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Slurm, or a person, may send it to all: the rank then finishes its step
    end_by_parent_alone(signal.SIGTERM)
    torch.set_num_threads(1)
    end_with_parent()


def train_steps(
    dataset: Any,
    order: SampleOrder,
    collate: Callable[[Sequence[Any]], Any],
    *,
    rank: int,
    world_size: int,
    accumulation: int,
    first_step: int,
    last_step: int,
    options: LoaderOptions,
    shares: Sequence[int] | None = None,
) -> Iterator[list[MicroBatch]]:
    """For each step in [first_step, last_step), this rank's ``accumulation`` micro-batches.

    Rank r takes micro-batches r × accumulation … (r + 1) × accumulation - 1 of the world ×
    accumulation the step is cut into. With ``shares`` (micro-batches of each rank, with the same
    sum) it takes ``shares[r]``, those after the ranks before it.
    """
    num_parts, first = world_size * accumulation, rank * accumulation
    if shares is not None:
        num_parts, first, accumulation = sum(shares), sum(shares[:rank]), shares[rank]
    mine = slice(first, first + accumulation)

    def parts(step: int) -> list[np.ndarray]:
        return order.micro_batches(step, num_parts)[mine]

    def keys() -> Iterator[list[Key]]:
        for step in range(first_step, last_step):
            epoch = step // order.steps_per_epoch
            for part in parts(step):
                sizes.append(len(part))
                yield [(epoch, int(index)) for index in part] or [(epoch, 0)]

    sizes: deque[int] = deque()  # the loader asks for keys ahead of the batches it hands out
    loader = iter(_loader(dataset, keys(), collate, options, order.seed, "sample"))
    for _ in range(first_step, last_step):
        yield [_weighted(next(loader), sizes.popleft()) for _ in range(accumulation)]


def _weighted(data: Any, samples: int) -> MicroBatch:
    return MicroBatch(data, weight=1.0 if samples else 0.0, samples=samples)


def eval_batches(
    dataset: Any,
    collate: Callable[[Sequence[Any]], Any],
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    seed: int,
    options: LoaderOptions,
) -> Iterator[MicroBatch]:
    """This rank's share of the whole set, each row on exactly one rank, every rank the same number
    of batches.

    Rows are dealt batch by batch (batch_size × world_size rows at a time), balanced by tokens where
    the dataset has ``lengths``; a rank that gets none of the last rows gets a filler of weight 0.
    """
    lengths = getattr(dataset, "lengths", None)
    rows = np.arange(len(dataset))
    stride = batch_size * world_size
    if lengths is not None:
        # near-equal lengths together: no wasted padding
        rows = rows[np.argsort(lengths, kind="stable")]
    shares: list[np.ndarray] = []
    for start in range(0, len(rows), stride):
        chunk = rows[start : start + stride]
        split = (
            split_even(chunk, world_size)
            if lengths is None
            else split_by_length(chunk, lengths, world_size)
        )
        shares.append(split[rank])
    keys = ([(0, int(index)) for index in share] or [(0, 0)] for share in shares)
    for data, share in zip(
        _loader(dataset, keys, collate, options, seed, "eval"), shares, strict=True
    ):
        yield _weighted(data, len(share))
