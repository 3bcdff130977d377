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
from paceline.observe.comm_advisor import CommAdvisor
from paceline.observe.metrics import StepMetrics, memory_peak
from paceline.observe.run_start import RunInfo
from paceline.parallel.cost import Cost
from paceline.parallel.registry import estimate_cost
from paceline.parallel.save_load import memory_bytes


def build_report(
    info: RunInfo,
    metrics: StepMetrics,
    advisor: CommAdvisor | None,
    *,
    status: str,
    step: int,
    resumed_from_step: int | None,
    skipped_batches: Collection[int],
    shares: tuple[int, ...] | None,
    best: BestModel | None,
    stop_reason: str | None,
) -> Report:
    """Return the report. A collective; only the result of rank 0 is complete.

    Args:
        info: the run.
        metrics: the measurements of its steps.
        advisor: the measurements of its communication, or None.
        status: ``done``, ``stopped`` or ``failed``.
        step: the last step of the run.
        resumed_from_step: the step of the checkpoint from which the run was resumed, or None.
        skipped_batches: the steps, counted from 0, whose batch was skipped after a loss spike.
        shares: number of micro-batches of each rank, or None with ``parallel.balance: equal``.
        best: the best evaluation, or None if none is selected.
        stop_reason: why a callback ended the run before its last step, or None.
    """
    strategy, config, order = info.strategy, info.config, info.order
    comm = strategy.world
    # A rank that was lost reports 0.
    peaks = [int(peak) or None for peak in comm.gather_numbers(memory_peak(comm.device))]
    state_bytes = [int(size) for size in comm.gather_numbers(memory_bytes(strategy))]
    traffic = strategy.sent_in_a_step(metrics.usual_traffic)
    sent = [int(size) for size in comm.gather_numbers(-1 if traffic is None else traffic)]
    figures = strategy.report_metrics(max(sent) if max(sent) > 0 else None)
    communication = advisor.report() if advisor is not None else {}
    communication |= figures.get("communication", {})
    events = read_events(info.run_dir.events) if comm.is_rank_zero else []
    steps = effective_steps(events)
    cost = estimate_cost(
        info.layout.strategy, info.shape, info.layout.axes, info.workload(step), config
    )
    losses = workers_lost(events, step)
    num_skipped_samples = sum(len(order.global_batch(step)) for step in skipped_batches)
    times_read = None if info.is_streamed else _times_read(info, step, skipped_batches)
    seen, tokens, labels = _seen(info, times_read)
    seen -= sum(loss["samples_unseen"] for loss in losses)
    evals = [event for event in events if event["type"] == "eval" and event["step"] <= step]
    starts = sum(1 for event in events if event["type"] == "run_start")
    report: Report = {
        "status": status,
        "strategy": strategy.name,
        "world_size": info.derived.world_size,
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
        "wall_s": time.time() - info.started_at,
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
        "step_time_s": _step_time(info, metrics, cost, step),
        "skipped_steps": skipped_steps(events, step),
        "restarts": max(0, starts - 1),
        "resumed_from_step": resumed_from_step,
        "data": cast(DataReport, {**info.data_counts}),
    }
    if info.has_packed_rows:
        report["packing"] = _packing(info, step, report["train_tokens"])
    if info.source_figures:
        report["sources"] = _sources(info, times_read, steps)
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
    if shares is not None:
        report["balance"] = {"shares": list(shares)}
    if best is not None:
        report["best"] = best
    if stop_reason is not None:
        report["stop_reason"] = stop_reason
    times = compile_times()
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


def _step_time(info: RunInfo, metrics: StepMetrics, cost: Cost, step: int) -> StepTime:
    """Return the predicted and the measured time of a step."""
    predicted = None
    if info.predict is not None and info.strategy.world.is_rank_zero:
        predicted = info.predict(info, cost, step)
    return StepTime(
        predicted=None if predicted is None else predicted.seconds,
        measured=metrics.train_s / metrics.train_steps if metrics.train_steps else None,
        measured_steps=metrics.train_steps,
        range=None if predicted is None else predicted.range_s,
        parts=None if predicted is None else predicted.parts_s,
    )


def _seen(info: RunInfo, times_read: np.ndarray | None) -> tuple[int, int | None, int | None]:
    """Return the numbers of samples, tokens and label tokens so far; None if samples have no
    tokens.

    Args:
        times_read: the result of :func:`_times_read`; None for streamed data.
    """
    if times_read is None:
        counts = info.data_counts
        return counts["samples"], counts["tokens"], counts["label_tokens"]
    dataset, labels = info.train_dataset, None
    # A part of a sample has as many labels as its mask, which the order does not know.
    if info.config.train_args.packing_strategy != "wrapped":
        labels = _total(dataset, "label_counts", times_read)
    return round(times_read.sum()), _total(dataset, "lengths", times_read), labels


def _times_read(info: RunInfo, step: int, skipped_batches: Collection[int]) -> np.ndarray:
    """Return how often each sample was trained on up to ``step``, over all attempts of the run:
    [num_samples]."""
    times = info.order.times_read(step)
    for skipped in skipped_batches:
        keys = info.order.global_batch(skipped)
        shares = sample_shares(keys, getattr(info.train_dataset, "lengths", times))
        np.subtract.at(times, keys[:, 1], shares)
    return times


def _total(dataset: Any, name: str, times: np.ndarray) -> int | None:
    """Return the sum of an attribute of the samples, each as often as it was read; None if samples
    do not have it."""
    values = getattr(dataset, name, None)
    return None if values is None else round(np.asarray(values) @ times)


def _packing(info: RunInfo, step: int, tokens: int | None) -> PackingFigures:
    args, rows = info.config.train_args, info.order.rows_read(step)
    figures: PackingFigures = {
        "strategy": args.packing_strategy,
        "rows": [rows],
        "capacity": args.max_length,
    }
    if rows and tokens is not None:
        figures["fill"] = tokens / (rows * args.max_length)
    return figures


def _sources(
    info: RunInfo, times_read: np.ndarray | None, steps: Sequence[StepEvent]
) -> list[SourceReport]:
    """Return the figures of each source.

    Args:
        times_read: the result of :func:`_times_read`; None for streamed data.
    """
    totals = _streamed_sources(info) if times_read is None else _read_sources(info, times_read)
    reports: list[SourceReport] = []
    for number, (source, total) in enumerate(zip(info.source_figures, totals, strict=True)):
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


def _read_sources(info: RunInfo, times_read: np.ndarray) -> list[tuple[int, int, float | None]]:
    """Return the samples, tokens and epochs of each source that was tokenized ahead."""
    lengths, first = info.train_dataset.lengths, 0
    totals: list[tuple[int, int, float | None]] = []
    for source in info.source_figures:
        part = slice(first, first + source["samples"])
        times, first = times_read[part], part.stop
        samples = float(times.sum())
        totals.append((round(samples), round(times @ lengths[part]), samples / max(1, len(times))))
    return totals


def _streamed_sources(info: RunInfo) -> list[tuple[int, int, float | None]]:
    """Return the samples, tokens and epochs of each source that is streamed."""
    rows = {source["name"]: source for source in info.data_counts.get("sources", [])}
    totals: list[tuple[int, int, float | None]] = []
    for source in info.source_figures:
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
