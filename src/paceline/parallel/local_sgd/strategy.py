"""What `local_sgd` and `diloco` have in common: workers that train on their own, and are
synchronised every so many steps."""

import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch import nn

from paceline.config.schema import Config
from paceline.core.formatting import counted
from paceline.distributed.collectives.schedules import all_reduce_bytes
from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import ParallelDims
from paceline.distributed.traffic import uncounted
from paceline.parallel.base import (
    MicroStep,
    OptimizerFactory,
    OptimizerStep,
    Strategy,
    optimizer_tensors,
    trained_parameters,
    whole_shards,
)
from paceline.parallel.comm_profile import CommProfile, CommTimes, StrategyMetrics
from paceline.parallel.compression.base import dropped_state_notices
from paceline.parallel.ddp.buckets import GradientBuckets
from paceline.parallel.gradients import changing_buffers, clip_to
from paceline.parallel.local_sgd.cost import mean_bytes
from paceline.parallel.local_sgd.schedule import SyncSchedule, fragment, num_workers, share
from paceline.parallel.local_sgd.state import load_local, local_parts, with_mean
from paceline.parallel.local_sgd.sync import FlatParams, GroupMean, PendingSync
from paceline.parallel.save_load import collect_shards, trained_state
from paceline.parallel.state import StateReader, TensorShard, frozen_parts

#: Elements that are averaged at a time where the whole model is, for a checkpoint or an evaluation.
_CHUNK = 1 << 24


