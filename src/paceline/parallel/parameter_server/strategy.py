"""`parameter_server`: embedding tables on servers, cut by rows; workers pull and push the rows of
their batch alone. After Li et al., "Scaling Distributed Machine Learning with the Parameter Server"
(2014), synchronous.

Ranks 0 to W - 1 are workers, those after them servers. A step: the workers pull rows and push
gradients through ``torch.distributed.rpc``; their other gradients are all-reduced among them as
under ``ddp``; when every push has arrived, each server updates its rows and each worker the rest.
Where the rest is on the servers too: ``server_dense.py``.

With ``on_worker_loss: go_on`` all collectives go through the first server (``server_meeting.py``)
as soon as it is reached, and none through a process group, which would break with the first worker.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed import rpc

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.communicator import Communicator
from paceline.distributed.traffic import uncounted
from paceline.models.recommend import Table, named_tables, tables_elsewhere
from paceline.parallel.base import (
    MicroStep,
    OptimizerFactory,
    Strategy,
    optimizer_tensors,
    persistent_buffers,
)
from paceline.parallel.ddp.buckets import GradientBuckets
from paceline.parallel.gradients import changing_buffers, clip_factor
from paceline.parallel.parameter_server.client import (
    RemoteEmbedding,
    bytes_of,
    connect,
    rank_name,
)
from paceline.parallel.parameter_server.collectives import ServerCommunicator
from paceline.parallel.parameter_server.cost import row_ranges
from paceline.parallel.parameter_server.roles import who_does_what
from paceline.parallel.parameter_server.server import RowOptimizer, TableShard, push, serve
from paceline.parallel.protocols import RankLoss
from paceline.parallel.state import StateReader, TensorShard


class ParameterServerStrategy(Strategy):
    """Tables on servers, the rest of the model on each worker; every step is the one that ``ddp``
    makes."""

    name = "parameter_server"
    rank0_has_full_model = False

    def __init__(self, config: Config, world: Communicator) -> None:
        super().__init__(config, world)
        self.said = config.parameter_server
        self.num_workers = world.axes.replicas
        servers = [[rank] for rank in range(self.num_workers, world.size)]
        #: On a worker all of them, on a server itself.
        self.workers = world.split([range(self.num_workers), *servers], world.waits)
        self.tables: dict[str, Table] = {}
        self.shards: list[TableShard] = []
        self.trained: dict[str, nn.Parameter] = {}
        self.connected = False
        self.members = list(range(self.num_workers))  # workers that have a share of the batch
        self.missed: dict[int, int] = {}  # worker that is lost → last steps without its gradients
        self.own_count = 0.0
        self.whole_count: Callable[[], torch.Tensor] | None = None

    @property
    def is_server(self) -> bool:
        return self.world.rank >= self.num_workers

    @property
    def has_data(self) -> bool:
        return not self.is_server

    @property
    def reports_loss(self) -> bool:
        return not self.is_server

    @property
    def replica(self) -> int:
        return self.members.index(self.world.rank) if not self.is_server else 0

    @property
    def num_replicas(self) -> int:
        return len(self.members)

    def poll_rank_losses(self) -> list[RankLoss]:
        if not isinstance(self.world, ServerCommunicator):
            return []
        losses, before = self.world.losses, self.members
        gone = [rank for rank in before if rank in losses]
        self.members = [rank for rank in before if rank not in losses]
        return [
            RankLoss(
                rank,
                losses[rank].pid,
                losses[rank].reason,
                before.index(rank),
                len(before),
                self._steps_missed(rank),
            )
            for rank in gone
        ]

    def _steps_missed(self, rank: int) -> int:
        return self.missed.get(rank, 0)

    def set_token_counts(self, own: float, whole: Callable[[], torch.Tensor]) -> None:
        self.own_count, self.whole_count = own, whole

    @contextmanager
    def model_init_context(self) -> Iterator[None]:
        with tables_elsewhere():
            yield

    # -- placing
    def setup(self, model: nn.Module) -> nn.Module:
        self.model = model
        self.tables = named_tables(model)
        if not self.tables:
            raise ConfigError(
                "`parallel.mode: parameter_server`: the model has no embedding table to serve",
                allowed="a model with paceline.models.recommend.Table, such as `builtin:dlrm`",
                fix="set `parallel.mode: ddp`",
            )
        seeds: Any = self.world.broadcast_object([one.seed for one in self.tables.values()])
        for table, seed in zip(self.tables.values(), seeds, strict=True):
            table.seed = seed
        num_servers = self.world.size - self.num_workers
        self.ranges = {
            name: row_ranges(table.rows, num_servers) for name, table in self.tables.items()
        }
        if self.is_server:
            self._make_shards()
            model.to("meta")
        else:
            self._make_worker(model)
        self.notices.append(("info", who_does_what(self.said, self.num_workers, self.world.size)))
        served = (
            ServerCommunicator(self.world, self.num_workers)
            if self.said.on_worker_loss == "go_on"
            else None
        )
        connect(self.world, self.settings.timeout_s)
        self.connected = True
        if served is not None:
            served.watch(self._clock_of)
            self.world = served
        return model

    def _clock_of(self, rank: int) -> int:
        """On the first server: a worker is lost. How many of its steps were applied, where servers
        keep clocks."""
        return 0

    def _make_shards(self) -> None:
        for name, table in self.tables.items():
            start, end = self.ranges[name][self.world.rank - self.num_workers]
            values = torch.empty(end - start, table.dim)
            table.fill(values, start)
            self.shards.append(TableShard(name, table.rows, start, nn.Parameter(values)))
        serve(self.shards)

    def _dense(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """All parameters but the tables."""
        return {name: one for name, one in model.named_parameters() if name not in self.tables}

    def _make_worker(self, model: nn.Module) -> None:
        self.trained = {name: one for name, one in self._dense(model).items() if one.requires_grad}
        for number, (name, table) in enumerate(self.tables.items()):
            table.source = RemoteEmbedding(
                number, self.ranges[name], self.num_workers, table.dim, self.world
            )
        self.workers.broadcast([*self._dense(model).values(), *model.buffers()])
        self.changing_buffers = changing_buffers(model) if self.workers.size > 1 else []
        self.buckets = GradientBuckets(
            self.trained.values(), int(self.settings.bucket_cap_mb * 2**20), self.workers
        )

    def close(self) -> None:
        if self.connected:
            self.connected = False
            if isinstance(self.world, ServerCommunicator):
                # rpc's own way to end waits for all ranks, the dead as well; sockets close with the
                # process
                self.world.leave()
            else:
                rpc.shutdown()

    # -- a step
    def setup_optimizer(self, build: OptimizerFactory) -> torch.optim.Optimizer:
        if not self.is_server:
            self.optimizer = build(list(self.trained.items()))
            return self.optimizer
        args = self.config.train_args
        usual = build([(shard.name, shard.values) for shard in self.shards]).defaults["lr"]
        betas, eps = (
            (args.adam_beta1, args.adam_beta2),
            args.adam_epsilon if self.said.optimizer == "adam" else None,
        )
        self.optimizer = RowOptimizer(
            self.shards, self.said.optimizer, self.said.learning_rate or usual, betas, eps
        )
        return self.optimizer

    def forward_backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        if not self.is_server:
            pushes = []
            self._before_forward()
            for number in range(num_micro_batches):
                loss = micro_step(number, self.model)
                if number == num_micro_batches - 1:
                    self._before_last_backward()
                loss.backward()
                pushes += self._push(number)
            pushes += self._after_backward()
            for one in pushes:
                one.wait()
        self._merge()

    def _before_forward(self) -> None:
        self.buckets.zero()

    def _before_last_backward(self) -> None:
        self.buckets.start_reducing()

    def _after_backward(self) -> list[Any]:
        self.buckets.finish()
        self.workers.broadcast(self.changing_buffers)
        return []

    def _merge(self) -> float:
        """Sum what was pushed, when every push has arrived. A worker that was lost before all of
        its own had is left out on every server, and the rest weighted up to the mean over those who
        are left; gives the weight."""
        with uncounted():
            arrived = self.world.sum(self.own_count)[0]
        for rank in self.members:
            if rank in self.world.lost:
                self.missed[rank] = 1
        weight = 1.0
        if self.world.lost and self.whole_count is not None and arrived > 0:
            weight = float(self.whole_count()) / arrived
        for shard in self.shards:
            shard.merge(self.world.lost, weight)
        return weight

    def _push(self, number: int) -> list[Any]:
        """Send off the rows' gradients of a micro-batch, one message a server."""
        by_server: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        for place, table in enumerate(self.tables.values()):
            source = table.source
            assert isinstance(source, RemoteEmbedding)
            for server, rows, gradient in source.gradients():
                by_server.setdefault(server, {})[place] = (rows, gradient)
                self.world.traffic.add("push", bytes_of(rows) + bytes_of(gradient))
        key = (self.world.rank, number)
        return [
            rpc.rpc_async(rank_name(server), push, args=(key, found))
            for server, found in by_server.items()
        ]

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        with uncounted():
            norm = torch.tensor(math.sqrt(self.world.sum(self._squares())[0]), dtype=torch.float32)
        if max_norm > 0:
            self._scale(clip_factor(norm, max_norm))
        return norm

    def _squares(self) -> float:
        """Of the gradients that are counted on this rank, the sum of squares."""
        if not self.is_server:
            # the same on each worker
            return float(self.buckets.norm()) ** 2 if self.world.is_rank_zero else 0.0
        return sum(
            (float(one.gradient[1].double().square().sum()) for one in self.shards if one.gradient),
            0.0,
        )

    def _scale(self, factor: torch.Tensor) -> None:
        if not self.is_server:
            self.buckets.scale(factor)
        for shard in self.shards:
            if shard.gradient is not None:
                shard.gradient[1].mul_(factor)

    def optimizer_step(self, apply: Callable[[torch.optim.Optimizer], bool]) -> bool:
        made = apply(self.optimizer)
        with uncounted():
            self.world.barrier()  # nobody pulls rows of the step before
        return made

    # -- state
    def tensor_shards(self) -> Iterable[TensorShard]:
        for shard in self.shards:
            shape = (shard.rows, shard.values.shape[1])
            yield TensorShard(shard.name, shard.values, shape, (shard.start, 0), key=shard.values)
        if not self.is_server:
            for name, one in self.trained.items():
                yield TensorShard.whole(name, one, key=one, owned=self.world.is_rank_zero)
            for name, buffer in persistent_buffers(self.model).items():
                yield TensorShard.whole(name, buffer, owned=self.world.is_rank_zero)

    def state_shards(self) -> list[TensorShard]:
        found = super().state_shards()
        for shard in self.shards:
            sums = self.optimizer.state[shard.values].get("row_sum")
            name = f"optimizer/{shard.name}/row_sum"
            if sums is not None and all(one.name != name for one in found):
                found.append(TensorShard(name, sums, (shard.rows, 1), (shard.start, 0)))
        return [replace(one, owned=True) for one in found]

    def load_state(self, source: StateReader) -> None:
        wanted = {key for shard in self.shards for key in self.optimizer.state[shard.values]}
        for shard in self.shards:
            stored = {
                name.rpartition("/")[2]
                for name in source.tensors()
                if name.rpartition("/")[0] == f"optimizer/{shard.name}"
            }
            if stored and stored != wanted:
                raise ConfigError(
                    f"the checkpoint's `{shard.name}` has the optimizer state"
                    f" {', '.join(sorted(stored))}, and `parameter_server.optimizer:"
                    f" {self.said.optimizer}` has {', '.join(sorted(wanted)) or 'none'}",
                    fix=(
                        "set `parameter_server.optimizer` as it was, or another `output_dir` for a"
                        " new run"
                    ),
                )
        super().load_state(source)

    def after_load(self) -> None:
        with uncounted():
            self.world.barrier()  # nobody pulls from a server that has not read its rows

    def load_optimizer_entry(
        self,
        source: StateReader,
        name: str,
        part: TensorShard,
        known: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    ) -> torch.Tensor:
        if name.endswith("/row_sum"):
            return source.read(name, (part.offset[0], 0), (len(part.tensor), 1))
        if self.is_server and known[name][1] == ():
            return source.read(name, (), ())
        return super().load_optimizer_entry(source, name, part, known)

    def memory_tensors(self) -> list[Any]:
        if self.is_server:
            return [*(shard.values for shard in self.shards), *optimizer_tensors(self.optimizer)]
        return [
            *self._dense(self.model).values(),
            *self.model.buffers(),
            *self.buckets.flats,
            *optimizer_tensors(self.optimizer),
        ]
