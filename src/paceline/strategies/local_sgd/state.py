"""The state of local training in a checkpoint.

What every strategy reads: ``model/NAME``, the mean of the workers' parameters (and running
statistics), and ``optimizer/NAME/…``, the state of the first worker. In addition, so that the
same number of workers continues bit for bit:

- ``local/worker-K/model/NAME``, ``…/buffer/NAME``: worker K's values, if the workers' differ;
- ``local/worker-K/optimizer/NAME/…``, ``local/worker-K/scaler/…``: of all workers but the first;
- ``local/steps``, ``local/workers``: number of steps made, number of workers;
- ``outer/parameters``, ``outer/momentum`` (`diloco`): over all parameters in the model's order,
  whatever the fragments;
- ``outer/flight-F`` (`diloco`), ``local/worker-K/flight-F`` (`local_sgd`): the result of a pending
  synchronization of fragment F. A checkpoint waits for it; it is still applied when it is due.
"""

from dataclasses import replace

import torch

from paceline.core.texts import UserText
from paceline.parallel.optimizer_state import entry_shapes, stored_entries_of
from paceline.parallel.save_load import load_entries
from paceline.parallel.state import (
    StateReader,
    TensorShard,
    dropped_state_notices,
    persistent_buffers,
)
from paceline.strategies.local_sgd.strategy import LocalSGDBase
from paceline.strategies.local_sgd.sync import PendingSync

_PREFIX = "local/"


