"""Figures of a run that several of its reports have."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.core.report import ContextReport, DataFigures
from paceline.data.order.build import tokens_per_row
from paceline.distributed.mesh import ParallelDims
from paceline.models.context.choice import facts_of_run, item_bytes_of
from paceline.parallel.cost import ContextWork, Workload
from paceline.parallel.registry import get_spec, load_object
from paceline.tasks.base import Task
from paceline.train.trainer import Trainer

#: Number of steps whose micro-batches are inspected to estimate the number of distinct IDs in a
#: micro-batch.
_COUNTED_STEPS = 8


def data_figures(trainer: Trainer) -> DataFigures:
    """Return how many rows of the training data were read, kept and dropped; if the data is
    streamed, up to now."""
    counts = trainer.data.counts
    return (trainer.spec.data.counts if counts is None else counts).as_dict()


def workload(trainer: Trainer, step: int) -> Workload:
    """Return the mean workload of a replica per step, as far as it is known at ``step``."""
    derived = trainer.spec.derived
    lengths = getattr(trainer.data.train_dataset, "lengths", None)
    mean_length = 1.0 if lengths is None else float(np.mean(lengths))
    if trainer.spec.config.train_args.packs_rows and trainer.spec.data.sources:
        mean_length = tokens_per_row(trainer.spec.config, trainer.spec.data.sources)
    elif trainer.is_streamed and derived.tokens_per_step is not None:
        mean_length = derived.tokens_per_step / derived.global_batch_size
    parts, samples = trainer.spec.layout.axes.context, derived.samples_per_micro_batch
    work = Workload(
        derived.gradient_accumulation_steps,
        samples * mean_length / parts,
        distinct=_distinct_ids(trainer, step),
        labels=derived.samples_per_micro_batch * mean_length * _label_share(trainer),
    )
    row = (max(1, round(mean_length)),) * max(1, round(samples))
    return with_rows(work, trainer.components.task, trainer.spec.layout.axes, [row])


def with_rows(
    work: Workload, task: Task, axes: ParallelDims, rows: Sequence[tuple[int, ...]]
) -> Workload:
    """Return the workload of a task whose rows are divided, with the samples of some rows. Other
    tasks have the same workload."""
    method = getattr(task, "context_method", None)
    if method is None:
        return work
    facts, item_bytes = facts_of_run(task.config, axes), item_bytes_of(task.config)
    return replace(work, context=ContextWork(method.name, facts, item_bytes, tuple(rows)))


def context_report(task: Any, size: int) -> ContextReport | None:
    """Return how ranks divide the rows of a task; None if they do not.

    Args:
        size: number of ranks that divide each row.
    """
    method = getattr(task, "context_method", None)
    if method is None:
        return None
    report: ContextReport = {"size": size, "method": method.name, "why": method.why}
    if task.place is not None and task.place.gathered_head_sizes:
        report["gathered_head_sizes"] = sorted(task.place.gathered_head_sizes)
    return report


def _label_share(trainer: Trainer) -> float:
    """Return the share of the tokens with a loss; 1 if it is unknown."""
    data = trainer.spec.data
    return data.label_tokens / data.train_tokens if data.label_tokens and data.train_tokens else 1.0


def _distinct_ids(trainer: Trainer, step: int) -> tuple[tuple[float, ...], ...]:
    """Return the mean number of distinct IDs in a micro-batch by table and server, counted in
    some micro-batches of the run; empty if the data have no IDs."""
    location = get_spec(trainer.spec.layout.strategy).count_distinct
    if location is None or step == 0:
        return ()
    num_parts = trainer.spec.derived.replicas * trainer.spec.derived.gradient_accumulation_steps
    steps = sorted({step * number // _COUNTED_STEPS for number in range(_COUNTED_STEPS)})
    micro_batches = (
        batch for step in steps for batch in trainer.data.order.micro_batches(step, num_parts)
    )
    counted: tuple[tuple[float, ...], ...] = load_object(location)(
        trainer.spec.config, trainer.data.train_dataset, micro_batches
    )
    return counted
