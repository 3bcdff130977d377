"""`parameter_server` with all parameters on the servers: tables by rows, the others dealt by size.
A worker pulls the others before its step and pushes one gradient of each after it; the servers sum
what all workers pushed and make the update."""

import threading
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import rpc

from paceline.distributed.traffic import TRAFFIC, uncounted
from paceline.parallel.base import OptimizerFactory, optimizer_tensors, persistent_buffers
from paceline.parallel.gradients import changing_buffers
from paceline.parallel.parameter_server.client import RemoteEmbedding, bytes_of, rank_name
from paceline.parallel.parameter_server.cost import deal
from paceline.parallel.parameter_server.strategy import ParameterServerStrategy
from paceline.parallel.state import TensorShard


class DenseServerStrategy(ParameterServerStrategy):
    """Synchronous: every step is the one that ``ddp`` makes, to rounding."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.owners: dict[str, int] = {}
        self.dense_optimizer: torch.optim.Optimizer | None = None

    # -- placing
    def setup(self, model: nn.Module) -> nn.Module:
        # Before the tables are known to this object: what is on the meta device is no table's
        # business.
        self.world.broadcast(
            [one for one in (*model.parameters(), *model.buffers()) if not one.is_meta]
        )
        return super().setup(model)

    def _deal(self, model: nn.Module) -> None:
        """Which server has which of the parameters that are no tables."""
        self.trained = {name: one for name, one in self._dense(model).items() if one.requires_grad}
        owners = deal(
            [one.numel() for one in self.trained.values()], self.world.size - self.num_workers
        )
        self.owners = {
            name: self.num_workers + owner for name, owner in zip(self.trained, owners, strict=True)
        }

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
            table.source = RemoteEmbedding(
                number, self.ranges[name], self.num_workers, table.dim, self.world
            )
        found = changing_buffers(model) if self.num_workers > 1 else []
        # By the workers' process group, which has to live; and a worker waits for the slowest in
        # it.
        self.changing_buffers = (
            found if self.said.mode == "sync" and self.said.on_worker_loss == "stop" else []
        )
        if found and not self.changing_buffers:
            text = (
                "each worker gathers running statistics of its own in normalisation layers; those"
                " of the first one are saved"
            )
            self.notices.append(("warning", text))

    def setup_optimizer(self, build: OptimizerFactory) -> torch.optim.Optimizer:
        if self.is_server:
            super().setup_optimizer(build)
            self.dense_optimizer = build(list(self.trained.items())) if self.trained else None
            DENSE.open(self.trained, self.dense_optimizer)
        else:  # sets the pace of the servers' optimizers, and has nothing to update itself
            self.optimizer = build(list(self.trained.items()))
        with uncounted():
            self.world.barrier()
        return self.optimizer

    # -- a step
    def _before_forward(self) -> None:
        self._pull_dense()
        for one in self.trained.values():
            one.grad = None

    def _pull_dense(self, trains: bool = True) -> None:
        servers = range(self.num_workers, self.world.size)
        calls = [rpc.rpc_async(rank_name(server), pull_dense, args=(trains,)) for server in servers]
        with torch.no_grad():
            for call in calls:
                for name, value in call.wait().items():
                    self.trained[name].copy_(value)

    def _before_last_backward(self) -> None:
        pass

    def _after_backward(self) -> list[Any]:
        calls = []
        for server in range(self.num_workers, self.world.size):
            found = self._gradients_of(server)
            TRAFFIC.add("push", sum(bytes_of(one) for one in found.values()))
            calls.append(
                rpc.rpc_async(rank_name(server), push_dense, args=(self.world.rank, found))
            )
        self.workers.broadcast(self.changing_buffers)
        return calls

    def _gradients_of(self, server: int) -> dict[str, torch.Tensor]:
        """The gradients of the parameters that a server has, where there are any."""
        found = {
            name: self.trained[name].grad for name, owner in self.owners.items() if owner == server
        }
        return {name: one for name, one in found.items() if one is not None}

    def _merge(self) -> float:
        weight = super()._merge()
        if self.is_server:
            DENSE.merge(self.world.lost, weight)
        return weight

    def _pushed(self) -> list[torch.Tensor]:
        """The gradients that this server has of its parameters that are no tables."""
        return (
            [one.grad for one in self.trained.values() if one.grad is not None]
            if self.is_server
            else []
        )

    def _squares(self) -> float:
        if not self.is_server:
            return 0.0
        return super()._squares() + sum(
            float(one.double().square().sum()) for one in self._pushed()
        )

    def _scale(self, factor: torch.Tensor) -> None:
        if self.is_server:
            super()._scale(factor)
            for one in self._pushed():
                one.mul_(factor)

    def optimizer_step(self, apply: Callable[[torch.optim.Optimizer], bool]) -> bool:
        made = True
        if self.is_server:
            rate, peak = (
                float(self.optimizer.param_groups[0]["lr"]),
                float(self.optimizer.defaults["lr"]),
            )
            made = apply(self.optimizer)
            if made:
                DENSE.step(rate / peak if peak else 0.0)
        with uncounted():
            self.world.barrier()  # nobody pulls what is of the step before
        return made

    @contextmanager
    def consolidated(self) -> Iterator[None]:
        with uncounted():
            self.world.barrier()  # nobody pushes any more
            if not self.is_server:
                self._pull_dense(trains=False)
        yield
        with uncounted():
            self.world.barrier()

    # -- state
    def tensor_shards(self) -> Iterable[TensorShard]:
        for shard in self.shards:
            yield TensorShard(
                shard.name,
                shard.values,
                (shard.rows, shard.values.shape[1]),
                (shard.start, 0),
                key=shard.values,
            )
        if self.is_server:
            for name, one in self.trained.items():
                yield TensorShard.whole(name, one, key=one)
        else:
            for name, buffer in persistent_buffers(self.model).items():
                yield TensorShard.whole(name, buffer, owned=self.world.is_rank_zero)

    def optimizer_entries(self, part: TensorShard) -> dict[str, torch.Tensor]:
        if self.dense_optimizer is None or part.key not in self.dense_optimizer.state:
            return super().optimizer_entries(part)
        entries = self.dense_optimizer.state[part.key]  # type: ignore[index]
        return {
            str(key): torch.as_tensor(value).detach()
            for key, value in entries.items()
            if value is not None
        }

    def after_load(self) -> None:
        if self.dense_optimizer is not None:
            for one in self.trained.values():
                self.dense_optimizer.state[one].update(self.optimizer.state.pop(one, {}))
        super().after_load()

    def memory_tensors(self) -> list[Any]:
        if self.is_server:
            dense = [] if self.dense_optimizer is None else optimizer_tensors(self.dense_optimizer)
            rows = [shard.values for shard in self.shards]
            return [*rows, *self.trained.values(), *dense, *optimizer_tensors(self.optimizer)]
        gradients = [one.grad for one in self.trained.values() if one.grad is not None]
        return [*self._dense(self.model).values(), *self.model.buffers(), *gradients]


# -- calls: what runs on a server
class DenseParameters:
    """The parameters of this server that are no tables, their optimizer, and what was pushed for
    them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.named: dict[str, nn.Parameter] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.pushed: dict[int, dict[str, torch.Tensor]] = {}  # by worker

    def open(self, named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer | None) -> None:
        self.named, self.optimizer = named, optimizer
        self.pushed.clear()

    def merge(self, lost: Container[int], weight: float) -> None:
        """Sum the pushes of a step in order of worker, those of ``lost`` left out; zero where
        nobody had a gradient, as under ``ddp``."""
        with self.lock:
            pushed, self.pushed = self.pushed, {}
        parts = [pushed[worker] for worker in sorted(pushed) if worker not in lost]
        for name, one in self.named.items():
            one.grad = torch.zeros_like(one)
            for part in parts:
                if name in part:
                    one.grad += part[name]
            if weight != 1.0:
                one.grad *= weight

    def step(self, factor: float) -> None:
        """Update by the gradients at hand, and drop them. ``factor``: of the peak learning
        rates."""
        if self.optimizer is None:
            return
        for group in self.optimizer.param_groups:
            group["lr"] = float(self.optimizer.defaults["lr"]) * factor
        self.optimizer.step()
        self.optimizer.zero_grad()


DENSE = DenseParameters()


def pull_dense(trains: bool) -> dict[str, torch.Tensor]:
    """The parameters of this server that are no tables. ``trains``: for a step of training, whose
    traffic is counted."""
    with DENSE.lock:
        found = {name: one.detach().clone() for name, one in DENSE.named.items()}
    if trains:
        TRAFFIC.add("pull", sum(bytes_of(one) for one in found.values()))
    return found


def push_dense(worker: int, gradients: dict[str, torch.Tensor]) -> None:
    """Leave a worker's gradients of a step here."""
    with DENSE.lock:
        DENSE.pushed[worker] = gradients
