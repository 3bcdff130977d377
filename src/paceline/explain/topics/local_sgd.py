"""`paceline explain local-sgd`: workers that train independently, drift apart and are synchronized
every few steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.files import human_bytes
from paceline.core.formatting import counted
from paceline.distributed.call_log import CountedCall
from paceline.distributed.collective_bytes import all_reduce_bytes
from paceline.explain.calls import collectives_of
from paceline.explain.catalog import ExplainOptions
from paceline.explain.record import (
    Check,
    DrawnRow,
    Frame,
    Recording,
    cells_of,
    check_traffic,
    number_text,
)
from paceline.launch.rank_pool import run_on_ranks

if TYPE_CHECKING:
    import torch

    from paceline.distributed.communicator import Communicator

PRELOAD = ("paceline.explain.training", "paceline.strategies.local_sgd.algorithms")
_WEIGHTS = 4
_SYNC_EVERY = 4
_STEPS = 2 * _SYNC_EVERY
_LEARNING_RATE = 0.1
_NAMES = {"local_sgd": "Local SGD", "diloco": "DiLoCo"}
_ABOUT = {
    "local_sgd": (
        f"Local SGD (Stich, 2019): each worker makes {_SYNC_EVERY} steps on its own data without"
        " communication, then the workers replace their weights by the mean."
    ),
    "diloco": (
        f"DiLoCo (Douillard et al., 2023): each worker makes {_SYNC_EVERY} steps on its own data."
        " The mean of the changes is a gradient for an outer optimizer with Nesterov momentum,"
        " which moves the common weights."
    ),
}
_DRIFT = (
    " Between synchronizations the workers drift apart, because their data differs. They send"
    " weights once in a while instead of gradients in each step."
)


@dataclass(frozen=True)
class LocalStep:
    """The values of one worker in one step: its weights after the local update, and after the
    synchronization if there is one."""

    local: list[float]
    weights: list[float]
    calls: list[CountedCall]


@dataclass(frozen=True)
class WorkerRun:
    """The recording of one worker. ``start``: the weights before the first step."""

    start: list[float]
    steps: list[LocalStep]
    counted_bytes: int


def record(options: ExplainOptions) -> Recording:
    """Train a small model on real ranks; each rank is a worker.

    The figures: ``algorithm, ranks, sync_every``, ``weights`` (of each worker after each step),
    ``drift`` (largest difference between two workers after the local update of each step) and
    ``ddp_bytes`` (that a rank would send with ``ddp``).
    """
    results: list[WorkerRun] = run_on_ranks(_record_rank, options.ranks, options.algorithm)
    drifts = [_drift([run.steps[step].local for run in results]) for step in range(_STEPS)]
    frames = _frames(results, drifts)
    ddp_bytes = _STEPS * all_reduce_bytes(4 * _WEIGHTS, options.ranks)
    sent_bytes = results[0].counted_bytes
    synced = range(_SYNC_EVERY - 1, _STEPS, _SYNC_EVERY)
    checks = [
        check_traffic(frames, [run.counted_bytes for run in results]),
        Check.equal(
            "after a synchronization all workers have the same weights",
            [0.0] * len(synced),
            [_drift([run.steps[step].weights for run in results]) for step in synced],
        ),
    ]
    if options.algorithm == "local_sgd":
        means = [_mean([run.steps[step].local for run in results]) for step in synced]
        weights = [results[0].steps[step].weights for step in synced]
        pairs = [
            pair for both in zip(means, weights, strict=True) for pair in zip(*both, strict=True)
        ]
        is_mean = all(abs(mean - weight) < 1e-6 for mean, weight in pairs)
        checks.append(Check("they are the mean of the workers", weights, means, is_mean))
    return Recording(
        topic="local-sgd",
        title=f"{_NAMES[options.algorithm]}: {counted(options.ranks, 'worker')}, {_STEPS} steps",
        about=_ABOUT[options.algorithm] + _DRIFT,
        actors=tuple(f"worker {rank}" for rank in range(options.ranks)),
        frames=frames,
        checks=tuple(checks),
        facts=(
            ("Synchronizations", f"{_STEPS // _SYNC_EVERY} in {_STEPS} steps"),
            ("Sent per worker", human_bytes(sent_bytes)),
            ("Gradients with ddp, without padding", human_bytes(ddp_bytes)),
            ("Largest drift", number_text(max(drifts))),
        ),
        figures={
            "algorithm": options.algorithm,
            "ranks": options.ranks,
            "sync_every": _SYNC_EVERY,
            "weights": [[step.weights for step in run.steps] for run in results],
            "drift": drifts,
            "ddp_bytes": ddp_bytes,
        },
    )


def _drift(weights: list[list[float]]) -> float:
    """Return the largest difference of a weight between two workers."""
    columns = list(zip(*weights, strict=True))
    differences: list[float] = [max(values) - min(values) for values in columns]
    return max(differences)


def _mean(weights: list[list[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*weights, strict=True)]


def _frames(results: list[WorkerRun], drifts: list[float]) -> tuple[Frame, ...]:
    rows = tuple((DrawnRow("weights", cells_of(run.start)),) for run in results)
    frames = [Frame("All workers start with the same weights.", rows, is_key=True)]
    for number in range(_STEPS):
        steps = [run.steps[number] for run in results]
        local = tuple((DrawnRow("weights", cells_of(step.local, "new")),) for step in steps)
        drift = number_text(drifts[number])
        is_synced = (number + 1) % _SYNC_EVERY == 0
        text = (
            f"Step {number + 1}: each worker updates its own weights; they differ by up to {drift}."
        )
        frames.append(Frame(text, local, is_key=is_synced))
        if is_synced:
            frames.append(
                Frame(
                    f"Synchronization after step {number + 1}: all workers get the same weights.",
                    tuple((DrawnRow("weights", cells_of(step.weights, "done")),) for step in steps),
                    collectives=collectives_of([step.calls for step in steps], "weights"),
                    is_key=True,
                )
            )
    return tuple(frames)


def _record_rank(world: Communicator, algorithm: str) -> WorkerRun:
    import torch
    from torch import nn

    from paceline.distributed.traffic import log_calls
    from paceline.explain import training
    from paceline.parallel.strategy import make_strategy

    config = training.make_config(algorithm)
    config.local_sgd.sync_every = _SYNC_EVERY
    config.local_sgd.workers = world.size
    torch.manual_seed(0)
    model = nn.Linear(_WEIGHTS, 1, bias=False)
    strategy = make_strategy(algorithm, config, world)
    strategy.setup(model)
    strategy.setup_optimizer(
        lambda named: torch.optim.SGD([each for _, each in named], lr=_LEARNING_RATE)
    )
    generator = torch.Generator().manual_seed(1 + world.rank)
    inputs = torch.randn(8, _WEIGHTS, generator=generator)
    targets = torch.randn(8, 1, generator=generator)
    local: list[float] = []

    def weights() -> list[float]:
        values: list[float] = model.weight.detach().reshape(-1).tolist()
        return values

    def micro_step(_: int, module: nn.Module) -> torch.Tensor:
        loss: torch.Tensor = (module(inputs) - targets).square().mean() / world.size
        return loss

    def apply(optimizer: torch.optim.Optimizer) -> bool:
        optimizer.step()
        local[:] = weights()
        return True

    start, steps = weights(), []
    before = world.traffic.total
    for _ in range(_STEPS):
        with log_calls() as calls:
            strategy.forward_backward(micro_step, 1)
            strategy.clip_grad_norm(0.0)
            strategy.optimizer_step(apply)
        steps.append(LocalStep(list(local), weights(), calls))
    return WorkerRun(start, steps, world.traffic.total - before)
