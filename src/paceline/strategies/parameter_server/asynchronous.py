"""`parameter_server` without waiting: each worker's gradients are applied when they arrive (Dean et
al., "Large Scale Distributed Deep Networks", 2012: Downpour SGD); with `bounded` the difference of
the workers' steps is limited (Ho et al., "More Effective Distributed ML via a Stale Synchronous
Parallel Parameter Server", 2013).

All parameters are on the servers. In its step a worker pulls the dense parameters, pulls rows when
its forward needs them, and pushes one gradient: the mean over its share of the batch. All ranks
synchronize for log lines, evaluation and checkpoints.
"""

import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import torch
from torch.distributed import rpc

from paceline.config.schema import Config
from paceline.distributed.communicator import Communicator
from paceline.distributed.traffic import TRAFFIC, uncounted
from paceline.parallel.comm_profile import StrategyMetrics
from paceline.parallel.gradients import clip_factor
from paceline.parallel.state import TensorShard
from paceline.parallel.strategy import MicroStep
from paceline.strategies.parameter_server.client import RemoteEmbedding, rank_name, send_gradients
from paceline.strategies.parameter_server.collectives import ServerCommunicator
from paceline.strategies.parameter_server.server import (
    LOCK,
    SERVED,
    Rows,
    sum_of_squares,
    sum_rows,
)
from paceline.strategies.parameter_server.strategy import ParameterServerStrategy

#: Maximum number of steps between ranks without a bound, because pending counts are kept.
_MAX_LAG = 64


class AsyncServerStrategy(ParameterServerStrategy):
    """Asynchronous, or with bounded staleness."""

    def __init__(self, config: Config, world: Communicator) -> None:
        super().__init__(config, world)
        #: Only this rank.
        self.own_group = world.split([[rank] for rank in range(world.size)])
        self.bound = self.options.max_staleness if self.options.consistency == "bounded" else None
        self.clock = 0
        if self.is_server:
            _STORE.open(self.num_workers)

    @property
    def count_group(self) -> Communicator:
        """Only this rank: each divides the loss by its local count."""
        return self.own_group

    @property
    def max_count_lag(self) -> int:
        return _MAX_LAG if self.bound is None else self.bound + 1

    def _clock_of(self, rank: int) -> int:
        return _STORE.drop(rank)

    def _steps_missed(self, rank: int) -> int:
        assert isinstance(self.world, ServerCommunicator)
        return max(0, self.clock - self.world.losses[rank].clock)

    # -- a step
    def forward_backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        self.clock += 1
        if self.is_server:
            return
        first = rank_name(self.num_workers)
        rpc.rpc_sync(first, enter, args=(self.world.rank, self.clock, self.bound))
        self.accumulate(micro_step, self.model, num_micro_batches)

    def begin_accumulation(self) -> None:
        super().begin_accumulation()
        self.pulled: dict[int, list[tuple[int, torch.Tensor, torch.Tensor]]] = {
            number: [] for number in range(len(self.tables))
        }

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        for place, table in enumerate(self.tables.values()):
            assert isinstance(table.source, RemoteEmbedding)
            self.pulled[place] += table.source.gradients()

    def last_backward(self, loss: torch.Tensor) -> None:
        self.backward(loss)

    def end_accumulation(self) -> None:
        # The loss was divided by this worker's count times the number of ranks (see `count_group`).
        self.rows = {
            server: _sum_for(server, self.pulled, self.world.size) for server in self.servers
        }
        for parameter in self.trained.values():
            if parameter.grad is not None:
                parameter.grad.mul_(self.world.size)

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Clip this worker's gradient by its norm."""
        if self.is_server:
            return torch.zeros(())
        gradients = [each.grad for each in self.trained.values() if each.grad is not None]
        gradients += [gradient for rows in self.rows.values() for _, gradient in rows.values()]
        norm = torch.tensor(math.sqrt(sum_of_squares(gradients)), dtype=torch.float32)
        if max_norm > 0:
            for gradient in gradients:
                gradient.mul_(clip_factor(norm, max_norm))
        return norm

    def optimizer_step(self, apply: Callable[[torch.optim.Optimizer], bool]) -> bool:
        """Push to every server, and wait until each has applied the gradients, so that a worker
        pulls its updates."""
        if self.is_server:
            return True
        proxy = SimpleNamespace(step=self._push_all, param_groups=self.optimizer.param_groups)
        return apply(cast(torch.optim.Optimizer, proxy))

    def _push_all(self) -> None:
        # The first group's rate gives the schedule's factor for both optimizers.
        group = self.optimizer.param_groups[0]
        peak = float(self.optimizer.defaults["lr"])
        factor = float(group["lr"]) / peak if peak else 0.0
        calls = []
        for server, rows in self.rows.items():
            args = (self.world.rank, self.clock, rows, self._gradients_for(server), factor)
            calls.append(send_gradients(server, apply_push, *args))
        for call in calls:
            call.wait()

    # -- state
    def state_shards(self) -> list[TensorShard]:
        with uncounted():
            # All pushes are applied, and none arrives before the state is copied.
            self.world.barrier()
        return super().state_shards()

    def sent_in_a_step(self, measured: int | None) -> int | None:
        """Return a mean over the steps for a server, which answers at any time."""
        if not self.is_server or self.clock == 0:
            return measured
        return round(TRAFFIC.bytes_by_collective.get("pull", 0) / self.clock)

    def report_metrics(self, sent_bytes: float | None) -> StrategyMetrics:
        """Return ``staleness``: the maximum number of steps that a worker was ahead of the slowest
        at the start of a step, and the bound of it."""
        self.world.barrier()  # the workers have made their last step
        seen = max(self.world.gather_numbers(float(_STORE.max_lead)))
        return {"staleness": {"bound": self.bound, "seen": int(seen)}}


