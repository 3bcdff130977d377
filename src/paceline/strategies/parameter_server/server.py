"""The data of a server, and the functions that workers call: ranges of the tables' rows, dense
parameters, their optimizers; pull and push."""

import threading
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paceline.distributed.traffic import TRAFFIC

#: Gradients of rows: shard's number → (places of distinct rows, float32 [n, dim]).
Rows = dict[int, tuple[torch.Tensor, torch.Tensor]]
#: Guards the dense parameters, and the pushed gradients that are not merged yet.
LOCK = threading.Lock()


@dataclass
class TableShard:
    """A server's rows of one table.

    Args:
        name: name of the parameter in the model.
        rows: number of rows of the full table.
        start: first row of this server.
        values: float32 [n, dim], this server's rows.
        pushed: (worker, number of the push in its step) → (places in ``values``, gradients
            [k, dim]).
        gradient: the sum of the pushes, as (distinct places, gradients), after :meth:`merge`.
    """

    name: str
    rows: int
    start: int
    values: nn.Parameter
    pushed: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    gradient: tuple[torch.Tensor, torch.Tensor] | None = None

    def merge(self, lost: Container[int] = (), weight: float = 1.0) -> None:
        """Sum the pushes of a step in order of worker and micro-batch, whatever order they arrived
        in, so that the bits are always the same.

        Args:
            lost: workers whose pushes are left out.
            weight: factor of the sum.
        """
        with LOCK:
            pushed, self.pushed = self.pushed, {}
        ordered = [pushed[key] for key in sorted(pushed) if key[0] not in lost]
        self.gradient = None
        if ordered:
            rows, total = sum_rows(ordered)
            self.gradient = (rows, total if weight == 1.0 else total.mul_(weight))


