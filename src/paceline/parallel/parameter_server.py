"""`parameter_server`: embedding tables on servers, cut by rows; workers pull and push the rows of their batch alone. After
Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (2014), synchronous.

Ranks 0 to W - 1 are workers, those after them servers. A step: the workers pull rows and push gradients through
``torch.distributed.rpc``; their other gradients are all-reduced among them as under ``ddp``; when every push has arrived, each
server updates its rows and each worker the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed import rpc

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.models.recommend import Table, named_tables, tables_elsewhere
from paceline.models.shape import TensorShape
from paceline.parallel.base import BuildOptimizer, MicroStep, Part, StateSource, Strategy, optimizer_tensors, persistent_buffers
from paceline.parallel.buckets import GradientBuckets
from paceline.parallel.cost import Cost, ModelShape, Workload, total_bytes
from paceline.parallel.replicated import changing_buffers, clip_factor
from paceline.parallel.server_client import RemoteRows, among_workers, bytes_of, connect, rank_name
from paceline.parallel.server_rows import STATE, RowOptimizer, Shard, push, row_ranges, serve
from paceline.world.group import World
from paceline.world.mesh import Axes
from paceline.world.traffic import uncounted
from paceline.world.volume import all_reduce_bytes


class ParameterServer(Strategy):
    """Tables on servers, the rest of the model on each worker; every step is the one that ``ddp`` makes."""

    name = "parameter_server"
    whole_on_first = False

    def __init__(self, config: Config, world: World) -> None:
        super().__init__(config, world)
        self.said = config.parameter_server
        self.num_workers = world.axes.replicas
        self.workers = among_workers(world, self.num_workers)
        self.tables: dict[str, Table] = {}
        self.shards: list[Shard] = []
        self.trained: dict[str, nn.Parameter] = {}
        self.connected = False

    @staticmethod
    def check(config: Config, axes: Axes) -> None:
        args = config.train_args
        wrong = {
            "train_args.weight_decay": args.weight_decay > 0 and "rows that no batch has are not touched",
            "train_args.fp16": args.fp16 and "there is no loss scale on the servers",
            "train_args.gradient_checkpointing": args.gradient_checkpointing and "rows would be pulled twice",
        }
        for key, reason in wrong.items():
            if reason:
                raise ConfigError(f"`{key}` does not go with `parallel.mode: parameter_server`: {reason}", fix="take it out")
        if config.task in ("sft", "pretrain", "classify"):
            raise ConfigError(
                f"`parallel.mode: parameter_server` keeps embedding tables on servers, and `task: {config.task}` has none",
                allowed="`task: recommend`, or a task of your own whose model has paceline.models.recommend.Table",
                fix="set `parallel.mode: ddp`, or zero3 where memory is short",
            )

    @classmethod
    def variant(cls, config: Config) -> type[Strategy]:
        from paceline.parallel.server_async import LooseParameterServer

        return cls if config.parameter_server.mode == "sync" else LooseParameterServer

    @classmethod
    def num_serving(cls, config: Config) -> int:
        return config.parameter_server.servers

    @classmethod
    def role(cls, config: Config, axes: Axes, rank: int) -> str | None:
        return "a worker" if rank < axes.replicas else "a server of the tables"

    @property
    def is_server(self) -> bool:
        return self.world.rank >= self.num_workers

    @property
    def works(self) -> bool:
        return not self.is_server

    @property
    def speaks(self) -> bool:
        return not self.is_server

    @property
    def replica(self) -> int:
        return self.world.rank if not self.is_server else 0

    @contextmanager
    def building(self) -> Iterator[None]:
        with tables_elsewhere():
            yield

    # -- placing ----------------------------------------------------------------------------------------------------------
    def place(self, model: nn.Module) -> nn.Module:
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
        self.ranges = {name: row_ranges(table.rows, num_servers) for name, table in self.tables.items()}
        if self.is_server:
            self._make_shards()
            model.to("meta")
        else:
            self._make_worker(model)
        connect(self.world, self.settings.timeout_s)
        self.connected = True
        return model

    def _make_shards(self) -> None:
        for name, table in self.tables.items():
            start, end = self.ranges[name][self.world.rank - self.num_workers]
            values = torch.empty(end - start, table.dim)
            table.fill(values, start)
            self.shards.append(Shard(name, table.rows, start, nn.Parameter(values)))
        serve(self.shards)

    def _dense(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """All parameters but the tables."""
        return {name: one for name, one in model.named_parameters() if name not in self.tables}

    def _make_worker(self, model: nn.Module) -> None:
        self.trained = {name: one for name, one in self._dense(model).items() if one.requires_grad}
        for number, (name, table) in enumerate(self.tables.items()):
            table.source = RemoteRows(number, self.ranges[name], self.num_workers, table.dim, self.world)
        self.workers.broadcast([*self._dense(model).values(), *model.buffers()])
        self.changing_buffers = changing_buffers(model) if self.workers.size > 1 else []
        self.buckets = GradientBuckets(self.trained.values(), int(self.settings.bucket_cap_mb * 2**20), self.workers)

    def close(self) -> None:
        if self.connected:
            self.connected = False
            rpc.shutdown()

    # -- a step -----------------------------------------------------------------------------------------------------------
    def build_optimizer(self, build: BuildOptimizer) -> torch.optim.Optimizer:
        if not self.is_server:
            self.optimizer = build(list(self.trained.items()))
            return self.optimizer
        args = self.config.train_args
        usual = build([(shard.name, shard.values) for shard in self.shards]).defaults["lr"]
        betas, eps = (args.adam_beta1, args.adam_beta2), args.adam_epsilon if self.said.optimizer == "adam" else None
        self.optimizer = RowOptimizer(self.shards, self.said.optimizer, self.said.learning_rate or usual, betas, eps)
        return self.optimizer

    def backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        if not self.is_server:
            self.buckets.zero()
            pushes = []
            for number in range(num_micro_batches):
                loss = micro_step(number, self.model)
                if number == num_micro_batches - 1:
                    self.buckets.start_reducing()
                loss.backward()
                pushes += self._push(number)
            self.buckets.finish()
            self.workers.broadcast(self.changing_buffers)
            for one in pushes:
                one.wait()
        with uncounted():
            self.world.barrier()  # every push has arrived
        for shard in self.shards:
            shard.merge()

    def _push(self, number: int) -> list[Any]:
        """Send off the rows' gradients of a micro-batch, one message a server."""
        by_server: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        for place, table in enumerate(self.tables.values()):
            source = table.source
            assert isinstance(source, RemoteRows)
            for server, rows, gradient in source.gradients():
                by_server.setdefault(server, {})[place] = (rows, gradient)
                self.world.traffic.add("push", bytes_of(rows) + bytes_of(gradient))
        key = (self.world.rank, number)
        return [rpc.rpc_async(rank_name(server), push, args=(key, found)) for server, found in by_server.items()]

    def clip(self, max_norm: float) -> torch.Tensor:
        if self.is_server:
            mine = sum((float(one.gradient[1].double().square().sum()) for one in self.shards if one.gradient), 0.0)
        else:
            mine = float(self.buckets.norm()) ** 2 if self.world.is_first else 0.0  # the same on each worker
        with uncounted():
            norm = torch.tensor(math.sqrt(self.world.sum(mine)[0]), dtype=torch.float32)
        if max_norm > 0:
            factor = clip_factor(norm, max_norm)
            if not self.is_server:
                self.buckets.scale(factor)
            for shard in self.shards:
                if shard.gradient is not None:
                    shard.gradient[1].mul_(factor)
        return norm

    def update(self, apply: Callable[[torch.optim.Optimizer], bool]) -> bool:
        made = apply(self.optimizer)
        with uncounted():
            self.world.barrier()  # nobody pulls rows of the step before
        return made

    # -- state ------------------------------------------------------------------------------------------------------------
    def parts(self) -> Iterable[Part]:
        for shard in self.shards:
            shape = (shard.rows, shard.values.shape[1])
            yield Part(shard.name, shard.values, shape, (shard.start, 0), key=shard.values)
        if not self.is_server:
            for name, one in self.trained.items():
                yield Part.whole(name, one, key=one, owned=self.world.is_first)
            for name, one in persistent_buffers(self.model).items():
                yield Part.whole(name, one, owned=self.world.is_first)

    def state(self) -> list[Part]:
        found = super().state()
        for shard in self.shards:
            sums = self.optimizer.state[shard.values].get("row_sum")
            name = f"optimizer/{shard.name}/row_sum"
            if sums is not None and all(one.name != name for one in found):
                found.append(Part(name, sums, (shard.rows, 1), (shard.start, 0)))
        return [replace(one, owned=True) for one in found]

    def load_state(self, source: StateSource) -> None:
        wanted = {key for shard in self.shards for key in self.optimizer.state[shard.values]}
        for shard in self.shards:
            stored = {
                name.rpartition("/")[2] for name in source.tensors() if name.rpartition("/")[0] == f"optimizer/{shard.name}"
            }
            if stored and stored != wanted:
                raise ConfigError(
                    f"the checkpoint's `{shard.name}` has the optimizer state {', '.join(sorted(stored))}, and "
                    f"`parameter_server.optimizer: {self.said.optimizer}` has {', '.join(sorted(wanted)) or 'none'}",
                    fix="set `parameter_server.optimizer` as it was, or another `output_dir` for a new run",
                )
        super().load_state(source)

    def after_load(self) -> None:
        with uncounted():
            self.world.barrier()  # nobody pulls from a server that has not read its rows

    def _read_entry(
        self, source: StateSource, name: str, part: Part, known: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    ) -> torch.Tensor:
        if name.endswith("/row_sum"):
            return source.read(name, (part.offset[0], 0), (len(part.tensor), 1))
        if self.is_server and known[name][1] == ():
            return source.read(name, (), ())
        return super()._read_entry(source, name, part, known)

    def held(self) -> list[Any]:
        if self.is_server:
            return [*(shard.values for shard in self.shards), *optimizer_tensors(self.optimizer)]
        return [
            *self._dense(self.model).values(),
            *self.model.buffers(),
            *self.buckets.flats,
            *optimizer_tensors(self.optimizer),
        ]

    @classmethod
    def cost(cls, shape: ModelShape, axes: Axes, work: Workload, config: Config) -> Cost:
        """A worker has the parameters without tables, as under ``ddp``; a server its rows and their state; the fuller of the
        two. Traffic is that of a batch without a repeated id, one id a column: less is sent where ids repeat, as they do."""
        tables, dense = tables_of(shape)
        others = shape.parameter_bytes - total_bytes(tables) + shape.buffer_bytes
        gradients = total_bytes(dense)
        state = sum(one.numel for one in dense) * shape.optimizer_bytes_per_element
        rows, row_state = server_bytes(tables, config)
        sent = row_traffic(tables, axes.data, config.parameter_server.servers, work)
        worker = {"all_reduce": all_reduce_bytes(gradients, axes.data), "pull": sent.asked, "push": sent.pushed}
        traffic = worker if sum(worker.values()) >= sent.answered else {"pull": sent.answered}
        if rows + row_state > others + gradients + state:
            return Cost(parameters=rows, gradients=0, optimizer=row_state, activations=0, traffic=traffic)
        return Cost(parameters=others, gradients=gradients, optimizer=state, activations=work.activation_bytes, traffic=traffic)


