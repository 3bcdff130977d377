"""`paceline explain parameter-server`: workers that pull rows and push gradients, synchronously and
asynchronously, and the staleness of the rows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.core.files import human_bytes
from paceline.core.formatting import counted
from paceline.explain.catalog import ExplainOptions
from paceline.explain.record import (
    Cell,
    Check,
    DrawnMessage,
    DrawnRow,
    Frame,
    Recording,
    Span,
    cells_of,
    check_traffic,
    number_text,
    on_step_clock,
)
from paceline.launch.rank_pool import run_on_ranks

if TYPE_CHECKING:
    import torch

    from paceline.distributed.communicator import Communicator

PRELOAD = ("paceline.explain.training", "paceline.strategies.parameter_server.asynchronous")
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
        "Bounded staleness (Ho et al., 2013): as asynchronous, but no worker may be more than"
        f" {counted(_MAX_STALENESS, 'step')} ahead of the slowest."
    ),
}
_COMMON = (
    " An embedding table is on a server. In each step, a worker sends the ids of its batch,"
    " receives these rows, and pushes their gradients: it never has the full table. The last worker"
    f" computes {1000 * _DELAY_S:.0f} ms longer than the others."
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


@dataclass(frozen=True)
class RankServed:
    """The recording of one rank. ``versions``: of the server's table."""

    steps: list[ServerWorkerStep]
    versions: list[TableVersion]
    staleness: int | None
    counted_bytes: int


def record(options: ExplainOptions) -> Recording:
    """Train an embedding table on real workers and a server.

    The figures: ``algorithm, ranks, steps: [[{ids, rows, stale}]]`` (of each worker; ``stale``:
    updates by other workers between its pull and the update with its gradients), ``table`` (at the
    start and the end), ``versions`` (the table at the start and after each update) and
    ``staleness`` (maximum number of steps that a worker was ahead of the slowest; null with
    ``sync``).
    """
    results: list[RankServed] = run_on_ranks(_record_rank, options.ranks, options.algorithm)
    workers, server = results[:-1], results[-1]
    stale = [[_stale_updates(server.versions, step) for step in worker.steps] for worker in workers]
    spans, begin = on_step_clock(
        span for rank, worker in enumerate(workers) for span in _spans(rank, worker)
    )
    frames = _frames(workers, server, stale, begin)
    staleness = server.staleness
    facts = [
        ("Step of the slowest worker", f"{1000 * _mean_step_s(workers[-1]):.0f} ms"),
        ("Step of the first worker", f"{1000 * _mean_step_s(workers[0]):.0f} ms"),
        ("Sent by the server", human_bytes(server.counted_bytes)),
    ]
    versions = [version.values for version in server.versions]
    updates = (1 if options.algorithm == "sync" else len(workers)) * _STEPS
    checks = [
        check_traffic(frames, [rank.counted_bytes for rank in results]),
        Check.equal("number of updates of the table", updates, len(versions) - 1),
        Check.equal("every pulled row is the server's", [], _unknown(workers, versions)),
    ]
    if options.algorithm != "sync":
        bound = _MAX_STALENESS if options.algorithm == "bounded" else None
        facts.append(("Most steps ahead of the slowest", str(staleness)))
        checks.append(
            Check(
                "no worker is further ahead than permitted",
                staleness,
                bound,
                bound is None or (staleness is not None and staleness <= bound),
            )
        )
    return Recording(
        topic="parameter-server",
        title=(
            f"Parameter server ({options.algorithm}): {counted(len(workers), 'worker')} and a"
            " server"
        ),
        about=_ABOUT[options.algorithm] + _COMMON,
        actors=(*(f"worker {rank}" for rank in range(len(workers))), "server"),
        frames=frames,
        checks=tuple(checks),
        facts=tuple(facts),
        spans=tuple(spans),
        figures={
            "algorithm": options.algorithm,
            "ranks": options.ranks,
            "steps": [
                [
                    {"ids": step.ids, "rows": step.rows, "stale": stale[rank][number]}
                    for number, step in enumerate(worker.steps)
                ]
                for rank, worker in enumerate(workers)
            ],
            "table": [versions[0], versions[-1]],
            "versions": versions,
            "staleness": staleness,
        },
    )


