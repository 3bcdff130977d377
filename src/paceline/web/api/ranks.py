"""``/ranks``, ``/traffic``: where each rank's time goes, and what the network carries. Read from
lines of the log that are spread over the steps asked for, so that a million steps of many ranks
cost no more than a thousand."""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, TypedDict

import numpy as np
from fastapi import APIRouter, Query

from paceline.core.events import RankStep, StepEvent
from paceline.core.formatting import finite, short_duration
from paceline.web.files import JSONObject, as_object, as_text, json_inside, open_inside
from paceline.web.responses import StrictJSONResponse
from paceline.web.runs.discovery import Run
from paceline.web.runs.log_lines import lines_at, parse
from paceline.web.state import AppState, Panel

router = APIRouter()
#: Where a rank's step goes, as the event names it; ``other_s`` is the rest.
PHASES = ("data_s", "forward_s", "backward_s", "communication_s", "optimizer_s", "other_s")
# `other_s` is, on an accelerator, mostly its work
_WORK = tuple(name for name in PHASES if name != "communication_s")
_OLDER = {"data_s": "data_wait_s", "communication_s": "comm_wait_s"}
_READ = (*PHASES, "memory_bytes", *_OLDER.values())
_LINES = 1200  # read for one answer, whatever the number of buckets
_VALUES = 60_000  # ranks × lines: of a large world fewer lines are read
_SLOWER = 0.05  # of a step, from which on a rank is worth a word
_MAX_RANKS = 4096
Step = Annotated[int | None, Query(ge=0, le=1 << 53)]
Points = Annotated[int, Query(ge=1, le=2000)]


@router.get("/api/runs/{id}/ranks")
def ranks(
    panel: Panel,
    id: str,
    start: Step = None,
    end: Step = None,
    points: Points = 200,
) -> StrictJSONResponse:
    """The parts of a step, of each rank, in at most ``points`` buckets; ``lines_read`` of ``lines``
    were looked at for it."""
    run = panel.runs.get(id)
    lines, found = _steps(panel, run, start, end, 2 * points)
    buckets = _groups(found, points)
    numbers = sorted({rank for event in found for rank in _by_rank(event)})[:_MAX_RANKS]
    table = _tables(buckets, numbers)
    places = _places(run)
    return StrictJSONResponse(
        {
            "step": [bucket[-1]["step"] for bucket in buckets],
            "time": [finite(bucket[-1].get("time")) for bucket in buckets],
            "step_time_s": [
                _mean([finite(one.get("step_time_s")) for one in bucket]) for bucket in buckets
            ],
            "ranks": [
                {
                    "rank": rank,
                    **places.get(rank, {"host": None, "device": None}),
                    **{name: table[name][rank] for name in table},
                }
                for rank in numbers
            ],
            "slowest": slowest(
                table, [rank for rank in numbers if "role" not in places.get(rank, {})], buckets
            ),
            "devices": next(
                (
                    event["devices"]
                    for event in reversed(found)
                    if isinstance(event.get("devices"), list)
                ),
                None,
            ),
            "lines": lines,
            "lines_read": len(found),
        }
    )


@router.get("/api/runs/{id}/heartbeats")
def heartbeats(panel: Panel, id: str) -> StrictJSONResponse:
    """Where each rank was when the run last told, every two seconds; none where it does not (one
    rank, or no watchdog)."""
    told = json_inside(panel.runs.get(id).run_dir.heartbeats) or {}
    rows = told.get("ranks")
    known = [
        one
        for one in (rows if isinstance(rows, list) else [])
        if isinstance(one, dict) and type(one.get("rank")) is int
    ]
    figures, words = (
        ("rank", "pid", "step", "heard_at", "moved_at"),
        ("host", "phase", "waits_for", "state"),
    )
    return StrictJSONResponse(
        {
            "time": finite(told.get("time")),
            "ranks": [
                {
                    **{name: finite(one.get(name)) for name in figures},
                    **{name: as_text(one.get(name), 200) for name in words},
                }
                for one in known[:_MAX_RANKS]
            ],
        }
    )