def tables_of(shape: ModelShape) -> tuple[list[TensorShape], list[TensorShape]]:
    """(the tables, the other trained parameters). By name: a shape says no more."""
    tables = [one for one in shape.trained if len(one.shape) == 2 and one.name.startswith("tables.")]
    return tables, [one for one in shape.trained if one not in tables]


def server_bytes(tables: list[TensorShape], config: Config) -> tuple[int, int]:
    """Bytes of (rows, their optimizer's state) on the fullest server."""
    elements, numbers = STATE[config.parameter_server.optimizer]
    most = [(math.ceil(one.shape[0] / config.parameter_server.servers), one.shape[1]) for one in tables]
    return sum(4 * count * dim for count, dim in most), sum(4 * count * (dim * elements + numbers) for count, dim in most)


@dataclass(frozen=True)
class RowTraffic:
    """Bytes in a step for the rows: 8 an id, 4 an element.

    Args:
        asked, pushed: that a worker sends.
        answered: that a server sends.
    """

    asked: int
    pushed: int
    answered: int


def row_traffic(tables: list[TensorShape], workers: int, servers: int, work: Workload) -> RowTraffic:
    """At most so much, with one id a column and row of the batch."""
    sizes = [(work.micro_batches * min(int(work.positions), one.shape[0]), one.shape[1]) for one in tables]
    return RowTraffic(
        asked=sum(8 * count for count, _ in sizes),
        pushed=sum((8 + 4 * dim) * count for count, dim in sizes),
        answered=workers * sum(4 * dim * math.ceil(count / servers) for count, dim in sizes),
    )
