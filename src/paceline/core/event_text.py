"""Describe an event in one sentence, for the console, the log and the timeline of the browser
UI."""

import json
from collections.abc import Callable
from typing import Any

from paceline.core.events import (
    CheckpointEvent,
    DataEvent,
    DriftEvent,
    EvalEvent,
    Event,
    FaultEvent,
    MemoryFallbackEvent,
    RollbackEvent,
    RunEndEvent,
    RunStartEvent,
    SkippedEvent,
)
from paceline.core.formatting import clean, count, counted, duration, loss, rank_names, ranks, size

INFO, WARNING, ERROR = "info", "warning", "error"
_MAX_CHARS = 4000


def event_text(event: Event) -> tuple[str, str]:
    """Return (level, text) of an event. An event of an unknown type, perhaps from a newer version,
    is described by its type and its ``text`` or fields."""
    try:
        level, text = _DESCRIPTIONS.get(event["type"], _other)(event)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError):
        level, text = _other(event)  # another version wrote it, with other fields
    return level, clean(text)[:_MAX_CHARS]


def _other(event: Event) -> tuple[str, str]:
    level = str(event.get("level"))
    level = level if level in (INFO, WARNING, ERROR) else INFO
    text = event.get("text")
    if isinstance(text, str):
        return _TEXT_LEVELS.get(event["type"], level), text
    fields = {key: value for key, value in event.items() if key not in ("time", "type")}
    return level, f"{event['type']}: {json.dumps(fields, ensure_ascii=False)[:400]}"


def _data(event: DataEvent) -> tuple[str, str]:
    data = event["data"]
    return (
        INFO,
        f"up to step {count(event['step'])}: {counted(data['read'], 'row')} read,"
        f" {count(data['kept'])} kept, {count(sum(data['dropped'].values()))} dropped",
    )


def _run_start(event: RunStartEvent) -> tuple[str, str]:
    step = event.get("resumed_from_step")
    resumed = f" from step {count(step)}" if step else ""
    world_size = ranks(event.get("world_size"))
    return (
        INFO,
        f"run starts{resumed}: {event.get('strategy')}, {world_size}, {event.get('device')}",
    )


def _run_end(event: RunEndEvent) -> tuple[str, str]:
    text = status = str(event.get("status"))
    if event.get("step") is not None:
        text += f" at step {count(event['step'])}"
    if event.get("wall_s") is not None:
        text += f" after {duration(event['wall_s'])}"
    if event.get("reason"):
        text += f": {event['reason']}"
    return {"done": INFO, "stopped": WARNING}.get(status, ERROR), text


def _fault(event: FaultEvent) -> tuple[str, str]:
    text = f"fault{_origin(event)}: {event.get('reason')}"
    if event.get("restart") is not None:
        text += f" (restart {count(event['restart'])})"
    return ERROR, text


def _memory_fallback(event: MemoryFallbackEvent) -> tuple[str, str]:
    settings = " ".join(f"{key}={value}" for key, value in event["settings"].items())
    text = f"{rank_names(event['ranks'])} ran out of memory ({event['phase']})"
    return WARNING, f"{text}: the run continues with {settings}"


def _skipped(event: SkippedEvent) -> tuple[str, str]:
    cause = f" ({event['cause']})" if event.get("cause") else ""
    updates = counted(event["updates"], "update")
    text = f"{updates} skipped, not finite{cause}{_origin(event)}"
    return WARNING, f"step {count(event.get('step'))}: {text}"


def _drift(event: DriftEvent) -> tuple[str, str]:
    tensors = f"{counted(event['tensors'], 'tensor')}, the first is {event.get('parameter')}"
    return ERROR, f"step {count(event.get('step'))}: replicas differ{_origin(event)}: {tensors}"


def _rollback(event: RollbackEvent) -> tuple[str, str]:
    spike = f"the loss spiked to {loss(event.get('loss'))} (median {loss(event.get('median'))})"
    target = f"rolled back to step {count(event.get('to_step'))}"
    return WARNING, f"step {count(event.get('step'))}: {spike}; {target}"


def _eval(event: EvalEvent) -> tuple[str, str]:
    parts = [f"evaluation at step {count(event.get('step'))}: loss {loss(event.get('loss'))}"]
    parts += [f"{name} {loss(value)}" for name, value in (event.get("metrics") or {}).items()]
    if event.get("count") is not None:
        rows = event.get("answered_rows")
        answers = f" and {counted(rows, 'generated answer')}" if rows else ""
        parts.append(f"over {counted(event['count'], 'target')}{answers}")
    if event.get("wall_s") is not None:
        parts.append(f"in {duration(event['wall_s'])}")
    best_step = event.get("best_step")
    if best_step is not None:
        is_best = best_step == event.get("step")
        parts.append("the best so far" if is_best else f"best: step {count(best_step)}")
    return INFO, ", ".join(parts)


def _checkpoint(event: CheckpointEvent) -> tuple[str, str]:
    step = count(event.get("step"))
    if event.get("error"):
        return WARNING, f"no checkpoint at step {step}: {event['error']}"
    text = f"checkpoint at step {step}: {size(event.get('size_bytes'))}"
    if event.get("wall_s") is not None:
        text += f" in {duration(event['wall_s'])}"
    return INFO, f"{text}, {event.get('path', '')}"


def _origin(event: FaultEvent | SkippedEvent | DriftEvent) -> str:
    hosts = [str(host) for host in event.get("hosts") or [] if host]
    on_hosts = f" on {', '.join(dict.fromkeys(hosts))}" if hosts else ""
    return f", {rank_names(event['ranks'])}{on_hosts}" if event.get("ranks") else on_hosts


_Describe = Callable[[Any], tuple[str, str]]
_DESCRIPTIONS: dict[str, _Describe] = {
    "run_start": _run_start,
    "run_end": _run_end,
    "resume": lambda event: (
        INFO,
        f"resumed at step {count(event.get('step'))}"
        + (f" from {event['path']}" if event.get("path") else ""),
    ),
    "fault": _fault,
    "memory_fallback": _memory_fallback,
    "skipped": _skipped,
    "drift": _drift,
    "rollback": _rollback,
    "worker_lost": lambda event: (
        ERROR,
        f"rank {event.get('rank')} ended and the others continue: {event.get('reason')}",
    ),
    "eval": _eval,
    "checkpoint": _checkpoint,
    "data": _data,
    "sample": lambda event: (INFO, f"samples generated at step {count(event.get('step'))}"),
    "profile": lambda event: (
        INFO,
        f"profile of steps {count(event.get('first_step'))} to {count(event.get('step'))}:"
        f" {counted(len(event['traces']), 'trace')} in the folder `profile`, to open at"
        " https://ui.perfetto.dev",
    ),
    "memory": lambda event: (INFO, f"memory measured on {ranks(len(event['ranks']))}"),
}
#: Levels of events that have a text, other than info.
_TEXT_LEVELS = {"hang": ERROR, "straggler": WARNING, "link": WARNING}
