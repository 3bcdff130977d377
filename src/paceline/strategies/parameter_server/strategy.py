"""`parameter_server`: embedding tables are divided by rows among servers, and workers pull and push
only the rows of their batch. Based on Li et al., "Scaling Distributed Machine Learning with the
Parameter Server" (2014), with synchronous updates.

Ranks 0 to W - 1 are workers, the others servers. In a step the workers pull rows and push gradients
through ``torch.distributed.rpc``. The other ("dense") parameters are either on the workers, which
all-reduce their gradients as with ``ddp``, or divided among the servers by size. In the latter case
a worker pulls them before its step and pushes one gradient of each afterwards. When all pushes have
arrived, each server updates its parameters, and each worker updates the rest. Workers compute on
their devices, and servers on the CPU.

With ``on_worker_failure: continue`` all collectives go through the first server
(``collectives.py``) once it is connected, and none through a process group, which would break when
a worker exits.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.distributed.communicator import Communicator
from paceline.distributed.traffic import uncounted
from paceline.models.recommend import (
    Table,
    move_dense,
    named_tables,
    tables_without_values,
)
from paceline.parallel.buckets.gradients import GradientBuckets
from paceline.parallel.comm_profile import RankLoss
from paceline.parallel.gradients import changing_buffers, clip_factor
from paceline.parallel.optimizer_state import entries_of, optimizer_tensors, read_entry
from paceline.parallel.state import StateReader, TensorShard, persistent_buffers
from paceline.parallel.strategy import (
    MemoryKind,
    MicroStep,
    OptimizerFactory,
    OptimizerStep,
    Strategy,
)
from paceline.strategies.parameter_server.client import (
    RemoteEmbedding,
    connect,
    rank_name,
    send_gradients,
)
from paceline.strategies.parameter_server.collectives import ServerCommunicator
from paceline.strategies.parameter_server.cost import assign_servers, row_ranges
from paceline.strategies.parameter_server.roles import describe_roles
from paceline.strategies.parameter_server.server import (
    SERVED,
    RowOptimizer,
    Rows,
    TableShard,
    pull_dense,
    push,
    sum_of_squares,
)


class ParameterServerStrategy(Strategy):
    """A synchronous parameter server. Every step equals a step of ``ddp``, up to rounding."""

    name = "parameter_server"
    optimizer: torch.optim.Optimizer
    rank0_has_full_model = False
    runs_trials = False  # servers count the requests of each step

    def __init__(self, config: Config, world: Communicator) -> None:
        super().__init__(config, world)
        self.options = config.parameter_server
        self.dense_on_servers = self.options.dense_on_servers
        self.num_workers = world.axes.replicas
        self.is_server = world.rank >= self.num_workers
        self.has_data, self.sends_between_steps = not self.is_server, self.is_server
        self.servers = range(self.num_workers, world.size)
        #: On a worker all workers, on a server only itself.
        (self.worker_device,) = world.device_types
        self.workers = world.split(
            [range(self.num_workers), *([rank] for rank in self.servers)],
            world.waits,
            # With servers on the CPU, the backend of all ranks is Gloo, and workers may have a
            # faster one.
            backend=dist.get_default_backend_for_device(self.worker_device),
        )
        self.tables: dict[str, Table] = {}
        self.shards: list[TableShard] = []
        #: Trained dense parameters: on a worker all of them, on a server those that it updates.
        self.trained: dict[str, nn.Parameter] = {}
        self.owners: dict[str, int] = {}  # dense parameter → the server that updates it
        self.changing_buffers: list[torch.Tensor] = []
        self.connected = False
        self.members = list(range(self.num_workers))  # workers that have a share of the batch
        self.steps_missed: dict[int, int] = {}  # lost worker → last steps without its gradients
        self.pushes: list[Any] = []  # messages of this step
        self.num_pushed = 0  # micro-batches of this step
        self.local_count = 0.0
        self.total_count: Callable[[], torch.Tensor] | None = None

    @property
    def replica(self) -> int:
        return 0 if self.is_server else self.members.index(self.world.rank)

    @property
    def num_replicas(self) -> int:
        return len(self.members)

    @property
    def reports_loss(self) -> bool:
        return self.has_data

    def lost_since_last_step(self) -> list[RankLoss]:
        if not isinstance(self.world, ServerCommunicator):
            return []
        exits, before = self.world.losses, self.members
        self.members = [rank for rank in before if rank not in exits]
        return [
            RankLoss(
                rank,
                exits[rank].pid,
                exits[rank].reason,
                before.index(rank),
                len(before),
                self._steps_missed(rank),
            )
            for rank in before
            if rank in exits
        ]

    def _steps_missed(self, rank: int) -> int:
        return self.steps_missed.get(rank, 0)

    def set_token_counts(self, local: float, total: Callable[[], torch.Tensor]) -> None:
        self.local_count, self.total_count = local, total

    def model_init_context(self) -> AbstractContextManager[None]:
        return tables_without_values()

    # -- setup
    def setup(self, model: nn.Module) -> nn.Module:
        self.model = model
        SERVED.open({}, None)
        if self.dense_on_servers:  # a table on the meta device has no values yet
            tensors = [*model.parameters(), *model.buffers()]
            self.world.broadcast([tensor for tensor in tensors if not tensor.is_meta])
        self.tables = named_tables(model)
        if not self.tables:
            raise ConfigError(
                "`parallel.mode: parameter_server`: the model has no embedding table for the"
                " servers",
                code="no-embedding-table",
                allowed="a model with paceline.models.recommend.Table, such as `builtin:dlrm`",
                fix="set `parallel.mode: ddp`",
            )
        seeds: Any = self.world.broadcast_object([table.seed for table in self.tables.values()])
        for table, seed in zip(self.tables.values(), seeds, strict=True):
            table.seed = seed
        self.ranges = {
            name: row_ranges(table.rows, len(self.servers)) for name, table in self.tables.items()
        }
        dense = self._dense(model)
        self.trained = {name: each for name, each in dense.items() if each.requires_grad}
        if self.dense_on_servers:
            sizes = [parameter.numel() for parameter in self.trained.values()]
            owners = assign_servers(sizes, len(self.servers))
            self.owners = {
                name: self.servers[owner] for name, owner in zip(self.trained, owners, strict=True)
            }
        if self.is_server:
            self._make_server()
            model.to("meta")
        else:
            self._make_worker(model)
        text = describe_roles(self.options, self.num_workers, self.world.size, self.worker_device)
        self.notices.append(("info", text))
        continues = self.options.on_worker_failure == "continue"
        communicator = ServerCommunicator(self.world, self.num_workers) if continues else None
        connect(self.world, self.config.parallel.collective_timeout_s)
        self.connected = True
        if communicator is not None:
            communicator.watch(self._clock_of)
            self.world = communicator
        return model

    def _clock_of(self, rank: int) -> int:
        """Return, on the first server, how many steps of a lost worker were applied, if servers
        count them."""
        return 0

    def _dense(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return all parameters but the tables."""
        return {name: each for name, each in model.named_parameters() if name not in self.tables}

    def _make_server(self) -> None:
        for name, table in self.tables.items():
            start, end = self.ranges[name][self.world.rank - self.num_workers]
            values = torch.empty(end - start, table.dim)
            table.fill(values, start)
            self.shards.append(TableShard(name, table.rows, start, nn.Parameter(values)))
        SERVED.shards = self.shards
        self.trained = {
            name: nn.Parameter(parameter.detach().clone())
            for name, parameter in self.trained.items()
            if self.owners.get(name) == self.world.rank
        }

    def _make_worker(self, model: nn.Module) -> None:
        move_dense(model, self.world.device)
        for number, (name, table) in enumerate(self.tables.items()):
            table.source = RemoteEmbedding(
                number, self.ranges[name], self.num_workers, table.dim, self.world
            )
        buffers = changing_buffers(model) if self.num_workers > 1 else []
        if not self.dense_on_servers:
            self.changing_buffers = buffers
            self.workers.broadcast([*self._dense(model).values(), *model.buffers()])
            self.buckets = GradientBuckets(
                self.trained.values(), int(self.config.parallel.bucket_cap_mb * 2**20), self.workers
            )
        elif self.options.consistency == "sync" and self.options.on_worker_failure == "restart":
            # Broadcast over the workers' process group, in which a worker waits for the slowest,
            # and which breaks when a worker exits.
            self.changing_buffers = buffers
        elif buffers:
            text = UserText(
                "each worker computes running statistics of normalization layers from its"
                " share of the batch; the first worker's are saved",
                code="running-statistics-of-workers",
            )
            self.notices.append(("warning", text))

    def close(self) -> None:
        if self.connected:
            self.connected = False
            self.workers.close()
            if isinstance(self.world, ServerCommunicator):
                # rpc.shutdown waits for all ranks, including dead ones; sockets close with the
                # process.
                self.world.leave()
            else:
                rpc.shutdown()

    # -- a step
    def setup_optimizer(self, build: OptimizerFactory) -> torch.optim.Optimizer:
        if self.is_server:
            args, kind = self.config.train_args, self.options.optimizer
            rows = [(shard.name, shard.values) for shard in self.shards]
            self.optimizer = SERVED.row_optimizer = RowOptimizer(
                self.shards,
                kind,
                self.options.learning_rate or build(rows).defaults["lr"],
                (args.adam_beta1, args.adam_beta2),
                args.adam_epsilon if kind == "adam" else None,
            )
            SERVED.open(self.trained, build(list(self.trained.items())) if self.trained else None)
        else:  # with dense parameters on servers, it only sets their learning rate
            self.optimizer = build(list(self.trained.items()))
        with uncounted():
            self.world.barrier()
        return self.optimizer

    def forward_backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        if self.is_server:
            self._merge()
        else:
            self.accumulate(micro_step, self.model, num_micro_batches)

    def begin_accumulation(self) -> None:
        self.pushes, self.num_pushed = [], 0
        if not self.dense_on_servers:
            self.buckets.zero()
            return
        self._pull_dense()
        for parameter in self.trained.values():
            parameter.grad = None

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self._push(with_dense=False)

    def last_backward(self, loss: torch.Tensor) -> None:
        if not self.dense_on_servers:
            self.buckets.start_reducing()
        loss.backward()
        self._push(with_dense=self.dense_on_servers)

    def end_accumulation(self) -> None:
        if not self.dense_on_servers:
            self.buckets.finish()
        self.workers.broadcast(self.changing_buffers)
        for pushed in self.pushes:
            pushed.wait()
        self._merge()

    def _pull_dense(self, trains: bool = True) -> None:
        calls = [
            rpc.rpc_async(rank_name(server), pull_dense, args=(trains,)) for server in self.servers
        ]
        with torch.no_grad():
            for call in calls:
                for name, value in call.wait().items():
                    self.trained[name].copy_(value)

    def _gradients_for(self, server: int) -> dict[str, torch.Tensor]:
        """Return the gradients of the dense parameters of a server, on the CPU."""
        return {
            name: parameter.grad.cpu()
            for name, parameter in self.trained.items()
            if parameter.grad is not None and self.owners[name] == server
        }

    def _push(self, with_dense: bool) -> None:
        """Send the gradients of the rows of the next micro-batch, and of the dense parameters, one
        message per server."""
        by_server: dict[int, Rows] = {server: {} for server in self.servers}
        for place, table in enumerate(self.tables.values()):
            assert isinstance(table.source, RemoteEmbedding)
            for server, rows, gradient in table.source.gradients():
                by_server[server][place] = (rows, gradient)
        for server, pushed in by_server.items():
            dense = self._gradients_for(server) if with_dense else {}
            if pushed or dense:
                args = (self.world.rank, self.num_pushed, pushed, dense)
                self.pushes.append(send_gradients(server, push, *args))
        self.num_pushed += 1

    def _merge(self) -> None:
        """Sum the pushes when all have arrived. If a worker was lost before all of its pushes had
        arrived, every server leaves it out and scales the rest up to the mean over the remaining
        workers."""
        with uncounted():
            arrived = self.world.sum(self.local_count)[0]
        for rank in self.members:
            if rank in self.world.lost:
                self.steps_missed[rank] = 1
        weight = 1.0
        if self.world.lost and self.total_count is not None and arrived > 0:
            weight = float(self.total_count()) / arrived
        for shard in self.shards:
            shard.merge(self.world.lost, weight)
        SERVED.merge(self.world.lost, weight)

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        rows = [shard.gradient[1] for shard in self.shards if shard.gradient is not None]
        with uncounted():
            norm = torch.tensor(
                math.sqrt(self.world.sum(self._squares(rows))[0]), dtype=torch.float32
            )
        if max_norm > 0:
            factor = clip_factor(norm, max_norm)
            if not self.is_server and not self.dense_on_servers:
                self.buckets.scale(factor)
            for gradient in (*rows, *SERVED.gradients()):
                gradient.mul_(factor)
        return norm

    def _squares(self, rows: list[torch.Tensor]) -> float:
        """Return the sum of squares of the gradients that are counted on this rank."""
        if self.is_server:
            return sum_of_squares(rows) + sum_of_squares(SERVED.gradients())
        # The buckets are the same on each worker.
        counts = self.world.is_rank_zero and not self.dense_on_servers
        return float(self.buckets.norm()) ** 2 if counts else 0.0

    def optimizer_step(self, apply: OptimizerStep) -> bool:
        updated = True
        if self.is_server or not self.dense_on_servers:
            rate, peak = self.optimizer.param_groups[0]["lr"], self.optimizer.defaults["lr"]
            factor = float(rate) / float(peak) if peak else 0.0
            updated = apply(self.optimizer)
            if updated:
                SERVED.step(factor)
        with uncounted():
            self.world.barrier()  # no worker pulls values of the previous step
        return updated

    @contextmanager
    def consolidated(self) -> Iterator[None]:
        with super().consolidated():
            with uncounted():
                self.world.barrier()  # all pushes are applied
                if self.dense_on_servers and not self.is_server:
                    self._pull_dense(trains=False)
            yield
            with uncounted():
                self.world.barrier()

    # -- state
    def tensor_shards(self) -> Iterable[TensorShard]:
        for shard in self.shards:
            shape = (shard.rows, shard.values.shape[1])
            yield TensorShard(shard.name, shard.values, shape, (shard.start, 0), key=shard.values)
        owned = self.is_server or self.world.is_rank_zero
        if self.is_server or not self.dense_on_servers:
            for name, parameter in self.trained.items():
                yield TensorShard.full(name, parameter, key=parameter, owned=owned)
        if not self.is_server:
            for name, buffer in persistent_buffers(self.model).items():
                yield TensorShard.full(name, buffer, owned=owned)

    def optimizer_entries(self, shard: TensorShard) -> dict[str, torch.Tensor]:
        if SERVED.optimizer is not None and shard.key in SERVED.optimizer.state:
            return entries_of(SERVED.optimizer, shard)
        return entries_of(self.optimizer, shard)

    def stored_entries(self, shard: TensorShard) -> dict[str, torch.Tensor]:
        return self.optimizer_entries(shard)

    def state_shards(self) -> list[TensorShard]:
        stored = super().state_shards()
        names = {shard.name for shard in stored}
        for shard in self.shards:
            sums = self.optimizer.state[shard.values].get("row_sum")
            name = f"optimizer/{shard.name}/row_sum"
            if sums is not None and name not in names:
                stored.append(TensorShard(name, sums, (shard.rows, 1), (shard.start, 0)))
        return [replace(shard, owned=True) for shard in stored]

    def check_state(self, source: StateReader) -> None:
        expected = {key for shard in self.shards for key in self.optimizer.state[shard.values]}
        for shard in self.shards:
            prefix = f"optimizer/{shard.name}/"
            stored = {
                name.removeprefix(prefix) for name in source.tensors() if name.startswith(prefix)
            }
            if stored and stored != expected:
                raise ConfigError(
                    "the checkpoint's `{shard}` has the optimizer state {stored}, and"
                    " `parameter_server.optimizer: {optimizer}` needs {expected}",
                    code="optimizer-state-mismatch",
                    fix="set the `parameter_server.optimizer` of the checkpoint, or another"
                    " `output_dir` for a new run",
                    shard=shard.name,
                    stored=", ".join(sorted(stored)),
                    optimizer=self.options.optimizer,
                    expected=", ".join(sorted(expected)) or "none",
                )

    def after_load(self) -> None:
        if SERVED.optimizer is not None:
            for parameter in self.trained.values():
                SERVED.optimizer.state[parameter].update(self.optimizer.state.pop(parameter, {}))
        with uncounted():
            self.world.barrier()  # no worker pulls before all servers have loaded their rows

    def load_optimizer_entry(
        self, source: StateReader, name: str, shape: tuple[int, ...], shard: TensorShard
    ) -> torch.Tensor:
        if name.endswith("/row_sum"):
            return source.read(name, (shard.offset[0], 0), (len(shard.tensor), 1))
        if self.is_server and shape == ():
            return source.read(name, (), ())
        return read_entry(self.optimizer, source, name, shape, shard)

    def memory_by_kind(self, model: nn.Module) -> dict[MemoryKind, list[torch.Tensor]]:
        kinds = super().memory_by_kind(model)
        if SERVED.optimizer is not None:  # of the dense parameters
            kinds["optimizer"] += optimizer_tensors(SERVED.optimizer)
            kinds["gradients"] += SERVED.gradients()
        return kinds

    def memory_tensors(self) -> list[Any]:
        if self.is_server:
            rows = [shard.values for shard in self.shards]
            dense = [] if SERVED.optimizer is None else optimizer_tensors(SERVED.optimizer)
            return [*rows, *self.trained.values(), *dense, *optimizer_tensors(self.optimizer)]
        weights = [*self._dense(self.model).values(), *self.model.buffers()]
        if not self.dense_on_servers:
            return [*weights, *self.buckets.flats, *optimizer_tensors(self.optimizer)]
        gradients = [each.grad for each in self.trained.values() if each.grad is not None]
        return [*weights, *gradients]
