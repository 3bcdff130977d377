"""The figures of ``report.json``, from the session and the events. What was not measured is None."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.events import effective_steps, read_events
from paceline.health.anomalies import skipped_steps
from paceline.observe.metrics import memory_peak
from paceline.parallel.cost import Workload
from paceline.parallel.parameter_server.cost import distinct_ids
from paceline.train.rank_loss import workers_lost

if TYPE_CHECKING:
    from paceline.train.run_spec import RunSpec
    from paceline.train.trainer import Session


_COUNTED_STEPS = 8


def build_report(session: Session, spec: RunSpec, status: str) -> dict[str, Any]:
    """A collective: every rank calls it; rank 0's result is the report."""
    world, meter = session.world, session.meter
    # of a rank that is lost: not known
    peaks = [int(one) or None for one in world.gather_numbers(memory_peak(world.device))]
    held = [int(one) for one in world.gather_numbers(session.strategy.memory_bytes())]
    traffic = session.strategy.sent_in_a_step(meter.usual_traffic)
    sent = [int(one) for one in world.gather_numbers(-1 if traffic is None else traffic)]
    figures = session.strategy.report_metrics(max(sent) if max(sent) > 0 else None)
    judged = session.judge.report() if session.judge is not None else {}
    if judged:
        judged["communication"] = {**judged["communication"], **figures.pop("communication", {})}
    events = read_events(session.run_dir.events) if world.is_rank_zero else []
    steps = effective_steps(events)
    cost = session.strategy.estimate_cost(
        session.shape, spec.layout.axes, workload(session), session.config
    )
    lost = workers_lost(events, session.step)
    left_out = session.guard.spikes.figures()
    seen = samples_seen(session) - sum(one["samples_unseen"] for one in lost)
    seen -= left_out["skipped_batches"]["samples"] if left_out else 0
    tokens, labels = _tokens_seen(session)
    evals = [event for event in events if event["type"] == "eval" and event["step"] <= session.step]
    starts = sum(1 for event in events if event["type"] == "run_start")
    return {
        "status": status,
        "strategy": session.strategy.name,
        "world_size": session.derived.world_size,
        "device": world.device.type,
        "precision": session.config.train_args.precision,
        "steps": session.step,
        "epochs": session.step / session.order.steps_per_epoch,
        "samples_seen": seen,
        "train_tokens": tokens,
        "label_tokens": labels,
        "tokens_per_second": meter.tokens_per_second,
        "samples_per_second": meter.samples_per_second,
        "time_to_first_step_s": meter.time_to_first_step_s,
        "wall_s": time.time() - spec.started_at,
        "first_train_loss": steps[0]["loss"] if steps else None,
        "final_train_loss": steps[-1]["loss"] if steps else None,
        "final_eval_loss": evals[-1]["loss"] if evals else None,
        "final_eval_metrics": evals[-1].get("metrics") if evals else None,
        **figures,
        **judged,
        **({"workers_lost": lost} if lost else {}),
        **session.balancer.figures(),
        "peak_memory_bytes": peaks,
        "state_memory_bytes": {"predicted": cost.state, "measured": max(held)},
        "traffic_bytes_per_step": {
            "predicted": cost.traffic_per_step,
            "measured": max(sent) if max(sent) >= 0 else None,
            # at most so much, and perhaps much less
            **({"bound": True} if cost.traffic_is_bound else {}),
        },
        "skipped_steps": skipped_steps(events, session.step),
        "restarts": max(0, starts - 1),
        "resumed_from_step": session.first_step if spec.resume_from is not None else None,
        "data": {**spec.data.counts.as_dict(), **left_out},
    }


def workload(session: Session) -> Workload:
    """The mean work of a replica in a step."""
    derived = session.derived
    lengths = getattr(session.train_dataset, "lengths", None)
    positions = derived.samples_per_micro_batch * (
        1.0 if lengths is None else float(np.mean(lengths))
    )
    return Workload(derived.gradient_accumulation_steps, positions, distinct=_distinct_ids(session))


def _distinct_ids(session: Session) -> tuple[tuple[float, ...], ...]:
    """How many ids a micro-batch asks of each table and server, counted in some micro-batches of
    the run; empty where the data have no ids."""
    of_rows = getattr(session.train_dataset, "distinct_ids", None)
    if of_rows is None or session.strategy.name != "parameter_server" or session.step == 0:
        return ()
    order, parts = (
        session.order,
        session.derived.replicas * session.derived.gradient_accumulation_steps,
    )
    steps = sorted({session.step * number // _COUNTED_STEPS for number in range(_COUNTED_STEPS)})
    batches = [
        of_rows(part) for step in steps for part in order.micro_batches(step, parts) if len(part)
    ]
    return distinct_ids(
        batches, session.train_dataset.tables, session.config.parameter_server.servers
    )


def samples_seen(session: Session) -> int:
    """Samples up to the step reached, over all lives of the run."""
    epochs, place = divmod(session.step, session.order.steps_per_epoch)
    return epochs * session.order.num_samples + min(
        place * session.order.batch_size, session.order.num_samples
    )


def _tokens_seen(session: Session) -> tuple[int | None, int | None]:
    """(tokens, label tokens) up to the step reached, over all lives; None where samples have none."""
    dataset = session.train_dataset
    lengths, labels = getattr(dataset, "lengths", None), getattr(dataset, "label_counts", None)
    if lengths is None:
        return None, None
    order = session.order
    epochs, place = divmod(session.step, order.steps_per_epoch)
    part = order.epoch_order(epochs)[: place * order.batch_size]
    left_out = [order.global_batch(step) for step in sorted(session.guard.spikes.left_out)]

    def total(values: Any) -> int | None:
        if values is None:
            return None
        return int(
            epochs * np.sum(values)
            + np.sum(values[part])
            - sum(np.sum(values[batch]) for batch in left_out)
        )

    return total(lengths), total(labels)
