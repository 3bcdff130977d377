"""What an event says to a person, in one sentence: for the console, the log and the marks of the
panel."""

import json
from typing import Any

from paceline.core import formatting
from paceline.core.events import Event

INFO, WARNING, ERROR = "info", "warning", "error"
_LONGEST = 4000  # characters


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
    if isinstance(event.get("text"), str):
        return str(level), event["text"]
    fields = {key: value for key, value in event.items() if key not in ("time", "type")}
    return str(level), f"{event['type']}: {json.dumps(fields, ensure_ascii=False)[:400]}"


def _run_start(event: Event) -> tuple[str, str]:
    resumed = (
        f", from step {formatting.count(event['resumed_from_step'])} on"
        if event.get("resumed_from_step")
        else ""
    )
    ranks = formatting.ranks(event.get("world_size"))
    return INFO, f"run starts{resumed}: {event.get('strategy')}, {ranks}, {event.get('device')}"


def _run_end(event: Event) -> tuple[str, str]:
    status, step = str(event.get("status")), event.get("step")
    text = status if step is None else f"{status} at step {formatting.count(step)}"
    text += (
        f" after {formatting.duration(event['wall_s'])}" if event.get("wall_s") is not None else ""
    )
    text += f": {event['reason']}" if event.get("reason") else ""
    return {"done": INFO, "stopped": WARNING}.get(status, ERROR), text


def _resume(event: Event) -> tuple[str, str]:
    where = f" from {event['path']}" if event.get("path") else ""
    return INFO, f"resumed at step {formatting.count(event.get('step'))}{where}"


def _fault(event: Event) -> tuple[str, str]:
    text = f"fault{_who(event)}: {event.get('reason')}"
    return ERROR, (
        f"{text} (restart {formatting.count(event['restart'])})"
        if event.get("restart") is not None
        else text
    )


def _skipped(event: Event) -> tuple[str, str]:
    cause = f" ({event['cause']})" if event.get("cause") else ""
    num_updates = formatting.count(event.get("updates"))
    return (
        WARNING,
        (
            f"step {formatting.count(event.get('step'))}: {num_updates} update(s) left out, not"
            f" finite{cause}{_who(event)}"
        ),
    )


def _drift(event: Event) -> tuple[str, str]:
    where = (
        f"{formatting.count(event.get('tensors'))} tensor(s), the first {event.get('parameter')}"
    )
    return (
        ERROR,
        f"step {formatting.count(event.get('step'))}: replicas differ{_who(event)}: {where}",
    )


def _rewind(event: Event) -> tuple[str, str]:
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


def _worker_lost(event: Event) -> tuple[str, str]:
    return ERROR, f"rank {event.get('rank')} ended and the others went on: {event.get('reason')}"


def _eval(event: Event) -> tuple[str, str]:
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


def _checkpoint(event: Event) -> tuple[str, str]:
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


def _sample(event: Event) -> tuple[str, str]:
    return INFO, f"samples generated at step {formatting.count(event.get('step'))}"


def _memory(event: Event) -> tuple[str, str]:
    return INFO, f"memory measured on {formatting.ranks(len(event['ranks']))}"


def _who(event: Event) -> str:
    ranks: Any = event.get("ranks")
    hosts = [str(host) for host in event.get("hosts") or [] if host]
    where = f" on {', '.join(dict.fromkeys(hosts))}" if hosts else ""
    return f", rank {', '.join(str(rank) for rank in ranks)}{where}" if ranks else where


def _told(level: str) -> Any:
    return lambda event: (level, str(event["text"]))


_WORDED = {
    "run_start": _run_start,
    "run_end": _run_end,
    "resume": _resume,
    "fault": _fault,
    "skipped": _skipped,
    "drift": _drift,
    "rewind": _rewind,
    "worker_lost": _worker_lost,
    "eval": _eval,
    "checkpoint": _checkpoint,
    "sample": _sample,
    "memory": _memory,
    "hang": _told(ERROR),
    "hang_end": _told(INFO),
    "straggler": _told(WARNING),
    "straggler_end": _told(INFO),
    "link": _told(WARNING),
    "link_end": _told(INFO),
    "balance": _told(INFO),
}
