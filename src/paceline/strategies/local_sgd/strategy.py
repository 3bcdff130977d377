"""Base class of `local_sgd` and `diloco`, in which workers train independently and are synchronized
every few steps."""

import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from pydantic import JsonValue
from torch import nn

from paceline.config.schema import Config
from paceline.core.formatting import counted
from paceline.core.texts import UserText
from paceline.distributed.collective_bytes import all_reduce_bytes
from paceline.distributed.communicator import Communicator, new_group
from paceline.distributed.mesh import ParallelDims
from paceline.distributed.traffic import uncounted
from paceline.parallel.buckets.gradients import GradientBuckets
from paceline.parallel.comm_profile import CommProfile, CommTimes, StrategyMetrics
from paceline.parallel.gradients import changing_buffers, clip_to
from paceline.parallel.initial_weights import sync_weights
from paceline.parallel.optimizer_state import optimizer_tensors
from paceline.parallel.save_load import trained_state
from paceline.parallel.state import TensorShard, frozen_parts, full_shards, trained_parameters
from paceline.parallel.strategy import MicroStep, OptimizerStep, Strategy
from paceline.strategies.local_sgd.cost import mean_bytes
from paceline.strategies.local_sgd.schedule import SyncSchedule, fragment_range, num_workers, share
from paceline.strategies.local_sgd.sync import FlatParams, GroupMean, PendingSync

#: Number of elements that are averaged at a time when the whole model is averaged.
_CHUNK_ELEMENTS = 1 << 24


