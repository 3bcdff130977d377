"""Evaluation over all ranks, exact to the last row: sums and counts are added up, then divided
once."""

import time
from dataclasses import dataclass

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.core.events import EvalEvent
from paceline.data.loader import LoaderOptions, eval_batches
from paceline.distributed.communicator import Communicator
from paceline.distributed.progress import PROGRESS
from paceline.parallel.base import Strategy
from paceline.parallel.protocols import evaluate as run_evaluation
from paceline.parallel.protocols import has_data, replica_of
from paceline.tasks.base import Task
from paceline.train.precision import Precision


@dataclass(frozen=True)
class EvalResult:
    """Means over the whole set; ``count`` is what they are over (label tokens, images)."""

    loss: float
    metrics: dict[str, float]
    count: int
    wall_s: float

    def event(self, step: int) -> EvalEvent:
        return {
            "type": "eval",
            "step": step,
            "loss": self.loss,
            "metrics": self.metrics,
            "count": self.count,
            "wall_s": self.wall_s,
        }


def evaluate(
    task: Task,
    model: nn.Module,
    strategy: Strategy,
    dataset: object,
    config: Config,
    world: Communicator,
    precision: Precision,
    options: LoaderOptions,
) -> EvalResult:
    """Loss and metrics over ``dataset``. The result is that of one rank over the whole set.

    With ``evaluation.mode: rank0`` rank 0 runs all rows and the others wait.
    """
    start = time.perf_counter()
    args = config.train_args
    alone = config.evaluation.mode == "rank0"
    sums: dict[str, torch.Tensor] = {}
    each: dict[str, list[torch.Tensor]] = {name: [] for name in task.gathers}
    count = 0
    was_training = model.training
    model.eval()
    try:
        if has_data(strategy) and (world.is_rank_zero or not alone):
            rank, num_replicas = (0, 1) if alone else replica_of(strategy)
            batches = eval_batches(
                dataset,
                task.collate,
                batch_size=args.per_device_eval_batch_size or args.per_device_train_batch_size,
                rank=rank,
                world_size=num_replicas,
                seed=args.seed,
                options=options,
            )
            for batch in batches:
                batch = batch.to(world.device)
                PROGRESS.tick()

                def run(module: nn.Module, data: object = batch.data) -> dict[str, torch.Tensor]:
                    with torch.no_grad(), precision.autocast():
                        return task.evaluate(module, data)

                found = run(model) if alone else run_evaluation(strategy, run, model)
                if batch.weight == 0 or found is None:
                    continue
                count += task.count(batch.data)
                for name, value in found.items():
                    if name in each:
                        each[name].append(value.detach().reshape(-1).to(world.wide_dtype))
                        continue
                    sums[name] = (
                        sums.get(name, torch.zeros((), device=world.device, dtype=world.wide_dtype))
                        + value
                    )
    finally:
        model.train(was_training)
    names = sorted({name for found in world.gather_objects(sorted(sums)) for name in found or ()})
    total, *values = world.sum(
        float(count), *(float(sums[name]) if name in sums else 0.0 for name in names)
    )
    means = {name: value / max(total, 1.0) for name, value in zip(names, values, strict=True)}
    loss = means.pop("loss")
    if each:
        means |= task.metrics({name: _gather(values, world) for name, values in each.items()})
    return EvalResult(loss, means, int(total), time.perf_counter() - start)


def _gather(values: list[torch.Tensor], world: Communicator) -> torch.Tensor:
    """Every rank's values, one after the other, on the CPU; each rank may have another number of
    them."""
    mine = (
        torch.cat(values) if values else torch.zeros(0, dtype=world.wide_dtype, device=world.device)
    )
    sizes = [int(one) for one in world.gather_numbers(float(len(mine)))]
    if max(sizes) == 0:
        return mine.cpu()
    padded = torch.zeros(max(sizes), dtype=mine.dtype, device=world.device)
    padded[: len(mine)] = mine
    output = torch.empty(world.size * max(sizes), dtype=mine.dtype, device=world.device)
    world.wait(world.all_gather(output, padded))
    rows = output.view(world.size, -1).cpu()
    return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])
