"""`parameter_server` without waiting: each worker's gradients are applied as they come (Dean et al., "Large Scale Distributed
Deep Networks", 2012: Downpour SGD), under `bounded` with a limit to how far workers drift apart (Ho et al., "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013).

All parameters lie on the servers, tables by rows and the others one by one. In its step a worker pulls the others, pulls rows
as its forward needs them, and pushes one gradient: the mean over its own share of the batch. Log lines, evaluation and
checkpoints are points where all ranks meet.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import rpc

from paceline.config.schema import Config
from paceline.parallel.base import BuildOptimizer, MicroStep, Part, optimizer_tensors, persistent_buffers
from paceline.parallel.cost import Cost, ModelShape, Workload, total_bytes
from paceline.parallel.parameter_server import ParameterServer, row_traffic, server_bytes, tables_of
from paceline.parallel.replicated import clip_factor
from paceline.parallel.server_client import RemoteRows, bytes_of, rank_name
from paceline.parallel.server_rows import RowOptimizer, Shard
from paceline.world.env import RankEnv
from paceline.world.group import World
from paceline.world.mesh import Axes
from paceline.world.traffic import TRAFFIC, uncounted

#: How far the ranks may be apart in steps where nothing bounds them: what is on its way has to be kept.
_FAR = 64
Rows = dict[int, tuple[torch.Tensor, torch.Tensor]]


class LooseParameterServer(ParameterServer):
    """Asynchronous, and with bounded staleness."""

    def __init__(self, config: Config, world: World) -> None:
        super().__init__(config, world)
        self.alone = World(
            RankEnv(0, 1, world.env.local_rank, world.env.local_world_size), world.device, Axes(), None, [world.rank]
        )
        self.bound = self.said.staleness if self.said.mode == "bounded" else None
        self.clock = 0
        self.owners: dict[str, int] = {}
        self.dense_optimizer: torch.optim.Optimizer | None = None

    @property
    def count_world(self) -> World:
        return self.alone

    @property
    def counts_late(self) -> int:
        return _FAR if self.bound is None else self.bound + 1

    # -- placing ----------------------------------------------------------------------------------------------------------
    def place(self, model: nn.Module) -> nn.Module:
        # Before the tables are known to this object: what is on the meta device is no table's business.
        own = [one for one in (*model.parameters(), *model.buffers()) if not one.is_meta]
        self.world.broadcast(own)
        return super().place(model)

    def _deal(self, model: nn.Module) -> None:
        """Which server has which of the parameters that are no tables."""
        self.trained = {name: one for name, one in self._dense(model).items() if one.requires_grad}
        servers = self.world.size - self.num_workers
        self.owners = {name: self.num_workers + number % servers for number, name in enumerate(self.trained)}

    def _make_shards(self) -> None:
        super()._make_shards()
        self._deal(self.model)
        self.trained = {
            name: nn.Parameter(one.detach().clone())
            for name, one in self.trained.items()
            if self.owners[name] == self.world.rank
        }

    def _make_worker(self, model: nn.Module) -> None:
        self._deal(model)
        for number, (name, table) in enumerate(self.tables.items()):
            table.source = RemoteRows(number, self.ranges[name], self.num_workers, table.dim, self.world)

    def build_optimizer(self, build: BuildOptimizer) -> torch.optim.Optimizer:
        if self.is_server:
            rows = super().build_optimizer(build)
            assert isinstance(rows, RowOptimizer)
            self.dense_optimizer = build(list(self.trained.items())) if self.trained else None
            _STORE.open(self.trained, self.dense_optimizer, rows, self.num_workers)
        else:  # sets the pace of the servers' optimizers, and has nothing to update itself
            self.optimizer = build(list(self.trained.items()))
        with uncounted():
            self.world.barrier()
        return self.optimizer

    # -- a step -----------------------------------------------------------------------------------------------------------
    def backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        if self.is_server:
            return
        self.clock += 1
        first = rank_name(self.num_workers)
        rpc.rpc_sync(first, enter, args=(self.world.rank, self.clock, self.bound))
        self._pull_dense()
        for one in self.trained.values():
            one.grad = None
        pulled: dict[int, list[tuple[int, torch.Tensor, torch.Tensor]]] = {number: [] for number in range(len(self.tables))}
        for number in range(num_micro_batches):
            micro_step(number, self.model).backward()
            for place, table in enumerate(self.tables.values()):
                assert isinstance(table.source, RemoteRows)
                pulled[place] += table.source.gradients()
        # The loss was divided by this worker's own count times the number of ranks (see `count_world`).
        self.rows = {server: _summed(pulled, server, self.world.size) for server in range(self.num_workers, self.world.size)}
        for one in self.trained.values():
            if one.grad is not None:
                one.grad.mul_(self.world.size)

    def _pull_dense(self) -> None:
        calls = [rpc.rpc_async(rank_name(server), pull_dense) for server in range(self.num_workers, self.world.size)]
        with torch.no_grad():
            for call in calls:
                for name, value in call.wait().items():
                    self.trained[name].copy_(value)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Of this worker's own gradient: there is no other at the time."""
        if self.is_server:
            return torch.zeros(())
        found = [one.grad for one in self.trained.values() if one.grad is not None]
        found += [gradient for rows in self.rows.values() for _, gradient in rows.values()]
        norm = torch.tensor(math.sqrt(sum(float(one.double().square().sum()) for one in found)), dtype=torch.float32)
        if max_norm > 0:
            for one in found:
                one.mul_(clip_factor(norm, max_norm))
        return norm

    def update(self, apply: Callable[[torch.optim.Optimizer], bool]) -> bool:
        """Push to every server, and wait until each has applied it: a worker reads what it wrote."""
        if self.is_server:
            return True
        # Of the first rate: how far the schedule has come, for both optimizers.
        group = self.optimizer.param_groups[0]
        factor = float(group["lr"]) / float(self.optimizer.defaults["lr"]) if self.optimizer.defaults["lr"] else 0.0
        calls = []
        for server, rows in self.rows.items():
            names = [name for name, owner in self.owners.items() if owner == server and self.trained[name].grad is not None]
            dense = {name: self.trained[name].grad for name in names}
            sent = sum(bytes_of(one) for one in dense.values() if one is not None)
            TRAFFIC.add("push", sent + sum(bytes_of(one) for pair in rows.values() for one in pair))
            calls.append(rpc.rpc_async(rank_name(server), apply_push, args=(rows, dense, factor)))
        for call in calls:
            call.wait()
        return True

    @contextmanager
    def consolidated(self) -> Iterator[None]:
        with uncounted():
            self.world.barrier()  # nobody pushes any more
            if not self.is_server:
                self._pull_dense()
        yield
        with uncounted():
            self.world.barrier()

    # -- state ------------------------------------------------------------------------------------------------------------
    def parts(self) -> Iterable[Part]:
        for shard in self.shards:
            yield Part(shard.name, shard.values, (shard.rows, shard.values.shape[1]), (shard.start, 0), key=shard.values)
        if self.is_server:
            for name, one in self.trained.items():
                yield Part.whole(name, one, key=one)
        else:
            for name, one in persistent_buffers(self.model).items():
                yield Part.whole(name, one, owned=self.world.is_first)

    def state(self) -> list[Part]:
        with uncounted():
            self.world.barrier()  # every push has been applied, and none comes before the state is copied
        return super().state()

    def _optimizer_state(self, part: Part) -> dict[str, torch.Tensor]:
        if self.dense_optimizer is None or part.key not in self.dense_optimizer.state:
            return super()._optimizer_state(part)
        entries = self.dense_optimizer.state[part.key]
        return {str(key): torch.as_tensor(value).detach() for key, value in entries.items() if value is not None}

    def after_load(self) -> None:
        if self.dense_optimizer is not None:
            for one in self.trained.values():
                self.dense_optimizer.state[one].update(self.optimizer.state.pop(one, {}))
        super().after_load()

    def held(self) -> list[Any]:
        if self.is_server:
            dense = [] if self.dense_optimizer is None else optimizer_tensors(self.dense_optimizer)
            rows = [shard.values for shard in self.shards]
            return [*rows, *self.trained.values(), *dense, *optimizer_tensors(self.optimizer)]
        gradients = [one.grad for one in self.trained.values() if one.grad is not None]
        return [*self._dense(self.model).values(), *self.model.buffers(), *gradients]

    def figures(self, sent_bytes: float | None) -> dict[str, Any]:
        """``staleness``: the most steps that a worker was ahead of the slowest when it began one, and what bounds it."""
        self.world.barrier()  # the workers have made their last step
        seen = max(self.world.gather_numbers(float(_STORE.furthest)))
        return {**super().figures(sent_bytes), "staleness": {"bound": self.bound, "seen": int(seen)}}

    @classmethod
    def cost(cls, shape: ModelShape, axes: Axes, work: Workload, config: Config) -> Cost:
        """A worker has the parameters without tables and their gradients; a server its rows, its share of the others, and the
        state of both; the fuller of the two. Traffic is that of a batch without a repeated id, one id a column."""
        servers = config.parameter_server.servers
        tables, dense = tables_of(shape)
        rows, state = server_bytes(tables, config)
        shares = [dense[number::servers] for number in range(servers)]
        most = max(shares, key=total_bytes)
        state += sum(one.numel for one in most) * shape.optimizer_bytes_per_element
        traffic = row_traffic(tables, axes.data, servers, work)
        worker = {"pull": traffic.asked, "push": traffic.pushed + total_bytes(dense)}
        server = {"pull": traffic.answered + axes.data * total_bytes(most)}
        sent = worker if sum(worker.values()) >= server["pull"] else server
        others = shape.parameter_bytes - total_bytes(tables) + shape.buffer_bytes
        if rows + total_bytes(most) + state > others + total_bytes(dense):
            return Cost(parameters=rows + total_bytes(most), gradients=0, optimizer=state, activations=0, traffic=sent)
        gradients = total_bytes(dense)
        return Cost(parameters=others, gradients=gradients, optimizer=0, activations=work.activation_bytes, traffic=sent)


