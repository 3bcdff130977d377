"""The state of local training in a checkpoint.

What any strategy reads: ``model/NAME``, the mean of the workers' parameters (of running statistics,
too), and ``optimizer/NAME/…``, that of the first worker. Beside it, so that the same number of
workers goes on bit for bit:

- ``local/worker-K/model/NAME``, ``…/buffer/NAME``: worker K's own, where the workers' differ;
- ``local/worker-K/optimizer/NAME/…``, ``local/worker-K/scaler/…``: of the workers but the first;
- ``local/steps``, ``local/workers``: steps made, number of workers;
- ``outer/parameters``, ``outer/momentum`` (`diloco`): over all parameters in the model's order,
  whatever the fragments;
- ``outer/flight-F`` (`diloco`), ``local/worker-K/flight-F`` (`local_sgd`): what came of a
  synchronisation of fragment F that has begun. It is waited for before a checkpoint, and takes
  effect when it is due all the same.
"""

from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from paceline.core.formatting import counted
from paceline.distributed.communicator import Communicator
from paceline.parallel.base import Strategy, persistent_buffers
from paceline.parallel.local_sgd.schedule import SyncSchedule, fragment
from paceline.parallel.local_sgd.sync import FlatParams, PendingSync
from paceline.parallel.save_load import entries_of, entry_shapes, load_entries
from paceline.parallel.state import StateReader, TensorShard

PREFIX = "local/"


class Workers(Strategy, Protocol):
    """What of the strategy its checkpoint is made from."""

    near: Communicator
    far: Communicator
    workers: int
    done: int
    model: nn.Module
    trained: dict[str, nn.Parameter]
    changing_buffers: list[torch.Tensor]
    flights: dict[int, PendingSync]
    flights_are_shared: bool
    rhythm: SyncSchedule
    vector: FlatParams
    apart: FlatParams

    @property
    def is_together(self) -> bool: ...
    def average(self) -> torch.Tensor: ...
    def share_of(self, number: int) -> tuple[int, int]: ...
    def landed(self, values: torch.Tensor) -> PendingSync: ...
    def start_apart(self) -> None: ...
    def outer_state(self) -> dict[str, list[tuple[int, torch.Tensor]]]: ...


def with_mean(strategy: Workers, parts: list[TensorShard]) -> list[TensorShard]:
    """The parts of a rank, with the workers' mean instead of its own. A collective."""
    if strategy.is_together:
        return parts
    mean = _by_name(strategy, strategy.average())
    return [replace(one, tensor=mean.get(one.name, one.tensor)) for one in parts]


def local_parts(strategy: Workers) -> list[TensorShard]:
    """What this rank writes beside a replica's state. A collective: what is under way is waited
    for."""
    for flight in strategy.flights.values():
        flight.land()
    found = []
    worker = f"{PREFIX}worker-{strategy.far.rank}"
    if strategy.near.is_rank_zero and not strategy.is_together:
        found += [
            TensorShard.whole(f"{worker}/{name}", one) for name, one in _apart(strategy).items()
        ]
    if strategy.near.is_rank_zero and not strategy.far.is_rank_zero:
        found += [
            TensorShard.whole(f"{worker}/{name}", value)
            for name, value in _optimizer(strategy).items()
        ]
        if strategy.scaler is not None:
            found += [
                TensorShard.whole(f"{worker}/scaler/{name}", value)
                for name, value in strategy.scaler.state().items()
            ]
    found += [
        TensorShard(
            _flight_name(strategy, number),
            flight.land(),
            _flight_shape(strategy, number),
            _start(strategy, number),
            flat=True,
        )
        for number, flight in strategy.flights.items()
        if strategy.far.is_rank_zero or not strategy.flights_are_shared
    ]
    if strategy.far.is_rank_zero:
        for name, ranges in strategy.outer_state().items():
            shape = (strategy.vector.size,)
            found += [
                TensorShard(name, values, shape, (start,), flat=True) for start, values in ranges
            ]
    if strategy.world.is_rank_zero:
        found.append(TensorShard.whole(f"{PREFIX}steps", torch.tensor(strategy.done)))
        found.append(TensorShard.whole(f"{PREFIX}workers", torch.tensor(strategy.workers)))
    return found