class LocalSGDBase(Strategy):
    """Base class of strategies with independent workers. A worker is a group of ranks that runs the
    optimizer on its share of the batch. Gradients are averaged within a worker at each step, and
    workers are synchronized every H steps by
    :class:`~paceline.strategies.local_sgd.algorithms.LocalSGDStrategy` or
    :class:`~paceline.strategies.local_sgd.algorithms.DiLoCoStrategy`.

    A worker's gradient is the mean over its share: the loss is divided by the worker's count. With
    shares of equal size the mean of the workers' gradients is the gradient of the global batch;
    with ragged ones it is an estimate.

    Each worker clips its gradients by its own norm; the reported norm is the norm of rank 0's
    worker. If a worker's norm is not finite, only this worker skips its update.

    Between workers, a rank communicates only with the ranks at the same position in the other
    workers. It exchanges its share of the parameters and distributes the result within its worker.
    So each parameter crosses the slow links only once, regardless of the number of ranks per
    worker.
    """

    replicas_diverge = True
    #: The result of a synchronization is the same for all workers.
    has_common_result = True

    def __init__(self, config: Config, world: Communicator) -> None:
        super().__init__(config, world)
        self.settings = config.local_sgd
        self.schedule = SyncSchedule.of(self.settings)
        self.workers = num_workers(self.settings, world.env)
        self.steps_done = 0  # since the run began, also before a restart
        self.pending: dict[int, PendingSync] = {}  # by fragment
        self.max_pending_bytes = 0
        self.fragments_synced = 0  # since this process started
        self.method_s = 0.0  # in synchronizations, without waiting
        self.model: nn.Module
        self.buckets: GradientBuckets

    # -- setup
    def setup(self, model: nn.Module) -> nn.Module:
        self.model = model
        self.trained = trained_parameters(model)
        for parameter in self.trained.values():
            parameter.data = parameter.data.contiguous()
        sync_weights(model, self.world)
        self._make_groups()
        self.changing_buffers = changing_buffers(model) if self.world.size > 1 else []
        cap_bytes = int(self.config.parallel.bucket_cap_mb * 2**20)
        self.buckets = GradientBuckets(self.trained.values(), cap_bytes, self.intra_group)
        self.params = FlatParams(list(self.trained.values()))
        #: Running statistics, which differ between workers like the parameters.
        self.statistics = [buffer for buffer in self.changing_buffers if buffer.is_floating_point()]
        #: What differs between workers between synchronizations, besides the optimizer.
        self.local_tensors = FlatParams([*self.trained.values(), *self.statistics])
        ranks = self.world.size // self.workers
        ranks_text = "" if ranks == 1 else f" of {counted(ranks, 'rank')}"
        text = UserText(
            "{name}: {workers:worker}{ranks_text}, synchronized every {period:step}",
            code="workers",
            name=self.name,
            workers=self.workers,
            ranks_text=ranks_text,
            period=self.schedule.period,
        )
        self.notices.append(("info", text))
        return model

    def _make_groups(self) -> None:
        """Create ``intra_group``, the ranks of this worker, and ``inter_group``, the ranks at the
        same position in all workers."""
        world = self.world
        if (
            self.settings.workers is None
            and len(set(world.gather_objects(world.env.local_world_size))) > 1
        ):
            self.workers = world.size
            text = UserText(
                "machines have different numbers of ranks, so each rank is a worker",
                code="rank-per-worker",
            )
            self.notices.append(("warning", text))
        axes = ParallelDims(data=self.workers, shard=world.size // self.workers)
        groups = type(world)(world.env, world.device, axes, world.group, world.ranks, world.waits)
        self.intra_group, self.inter_group = groups.subgroup("shard"), groups.subgroup("data")
        if self.schedule.delay and self.inter_group.size == world.size > 1:
            # Pending synchronizations must not block the collectives of the steps.
            group = new_group(world.ranks, world.timeout)
            self.inter_group = type(world)(
                world.env, world.device, axes, group, world.ranks, world.waits
            )

    def fragment_range(self, number: int) -> tuple[int, int]:
        """Return a fragment's range in :attr:`params`."""
        return fragment_range(self.params.size, self.schedule.fragments, number)

    def local_range(self, number: int) -> tuple[int, int]:
        """Return the range of a fragment that this rank averages with the other workers."""
        group = self.intra_group
        return share(*self.fragment_range(number), group.size, group.rank)

    # -- a step
    @property
    def in_warmup(self) -> bool:
        """True before and in the steps of plain data parallelism."""
        return self.steps_done < self.schedule.warmup

    def skip_warmup(self) -> None:
        if self.in_warmup:
            self.steps_done = self.schedule.warmup - 1
            self.optimizer_step(lambda _: False)

    @property
    def is_synchronized(self) -> bool:
        """True if all workers have the same parameters."""
        return self.workers == 1 or self.schedule.is_synchronized(self.steps_done)

    @property
    def count_group(self) -> Communicator:
        same = self.intra_group.size == self.world.size
        return self.world if self.in_warmup or same else self.intra_group

    @property
    def traffic_period(self) -> int:
        return self.schedule.period

    def forward_backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        self.accumulate(micro_step, self.model, num_micro_batches)

    def begin_accumulation(self) -> None:
        self.buckets.world = self.world if self.in_warmup else self.intra_group
        self.buckets.zero()

    def backward(self, loss: torch.Tensor) -> None:
        # The loss is divided by the worker's count times the number of workers (`count_group`).
        (loss if self.in_warmup else loss * self.workers).backward()

    def last_backward(self, loss: torch.Tensor) -> None:
        self.buckets.start_reducing()
        self.backward(loss)

    def end_accumulation(self) -> None:
        self.buckets.finish()
        self.buckets.world.broadcast(self.changing_buffers)

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        return clip_to(max_norm, self.buckets.norm(), self.buckets.scale)

    def local_grad_finite(self) -> torch.Tensor | None:
        return self.buckets.local_sum()

    @property
    def replica_group(self) -> Communicator:
        return self.world if self.is_synchronized else self.intra_group

    def replicated_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        # After the warm-up, the optimizer's state is common only within a worker.
        in_worker = self.replica_group is self.intra_group
        same_optimizer = in_worker or self.steps_done <= self.schedule.warmup
        yield from trained_state(self) if same_optimizer else self.trained.items()
        yield from frozen_parts(self.model)

    def optimizer_step(self, apply: OptimizerStep) -> bool:
        updated = apply(self.optimizer)
        self.steps_done += 1
        start_s, waited_s = time.perf_counter(), self.world.wait_s
        with torch.no_grad():
            self._synchronize()
        self.method_s += time.perf_counter() - start_s - (self.world.wait_s - waited_s)
        return updated

    def discard_gradients(self) -> None:
        """Do nothing: the next :meth:`forward_backward` overwrites the gradients, and a step would
        count towards the next synchronization."""

    def _synchronize(self) -> None:
        """Run what is due after this step, in the same order on every rank: completions, second
        messages, starts."""
        step, schedule = self.steps_done, self.schedule
        if step == schedule.warmup:
            self.start_local_training()
        if schedule.delay:
            for number in schedule.completing_at(step):
                if number in self.pending:  # else it was dropped with a checkpoint's state
                    self._complete(number, self.pending.pop(number))
            for number in schedule.halfway_at(step):
                if number in self.pending:
                    self.pending[number].advance()
        for number in schedule.starting_at(step):
            sync = self.start_sync(number)
            if schedule.delay:
                self.pending[number] = sync
            else:
                self._complete(number, sync)
        self.max_pending_bytes = max(
            self.max_pending_bytes, sum(sync.num_bytes for sync in self.pending.values())
        )

    def _complete(self, number: int, sync: PendingSync) -> None:
        self.finish_sync(number, sync.wait())
        self.fragments_synced += 1
        if number == self.schedule.fragments - 1:
            statistics = FlatParams(self.statistics)  # small, so waiting for them is cheap
            if statistics.size:
                mean = GroupMean(statistics.read(0, statistics.size), self.inter_group)
                statistics.write(0, mean.value())

    @abstractmethod
    def start_sync(self, number: int) -> PendingSync:
        """Start the synchronization of a fragment."""

    @abstractmethod
    def finish_sync(self, number: int, result: torch.Tensor) -> None:
        """Apply this rank's share of the result of a synchronization."""

    def start_local_training(self) -> None:
        """Called when the workers have the same parameters and start to train independently."""

    def all_gather_share(self, values: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Gather the range [start, stop) from the shares of this worker's ranks."""
        group = self.intra_group
        if group.size == 1:
            return values
        low, high = share(start, stop, group.size, 0)
        padded = values.new_zeros(high - low)
        padded[: values.numel()] = values
        gathered = values.new_empty(group.size * padded.numel())
        group.wait(group.all_gather(gathered, padded))
        return gathered[: stop - start]

    # -- evaluation
    def average(self) -> torch.Tensor:
        """Return the full mean of :attr:`local_tensors` over the workers. A collective outside of
        steps."""
        local, group, chunks = self.local_tensors, self.intra_group, []
        with uncounted(), torch.no_grad():
            for start in range(0, local.size, _CHUNK_ELEMENTS):
                stop = min(local.size, start + _CHUNK_ELEMENTS)
                values = local.read(*share(start, stop, group.size, group.rank))
                mean = GroupMean(values, self.inter_group).value()
                chunks.append(self.all_gather_share(mean, start, stop))
        return torch.cat(chunks) if chunks else torch.zeros(0)

    @contextmanager
    def consolidated(self) -> Iterator[None]:
        with super().consolidated():
            if self.is_synchronized:
                yield
                return
            tensors = self.local_tensors.tensors
            copies = [tensor.clone() for tensor in tensors]
            self.local_tensors.write(0, self.average())
            try:
                yield
            finally:
                with torch.no_grad():
                    for tensor, values in zip(tensors, copies, strict=True):
                        tensor.copy_(values)

    # -- state and report
    def tensor_shards(self) -> Iterable[TensorShard]:
        return full_shards(self.trained, self.model, owned=self.world.is_rank_zero)

    def outer_state(self) -> dict[str, list[tuple[int, torch.Tensor]]]:
        """Return other state that is the same for all workers: name → (start in :attr:`params`,
        live tensor) of this rank's ranges."""
        return {}

    @property
    def comm_profile(self) -> CommProfile | None:
        if self.workers == 1:
            return None
        moments = 2 if self.config.train_args.optim in ("adamw", "adam") else 1
        vectors = 1 + moments if self.settings.average_optimizer_state else 1
        schedule = self.schedule
        return CommProfile(
            self.name,
            "set `parallel.mode: ddp`",
            self.buckets.bucket_bytes,
            self.world,
            self.inter_group,
            vectors * self._sync_bytes() / schedule.period,
            2 * (self.workers - 1) * vectors * schedule.fragments / schedule.period,
            lambda: CommTimes(self.buckets.backward_s, self.method_s),
            period=schedule.period,
            warmup=schedule.warmup,
            has_other_collectives=self.intra_group.size not in (1, self.world.size),
        )

    def report_metrics(self, sent_bytes: float | None) -> StrategyMetrics:
        plain = all_reduce_bytes(sum(self.buckets.bucket_bytes), self.world.size)
        metrics: dict[str, JsonValue] = {
            "method": self.name,
            "ratio_sent": plain / sent_bytes if sent_bytes else None,
            "workers": self.workers,
            "synchronisations": self.fragments_synced // self.schedule.fragments,
            "bytes_per_synchronisation": self._sync_bytes(),
        }
        return {"communication": metrics}

    def _sync_bytes(self) -> int:
        ranges = map(self.local_range, range(self.schedule.fragments))
        dtype = self.settings.outer_dtype if self.name == "diloco" else "float32"
        return mean_bytes([stop - start for start, stop in ranges], self.workers, dtype)

    def memory_tensors(self) -> list[torch.Tensor]:
        outer = [tensor for ranges in self.outer_state().values() for _, tensor in ranges]
        return [
            *self.model.parameters(),
            *self.model.buffers(),
            *self.buckets.flats,
            *optimizer_tensors(self.optimizer),
            *outer,
        ]

    @property
    def transient_bytes(self) -> int:
        return self.max_pending_bytes