def _summed(pulled: dict[int, list[tuple[int, torch.Tensor, torch.Tensor]]], server: int, factor: float) -> Rows:
    """One gradient a row for what a server has, over the micro-batches."""
    found: Rows = {}
    for place, parts in pulled.items():
        mine = [(rows, gradient) for owner, rows, gradient in parts if owner == server]
        if mine:
            shard = Shard("", 0, 0, nn.Parameter(torch.empty(0, mine[0][1].shape[1])))
            shard.pushed = {(0, number): one for number, one in enumerate(mine)}
            shard.merge()
            assert shard.gradient is not None
            found[place] = (shard.gradient[0], shard.gradient[1] * factor)
    return found


# -- calls: what runs on a server -----------------------------------------------------------------------------------------
class _Store:
    """The parameters of this server that are no tables, its optimizers, and, on the first server, the workers' clocks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.furthest = 0
        self.clocks: dict[int, int] = {}
        self.waiting: list[
            tuple[int, torch.futures.Future[int]]
        ] = []  # (the clock that the slowest must reach, whom it lets go)

    def open(
        self,
        dense: dict[str, nn.Parameter],
        dense_optimizer: torch.optim.Optimizer | None,
        rows: RowOptimizer,
        num_workers: int,
    ) -> None:
        self.dense = dense
        self.dense_optimizer = dense_optimizer
        self.rows = rows
        self.clocks = dict.fromkeys(range(num_workers), 0)


_STORE = _Store()


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def enter(worker: int, clock: int, bound: int | None) -> torch.futures.Future[int]:
    """A worker begins its step ``clock``: let it, when the slowest has begun step ``clock - bound``. Gives the slowest's."""
    go: torch.futures.Future[int] = torch.futures.Future()
    with _STORE.lock:
        _STORE.clocks[worker] = clock
        slowest = min(_STORE.clocks.values())
        _STORE.waiting.append((slowest if bound is None else clock - bound, go))
        ready = [one for one in _STORE.waiting if one[0] <= slowest]
        _STORE.waiting = [one for one in _STORE.waiting if one[0] > slowest]
        if any(one is go for _, one in ready):
            _STORE.furthest = max(_STORE.furthest, clock - slowest)
        elif bound is not None:
            _STORE.furthest = max(_STORE.furthest, bound)  # it goes as soon as the slowest is that near
    for _, one in ready:
        one.set_result(slowest)
    return go


def pull_dense() -> dict[str, torch.Tensor]:
    """The parameters of this server that are no tables."""
    with _STORE.lock:
        found = {name: one.detach().clone() for name, one in _STORE.dense.items()}
    TRAFFIC.add("pull", sum(bytes_of(one) for one in found.values()))
    return found


def apply_push(rows: Rows, dense: dict[str, torch.Tensor], factor: float) -> None:
    """One worker's gradients, applied at once. ``factor``: of the peak learning rates."""
    with _STORE.lock:
        for number, gradient in rows.items():
            _STORE.rows.shards[number].gradient = gradient
        _STORE.rows.rate = float(_STORE.rows.defaults["lr"]) * factor
        _STORE.rows.step()
        if _STORE.dense_optimizer is not None:
            for name, one in _STORE.dense.items():
                one.grad = dense.get(name)
            for group in _STORE.dense_optimizer.param_groups:
                group["lr"] = float(_STORE.dense_optimizer.defaults["lr"]) * factor
            _STORE.dense_optimizer.step()
            _STORE.dense_optimizer.zero_grad()