def _stale_updates(versions: list[TableVersion], step: ServerWorkerStep) -> int:
    """Return the number of updates between the pull of a step and the update with its gradients."""
    updates = sum(step.pulled_s < version.since_s < step.pushed_s for version in versions)
    return max(0, updates - 1)


def _unknown(workers: list[RankServed], versions: list[list[float]]) -> list[tuple[int, float]]:
    """Return the pulled rows (id, value) that the table had neither at the start nor later."""
    return [
        (row, value)
        for worker in workers
        for step in worker.steps
        for row, value in zip(step.ids, step.rows, strict=True)
        if value not in [values[row] for values in versions]
    ]


def _mean_step_s(worker: RankServed) -> float:
    return sum(step.pushed_s - step.start_s for step in worker.steps) / len(worker.steps)


def _spans(rank: int, worker: RankServed) -> list[Span]:
    spans = []
    for number, step in enumerate(worker.steps):
        for kind, start_s, end_s in (
            ("pull", step.start_s, step.pulled_s),
            ("compute", step.pulled_s, step.computed_s),
            ("push and wait", step.computed_s, step.pushed_s),
        ):
            spans.append(Span(rank, "steps", kind, str(number + 1), start_s, end_s))
    return spans


def _frames(
    workers: list[RankServed], server: RankServed, stale: list[list[int]], begin: float
) -> tuple[Frame, ...]:
    """Return a frame for each pull and each push, in the order of time."""
    last = len(workers)
    moments: list[tuple[float, int, int, bool]] = []
    for rank, worker in enumerate(workers):
        for number, step in enumerate(worker.steps):
            moments.append((step.pulled_s, rank, number, False))
            moments.append((step.pushed_s, rank, number, True))
    state: list[tuple[DrawnRow, ...]] = [(DrawnRow("rows", _blank()),) for _ in workers]
    before = server.versions[0].values
    frames = [
        Frame(
            "The table is on the server. A cell stands for a row of the table.",
            (*state, (DrawnRow("table", cells_of(before)),)),
            time_s=0.0,
            is_key=True,
        )
    ]
    for time_s, rank, number, is_push in sorted(moments):
        step = workers[rank].steps[number]
        if is_push:
            text = (
                f"Worker {rank}, step {number + 1}: its gradients are applied"
                f" ({counted(stale[rank][number], 'update')} by others since its pull)."
            )
            messages: tuple[DrawnMessage, ...] = (
                DrawnMessage(rank, last, "gradients", step.push_bytes),
            )
        else:
            values = {
                row: number_text(value) for row, value in zip(step.ids, step.rows, strict=True)
            }
            cells = tuple(
                Cell(values[row], tone="new") if row in values else Cell("", tone="idle")
                for row in range(_TABLE_ROWS)
            )
            state[rank] = (DrawnRow("rows", cells),)
            text = f"Worker {rank}, step {number + 1}: it pulls rows {_names(step.ids)}."
            messages = (
                DrawnMessage(rank, last, "ids", step.pull_bytes),
                DrawnMessage(last, rank, "rows", step.rows_bytes),
            )
        table = _table_at(server.versions, time_s)
        row = _table_row(table, before)
        before = table
        frames.append(
            Frame(
                text,
                (*state, (row,)),
                messages=messages,
                time_s=time_s - begin,
                is_key=number == 0,
            )
        )
    end_s = max(moment[0] for moment in moments) - begin
    end = (DrawnRow("table", cells_of(server.versions[-1].values, "done")),)
    frames.append(Frame("The table at the end.", (*state, end), time_s=end_s, is_key=True))
    return tuple(frames)


