"""Compute the figures of ``report.json`` from a run and its events. Figures that were not measured
are None."""

import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any, cast

import numpy as np

from paceline.core.event_log import effective_events, effective_steps, read_events
from paceline.core.events import Event, StepEvent
from paceline.core.report import (
    BestModel,
    DataReport,
    MemoryFallback,
    PackingFigures,
    Report,
    SourceReport,
    StepTime,
    WorkerLoss,
)
from paceline.data.order.base import sample_shares
from paceline.health.anomalies import skipped_steps
from paceline.models.transforms.compile import compile_times
from paceline.observe.metrics import memory_peak
from paceline.parallel.cost import Cost, Workload
from paceline.parallel.registry import estimate_cost
from paceline.parallel.save_load import memory_bytes
from paceline.train.callbacks.experts import ExpertRecorder
from paceline.train.callbacks.monitoring import CommAdvice
from paceline.train.reports.figures import context_report, data_figures, workload
from paceline.train.trainer import Trainer


def build_report(trainer: Trainer, status: str, best: BestModel | None) -> Report:
    """Return the report. A collective; only the result of rank 0 is complete.

    Args:
        status: ``done``, ``stopped`` or ``failed``.
        best: the best evaluation, or None if none is selected.
    """
    strategy, config, order = trainer.strategy, trainer.spec.config, trainer.data.order
    metrics, state, balancer = trainer.metrics, trainer.state, trainer.balancer
    step, skipped_batches = state.step, state.skipped_batches
    comm = strategy.world
    # A rank that was lost reports 0.
    peaks = [int(peak) or None for peak in comm.gather_numbers(memory_peak(comm.device))]
    state_bytes = [int(size) for size in comm.gather_numbers(memory_bytes(strategy))]
    traffic = strategy.sent_in_a_step(metrics.usual_traffic)
    sent = [int(size) for size in comm.gather_numbers(-1 if traffic is None else traffic)]
    figures = strategy.report_metrics(max(sent) if max(sent) > 0 else None)
    advice = trainer.callbacks.find(CommAdvice)
    advisor = None if advice is None else advice.advisor
    communication = advisor.report() if advisor is not None else {}
    communication |= figures.get("communication", {})
    events = read_events(trainer.ctx.run_dir.events) if comm.is_rank_zero else []
    steps = effective_steps(events)
    layout, work = trainer.spec.layout, workload(trainer, step)
    cost = estimate_cost(layout.strategy, trainer.components.shape, layout.axes, work, config)
    losses = workers_lost(events, step)
    num_skipped_samples = sum(len(order.global_batch(step)) for step in skipped_batches)
    times_read = None if trainer.is_streamed else _times_read(trainer, step, skipped_batches)
    seen, tokens, labels = _seen(trainer, times_read)
    seen -= sum(loss["samples_unseen"] for loss in losses)
    evals = [event for event in events if event["type"] == "eval" and event["step"] <= step]
    starts = sum(1 for event in events if event["type"] == "run_start")
    report: Report = {
        "status": status,
        "task": config.task,
        "model": config.model,
        "dataset": [source.path for source in config.sources()],
        "adapter": config.lora.method if config.lora.enable else None,
        "strategy": strategy.name,
        "world_size": trainer.spec.derived.world_size,
        "device": comm.device.type,
        "precision": config.train_args.precision,
        "tf32": config.train_args.tf32,
        "fp8": config.train_args.fp8,
        "steps": step,
        "epochs": order.epochs(step),
        "samples_seen": seen,
        "train_tokens": tokens,
        "label_tokens": labels,
        "tokens_per_second": metrics.tokens_per_second,
        "samples_per_second": metrics.samples_per_second,
        "flops_per_device_s": metrics.flops_per_device_s,
        "mfu": metrics.utilization(metrics.flops_per_device_s),
        "peak": None if metrics.flops is None else metrics.flops.peak,
        "time_to_first_step_s": metrics.time_to_first_step_s,
        "wall_s": time.time() - trainer.spec.started_at,
        "first_train_loss": steps[0]["loss"] if steps else None,
        "final_train_loss": steps[-1]["loss"] if steps else None,
        "final_eval_loss": evals[-1]["loss"] if evals else None,
        "final_eval_metrics": evals[-1].get("metrics") if evals else None,
        "peak_memory_bytes": peaks,
        "state_memory_bytes": {"predicted": cost.state, "measured": max(state_bytes)},
        "traffic_bytes_per_step": {
            "predicted": cost.traffic_per_step,
            "measured": max(sent) if max(sent) >= 0 else None,
        },
        "step_time_s": _step_time(trainer, work, cost),
        "skipped_steps": skipped_steps(events, step),
        "restarts": max(0, starts - 1),
        "resumed_from_step": state.first_step if trainer.spec.resume_from is not None else None,
        "data": cast(DataReport, {**data_figures(trainer)}),
    }
    if trainer.has_packed_rows:
        report["packing"] = _packing(trainer, step, report["train_tokens"])
    if trainer.spec.data.source_figures:
        report["sources"] = _sources(trainer, times_read, steps)
    experts = trainer.callbacks.find(ExpertRecorder)
    if experts is not None:
        experts.update_total()
        report["experts"] = experts.report(trainer.spec.layout.axes.expert)
    if cost.traffic_is_bound:
        report["traffic_bytes_per_step"]["bound"] = True
    if communication:
        report["communication"] = communication
    if advisor is not None and advisor.link is not None:
        report["link"] = asdict(advisor.link)
    if "staleness" in figures:
        report["staleness"] = figures["staleness"]
    if losses:
        report["workers_lost"] = losses
    fallbacks: list[MemoryFallback] = [
        event for event in events if event["type"] == "memory_fallback"
    ]
    if fallbacks:
        report["memory_fallbacks"] = fallbacks
    if not balancer.is_equal:
        report["balance"] = {"shares": list(balancer.counts)}
    if best is not None:
        report["best"] = best
    if state.stop_reason is not None:
        report["stop_reason"] = state.stop_reason
    times = compile_times()
    context = context_report(trainer.components.task, layout.axes.context)
    if context is not None:
        report["context"] = context
    if times is not None:
        report["compile"] = {
            "graphs": times.count,
            "seconds": times.seconds,
            "recompilations": times.recompilations,
        }
    if num_skipped_samples:
        steps_from_1 = sorted(step + 1 for step in skipped_batches)
        report["data"]["skipped_batches"] = {"steps": steps_from_1, "samples": num_skipped_samples}
    return report