@router.get("/api/runs/{id}/traffic")
def traffic(
    panel: Panel,
    id: str,
    start: Step = None,
    end: Step = None,
    points: Points = 200,
) -> StrictJSONResponse:
    """Bytes a step of the busiest rank, by collective; what was predicted beside what was
    measured."""
    run = panel.runs.get(id)
    lines, found = _steps(panel, run, start, end, 2 * points)
    found = [event for event in found if isinstance(event.get("traffic"), dict)]
    buckets = _groups(found, points)
    sent = [as_object(event.get("traffic")) for event in found]
    names = sorted({str(name) for traffic in sent for name in traffic})[:50]
    by_collective = {
        name: [
            _mean([finite(as_object(event.get("traffic")).get(name)) for event in bucket])
            for bucket in buckets
        ]
        for name in names
    }
    report, begun = run.digest.report or {}, run.digest.start
    told, predicted = (
        as_object(report.get("traffic_bytes_per_step")),
        as_object(begun.get("predicted")),
    )
    sums = [sum(finite(size) or 0.0 for size in traffic.values()) for traffic in sent]
    measured = finite(told.get("measured"))
    foreseen = finite(told.get("predicted"))
    return StrictJSONResponse(
        {
            "step": [bucket[-1]["step"] for bucket in buckets],
            "by_collective": by_collective,
            "predicted_bytes": (
                foreseen
                if foreseen is not None
                else finite(predicted.get("traffic_bytes_per_step"))
            ),
            "measured_bytes": (
                measured if measured is not None else statistics.median(sums) if sums else None
            ),
            "compression": _compression(as_object(begun.get("config")), report),
            "lines": lines,
            "lines_read": len(found),
        }
    )


class Slowest(TypedDict):
    """The rank that holds up the others. ``phase`` (the largest difference) and ``share`` (seconds
    by phase) are None if the parts of a step are not known."""

    rank: int
    why: str
    slower_by_s: float
    phase: str | None
    share: dict[str, float] | None


def slowest(
    table: dict[str, dict[int, list[float | None]]],
    numbers: Sequence[int],
    buckets: list[list[StepEvent]],
) -> Slowest | None:
    """The rank that works longest before it meets the others, where that is by a margin: ``{rank,
    why, slower_by_s, share}``. Where the parts of a step are not known: the one that waits least
    for the others."""
    if len(numbers) < 2:
        return None
    step_s = _mean([finite(one.get("step_time_s")) for bucket in buckets for one in bucket])
    means = {name: {rank: _mean(table[name][rank]) for rank in numbers} for name in PHASES}
    known = all(means["forward_s"][rank] is not None for rank in numbers)
    if known:
        work = {rank: sum(means[name][rank] or 0.0 for name in _WORK) for rank in numbers}
    elif step_s is not None and all(means["communication_s"][rank] is not None for rank in numbers):
        work = {rank: step_s - (means["communication_s"][rank] or 0.0) for rank in numbers}
    else:
        return None
    last = max(work, key=lambda rank: work[rank])
    by_s = work[last] - statistics.median(value for rank, value in work.items() if rank != last)
    if not step_s or by_s < _SLOWER * step_s:
        return None
    share = (
        {
            name: (means[name][last] or 0.0)
            - statistics.median(means[name][rank] or 0.0 for rank in numbers if rank != last)
            for name in _WORK
        }
        if known
        else {}
    )
    most = max(share, key=lambda name: share[name]).removesuffix("_s") if share else None
    what = f"most of it in {most}" if most else "the others wait for it"
    why = (
        f"rank {last} works {short_duration(by_s)} longer a step than the others"
        f" ({100 * by_s / step_s:.0f} %); {what}"
    )
    return {"rank": last, "why": why, "slower_by_s": by_s, "phase": most, "share": share or None}