def _table_at(versions: list[TableVersion], time_s: float) -> list[float]:
    return [each.values for each in versions if each.since_s <= time_s][-1]


def _table_row(values: list[float], before: list[float]) -> DrawnRow:
    """Return the table, with the rows that an update has changed since ``before``."""
    cells = [
        Cell(number_text(value), tone="" if value == old else "new")
        for value, old in zip(values, before, strict=True)
    ]
    return DrawnRow("table", tuple(cells))


def _blank() -> tuple[Cell, ...]:
    return tuple(Cell("", tone="idle") for _ in range(_TABLE_ROWS))


def _names(ids: list[int]) -> str:
    return ", ".join(map(str, ids))


def _record_rank(world: Communicator, consistency: str) -> RankServed:
    import torch
    from torch import nn

    from paceline.config.schema import Config
    from paceline.distributed.communicator import Communicator
    from paceline.distributed.mesh import ParallelDims
    from paceline.models.recommend import Table
    from paceline.parallel.strategy import make_strategy
    from paceline.strategies.parameter_server.asynchronous import AsyncServerStrategy
    from paceline.strategies.parameter_server.strategy import ParameterServerStrategy

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
    meshed = Communicator(world.env, world.device, axes, world.group, world.ranks, world.waits)
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
    generator = torch.Generator().manual_seed(world.rank)
    is_slow = world.rank == world.size - 2
    marks: dict[str, float] = {}
    pulled: dict[str, torch.Tensor] = {}

    def micro_step(_: int, module: nn.Module) -> torch.Tensor:
        ids = torch.randint(_TABLE_ROWS, (3,), generator=generator)
        table = module["table"]  # type: ignore[index]
        rows, places = table.fetch(ids)()
        marks["pulled"] = time.perf_counter()
        pulled.update(ids=torch.unique(ids), rows=rows.detach().clone())
        if is_slow:
            time.sleep(_DELAY_S)
        loss: torch.Tensor = (table(lambda: (rows, places), torch.arange(4)) - 1).square().mean()
        marks["computed"] = time.perf_counter()
        return loss / (world.size - 1)

    def apply(optimizer: torch.optim.Optimizer) -> bool:
        optimizer.step()
        return True

    traffic = world.traffic
    versions: list[TableVersion] = []

    def keep_table(*_: object) -> None:
        versions.append(TableVersion(time.perf_counter(), _values(strategy.shards[0].values)))

    if strategy.shards:
        keep_table()
        strategy.optimizer.register_step_post_hook(keep_table)
    world.barrier()
    steps = []
    for _ in range(_STEPS):
        marks["start"] = time.perf_counter()
        kinds = traffic.snapshot()
        strategy.forward_backward(micro_step, 1)
        strategy.clip_grad_norm(0.0)
        strategy.optimizer_step(apply)
        sent = {kind: size - kinds.get(kind, 0) for kind, size in traffic.snapshot().items()}
        if strategy.has_data:
            steps.append(
                ServerWorkerStep(
                    pulled["ids"].tolist(),
                    _values(pulled["rows"]),
                    sent["pull"],
                    pulled["rows"].nbytes,
                    sent["push"],
                    marks["start"],
                    marks["pulled"],
                    marks["computed"],
                    time.perf_counter(),
                )
            )
    staleness = None
    if isinstance(strategy, AsyncServerStrategy):
        metrics: Any = strategy.report_metrics(None)
        staleness = int(metrics["staleness"]["seen"])
    counted_bytes = sum(
        size for kind, size in traffic.snapshot().items() if kind in ("pull", "push")
    )
    world.barrier()
    strategy.close()
    return RankServed(steps, versions, staleness, counted_bytes)


def _values(tensor: torch.Tensor) -> list[float]:
    values: list[float] = tensor.detach().reshape(-1).tolist()
    return values