def _sum_for(
    server: int, pulled: dict[int, list[tuple[int, torch.Tensor, torch.Tensor]]], factor: float
) -> Rows:
    """Return one gradient for each row of a server, summed over the micro-batches."""
    sums: Rows = {}
    for place, gradients in pulled.items():
        pushed = [(rows, gradient) for owner, rows, gradient in gradients if owner == server]
        if pushed:
            rows, total = sum_rows(pushed)
            sums[place] = (rows, total * factor)
    return sums


# -- calls that run on a server
class ServerStore:
    """The workers' clocks on the first server: the step that each has started, and the last one
    that was applied. Every server also holds the lock while it applies gradients."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.max_lead = 0
        self.clocks: dict[int, int] = {}
        self.applied: dict[int, int] = {}
        #: (clock that the slowest worker must reach, future of the worker that waits for it)
        self.waiting: list[tuple[int, torch.futures.Future[int]]] = []

    def open(self, num_workers: int) -> None:
        self.clocks = dict.fromkeys(range(num_workers), 0)
        self.applied = dict.fromkeys(range(num_workers), 0)

    def drop(self, worker: int) -> int:
        """Remove a lost worker, so that no other waits for it. Returns the last of its steps that
        was applied."""
        with self.lock:
            self.clocks.pop(worker, None)
            ready = self.take_ready()
        for future in ready:
            future.set_result(0)
        return self.applied.get(worker, 0)

    def take_ready(self) -> list[torch.futures.Future[int]]:
        """Remove and return the futures for which the slowest worker has come far enough."""
        slowest = min(self.clocks.values(), default=0)
        ready = [future for clock, future in self.waiting if clock <= slowest]
        self.waiting = [entry for entry in self.waiting if entry[0] > slowest]
        return ready


_STORE = ServerStore()


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def enter(worker: int, clock: int, bound: int | None) -> torch.futures.Future[int]:
    """Start step ``clock`` of a worker. The future completes when the slowest worker has started
    step ``clock - bound``; its result is the slowest's clock."""
    entered: torch.futures.Future[int] = torch.futures.Future()
    with _STORE.lock:
        if worker in _STORE.clocks:  # else its process has ended in the meantime
            _STORE.clocks[worker] = clock
        slowest = min(_STORE.clocks.values(), default=clock)
        _STORE.waiting.append((slowest if bound is None else clock - bound, entered))
        ready = _STORE.take_ready()
        if any(future is entered for future in ready):
            _STORE.max_lead = max(_STORE.max_lead, clock - slowest)
        elif bound is not None:
            # It starts as soon as its lead is down to the bound.
            _STORE.max_lead = max(_STORE.max_lead, bound)
    for future in ready:
        future.set_result(slowest)
    return entered


def apply_push(
    worker: int, clock: int, rows: Rows, dense: dict[str, torch.Tensor], factor: float
) -> None:
    """Apply a worker's gradients of its step ``clock``. ``factor``: of the peak learning rates."""
    with _STORE.lock:
        optimizer = SERVED.row_optimizer
        assert optimizer is not None
        for number, gradient in rows.items():
            SERVED.shards[number].gradient = gradient
        optimizer.rate = float(optimizer.defaults["lr"]) * factor
        optimizer.step()
        with LOCK:
            for name, parameter in SERVED.named.items():
                parameter.grad = dense.get(name)
            SERVED.step(factor)
        _STORE.applied[worker] = clock