def _steps(
    panel: AppState, run: Run, start: int | None, end: int | None, count: int
) -> tuple[int, list[StepEvent]]:
    """(lines there are, ``step`` events of some of them, in their order)."""
    run.digest.refresh()
    size = int(finite(run.digest.start.get("world_size")) or 1)
    count = max(2, min(count, _LINES, _VALUES // max(size, 1)))
    exact = panel.runs.indexer.ready(run.index)
    if exact:
        with run.index.lock:
            steps, offsets = run.index.columns.column("step"), run.index.columns.column("offset")
    else:
        seen = run.index.overview().rows
        steps, offsets = seen["step"], seen["offset"]
    low = 0 if start is None else int(np.searchsorted(steps, start, side="left"))
    high = len(steps) if end is None else int(np.searchsorted(steps, end, side="right"))
    picked = np.unique(
        np.linspace(low, high - 1, min(count, max(high - low, 0))).round().astype(np.int64)
    )
    handle = open_inside(run.run_dir.events) if len(picked) else None
    if handle is None:
        return 0, []
    with handle:
        events = [parse(line) for line in lines_at(handle, offsets[picked].tolist()) if line]
    good = [
        event
        for event in events
        if event is not None and event["type"] == "step" and type(event.get("step")) is int
    ]
    return max(0, high - low), good


def _groups(events: list[StepEvent], points: int) -> list[list[StepEvent]]:
    many = min(points, len(events))
    edges = [len(events) * number // many for number in range(many + 1)] if many else [0]
    return [events[begin:end] for begin, end in pairwise(edges)]


def _by_rank(event: StepEvent) -> dict[int, RankStep]:
    told = event.get("ranks")
    rows = told if isinstance(told, list) else []
    return {
        one["rank"]: one for one in rows if isinstance(one, dict) and type(one.get("rank")) is int
    }


def _tables(
    buckets: list[list[StepEvent]], numbers: Sequence[int]
) -> dict[str, dict[int, list[float | None]]]:
    """Means of each part of the step, and of memory: name → rank → one a bucket."""
    events = [event for bucket in buckets for event in bucket]
    place = {rank: at for at, rank in enumerate(numbers)}
    cube = np.full((len(_READ), len(events), len(numbers)), np.nan)
    for at, event in enumerate(events):
        for rank, row in _by_rank(event).items():
            if rank in place:
                cube[:, at, place[rank]] = [_number(row.get(name)) for name in _READ]
    found = dict(zip(_READ, cube, strict=True))
    for name, older in _OLDER.items():  # logs that do not tell the parts
        found[name] = np.where(np.isnan(found[name]), found[older], found[name])
    step_s = np.array([_number(event.get("step_time_s")) for event in events])
    rest = step_s[:, None] - sum(found[name] for name in PHASES[:-1])
    found["other_s"] = np.where(np.isnan(found["other_s"]), np.maximum(rest, 0.0), found["other_s"])
    found["memory_bytes"] = np.where(
        np.isnan(found["memory_bytes"]), _memory(events, numbers), found["memory_bytes"]
    )
    return {name: _means(found[name], buckets, numbers) for name in (*PHASES, "memory_bytes")}


def _memory(events: list[StepEvent], numbers: Sequence[int]) -> np.ndarray:
    """Of each rank, as older logs tell it: events × ranks."""
    told = [event.get("memory_bytes") for event in events]
    rows = [one if isinstance(one, list) else [] for one in told]
    return np.array(
        [
            [_number(row[rank]) if 0 <= rank < len(row) else np.nan for rank in numbers]
            for row in rows
        ]
    ).reshape(len(events), len(numbers))


def _means(
    values: np.ndarray, buckets: list[list[StepEvent]], numbers: Sequence[int]
) -> dict[int, list[float | None]]:
    """Of events × ranks, by rank; None where a bucket has none."""
    if not buckets:
        return {rank: [] for rank in numbers}
    begins = np.cumsum([0, *map(len, buckets[:-1])])
    known = np.add.reduceat((~np.isnan(values)).astype(np.int64), begins, axis=0)
    sums = np.add.reduceat(np.nan_to_num(values), begins, axis=0)
    means = np.round(sums / np.maximum(known, 1), 7)
    shown = means.astype(object)
    shown[known == 0] = None
    return dict(zip(numbers, shown.T.tolist(), strict=True))


def _number(value: Any) -> float:
    if type(value) is float or type(value) is int:  # most; a log may hold anything
        return value if math.isfinite(value) else math.nan
    found = finite(value)
    return math.nan if found is None else found


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(f"{sum(known) / len(known):.7g}") if known else None


def _places(run: Run) -> dict[int, JSONObject]:
    """Host and device of each rank, as the run said at its start."""
    places: dict[int, JSONObject] = {}
    ranks = as_object(run.digest.start.get("mesh")).get("ranks")
    for entry in map(as_object, ranks if isinstance(ranks, list) else []):
        rank = entry.get("rank")
        if type(rank) is int:
            places[rank] = {"host": entry.get("host"), "device": entry.get("device")}
            if "role" in entry:
                places[rank]["role"] = entry["role"]
    return places


def _compression(config: JSONObject, report: JSONObject) -> JSONObject | None:
    """``ratio``: how many times less is sent than without; None until the report tells."""
    method = as_object(config.get("compression")).get("method")
    if method in (None, "none"):
        return None
    return {
        "method": method,
        "ratio": finite(as_object(report.get("communication")).get("ratio_sent")),
    }