class LocalSGDBase(Strategy):
    """Each worker, a group of ranks, runs the optimizer on its own share of the batch; within a
    worker gradients are averaged at each step, workers are synchronised every H steps: see
    :class:`~paceline.parallel.local_sgd.algorithms.LocalSGDStrategy` and
    :class:`~paceline.parallel.local_sgd.algorithms.DiLoCoStrategy`.

    A worker's gradient is the mean over its own share: the loss is divided by the worker's own
    count. With shares of one size the mean of the workers' gradients is that of the global batch;
    with ragged ones it is an estimate.

    Gradients are clipped by each worker to its own norm, and the norm that is told is that of rank
    0's worker. Where it is not finite, that worker alone skips its update.

    Between workers only the ranks with the same place in their workers talk, each about its share
    of the parameters, and hand on to the others of their worker what came of it: over the slow
    links each parameter goes once, whatever the number of ranks of a worker.
    """

    replicas_diverge = True
    max_count_lag = 1
    #: What comes of a synchronisation is the same for all workers.
    flights_are_shared = True

    def __init__(self, config: Config, world: Communicator) -> None:
        super().__init__(config, world)
        self.local = config.local_sgd
        self.rhythm = SyncSchedule.of(self.local)
        self.workers = num_workers(self.local, world.env)
        self.done = 0  # steps made, over all lives of the run
        self.flights: dict[int, PendingSync] = {}
        self.most_in_flight = 0  # bytes
        self.synchronised = 0  # fragments, in this life
        self.method_s = 0.0  # in synchronisations, less the waiting
        self.model: nn.Module
        self.buckets: GradientBuckets

    # -- where things are
    def setup(self, model: nn.Module) -> nn.Module:
        self.model = model
        self.trained = trained_parameters(model)
        for one in self.trained.values():
            one.data = one.data.contiguous()
        self.world.broadcast([*model.parameters(), *model.buffers()])
        self._make_lines()
        self.changing_buffers = changing_buffers(model) if self.world.size > 1 else []
        self.buckets = GradientBuckets(
            self.trained.values(), int(self.config.parallel.bucket_cap_mb * 2**20), self.near
        )
        self.vector = FlatParams(list(self.trained.values()))
        #: What lies apart between synchronisations, besides the optimizer: parameters, and running
        #: statistics.
        self.apart = FlatParams(
            [
                *self.trained.values(),
                *(one for one in self.changing_buffers if one.is_floating_point()),
            ]
        )
        ranks = self.world.size // self.workers
        each = "" if ranks == 1 else f" of {counted(ranks, 'rank')}"
        self.notices.append(
            (
                "info",
                (
                    f"{self.name}: {counted(self.workers, 'worker')}{each}, synchronised every"
                    f" {self.rhythm.period} steps"
                ),
            )
        )
        return model

    def _make_lines(self) -> None:
        """``near``: the ranks of this worker; ``far``: those with the same place in all workers."""
        world = self.world
        if (
            self.local.workers is None
            and len(set(world.gather_objects(world.env.local_world_size))) > 1
        ):
            self.workers = world.size
            self.notices.append(
                (
                    "warning",
                    "machines with different numbers of ranks: each rank is a worker of its own",
                )
            )
        axes = ParallelDims(data=self.workers, shard=world.size // self.workers)
        lines = Communicator(world.env, world.device, axes, world.group, world.ranks, world.waits)
        self.near, self.far = lines.subgroup("shard"), lines.subgroup("data")
        if self.rhythm.overlap and self.far.size == world.size > 1:
            # What travels beside the steps must not stand in the way of their own collectives.
            self.far = Communicator(
                world.env, world.device, axes, dist.new_group(world.ranks), world.ranks, world.waits
            )

    def setup_optimizer(self, build: OptimizerFactory) -> torch.optim.Optimizer:
        self.optimizer = build(list(self.trained.items()))
        return self.optimizer

    def share_of(self, number: int) -> tuple[int, int]:
        """The range of the parameters' vector that this rank averages with the other workers, of a
        fragment."""
        return share(
            *fragment(self.vector.size, self.rhythm.fragments, number),
            self.near.size,
            self.near.rank,
        )

    # -- a step
    @property
    def is_warming(self) -> bool:
        """True before and in the steps of plain data parallelism."""
        return self.done < self.rhythm.warmup

    @property
    def is_together(self) -> bool:
        """True where all workers hold the same parameters."""
        return self.workers == 1 or self.rhythm.together(self.done)

    @property
    def count_group(self) -> Communicator:
        return self.world if self.is_warming or self.near.size == self.world.size else self.near

    @property
    def traffic_period(self) -> int:
        return self.rhythm.period

    def forward_backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        self.buckets.world = self.world if self.is_warming else self.near
        self.buckets.zero()
        for number in range(num_micro_batches):
            loss = micro_step(number, self.model)
            if number == num_micro_batches - 1:
                self.buckets.start_reducing()
            (loss if self.is_warming else loss * self.workers).backward()
        self.buckets.finish()
        self.buckets.world.broadcast(self.changing_buffers)

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        return clip_to(max_norm, self.buckets.norm(), self.buckets.scale)

    def local_grad_finite(self) -> torch.Tensor | None:
        return self.buckets.local_sum()

    @property
    def replica_group(self) -> Communicator:
        return self.world if self.is_together else self.near

    def replicated_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        # else each worker's optimizer is its own
        alike = self.replica_group is self.near or self.done <= self.rhythm.warmup
        yield from trained_state(self) if alike else self.trained.items()
        yield from frozen_parts(self.model)

    def optimizer_step(self, apply: OptimizerStep) -> bool:
        made = apply(self.optimizer)
        self.done += 1
        begin, waited = time.perf_counter(), self.world.wait_s
        with torch.no_grad():
            self._synchronise()
        self.method_s += time.perf_counter() - begin - (self.world.wait_s - waited)
        return made

    def _synchronise(self) -> None:
        """What is due after this step, in one order on every rank: what ends, second messages, what
        begins."""
        step, rhythm = self.done, self.rhythm
        if step == rhythm.warmup:
            self.start_apart()
        if rhythm.overlap:
            for number in rhythm.ends(step):
                flight = self.flights.pop(number, None)
                if flight is not None:  # begun in this life, or in the checkpoint
                    self._end(number, flight)
            for number in rhythm.halfway(step):
                if number in self.flights:
                    self.flights[number].advance()
        for number in rhythm.begins(step):
            flight = self.depart(number)
            if rhythm.overlap:
                self.flights[number] = flight
            else:
                self._end(number, flight)
        self.most_in_flight = max(
            self.most_in_flight, sum(one.held_bytes for one in self.flights.values())
        )

    def _end(self, number: int, flight: PendingSync) -> None:
        self.arrive(number, flight.land())
        self.synchronised += 1
        if number == self.rhythm.fragments - 1:
            self._average_statistics()

    def _average_statistics(self) -> None:
        """Bring running statistics together: small, and waited for."""
        statistics = FlatParams([one for one in self.changing_buffers if one.is_floating_point()])
        if statistics.size:
            statistics.write(0, GroupMean(statistics.read(0, statistics.size), self.far).value())

    @abstractmethod
    def depart(self, number: int) -> PendingSync:
        """Begin the synchronisation of a fragment."""

    @abstractmethod
    def arrive(self, number: int, landed: torch.Tensor) -> None:
        """End it: ``landed`` is this rank's share of what came of it."""

    def start_apart(self) -> None:
        """Called when the workers hold the same parameters and begin to train on their own."""

    def landed(self, values: torch.Tensor) -> PendingSync:
        """A synchronisation of which a checkpoint holds what came of it."""
        return PendingSync(None, landed=values)

    def hand_on(self, values: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """The range [start, stop) put together from the shares of this worker's ranks."""
        if self.near.size == 1:
            return values
        each = share(start, stop, self.near.size, 0)
        mine = values.new_zeros(each[1] - each[0])
        mine[: values.numel()] = values
        whole = values.new_empty(self.near.size * mine.numel())
        self.near.wait(self.near.all_gather(whole, mine))
        return whole[: stop - start]

    # -- evaluation and state
    def average(self) -> torch.Tensor:
        """The mean over the workers of :attr:`apart`, whole. A collective; no part of a step."""
        vector, found = self.apart, []
        with uncounted(), torch.no_grad():
            for start in range(0, vector.size, _CHUNK):
                stop = min(vector.size, start + _CHUNK)
                low, high = share(start, stop, self.near.size, self.near.rank)
                found.append(
                    self.hand_on(GroupMean(vector.read(low, high), self.far).value(), start, stop)
                )
        return torch.cat(found) if found else torch.zeros(0)

    @contextmanager
    def consolidated(self) -> Iterator[None]:
        if self.is_together:
            yield
            return
        own = [one.clone() for one in self.apart.tensors]
        self.apart.write(0, self.average())
        try:
            yield
        finally:
            with torch.no_grad():
                for one, kept in zip(self.apart.tensors, own, strict=True):
                    one.copy_(kept)

    def tensor_shards(self) -> Iterable[TensorShard]:
        return whole_shards(self.trained, self.model, owned=self.world.is_rank_zero)

    def state_shards(self) -> list[TensorShard]:
        return with_mean(self, collect_shards(self))

    def extra_state(self) -> list[TensorShard]:
        return local_parts(self)

    def outer_state(self) -> dict[str, list[tuple[int, torch.Tensor]]]:
        """What lasts besides, the same for all workers: name → this rank's ranges of the
        parameters' vector, live."""
        return {}

    def load_extra_state(self, source: StateReader) -> list[tuple[str, str]]:
        return [*dropped_state_notices(source), *load_local(self, source)]

    @property
    def comm_profile(self) -> CommProfile | None:
        if self.workers == 1:
            return None
        moments = 2 if self.config.train_args.optim in ("adamw", "adam") else 1
        vectors = 1 + moments if self.local.average_optimizer_state else 1
        sent = vectors * self._sync_bytes() / self.rhythm.period
        messages = 2 * (self.workers - 1) * vectors * self.rhythm.fragments / self.rhythm.period
        return CommProfile(
            self.name,
            "set `parallel.mode: ddp`",
            self.buckets.bucket_bytes,
            self.world,
            self.far,
            sent,
            messages,
            lambda: CommTimes(self.buckets.backward_s, self.method_s),
            period=self.rhythm.period,
            warmup=self.rhythm.warmup,
            has_other_collectives=self.near.size not in (1, self.world.size),
        )

    def report_metrics(self, sent_bytes: float | None) -> StrategyMetrics:
        plain = all_reduce_bytes(
            sum(one.numel() * one.element_size() for one in self.buckets.flats), self.world.size
        )
        metrics: dict[str, JsonValue] = {
            "method": self.name,
            "ratio_sent": plain / sent_bytes if sent_bytes else None,
            "workers": self.workers,
            "synchronisations": self.synchronised // self.rhythm.fragments,
            "bytes_per_synchronisation": self._sync_bytes(),
        }
        return {"communication": metrics}

    def _sync_bytes(self) -> int:
        ranges = map(self.share_of, range(self.rhythm.fragments))
        dtype = self.local.outer_dtype if self.name == "diloco" else "float32"
        return mean_bytes([stop - start for start, stop in ranges], self.workers, dtype)

    def memory_tensors(self) -> list[torch.Tensor]:
        outer = [one for ranges in self.outer_state().values() for _, one in ranges]
        return [
            *self.model.parameters(),
            *self.model.buffers(),
            *self.buckets.flats,
            *optimizer_tensors(self.optimizer),
            *outer,
        ]

    @property
    def transient_bytes(self) -> int:
        return self.most_in_flight