def load_local(strategy: Workers, source: StateReader) -> list[tuple[str, str]]:
    """The reverse, after the mean and the first worker's optimizer were loaded into every
    worker. Returns notices."""
    notices = []
    known = source.tensors()
    workers = _number(source, f"{PREFIX}workers")
    steps = _number(source, f"{PREFIX}steps")
    strategy.done = (_number(source, "schedule/step") or 0) if steps is None else steps
    same = workers == strategy.workers
    _load_outer(strategy, source)
    if same:
        _load_worker(strategy, source)
    elif workers is not None:
        notices.append(
            (
                "warning",
                (
                    f"the checkpoint is of {counted(workers, 'worker')} and there are"
                    f" {strategy.workers} now: all go on from the mean of its parameters and the"
                    " first worker's optimizer; the state of the others is dropped"
                ),
            )
        )
    strategy.flights = {}
    for number, _ in strategy.rhythm.in_flight(strategy.done):
        name = _flight_name(strategy, number)
        if known.get(name, (None, ()))[1] == _flight_shape(strategy, number) and (
            same or strategy.flights_are_shared
        ):
            start, stop = strategy.share_of(number)
            first = fragment(strategy.vector.size, strategy.rhythm.fragments, number)[0]
            values = source.read_flat(name, start - first, stop - start).to(strategy.vector.device)
            strategy.flights[number] = strategy.landed(values)
        elif workers is not None:
            text = "a synchronisation that was under way in the checkpoint is dropped"
            notices.append(("warning", text))
    return notices


def _load_outer(strategy: Workers, source: StateReader) -> None:
    known = source.tensors()
    strategy.start_apart()  # from the mean, where the checkpoint has no outer state
    for name, ranges in strategy.outer_state().items():
        if known.get(name, (None, ()))[1] == (strategy.vector.size,):
            for start, values in ranges:
                values.copy_(source.read_flat(name, start, values.numel()))


def _load_worker(strategy: Workers, source: StateReader) -> None:
    known = source.tensors()
    worker = f"{PREFIX}worker-{strategy.far.rank}/"
    for name, one in _apart(strategy).items():
        if worker + name in known:
            one.copy_(source.read(worker + name, (0,) * one.dim(), one.shape))
    scaler = {name: f"{worker}scaler/{name}" for name in ("scale", "growth_tracker")}
    if strategy.scaler is not None and all(name in known for name in scaler.values()):
        strategy.scaler.load(
            **{name: float(source.read(stored, (), ())) for name, stored in scaler.items()}
        )
    prefix = f"{worker}optimizer/"
    entries = entry_shapes(source, prefix)
    for shard in strategy.tensor_shards():
        if shard.key is not None:
            load_entries(strategy, source, prefix, entries.get(shard.name, {}), shard)


def _apart(strategy: Workers) -> dict[str, torch.Tensor]:
    """What lies apart between synchronisations, by its name in a state, live; in the order of
    ``strategy.apart``."""
    statistics = {id(one) for one in strategy.changing_buffers if one.is_floating_point()}
    buffers = {
        f"buffer/{name}": one
        for name, one in persistent_buffers(strategy.model).items()
        if id(one) in statistics
    }
    return {f"model/{name}": one.detach() for name, one in strategy.trained.items()} | buffers


def _by_name(strategy: Workers, mean: torch.Tensor) -> dict[str, torch.Tensor]:
    """The pieces of ``strategy.average()``, by name, in their own types and shapes."""
    own = _apart(strategy)
    names = {one.data_ptr(): name for name, one in own.items() if one.numel()}
    found = {}
    for flat, piece in zip(
        strategy.apart.tensors,
        mean.split([one.numel() for one in strategy.apart.tensors]),
        strict=True,
    ):
        name = names.get(flat.data_ptr()) if flat.numel() else None
        if name is not None:
            found[name] = piece.view(own[name].shape).to(own[name].dtype)
    return found


def _optimizer(strategy: Workers) -> dict[str, torch.Tensor]:
    return {
        f"optimizer/{part.name}/{entry}": value
        for part in strategy.tensor_shards()
        for entry, value in entries_of(strategy.optimizer, part).items()
    }


def _flight_name(strategy: Workers, number: int) -> str:
    where = "outer" if strategy.flights_are_shared else f"{PREFIX}worker-{strategy.far.rank}"
    return f"{where}/flight-{number}"


def _flight_shape(strategy: Workers, number: int) -> tuple[int]:
    start, stop = fragment(strategy.vector.size, strategy.rhythm.fragments, number)
    return (stop - start,)


def _start(strategy: Workers, number: int) -> tuple[int]:
    return (
        strategy.share_of(number)[0]
        - fragment(strategy.vector.size, strategy.rhythm.fragments, number)[0],
    )


def _number(source: StateReader, name: str) -> int | None:
    return int(source.read(name, (), ())) if name in source.tensors() else None
