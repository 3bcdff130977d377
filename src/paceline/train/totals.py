"""Sums over a global batch that the loss of each of its samples depends on."""

import torch

from paceline.data.loader import MicroBatch
from paceline.distributed.traffic import uncounted
from paceline.train.state import TrainComponents


def add_totals(components: TrainComponents, batches: list[MicroBatch]) -> None:
    """Compute the sums that the task's loss needs (:attr:`~paceline.tasks.base.Task.total_names`)
    over the global batch, and add them to the micro-batches. A collective of the ranks that share a
    global batch."""
    task, strategy = components.task, components.strategy
    world = strategy.world
    names = task.total_names
    if not names:
        return
    if task.sums_own_totals and len(batches) == strategy.count_group.size == 1:
        batches[0].data["totals"] = {}
        return
    sums = torch.zeros(len(names), dtype=world.wide_dtype, device=world.device)
    for batch in batches:

        def run(model: torch.nn.Module, data: object = batch.data) -> dict[str, torch.Tensor]:
            with torch.no_grad(), components.precision.autocast():
                return task.totals(model, data)

        terms = strategy.evaluate(run, components.model)
        if terms is not None and batch.weight and strategy.reports_loss:
            sums += torch.stack([terms[name].to(sums.dtype) for name in names])
    with uncounted():
        group = strategy.count_group
        group.wait(group.all_reduce(sums))
    totals = dict(zip(names, sums.float().unbind(), strict=True))
    for batch in batches:
        batch.data["totals"] = totals
