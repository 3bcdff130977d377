"""Evaluation over all ranks. Sums and counts are added up over the ranks and divided once, so that
the result is exact even if ranks have different numbers of rows."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.config.metrics.evaluation import generated_metrics
from paceline.config.schema import Config
from paceline.core.events import EvalEvent
from paceline.core.texts import UserText
from paceline.data.loader import eval_batches
from paceline.data.loader_process import LoaderOptions
from paceline.distributed.communicator import Communicator
from paceline.distributed.rank_zero import rank_zero_phase
from paceline.distributed.timing.progress import ProgressTracker
from paceline.parallel.strategy import Strategy
from paceline.tasks.base import Task
from paceline.train.answers.generation import AnswerGenerator
from paceline.train.answers.metrics import answer_metrics
from paceline.train.precision import Precision

logger = logging.getLogger(__name__)


@dataclass
class EvalResult:
    """Means over the evaluation set. ``count`` is the number of label tokens or images that the
    sums were divided by (rounded, if rows have weights), ``answered_rows`` the number of rows
    with a generated answer, and ``best_step`` the step of the best evaluation so far, if the best
    model is selected."""

    loss: float
    metrics: dict[str, float]
    count: int
    wall_s: float
    answered_rows: int = 0
    best_step: int | None = None

    def event(self, step: int) -> EvalEvent:
        event: EvalEvent = {
            "type": "eval",
            "step": step,
            "loss": self.loss,
            "metrics": self.metrics,
            "count": self.count,
            "wall_s": self.wall_s,
        }
        if self.answered_rows:
            event["answered_rows"] = self.answered_rows
        if self.best_step is not None:
            event["best_step"] = self.best_step
        return event


def evaluate(
    task: Task,
    model: nn.Module,
    strategy: Strategy,
    dataset: Any,
    config: Config,
    precision: Precision,
    options: LoaderOptions,
    progress: ProgressTracker,
) -> EvalResult:
    """Return the loss and the metrics over all of ``dataset``, the same that a single rank would
    compute. With ``evaluation.mode: rank0``, rank 0 evaluates all rows and the other ranks wait. A
    collective."""
    start = time.perf_counter()
    comm, args = strategy.world, config.train_args
    batch_size = args.per_device_eval_batch_size or args.per_device_train_batch_size
    sums: dict[str, torch.Tensor] = {}
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in task.gathers}
    count = 0.0
    batches = run_batches(
        task.evaluate, task, model, strategy, dataset, config, precision, options, progress
    )
    for data, results in batches:
        count += task.count(data)
        for name, value in results.items():
            if name in rows:
                rows[name].append(value.detach().reshape(-1).to(comm.wide_dtype))
            else:
                zero = torch.zeros((), device=comm.device, dtype=comm.wide_dtype)
                sums[name] = sums.get(name, zero) + value
    names_by_rank = comm.gather_objects(sorted(sums))
    names = sorted({name for rank_names in names_by_rank for name in rank_names or ()})
    total, *values = comm.sum(count, *(float(sums.get(name, 0.0)) for name in names))
    means = {name: value / (total or 1.0) for name, value in zip(names, values, strict=True)}
    if rows:
        means |= task.metrics({name: gather(values, comm) for name, values in rows.items()})
    loss = means.pop("loss")
    if "perplexity" in config.evaluation.metrics:
        means["perplexity"] = _perplexity(loss)
    if not math.isfinite(loss):
        logger.warning(
            UserText(
                "evaluation: the loss is {loss}: the model's outputs for the evaluation rows are"
                " not finite. Its weights have diverged, or a value exceeds the range of"
                " `train_args.precision: {precision}`",
                code="evaluation-not-finite",
                loss=loss,
                precision=args.precision,
            )
        )
    answered_rows = 0
    generated = generated_metrics(config.evaluation.metrics)
    if generated:
        generator = AnswerGenerator(task, model, strategy, precision, config, progress)
        metrics, answered_rows = answer_metrics(generator, dataset, generated, batch_size)
        means |= metrics
    return EvalResult(loss, means, round(total), time.perf_counter() - start, answered_rows)


def run_batches(
    run: Callable[[nn.Module, Any], dict[str, torch.Tensor]],
    task: Task,
    model: nn.Module,
    strategy: Strategy,
    dataset: Any,
    config: Config,
    precision: Precision,
    options: LoaderOptions,
    progress: ProgressTracker,
) -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
    """Run a function of the model and a batch on this rank's share of a dataset, without gradients
    and with the model in evaluation mode. A collective.

    Yields:
        Each batch with its results, where this rank has them.
    """
    comm, args = strategy.world, config.train_args
    on_rank_zero = config.evaluation.mode == "rank0"
    with rank_zero_phase(comm, "evaluating the model") if on_rank_zero else nullcontext():
        if not strategy.has_data or (on_rank_zero and not comm.is_rank_zero):
            return
        rank, num_replicas = (0, 1) if on_rank_zero else (strategy.replica, strategy.num_replicas)
        batches = eval_batches(
            dataset,
            task.collate,
            batch_size=args.per_device_eval_batch_size or args.per_device_train_batch_size,
            rank=rank,
            world_size=num_replicas,
            seed=args.seed,
            options=options,
        )
        was_training = model.training
        model.eval()
        try:
            for batch in batches:
                batch = batch.to(comm.device)
                progress.tick()

                def step(module: nn.Module, data: object = batch.data) -> dict[str, torch.Tensor]:
                    with torch.no_grad(), precision.autocast():
                        return run(module, data)

                results = step(model) if on_rank_zero else strategy.evaluate(step, model)
                if batch.weight and results is not None:
                    yield batch.data, results
        finally:
            model.train(was_training)


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def gather(values: list[torch.Tensor], comm: Communicator) -> torch.Tensor:
    """Gather the values of all ranks, ordered by rank, on the CPU. Ranks may have different numbers
    of values."""
    local = torch.cat([torch.zeros(0, dtype=comm.wide_dtype, device=comm.device), *values])
    sizes = [int(size) for size in comm.gather_numbers(float(len(local)))]
    if max(sizes) == 0:
        return local.cpu()
    padded = local.new_zeros(max(sizes))
    padded[: len(local)] = local
    gathered = local.new_empty(comm.size * max(sizes))
    comm.wait(comm.all_gather(gathered, padded))
    rows = comm.read(gathered).view(comm.size, -1)
    return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])
