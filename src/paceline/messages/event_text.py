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
    HangEndEvent,
    HangEvent,
    LinkEvent,
    MemoryEvent,
    MemoryFallbackEvent,
    ProfileEvent,
    ResumeEvent,
    RollbackEvent,
    RunEndEvent,
    RunStartEvent,
    SampleEvent,
    SkippedEvent,
    StragglerEndEvent,
    StragglerEvent,
    WorkerLostEvent,
)
from paceline.core.formatting import clean, count, counted, duration, loss, rank_names, ranks, size
from paceline.core.texts import UserText

INFO, WARNING, ERROR = "info", "warning", "error"
_MAX_CHARS = 4000


def event_text(event: Event) -> tuple[str, str]:
    """Return (level, text) of an event. An event of an unknown type, perhaps from a newer version,
    is described by its type and its ``text`` or fields. The text has a code if it is known."""
    try:
        level, text = _DESCRIPTIONS.get(event["type"], _other)(event)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError):
        level, text = _other(event)  # another version wrote it, with other fields
    shown = clean(text)[:_MAX_CHARS]
    if isinstance(text, UserText):
        shown = UserText.of(shown, text.code, text.values)
    return level, shown


def text_of_event(event: Event, key: str = "text") -> str:
    """Return a text that an event has, with the event's code and values if it has them."""
    text, code, values = str(event.get(key)), event.get("code"), event.get("values")
    if not isinstance(code, str) or not isinstance(values, dict):
        return text
    plain = {
        str(name)[:100]: value[:_MAX_CHARS] if isinstance(value, str) else value
        for name, value in list(values.items())[:100]
        if isinstance(value, str | int | float | bool | None)
    }
    return UserText.of(text, code[:100], plain)


def _other(event: Event) -> tuple[str, str]:
    level = str(event.get("level"))
    level = level if level in (INFO, WARNING, ERROR) else INFO
    if isinstance(event.get("text"), str):
        return _TEXT_LEVELS.get(event["type"], level), text_of_event(event)
    fields = {key: value for key, value in event.items() if key not in ("time", "type")}
    return level, f"{event['type']}: {json.dumps(fields, ensure_ascii=False)[:400]}"


def _data(event: DataEvent) -> tuple[str, str]:
    data = event["data"]
    return INFO, UserText(
        "up to step {step}: {read:row} read, {kept} kept, {dropped} dropped",
        code="event-data",
        step=count(event["step"]),
        read=data["read"],
        kept=count(data["kept"]),
        dropped=count(sum(data["dropped"].values())),
    )


def _run_start(event: RunStartEvent) -> tuple[str, str]:
    step = event.get("resumed_from_step")
    return INFO, UserText(
        "run starts{resumed}: {strategy}, {on_ranks}, {device}",
        code="event-run-resumes" if step else "event-run-starts",
        resumed=f" from step {count(step)}" if step else "",
        step=count(step),
        strategy=event.get("strategy"),
        on_ranks=ranks(event.get("world_size")),
        world_size=event.get("world_size"),
        device=event.get("device"),
    )


def _run_end(event: RunEndEvent) -> tuple[str, str]:
    status, step, wall_s = str(event.get("status")), event.get("step"), event.get("wall_s")
    return {"done": INFO, "stopped": WARNING}.get(status, ERROR), UserText(
        "{status}{at}{after}{because}",
        code="event-run-done"
        if status == "done"
        else "event-run-stopped"
        if status == "stopped"
        else "event-run-failed",
        status=status,
        at="" if step is None else f" at step {count(step)}",
        step=None if step is None else count(step),
        after="" if wall_s is None else f" after {duration(wall_s)}",
        because=f": {event['reason']}" if event.get("reason") else "",
        reason=event.get("reason"),
    )


def _fault(event: FaultEvent) -> tuple[str, str]:
    restart = event.get("restart")
    return ERROR, UserText(
        "fault{origin}: {reason}{restarts}",
        code="event-fault",
        origin=_origin(event),
        rank_numbers=_rank_numbers(event),
        reason=event.get("reason"),
        restarts="" if restart is None else f" (restart {count(restart)})",
        restart=restart,
    )


def _memory_fallback(event: MemoryFallbackEvent) -> tuple[str, str]:
    return WARNING, UserText(
        "{who} ran out of memory ({phase}): the run continues with {settings}",
        code="event-memory-fallback",
        who=rank_names(event["ranks"]),
        rank_numbers=_rank_numbers(event),
        phase=event["phase"],
        settings=" ".join(f"{key}={value}" for key, value in event["settings"].items()),
    )


def _skipped(event: SkippedEvent) -> tuple[str, str]:
    return WARNING, UserText(
        "step {step}: {updates:update} skipped, not finite{causes}{origin}",
        code="event-skipped",
        step=count(event.get("step")),
        updates=event["updates"],
        causes=f" ({event['cause']})" if event.get("cause") else "",
        origin=_origin(event),
        rank_numbers=_rank_numbers(event),
    )


def _drift(event: DriftEvent) -> tuple[str, str]:
    return ERROR, UserText(
        "step {step}: replicas differ{origin}: {tensors:tensor}, the first is {parameter}",
        code="event-drift",
        step=count(event.get("step")),
        origin=_origin(event),
        rank_numbers=_rank_numbers(event),
        tensors=event["tensors"],
        parameter=event.get("parameter"),
    )


def _rollback(event: RollbackEvent) -> tuple[str, str]:
    return WARNING, UserText(
        "step {step}: the loss spiked to {loss} (median {median}); rolled back to step {to_step}",
        code="event-rollback",
        step=count(event.get("step")),
        loss=loss(event.get("loss")),
        median=loss(event.get("median")),
        to_step=count(event.get("to_step")),
    )