def _step_time(trainer: Trainer, work: Workload, cost: Cost) -> StepTime:
    """Return the predicted and the measured time of a step."""
    spec, parts, metrics = trainer.spec, trainer.components, trainer.metrics
    predicted = None
    if spec.predict and parts.task.is_language_model and trainer.strategy.world.is_rank_zero:
        dataset = trainer.data.train_dataset
        predicted = spec.predict(spec, parts.model, parts.shape, dataset, work, cost)
    return StepTime(
        predicted=None if predicted is None else predicted.seconds,
        measured=metrics.train_s / metrics.train_steps if metrics.train_steps else None,
        measured_steps=metrics.train_steps,
        range=None if predicted is None else predicted.range_s,
        parts=None if predicted is None else predicted.parts_s,
    )


def _seen(trainer: Trainer, times_read: np.ndarray | None) -> tuple[int, int | None, int | None]:
    """Return the numbers of samples, tokens and label tokens so far; None if samples have no
    tokens.

    Args:
        times_read: the result of :func:`_times_read`; None for streamed data.
    """
    if times_read is None:
        counts = data_figures(trainer)
        return counts["samples"], counts["tokens"], counts["label_tokens"]
    dataset, labels = trainer.data.train_dataset, None
    # A part of a sample has as many labels as its mask, which the order does not know.
    if trainer.spec.config.train_args.packing_strategy != "wrapped":
        labels = _total(dataset, "label_counts", times_read)
    return round(times_read.sum()), _total(dataset, "lengths", times_read), labels


