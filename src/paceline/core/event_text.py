"""What an event says to a person, in one sentence: for the console, the log and the marks of the
panel."""

import json
from collections.abc import Callable
from typing import Any

from paceline.core import formatting
from paceline.core.events import (
    CheckpointEvent,
    DriftEvent,
    EvalEvent,
    Event,
    FaultEvent,
    MemoryEvent,
    ResumeEvent,
    RollbackEvent,
    RunEndEvent,
    RunStartEvent,
    SampleEvent,
    SkippedEvent,
    WorkerLostEvent,
)

INFO, WARNING, ERROR = "info", "warning", "error"
_LONGEST = 4000  # characters
_Describe = Callable[[Any], tuple[str, str]]


def event_text(event: Event) -> tuple[str, str]:
    """(level, text). An event of a type that is not known, of a newer version perhaps, is shown by
    its type and its ``text`` or fields."""
    known = _WORDED.get(event["type"]) if isinstance(event["type"], str) else None
    try:
        level, text = known(event) if known is not None else _other(event)
    except (
        TypeError,
        ValueError,
        AttributeError,
        KeyError,
        IndexError,
    ):  # fields of another kind than this version writes
        level, text = _other(event)
    return level, formatting.clean(text)[:_LONGEST]


def _other(event: Event) -> tuple[str, str]:
    level = event.get("level") if event.get("level") in (INFO, WARNING, ERROR) else INFO
    text = event.get("text")
    if isinstance(text, str):
        return str(level), text
    fields = {key: value for key, value in event.items() if key not in ("time", "type")}
    return str(level), f"{event['type']}: {json.dumps(fields, ensure_ascii=False)[:400]}"


def _run_start(event: RunStartEvent) -> tuple[str, str]:
    resumed = (
        f", from step {formatting.count(event['resumed_from_step'])} on"
        if event.get("resumed_from_step")
        else ""
    )
    ranks = formatting.ranks(event.get("world_size"))
    return INFO, f"run starts{resumed}: {event.get('strategy')}, {ranks}, {event.get('device')}"


def _run_end(event: RunEndEvent) -> tuple[str, str]:
    status, step = str(event.get("status")), event.get("step")
    text = status if step is None else f"{status} at step {formatting.count(step)}"
    text += (
        f" after {formatting.duration(event['wall_s'])}" if event.get("wall_s") is not None else ""
    )
    text += f": {event['reason']}" if event.get("reason") else ""
    return {"done": INFO, "stopped": WARNING}.get(status, ERROR), text


def _resume(event: ResumeEvent) -> tuple[str, str]:
    where = f" from {event['path']}" if event.get("path") else ""
    return INFO, f"resumed at step {formatting.count(event.get('step'))}{where}"


def _fault(event: FaultEvent) -> tuple[str, str]:
    text = f"fault{_who(event)}: {event.get('reason')}"
    return ERROR, (
        f"{text} (restart {formatting.count(event['restart'])})"
        if event.get("restart") is not None
        else text
    )


def _skipped(event: SkippedEvent) -> tuple[str, str]:
    cause = f" ({event['cause']})" if event.get("cause") else ""
    num_updates = formatting.count(event.get("updates"))
    return (
        WARNING,
        (
            f"step {formatting.count(event.get('step'))}: {num_updates} update(s) left out, not"
            f" finite{cause}{_who(event)}"
        ),
    )


def _drift(event: DriftEvent) -> tuple[str, str]:
    where = (
        f"{formatting.count(event.get('tensors'))} tensor(s), the first {event.get('parameter')}"
    )
    return (
        ERROR,
        f"step {formatting.count(event.get('step'))}: replicas differ{_who(event)}: {where}",
    )


def _rollback(event: RollbackEvent) -> tuple[str, str]:
    jump = (
        f"the loss jumped to {formatting.loss(event.get('loss'))} (median"
        f" {formatting.loss(event.get('median'))})"
    )
    return (
        WARNING,
        (
            f"step {formatting.count(event.get('step'))}: {jump}; back to step"
            f" {formatting.count(event.get('to_step'))}"
        ),
    )


def _worker_lost(event: WorkerLostEvent) -> tuple[str, str]:
    return ERROR, f"rank {event.get('rank')} ended and the others went on: {event.get('reason')}"


def _eval(event: EvalEvent) -> tuple[str, str]:
    parts = [
        f"evaluation at step {formatting.count(event.get('step'))}: loss"
        f" {formatting.loss(event.get('loss'))}"
    ]
    parts += [
        f"{name} {formatting.loss(value)}" for name, value in (event.get("metrics") or {}).items()
    ]
    parts += [f"over {formatting.count(event['count'])}"] if event.get("count") is not None else []
    parts += (
        [f"in {formatting.duration(event['wall_s'])}"] if event.get("wall_s") is not None else []
    )
    return INFO, ", ".join(parts)


def _checkpoint(event: CheckpointEvent) -> tuple[str, str]:
    step = formatting.count(event.get("step"))
    if event.get("error"):
        return WARNING, f"no checkpoint at step {step}: {event['error']}"
    took = f" in {formatting.duration(event['wall_s'])}" if event.get("wall_s") is not None else ""
    return (
        INFO,
        (
            f"checkpoint at step {step}: {formatting.size(event.get('size_bytes'))}{took},"
            f" {event.get('path', '')}"
        ),
    )


def _sample(event: SampleEvent) -> tuple[str, str]:
    return INFO, f"samples generated at step {formatting.count(event.get('step'))}"


def _memory(event: MemoryEvent) -> tuple[str, str]:
    return INFO, f"memory measured on {formatting.ranks(len(event['ranks']))}"


def _who(event: FaultEvent | SkippedEvent | DriftEvent) -> str:
    ranks: Any = event.get("ranks")
    hosts = [str(host) for host in event.get("hosts") or [] if host]
    where = f" on {', '.join(dict.fromkeys(hosts))}" if hosts else ""
    return f", rank {', '.join(str(rank) for rank in ranks)}{where}" if ranks else where


def _text_of(level: str) -> _Describe:
    return lambda event: (level, str(event["text"]))


_WORDED: dict[str, _Describe] = {
    "run_start": _run_start,
    "run_end": _run_end,
    "resume": _resume,
    "fault": _fault,
    "skipped": _skipped,
    "drift": _drift,
    "rollback": _rollback,
    "worker_lost": _worker_lost,
    "eval": _eval,
    "checkpoint": _checkpoint,
    "sample": _sample,
    "memory": _memory,
    "hang": _text_of(ERROR),
    "hang_end": _text_of(INFO),
    "straggler": _text_of(WARNING),
    "straggler_end": _text_of(INFO),
    "link": _text_of(WARNING),
    "link_end": _text_of(INFO),
    "balance": _text_of(INFO),
}
