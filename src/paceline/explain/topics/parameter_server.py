"""`paceline explain parameter-server`: workers that pull rows and push gradients, synchronously and
asynchronously, and the staleness of the rows."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.core.files import human_bytes
from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import ParallelDims
from paceline.explain import training
from paceline.explain.rank_topic import RankTopic, make_mesh, numbers_of
from paceline.explain.record import (
    Cell,
    Check,
    DrawnMessage,
    DrawnRow,
    Frame,
    Span,
    cells_of,
    idle_cells,
    number_text,
    on_step_clock,
)
from paceline.messages.pages import PageText
from paceline.models.recommend import Table
from paceline.parallel.strategy import make_strategy
from paceline.strategies.parameter_server.asynchronous import AsyncServerStrategy
from paceline.strategies.parameter_server.strategy import ParameterServerStrategy

_STEPS = 4
_TABLE_ROWS = 6
_LEARNING_RATE = 0.5
_MAX_STALENESS = 1
#: The last worker computes longer by this, so that the others get ahead.
_DELAY_S = 0.05
_ABOUT = {
    "sync": (
        "Synchronous: the server waits for the gradients of all workers, sums them and makes one"
        " update. Every step equals that of data parallelism, and the fast worker waits."
    ),
    "async": (
        "Asynchronous (Downpour SGD, Dean et al., 2012): the server applies the gradients of each"
        " worker as they arrive. No worker waits, but gradients are computed from rows that other"
        " workers have changed since: they are stale."
    ),
    "bounded": (
        PageText(
            "Bounded staleness (Ho et al., 2013): as asynchronous, but no worker may be more than"
            " {steps:step} ahead of the slowest.",
            steps=_MAX_STALENESS,
        )
    ),
}
_COMMON = PageText(
    " An embedding table is on a server. In each step, a worker sends the ids of its batch,"
    " receives these rows, and pushes their gradients: it never has the full table. The last"
    " worker computes {delay} ms longer than the others.",
    delay=f"{1000 * _DELAY_S:.0f}",
)


@dataclass(frozen=True)
class ServerWorkerStep:
    """A step of a worker.

    Args:
        ids: distinct rows of its batch.
        rows: their values as pulled.
        pull_bytes, rows_bytes, push_bytes: bytes of the ids that it sent, of the rows that it
            received, and of the gradients that it pushed.
        pulled_s, pushed_s: when the rows were there, and when its push was complete.
    """

    ids: list[int]
    rows: list[float]
    pull_bytes: int
    rows_bytes: int
    push_bytes: int
    start_s: float
    pulled_s: float
    computed_s: float
    pushed_s: float


@dataclass(frozen=True)
class TableVersion:
    """The table of the server from a time on: at the start, and after each update."""

    since_s: float
    values: list[float]


class WorkerLog:
    """Makes the steps of a rank, and records them if it is a worker."""

    def __init__(self, world: Communicator, strategy: ParameterServerStrategy) -> None:
        self.steps: list[ServerWorkerStep] = []
        self._world, self._strategy = world, strategy
        self._generator = torch.Generator().manual_seed(world.rank)
        self._marks: dict[str, float] = {}
        self._ids = self._rows = torch.zeros(0)

    def make_step(self) -> None:
        strategy, traffic, start_s = self._strategy, self._world.traffic, time.perf_counter()
        before = traffic.snapshot()
        strategy.forward_backward(self._micro_step, 1)
        strategy.clip_grad_norm(0.0)
        strategy.optimizer_step(training.apply_update)
        sent = {kind: size - before.get(kind, 0) for kind, size in traffic.snapshot().items()}
        if strategy.has_data:
            self.steps.append(
                ServerWorkerStep(
                    self._ids.tolist(),
                    numbers_of(self._rows),
                    sent["pull"],
                    self._rows.nbytes,
                    sent["push"],
                    start_s,
                    self._marks["pulled"],
                    self._marks["computed"],
                    time.perf_counter(),
                )
            )

    def _micro_step(self, _: int, module: nn.Module) -> torch.Tensor:
        ids = torch.randint(_TABLE_ROWS, (3,), generator=self._generator)
        table = module["table"]  # type: ignore[index]
        rows, places = table.fetch(ids)()
        self._marks["pulled"] = time.perf_counter()
        self._ids, self._rows = torch.unique(ids), rows.detach().clone()
        if self._world.rank == self._world.size - 2:
            time.sleep(_DELAY_S)
        loss: torch.Tensor = (table(lambda: (rows, places), torch.arange(4)) - 1).square().mean()
        self._marks["computed"] = time.perf_counter()
        return loss / (self._world.size - 1)


class ServerTopic(RankTopic):
    """Train an embedding table on real workers and a server.

    The figures: ``algorithm, ranks, steps: [[{ids, rows, stale}]]`` (of each worker; ``stale``:
    updates by other workers between its pull and the update with its gradients), ``table`` (at the
    start and the end), ``versions`` (the table at the start and after each update) and
    ``staleness`` (maximum number of steps that a worker was ahead of the slowest; null with
    ``sync``).

    Attributes:
        workers: steps of each worker; ``versions``: of the server's table.
    """

    def run(self) -> None:
        world, strategy = self.world, _make_strategy(self.world, self.options.algorithm)
        log, versions = WorkerLog(world, strategy), list[TableVersion]()

        def keep_table(*_: object) -> None:
            table = numbers_of(strategy.shards[0].values)
            versions.append(TableVersion(time.perf_counter(), table))

        if strategy.shards:
            keep_table()
            strategy.optimizer.register_step_post_hook(keep_table)
        world.barrier()
        for _ in range(_STEPS):
            log.make_step()
        staleness = None
        if isinstance(strategy, AsyncServerStrategy):
            metrics: Any = strategy.report_metrics(None)
            staleness = int(metrics["staleness"]["seen"])
        sent = world.traffic.snapshot()
        self.counted_bytes = sent.get("pull", 0) + sent.get("push", 0)
        world.barrier()
        strategy.close()
        self.workers = self.gather(log.steps)[:-1]
        self.versions, self.staleness, self.server_bytes = self.gather(
            (versions, staleness, self.counted_bytes)
        )[-1]
        self.spans, self.begin_s = on_step_clock(
            span for rank, steps in enumerate(self.workers) for span in _spans(rank, steps)
        )
        self.stale = [[self._stale_updates(step) for step in steps] for steps in self.workers]
        algorithm = self.options.algorithm
        self.title = PageText(
            "Parameter server ({algorithm}): {workers:worker} and a server",
            algorithm=algorithm,
            workers=len(self.workers),
        )
        self.about = PageText("{about}{more}", about=_ABOUT[algorithm], more=_COMMON)
        workers = range(len(self.workers))
        self.actors = [PageText("worker {rank}", rank=rank) for rank in workers]
        self.actors.append("server")

    def _stale_updates(self, step: ServerWorkerStep) -> int:
        """Return the number of updates between the pull of a step and the update with its
        gradients."""
        updates = sum(step.pulled_s < each.since_s < step.pushed_s for each in self.versions)
        return max(0, updates - 1)

    def frames(self) -> Iterator[Frame]:
        """Return a frame for each pull and each push, in the order of time."""
        moments = sorted(
            (time_s, rank, number, is_push)
            for rank, steps in enumerate(self.workers)
            for number, step in enumerate(steps)
            for time_s, is_push in ((step.pulled_s, False), (step.pushed_s, True))
        )
        state = [(DrawnRow("rows", idle_cells(_TABLE_ROWS)),) for _ in self.workers]
        before = self.versions[0].values
        yield Frame(
            "The table is on the server. A cell stands for a row of the table.",
            (*state, (DrawnRow("table", cells_of(before)),)),
            time_s=0.0,
            is_key=True,
        )
        for time_s, rank, number, is_push in moments:
            step = self.workers[rank][number]
            if not is_push:
                state[rank] = (DrawnRow("rows", _pulled_cells(step)),)
            text, messages = self._change(rank, number, is_push)
            table = [each.values for each in self.versions if each.since_s <= time_s][-1]
            row = _table_row(table, before)
            before = table
            yield Frame(
                PageText(
                    "Worker {rank}, step {number}: {text}", rank=rank, number=number + 1, text=text
                ),
                (*state, (row,)),
                messages=messages,
                time_s=time_s - self.begin_s,
                is_key=number == 0,
            )
        end = (DrawnRow("table", cells_of(self.versions[-1].values, "done")),)
        end_s = moments[-1][0] - self.begin_s
        yield Frame("The table at the end.", (*state, end), time_s=end_s, is_key=True)

    def _change(
        self, rank: int, number: int, is_push: bool
    ) -> tuple[str, tuple[DrawnMessage, ...]]:
        """Return the caption and the messages of a pull or a push."""
        step, server = self.workers[rank][number], len(self.workers)
        if is_push:
            updates = self.stale[rank][number]
            return PageText(
                "its gradients are applied ({updates:update} by others since its pull).",
                updates=updates,
            ), (DrawnMessage(rank, server, "gradients", step.push_bytes),)
        return PageText("it pulls rows {rows}.", rows=", ".join(map(str, step.ids))), (
            DrawnMessage(rank, server, "ids", step.pull_bytes),
            DrawnMessage(server, rank, "rows", step.rows_bytes),
        )

    def checks(self) -> list[Check]:
        algorithm = self.options.algorithm
        updates = (1 if algorithm == "sync" else len(self.workers)) * _STEPS
        checks = [
            Check.equal("number of updates of the table", updates, len(self.versions) - 1),
            Check.equal("every pulled row is the server's", [], self._unknown_rows()),
        ]
        if self.staleness is not None:
            bound = _MAX_STALENESS if algorithm == "bounded" else None
            is_within = bound is None or self.staleness <= bound
            name = "no worker is further ahead than permitted"
            checks.append(Check(name, self.staleness, bound, is_within))
        return checks

    def _unknown_rows(self) -> list[tuple[int, float]]:
        """Return the pulled rows (id, value) that the table had neither at the start nor later."""
        return [
            (row, value)
            for steps in self.workers
            for step in steps
            for row, value in zip(step.ids, step.rows, strict=True)
            if value not in [version.values[row] for version in self.versions]
        ]

    def facts(self) -> dict[str, str]:
        facts = {
            "Step of the slowest worker": f"{1000 * _mean_step_s(self.workers[-1]):.0f} ms",
            "Step of the first worker": f"{1000 * _mean_step_s(self.workers[0]):.0f} ms",
            "Sent by the server": human_bytes(self.server_bytes),
        }
        if self.staleness is not None:
            facts["Most steps ahead of the slowest"] = str(self.staleness)
        return facts

    def add_figures(self) -> None:
        versions = [version.values for version in self.versions]
        steps = [
            [
                {"ids": step.ids, "rows": step.rows, "stale": stale}
                for step, stale in zip(*worker, strict=True)
            ]
            for worker in zip(self.workers, self.stale, strict=True)
        ]
        self.figures.update(
            steps=steps,
            table=[versions[0], versions[-1]],
            versions=versions,
            staleness=self.staleness,
        )


def _mean_step_s(steps: list[ServerWorkerStep]) -> float:
    return sum(step.pushed_s - step.start_s for step in steps) / len(steps)


def _spans(rank: int, steps: list[ServerWorkerStep]) -> list[Span]:
    return [
        Span(rank, "steps", kind, str(number), start_s, end_s)
        for number, step in enumerate(steps, 1)
        for kind, start_s, end_s in (
            ("pull", step.start_s, step.pulled_s),
            ("compute", step.pulled_s, step.computed_s),
            ("push and wait", step.computed_s, step.pushed_s),
        )
    ]


def _pulled_cells(step: ServerWorkerStep) -> tuple[Cell, ...]:
    """Return the rows of the table that a worker has pulled."""
    cells = list(idle_cells(_TABLE_ROWS))
    for row, value in zip(step.ids, step.rows, strict=True):
        cells[row] = Cell(number_text(value), tone="new")
    return tuple(cells)


def _table_row(values: list[float], before: list[float]) -> DrawnRow:
    """Return the table, with the rows that an update has changed since ``before``."""
    cells = [
        Cell(number_text(value), tone="" if value == old else "new")
        for value, old in zip(values, before, strict=True)
    ]
    return DrawnRow("table", tuple(cells))


def _make_strategy(world: Communicator, consistency: str) -> ParameterServerStrategy:
    config = Config.model_validate(
        {
            "model": "table",
            "dataset": "noise",
            "parallel": {"mode": "parameter_server", "device": "cpu"},
            "parameter_server": {
                "consistency": consistency,
                "max_staleness": _MAX_STALENESS,
                "optimizer": "sgd",
                "learning_rate": _LEARNING_RATE,
                "dense_placement": "server",
            },
        }
    )
    axes = ParallelDims(data=world.size - 1)
    meshed = make_mesh(world, axes)
    strategy = make_strategy("parameter_server", config, meshed)
    assert isinstance(strategy, ParameterServerStrategy)
    torch.manual_seed(0)
    with strategy.model_init_context():
        model = nn.ModuleDict({"table": Table(_TABLE_ROWS, 1)})
    strategy.setup(model)
    strategy.setup_optimizer(
        lambda named: torch.optim.SGD(
            [each for _, each in named] or [torch.zeros(1)], _LEARNING_RATE
        )
    )
    return strategy
