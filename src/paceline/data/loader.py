"""Load the micro-batches of one rank, starting at any step. They do not depend on the number of
loader processes."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from paceline.core.errors import PacelineError, RunError
from paceline.core.processes import end_by_starter_alone, end_with_starter, hidden_main
from paceline.data.collate import map_tensors
from paceline.data.counts import StreamCounts
from paceline.data.loader_process import LoaderOptions, RankEnvironment, start_loader_server
from paceline.data.order.base import Keys, Order, split_by_length, split_even
from paceline.data.streaming.base import Key, StreamedDataset
from paceline.distributed.seeds import seed_everything


@dataclass
class MicroBatch:
    """A collated batch. ``samples`` is 0 for a filler, which a rank gets if a short global batch
    has no samples for it. ``counts`` are the counts of its rows, if the data is streamed."""

    data: Any
    samples: int
    counts: StreamCounts | None = None

    @property
    def weight(self) -> float:
        return 1.0 if self.samples else 0.0

    def to(self, device: torch.device) -> MicroBatch:
        data = map_tensors(self.data, lambda tensor: tensor.to(device, non_blocking=True))
        return replace(self, data=data)


class _SentDataset(Dataset):  # type: ignore[type-arg]
    """A dataset that loader processes read, with the environment variables of their rank."""

    def __getstate__(self) -> dict[str, Any]:
        # The first entry is unpickled first, so that modules see the variables when they are
        # imported.
        return {"environment": RankEnvironment(), **self.__dict__}


class _Streamed(_SentDataset):
    """Read the rows of a micro-batch at once. An error of the input is passed on as a value,
    because the loader would add the traceback of its process to the message."""

    def __init__(self, dataset: StreamedDataset) -> None:
        self.dataset = dataset

    def __getitems__(self, keys: list[Key]) -> tuple[list[Any], StreamCounts] | PacelineError:
        try:
            return self.dataset.read(keys)
        except PacelineError as error:
            return error


class _StreamedCollate:
    """Collate what :class:`_Streamed` returns to (batch, number of samples, counts)."""

    def __init__(self, collate: Callable[[Sequence[Any]], Any], filler: Any) -> None:
        self.collate, self.filler = collate, filler

    def __call__(self, result: tuple[list[Any], StreamCounts] | PacelineError) -> Any:
        if isinstance(result, PacelineError):
            return result
        samples, counts = result
        return self.collate(samples or [self.filler]), len(samples), counts


class _KeyedDataset(_SentDataset):
    """Look up samples by (epoch, index) and seed the random state with them, so that augmentation
    does not depend on the process. Datasets with ``deterministic = True`` need no seeding."""

    def __init__(self, dataset: Any, seed: int, purpose: str) -> None:
        self.dataset = dataset
        self.seed = seed
        self.purpose = purpose
        self.seeded = not getattr(dataset, "deterministic", False)

    def __getitem__(self, key: Key) -> Any:
        epoch, index, *span = key
        if self.seeded:
            seed_everything(self.seed, self.purpose, epoch, index)
        return self.dataset.piece(index, *span) if span else self.dataset[index]


def _load(
    dataset: Any,
    batches: Iterator[list[Key]],
    collate: Callable[[Sequence[Any]], Any],
    options: LoaderOptions,
    seed: int,
    purpose: str,
) -> Iterator[Any]:
    keyed: _SentDataset = _KeyedDataset(dataset, seed, purpose)
    collate_loaded: Callable[[Any], Any] = collate
    if isinstance(dataset, StreamedDataset):
        keyed, collate_loaded = _Streamed(dataset), _StreamedCollate(collate, dataset.filler)
    loader: DataLoader[Any] = DataLoader(
        keyed,
        batch_sampler=batches,
        collate_fn=collate_loaded,
        num_workers=options.num_workers,
        prefetch_factor=options.prefetch_factor if options.num_workers else None,
        pin_memory=options.pin_memory,
        multiprocessing_context=options.context,
        worker_init_fn=_loader_process_start if options.num_workers else None,
    )
    if options.num_workers and options.start_method == "forkserver":
        start_loader_server()  # unless the rank has started it in advance
    with hidden_main():
        return iter(loader)


def _loader_process_start(_worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Slurm or a user may send SIGTERM to all processes; the rank then finishes its step.
    end_by_starter_alone(signal.SIGTERM)
    torch.set_num_threads(1)
    # Loader processes must end whenever the rank ends, for any reason. Torch's check for that takes
    # seconds.
    end_with_starter()


def train_steps(
    dataset: Any,
    order: Order,
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
    """Yield this rank's ``accumulation`` micro-batches of each step in [first_step, last_step).

    A step has world size × accumulation micro-batches; rank r gets the micro-batches
    r × accumulation to (r + 1) × accumulation - 1. With ``shares`` (number of micro-batches of each
    rank, with the same sum), rank r gets ``shares[r]`` micro-batches, which follow the lower ranks'
    micro-batches.
    """
    num_parts, first = world_size * accumulation, rank * accumulation
    if shares is not None:
        num_parts, first, accumulation = sum(shares), sum(shares[:rank]), shares[rank]

    def micro_batch_keys() -> Iterator[list[Key]]:
        for step in range(first_step, last_step):
            parts = order.micro_batches(step, num_parts)
            for part in parts[first : first + accumulation]:
                sizes.append(len(part))
                keys: list[Key] = [tuple(key) for key in part.tolist()]
                yield keys or [(order.position(step)[0], 0, 0, 2)[: part.shape[1]]]

    sizes: deque[int] = deque()  # the loader requests keys before it returns their batches
    loader = _load(dataset, micro_batch_keys(), collate, options, order.seed, "sample")
    for _ in range(first_step, last_step):
        yield [_micro_batch(next(loader), sizes.popleft()) for _ in range(accumulation)]


def load_micro_batch(
    dataset: Any, keys: Keys, collate: Callable[[Sequence[Any]], Any], seed: int
) -> MicroBatch:
    """Load a micro-batch in this process."""
    keyed = _KeyedDataset(dataset, seed, "sample")
    samples = [keyed[tuple(key)] for key in keys.tolist()]
    return MicroBatch(collate(samples), len(samples))


def _micro_batch(loaded: Any, size: int) -> MicroBatch:
    """Return what the loader has loaded for ``size`` keys as a micro-batch."""
    if isinstance(loaded, PacelineError):
        raise RunError.from_record(loaded.record()) from loaded
    if isinstance(loaded, tuple) and isinstance(loaded[-1], StreamCounts):
        data, samples, counts = loaded
        if not size:  # a short global batch has no rows for this rank
            return MicroBatch(data, 0, StreamCounts())
        return MicroBatch(data, samples, counts)
    return MicroBatch(loaded, size)


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
    """Yield this rank's share of the dataset. Each row is on exactly one rank, and every rank has
    the same number of batches.

    Rows are distributed in batches of batch_size × world_size, balanced by tokens if the dataset
    has ``lengths``. A rank with none of the last rows gets a filler of weight 0.
    """
    lengths = getattr(dataset, "lengths", None)
    rows = np.arange(len(dataset))
    stride = batch_size * world_size
    if lengths is not None:
        # Rows of similar lengths need little padding.
        rows = rows[np.argsort(lengths, kind="stable")]
    shares: list[np.ndarray] = []
    for start in range(0, len(rows), stride):
        chunk = rows[start : start + stride]
        split = (
            split_even(chunk, world_size)
            if lengths is None
            else split_by_length(chunk, lengths[chunk], world_size)
        )
        shares.append(split[rank])
    keys: Iterator[list[Key]] = (
        [(0, int(index)) for index in share] or [(0, 0)] for share in shares
    )
    loader = _load(dataset, keys, collate, options, seed, "eval")
    for data, share in zip(loader, shares, strict=True):
        yield MicroBatch(data, len(share))