class ResumableLocalSGD(LocalSGDBase):
    """Local training that can be saved and resumed."""

    def state_shards(self) -> list[TensorShard]:
        """Return this rank's shards, with the workers' mean instead of local values. A
        collective."""
        shards = super().state_shards()
        if self.is_synchronized:
            return shards
        mean = self._mean_by_name()
        return [replace(shard, tensor=mean.get(shard.name, shard.tensor)) for shard in shards]

    def extra_state(self) -> list[TensorShard]:
        """Return what this rank writes besides a replica's state, after waiting for pending
        synchronizations. A collective."""
        for sync in self.pending.values():
            sync.wait()
        is_first_worker = self.inter_group.is_rank_zero
        tensors: dict[str, torch.Tensor] = {}
        if self.intra_group.is_rank_zero and not self.is_synchronized:
            tensors |= self._local_by_name()
        if self.intra_group.is_rank_zero and not is_first_worker:
            for shard in self.tensor_shards():
                for entry, value in stored_entries_of(self.optimizer, shard).items():
                    tensors[f"optimizer/{shard.name}/{entry}"] = value
            if self.scaler is not None:
                for name, value in self.scaler.state().items():
                    tensors[f"scaler/{name}"] = value
        shards = [
            TensorShard.full(f"{self._worker_prefix}{name}", tensor)
            for name, tensor in tensors.items()
        ]
        if is_first_worker or not self.has_common_result:
            for number, sync in self.pending.items():
                name, size, start = self._stored_pending(number)
                shards.append(TensorShard(name, sync.wait(), (size,), (start,), flat=True))
        if is_first_worker:
            for name, ranges in self.outer_state().items():
                shape = (self.params.size,)
                shards += [
                    TensorShard(name, values, shape, (start,), flat=True)
                    for start, values in ranges
                ]
        if self.world.is_rank_zero:
            for name, count in (("steps", self.steps_done), ("workers", self.workers)):
                shards.append(TensorShard.full(f"{_PREFIX}{name}", torch.tensor(count)))
        return shards

    def load_extra_state(self, source: StateReader) -> list[tuple[str, str]]:
        """Read it, after the mean and the first worker's optimizer were loaded into every worker.
        Returns notices."""
        notices = dropped_state_notices(source)
        stored = source.tensors()
        workers = _read_number(source, f"{_PREFIX}workers")
        steps = _read_number(source, f"{_PREFIX}steps")
        self.steps_done = (_read_number(source, "schedule/step") or 0) if steps is None else steps
        self._load_outer(source)
        same_workers = workers == self.workers
        if same_workers:
            self._load_worker(source)
        elif workers is not None:
            text = UserText(
                "the checkpoint has {workers:worker} and this run has {workers_now}: all start"
                " from the mean of their parameters and the first worker's optimizer; the"
                " state of the other workers is dropped",
                code="other-number-of-workers",
                workers=workers,
                workers_now=self.workers,
            )
            notices.append(("warning", text))
        self.pending = {}
        for number, _ in self.schedule.pending_at(self.steps_done):
            name, size, offset = self._stored_pending(number)
            if stored.get(name, (None, ()))[1] == (size,) and (
                same_workers or self.has_common_result
            ):
                start, stop = self.local_range(number)
                values = source.read_flat(name, offset, stop - start).to(self.params.device)
                self.pending[number] = PendingSync(None, result=values)
            elif workers is not None:
                text = UserText(
                    "a synchronization that was pending in the checkpoint is dropped",
                    code="pending-synchronization-dropped",
                )
                notices.append(("warning", text))
        return notices

    def _load_outer(self, source: StateReader) -> None:
        self.start_local_training()  # from the mean, if the checkpoint has no outer state
        for name, ranges in self.outer_state().items():
            if source.tensors().get(name, (None, ()))[1] == (self.params.size,):
                for start, values in ranges:
                    values.copy_(source.read_flat(name, start, values.numel()))

    def _load_worker(self, source: StateReader) -> None:
        stored, worker = source.tensors(), self._worker_prefix
        for name, tensor in self._local_by_name().items():
            if worker + name in stored:
                tensor.copy_(source.read(worker + name, (0,) * tensor.dim(), tensor.shape))
        scaler = {name: f"{worker}scaler/{name}" for name in ("scale", "growth_tracker")}
        if self.scaler is not None and all(name in stored for name in scaler.values()):
            self.scaler.load(
                **{key: float(source.read(name, (), ())) for key, name in scaler.items()}
            )
        prefix = f"{worker}optimizer/"
        entries = entry_shapes(source, prefix)
        for shard in self.tensor_shards():
            if shard.key is not None:
                load_entries(self, source, prefix, entries.get(shard.name, {}), shard)

    @property
    def _worker_prefix(self) -> str:
        return f"{_PREFIX}worker-{self.inter_group.rank}/"

    def _local_by_name(self) -> dict[str, torch.Tensor]:
        """Return what differs between workers by its name in a state, live."""
        statistics = {id(buffer) for buffer in self.statistics}
        parameters = {f"model/{name}": each.detach() for name, each in self.trained.items()}
        return parameters | {
            f"buffer/{name}": buffer
            for name, buffer in persistent_buffers(self.model).items()
            if id(buffer) in statistics
        }

    def _mean_by_name(self) -> dict[str, torch.Tensor]:
        """Return the workers' mean, in the types and shapes of :meth:`_local_by_name`. A
        collective."""
        flats = self.local_tensors.tensors
        pieces = self.average().split([len(flat) for flat in flats])
        by_address = {flat.data_ptr(): piece for flat, piece in zip(flats, pieces, strict=True)}
        return {
            name: by_address[tensor.data_ptr()].view(tensor.shape).to(tensor.dtype)
            for name, tensor in self._local_by_name().items()
            if tensor.numel()
        }

    def _stored_pending(self, number: int) -> tuple[str, int, int]:
        """Return the name and size of a fragment's pending result, and where this rank's share
        starts in it."""
        start, stop = self.fragment_range(number)
        prefix = "outer/" if self.has_common_result else self._worker_prefix
        return f"{prefix}flight-{number}", stop - start, self.local_range(number)[0] - start


def _read_number(source: StateReader, name: str) -> int | None:
    return int(source.read(name, (), ())) if name in source.tensors() else None