def sum_rows(
    pushed: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum gradients [k, dim] of rows in the order given. The rows of one push are distinct.

    Returns:
        (distinct rows, one gradient for each).
    """
    distinct, places = torch.unique(torch.cat([rows for rows, _ in pushed]), return_inverse=True)
    total = torch.zeros(len(distinct), pushed[0][1].shape[1])
    start = 0
    for rows, gradient in pushed:
        total[places[start : start + len(rows)]] += gradient
        start += len(rows)
    return distinct, total


class RowOptimizer(torch.optim.Optimizer):
    """Updates the rows of a batch and leaves all others unchanged. It computes the update of
    torch's optimizer of the same name for a gradient that is zero elsewhere (SGD, Adagrad), or, for
    Adam, of ``torch.optim.SparseAdam``.

    ``row_wise_adagrad``: one sum per row, of the mean of the gradient's squares over the row
    (Mudigere et al., "Software-Hardware Co-design for Fast and Scalable Training of Deep
    Learning Recommendation Models", 2022).
    """

    def __init__(
        self,
        shards: Iterable[TableShard],
        kind: str,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float | None = None,
    ) -> None:
        self.shards = list(shards)
        self.kind = kind
        self.betas = betas
        self.rate: float | None = None  # overrides the group's, which another thread may set
        self.eps = eps if eps is not None else 1e-8 if kind == "adam" else 1e-10
        super().__init__([shard.values for shard in self.shards], {"lr": lr})
        for shard in self.shards:
            self.state[shard.values].update(self._initial_state(shard.values))

    def _initial_state(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.kind == "adagrad":
            return {"step": torch.tensor(0.0), "sum": torch.zeros_like(values.detach())}
        if self.kind == "row_wise_adagrad":
            return {"row_sum": torch.zeros(len(values), 1)}
        if self.kind == "adam":
            moments = {key: torch.zeros_like(values.detach()) for key in ("exp_avg", "exp_avg_sq")}
            return {"step": torch.tensor(0.0), **moments}
        return {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply each shard's gradient, and drop it."""
        rate = float(self.param_groups[0]["lr"]) if self.rate is None else self.rate
        for shard in self.shards:
            if "step" in self.state[shard.values]:
                # Counted also on a server without a row of the batch.
                self.state[shard.values]["step"] += 1
            if shard.gradient is not None:
                self._update(shard, *shard.gradient, rate)
                shard.gradient = None

    def _update(
        self, shard: TableShard, rows: torch.Tensor, gradient: torch.Tensor, rate: float
    ) -> None:
        values, state = shard.values, self.state[shard.values]
        if self.kind == "sgd":
            values[rows] -= rate * gradient
        elif self.kind == "adagrad":
            state["sum"][rows] += gradient**2
            values[rows] -= rate * gradient / (state["sum"][rows].sqrt() + self.eps)
        elif self.kind == "row_wise_adagrad":
            state["row_sum"][rows] += (gradient**2).mean(dim=1, keepdim=True)
            values[rows] -= rate * gradient / (state["row_sum"][rows].sqrt() + self.eps)
        else:
            first, second = self.betas
            mean = state["exp_avg"][rows] * first + gradient * (1 - first)
            square = state["exp_avg_sq"][rows] * second + gradient**2 * (1 - second)
            state["exp_avg"][rows], state["exp_avg_sq"][rows] = mean, square
            step = float(state["step"])
            size = rate * (1 - second**step) ** 0.5 / (1 - first**step)
            values[rows] -= size * mean / (square.sqrt() + self.eps)


class ServedParameters:
    """What this server stores: its rows of the tables, its dense parameters, which are those other
    than tables, their optimizers, and the gradients of dense parameters pushed by workers."""

    def __init__(self) -> None:
        self.shards: list[TableShard] = []
        self.row_optimizer: RowOptimizer | None = None
        self.named: dict[str, nn.Parameter] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.pushed: dict[int, dict[str, torch.Tensor]] = {}  # by worker

    def open(self, named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer | None) -> None:
        self.named, self.optimizer = named, optimizer
        self.pushed.clear()

    def merge(self, lost: Container[int], weight: float) -> None:
        """Sum the pushes of a step in order of worker, without the pushes of ``lost`` workers. A
        parameter for which no worker has a gradient gets zero, as with ``ddp``."""
        with LOCK:
            pushed, self.pushed = self.pushed, {}
        pushes = [pushed[worker] for worker in sorted(pushed) if worker not in lost]
        for name, parameter in self.named.items():
            parameter.grad = torch.zeros_like(parameter)
            for gradients in pushes:
                if name in gradients:
                    parameter.grad += gradients[name]
            if weight != 1.0:
                parameter.grad *= weight

    def gradients(self) -> list[torch.Tensor]:
        return [each.grad for each in self.named.values() if each.grad is not None]

    def step(self, factor: float) -> None:
        """Apply the gradients, and drop them. ``factor``: of the peak learning rates."""
        if self.optimizer is None:
            return
        for group in self.optimizer.param_groups:
            group["lr"] = float(self.optimizer.defaults["lr"]) * factor
        self.optimizer.step()
        self.optimizer.zero_grad()


def sum_of_squares(tensors: Iterable[torch.Tensor]) -> float:
    return sum((float(tensor.double().square().sum()) for tensor in tensors), 0.0)


# -- calls
SERVED = ServedParameters()


def pull(number: int, rows: torch.Tensor, trains: bool) -> torch.Tensor:
    """Return rows of this server's shard ``number``, float32 [n, dim].

    Args:
        rows: their places in the shard.
        trains: the rows are for a training step, whose traffic is counted.
    """
    with torch.no_grad():
        values = SERVED.shards[number].values[rows]
    if trains:
        TRAFFIC.add("pull", values.nbytes)
    return values


def push(worker: int, number: int, rows: Rows, dense: dict[str, torch.Tensor]) -> None:
    """Store a worker's gradients on this server.

    Args:
        number: number of the push in the worker's step.
        dense: gradients of the dense parameters; empty except in one push of a step.
    """
    with LOCK:
        for place, pushed in rows.items():
            SERVED.shards[place].pushed[worker, number] = pushed
        if dense:
            SERVED.pushed[worker] = dense


def pull_dense(trains: bool) -> dict[str, torch.Tensor]:
    """Return this server's parameters other than tables. ``trains``: they are for a training step,
    whose traffic is counted."""
    with LOCK:
        values = {name: value.detach().clone() for name, value in SERVED.named.items()}
    if trains:
        TRAFFIC.add("pull", sum(value.nbytes for value in values.values()))
    return values