def _eval(event: EvalEvent) -> tuple[str, str]:
    parts = [f"{name} {loss(value)}" for name, value in (event.get("metrics") or {}).items()]
    metrics = ", ".join(parts)
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
    return INFO, UserText(
        "evaluation at step {step}: loss {loss}{more}",
        code="event-eval",
        step=count(event.get("step")),
        loss=loss(event.get("loss")),
        more="".join(f", {part}" for part in parts),
        metrics=metrics,
    )


def _checkpoint(event: CheckpointEvent) -> tuple[str, str]:
    step = count(event.get("step"))
    if event.get("error"):
        return WARNING, UserText(
            "no checkpoint at step {step}: {reason}",
            code="event-no-checkpoint",
            step=step,
            reason=event["error"],
        )
    return INFO, UserText(
        "checkpoint at step {step}: {size}{time}, {path}",
        code="event-checkpoint",
        step=step,
        size=size(event.get("size_bytes")),
        time="" if event.get("wall_s") is None else f" in {duration(event['wall_s'])}",
        path=event.get("path", ""),
    )


def _resume(event: ResumeEvent) -> tuple[str, str]:
    path = event.get("path")
    return INFO, UserText(
        "resumed at step {step}{source}",
        code="event-resume",
        step=count(event.get("step")),
        source=f" from {path}" if path else "",
    )


def _worker_lost(event: WorkerLostEvent) -> tuple[str, str]:
    return ERROR, UserText(
        "rank {rank} ended and the others continue: {reason}",
        code="event-worker-lost",
        rank=event.get("rank"),
        reason=event.get("reason"),
    )


def _hang(event: HangEvent) -> tuple[str, str]:
    rank, step = event.get("rank"), event.get("step")
    return ERROR, UserText(
        "{text}",
        code="event-all-ranks-hang" if rank is None else "event-hang",
        text=event["text"],
        rank=rank,
        host=event.get("host"),
        phase=event.get("phase"),
        step=None if step is None else count(step),
        seconds=count(event.get("since_s")),
    )


def _hang_end(event: HangEndEvent) -> tuple[str, str]:
    seconds = count(event.get("since_s"))
    return INFO, UserText("{text}", code="event-hang-end", text=event["text"], seconds=seconds)


def _straggler(event: StragglerEvent) -> tuple[str, str]:
    slower_by_s = event.get("slower_by_s")
    return WARNING, UserText(
        "{text}",
        code="event-straggler",
        text=event["text"],
        rank=event.get("rank"),
        host=event.get("host"),
        step=count(event.get("step")),
        slower_by_ms=None if slower_by_s is None else count(round(1000 * slower_by_s)),
    )


def _straggler_end(event: StragglerEndEvent) -> tuple[str, str]:
    rank, host = event.get("rank"), event.get("host")
    text = event["text"]
    return INFO, UserText("{text}", code="event-straggler-end", text=text, rank=rank, host=host)


def _link(event: LinkEvent) -> tuple[str, str]:
    is_end = event["type"] == "link_end"
    return INFO if is_end else WARNING, UserText(
        "{text}",
        code="event-link-end" if is_end else "event-link",
        text=event["text"],
        rank=event.get("rank"),
        host=event.get("host"),
    )


def _sample(event: SampleEvent) -> tuple[str, str]:
    step = count(event.get("step"))
    return INFO, UserText("samples generated at step {step}", code="event-sample", step=step)


def _profile(event: ProfileEvent) -> tuple[str, str]:
    return INFO, UserText(
        "profile of steps {first_step} to {step}: {traces:trace} in the folder `profile`, to open"
        " at https://ui.perfetto.dev",
        code="event-profile",
        first_step=count(event.get("first_step")),
        step=count(event.get("step")),
        traces=len(event["traces"]),
    )


def _memory(event: MemoryEvent) -> tuple[str, str]:
    number = len(event["ranks"])
    return INFO, UserText("memory measured on {number:rank}", code="event-memory", number=number)


def _origin(event: FaultEvent | SkippedEvent | DriftEvent) -> str:
    hosts = [str(host) for host in event.get("hosts") or [] if host]
    on_hosts = f" on {', '.join(dict.fromkeys(hosts))}" if hosts else ""
    return f", {rank_names(event['ranks'])}{on_hosts}" if event.get("ranks") else on_hosts


def _rank_numbers(event: FaultEvent | SkippedEvent | DriftEvent | MemoryFallbackEvent) -> str:
    return ", ".join(str(rank) for rank in event.get("ranks") or [])


_Describe = Callable[[Any], tuple[str, str]]
_DESCRIPTIONS: dict[str, _Describe] = {
    "run_start": _run_start,
    "run_end": _run_end,
    "resume": _resume,
    "fault": _fault,
    "memory_fallback": _memory_fallback,
    "skipped": _skipped,
    "drift": _drift,
    "rollback": _rollback,
    "worker_lost": _worker_lost,
    "hang": _hang,
    "hang_end": _hang_end,
    "straggler": _straggler,
    "straggler_end": _straggler_end,
    "link": _link,
    "link_end": _link,
    "eval": _eval,
    "checkpoint": _checkpoint,
    "data": _data,
    "sample": _sample,
    "profile": _profile,
    "memory": _memory,
}
#: Levels of events that have a text, other than info.
_TEXT_LEVELS = {"hang": ERROR, "straggler": WARNING, "link": WARNING}