def _times_read(trainer: Trainer, step: int, skipped_batches: Collection[int]) -> np.ndarray:
    """Return how often each sample was trained on up to ``step``, over all attempts of the run:
    [num_samples]."""
    times = trainer.data.order.times_read(step)
    for skipped in skipped_batches:
        keys = trainer.data.order.global_batch(skipped)
        shares = sample_shares(keys, getattr(trainer.data.train_dataset, "lengths", times))
        np.subtract.at(times, keys[:, 1], shares)
    return times


def _total(dataset: Any, name: str, times: np.ndarray) -> int | None:
    """Return the sum of an attribute of the samples, each as often as it was read; None if samples
    do not have it."""
    values = getattr(dataset, name, None)
    return None if values is None else round(np.asarray(values) @ times)


def _packing(trainer: Trainer, step: int, tokens: int | None) -> PackingFigures:
    args, rows = trainer.spec.config.train_args, trainer.data.order.rows_read(step)
    figures: PackingFigures = {
        "strategy": args.packing_strategy,
        "rows": [rows],
        "capacity": args.max_length,
    }
    if rows and tokens is not None:
        figures["fill"] = tokens / (rows * args.max_length)
    return figures


def _sources(
    trainer: Trainer, times_read: np.ndarray | None, steps: Sequence[StepEvent]
) -> list[SourceReport]:
    """Return the figures of each source.

    Args:
        times_read: the result of :func:`_times_read`; None for streamed data.
    """
    totals = (
        _streamed_sources(trainer) if times_read is None else _read_sources(trainer, times_read)
    )
    reports: list[SourceReport] = []
    for number, (source, total) in enumerate(
        zip(trainer.spec.data.source_figures, totals, strict=True)
    ):
        losses = [event["sources"][number]["loss"] for event in steps if "sources" in event]
        known = [loss for loss in losses if loss is not None]
        samples, tokens, epochs = total
        reports.append(
            {
                "name": source["name"],
                "samples": samples,
                "tokens": tokens,
                "epochs": epochs,
                "first_loss": known[0] if known else None,
                "final_loss": known[-1] if known else None,
            }
        )
    return reports


def _read_sources(trainer: Trainer, times_read: np.ndarray) -> list[tuple[int, int, float | None]]:
    """Return the samples, tokens and epochs of each source that was tokenized ahead."""
    lengths, first = trainer.data.train_dataset.lengths, 0
    totals: list[tuple[int, int, float | None]] = []
    for source in trainer.spec.data.source_figures:
        part = slice(first, first + source["samples"])
        times, first = times_read[part], part.stop
        samples = float(times.sum())
        totals.append((round(samples), round(times @ lengths[part]), samples / max(1, len(times))))
    return totals


def _streamed_sources(trainer: Trainer) -> list[tuple[int, int, float | None]]:
    """Return the samples, tokens and epochs of each source that is streamed."""
    rows = {source["name"]: source for source in data_figures(trainer).get("sources", [])}
    totals: list[tuple[int, int, float | None]] = []
    for source in trainer.spec.data.source_figures:
        counts = rows.get(source["name"])
        if counts is None:
            totals.append((0, 0, None))
            continue
        number = source.get("rows")
        totals.append(
            (counts["samples"], counts["tokens"], counts["read"] / number if number else None)
        )
    return totals


def workers_lost(events: Sequence[Event], step: int) -> list[WorkerLoss]:
    """Return the workers that this run has lost up to ``step`` in all attempts, not counting steps
    that were rolled back."""
    return [
        {
            "step": event["step"],
            "rank": event["rank"],
            "pid": event["pid"],
            "reason": event["reason"],
            "samples_unseen": event["samples_unseen"],
        }
        for event in effective_events(events)
        if event["type"] == "worker_lost" and event["step"] <= step
    ]
