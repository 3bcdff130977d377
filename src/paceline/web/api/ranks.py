"""Routes for the ranks of a run: time, memory, heartbeats and traffic.

They read a limited number of lines of the log, spread over the requested steps, so that a million
steps of many ranks take no longer than a thousand.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, TypedDict

import numpy as np
from fastapi import APIRouter, Query

from paceline.core.events import RankStep, StepEvent
from paceline.core.formatting import finite
from paceline.web.files import JSONObject, as_object, as_text, json_inside, open_inside
from paceline.web.responses import StrictJSONResponse
from paceline.web.runs.columns import step_range
from paceline.web.runs.discovery import Run
from paceline.web.runs.log_lines import line_at, parse
from paceline.web.state import AppState, Panel

router = APIRouter()
#: The parts of a step, as the event names them. ``other_s`` is the rest.
PHASES = ("data_s", "forward_s", "backward_s", "communication_s", "optimizer_s", "other_s")
# On an accelerator, `other_s` is mostly work.
_WORK = tuple(name for name in PHASES if name != "communication_s")
#: Keys of older logs, which do not have the parts of a step.
_OLDER = {"data_s": "data_wait_s", "communication_s": "comm_wait_s"}
_KEYS = (*PHASES, "memory_bytes", *_OLDER.values())
_MAX_LINES = 1200  # read for one response
_MAX_VALUES = 60_000  # ranks × lines: with many ranks, fewer lines are read
_MIN_SLOWDOWN = 0.05  # of a step, from which a rank is reported as slow
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
    """Return the parts of a step of each rank in at most ``points`` buckets, computed from
    ``lines_read`` of ``lines`` steps."""
    run = panel.runs.get(id)
    lines, events = _sample_steps(panel, run, start, end, 2 * points)
    buckets = _split(events, points)
    ranks = sorted({rank for event in events for rank in _by_rank(event)})[:_MAX_RANKS]
    table = _tables(buckets, ranks)
    places = _places(run)
    workers = [rank for rank in ranks if "role" not in places.get(rank, {})]
    devices = (event.get("devices") for event in reversed(events))
    return StrictJSONResponse(
        {
            "step": [bucket[-1]["step"] for bucket in buckets],
            "time": [finite(bucket[-1].get("time")) for bucket in buckets],
            "step_time_s": [_mean_step_time(bucket) for bucket in buckets],
            "ranks": [
                {
                    "rank": rank,
                    **places.get(rank, {"host": None, "device": None}),
                    **{name: table[name][rank] for name in table},
                }
                for rank in ranks
            ],
            "slowest": slowest(table, workers, buckets),
            "devices": next((rows for rows in devices if isinstance(rows, list)), None),
            "lines": lines,
            "lines_read": len(events),
        }
    )


@router.get("/api/runs/{id}/heartbeats")
def heartbeats(panel: Panel, id: str) -> StrictJSONResponse:
    """Return the newest heartbeat of each rank, which a run writes every two seconds; none for a
    run with one rank or without a watchdog."""
    heartbeats = json_inside(panel.runs.get(id).run_dir.heartbeats) or {}
    rows = _rank_rows(heartbeats.get("ranks"))
    numbers = ("rank", "pid", "step", "heard_at", "moved_at")
    texts = ("host", "phase", "waits_for", "state")
    return StrictJSONResponse(
        {
            "time": finite(heartbeats.get("time")),
            "ranks": [
                {
                    **{name: finite(row.get(name)) for name in numbers},
                    **{name: as_text(row.get(name), 200) for name in texts},
                }
                for row in rows[:_MAX_RANKS]
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
    """Return the bytes that the busiest rank sends per step, by collective, with the predicted and
    the measured total."""
    run = panel.runs.get(id)
    lines, events = _sample_steps(panel, run, start, end, 2 * points)
    events = [event for event in events if isinstance(event.get("traffic"), dict)]
    buckets = _split(events, points)
    by_event = [as_object(event.get("traffic")) for event in events]
    names = sorted({str(name) for traffic in by_event for name in traffic})[:50]
    by_collective = {
        name: [
            _mean([finite(as_object(event.get("traffic")).get(name)) for event in bucket])
            for bucket in buckets
        ]
        for name in names
    }
    report, run_start = run.summary.report or {}, run.summary.start
    reported = as_object(report.get("traffic_bytes_per_step"))
    predicted, measured = finite(reported.get("predicted")), finite(reported.get("measured"))
    if predicted is None:
        predicted = finite(as_object(run_start.get("predicted")).get("traffic_bytes_per_step"))
    if measured is None and by_event:
        measured = statistics.median(
            sum(finite(size) or 0.0 for size in traffic.values()) for traffic in by_event
        )
    return StrictJSONResponse(
        {
            "step": [bucket[-1]["step"] for bucket in buckets],
            "by_collective": by_collective,
            "predicted_bytes": predicted,
            "measured_bytes": measured,
            "compression": _compression(as_object(run_start.get("config")), report),
            "lines": lines,
            "lines_read": len(events),
        }
    )


class Slowest(TypedDict):
    """The rank that delays the others. ``slower_by_share`` is relative to the step. ``phase`` (with
    the largest difference) and ``share`` (seconds by phase) are None if the parts of a step are
    unknown."""

    rank: int
    slower_by_s: float
    slower_by_share: float
    phase: str | None
    share: dict[str, float] | None


def slowest(
    table: dict[str, dict[int, list[float | None]]],
    ranks: Sequence[int],
    buckets: list[list[StepEvent]],
) -> Slowest | None:
    """Return the rank that works longer than the others by a margin before it waits for them. If
    the parts of a step are unknown, that is the rank that waits least."""
    if len(ranks) < 2:
        return None
    step_s = _mean_step_time([event for bucket in buckets for event in bucket])
    means = {name: {rank: _mean(table[name][rank]) for rank in ranks} for name in PHASES}
    has_phases = all(means["forward_s"][rank] is not None for rank in ranks)
    if has_phases:
        work_s = {rank: sum(means[name][rank] or 0.0 for name in _WORK) for rank in ranks}
    elif step_s is not None and all(means["communication_s"][rank] is not None for rank in ranks):
        work_s = {rank: step_s - (means["communication_s"][rank] or 0.0) for rank in ranks}
    else:
        return None
    last = max(work_s, key=lambda rank: work_s[rank])
    others = [rank for rank in ranks if rank != last]
    slower_by_s = work_s[last] - statistics.median(work_s[rank] for rank in others)
    if not step_s or slower_by_s < _MIN_SLOWDOWN * step_s:
        return None
    share, phase = None, None
    if has_phases:
        share = {
            name: (means[name][last] or 0.0)
            - statistics.median(means[name][rank] or 0.0 for rank in others)
            for name in _WORK
        }
        phase = max(share, key=share.__getitem__).removesuffix("_s")
    return {
        "rank": last,
        "slower_by_s": slower_by_s,
        "slower_by_share": slower_by_s / step_s,
        "phase": phase,
        "share": share,
    }


def _sample_steps(
    panel: AppState, run: Run, start: int | None, end: int | None, count: int
) -> tuple[int, list[StepEvent]]:
    """Return the number of steps in a range, and the ``step`` events of about ``count`` of them."""
    run.summary.refresh()
    world_size = int(finite(run.summary.start.get("world_size")) or 1)
    count = max(2, min(count, _MAX_LINES, _MAX_VALUES // max(world_size, 1)))
    if panel.runs.indexer.ready(run.index):
        with run.index.lock:
            steps, offsets = run.index.columns.column("step"), run.index.columns.column("offset")
    else:
        rows = run.index.overview().rows
        steps, offsets = rows["step"], rows["offset"]
    low, high = step_range(steps, start, end)
    selected = np.unique(
        np.linspace(low, high - 1, min(count, high - low)).round().astype(np.int64)
    )
    handle = open_inside(run.run_dir.events) if len(selected) else None
    if handle is None:
        return 0, []
    with handle:
        events = [parse(line_at(handle, offset)) for offset in offsets[selected].tolist()]
    return high - low, [
        event
        for event in events
        if event is not None and event["type"] == "step" and type(event.get("step")) is int
    ]


def _split(events: list[StepEvent], count: int) -> list[list[StepEvent]]:
    """Split events into at most ``count`` buckets of nearly equal size."""
    count = min(count, len(events))
    edges = [len(events) * number // count for number in range(count + 1)] if count else []
    return [events[begin:end] for begin, end in pairwise(edges)]


def _rank_rows(rows: object) -> list[Any]:
    """Return the objects of a list that have the number of a rank."""
    return [
        row
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict) and type(row.get("rank")) is int
    ]


def _by_rank(event: StepEvent) -> dict[int, RankStep]:
    return {row["rank"]: row for row in _rank_rows(event.get("ranks"))}


def _tables(
    buckets: list[list[StepEvent]], ranks: Sequence[int]
) -> dict[str, dict[int, list[float | None]]]:
    """Return the means of each part of a step and of memory: name → rank → value per bucket."""
    events = [event for bucket in buckets for event in bucket]
    column_of = {rank: column for column, rank in enumerate(ranks)}
    values = np.full((len(_KEYS), len(events), len(ranks)), np.nan)
    for index, event in enumerate(events):
        for rank, row in _by_rank(event).items():
            if rank in column_of:
                values[:, index, column_of[rank]] = [_number(row.get(name)) for name in _KEYS]
    tables = dict(zip(_KEYS, values, strict=True))
    step_s = np.array([_number(event.get("step_time_s")) for event in events])
    fallbacks = {name: tables[older] for name, older in _OLDER.items()}
    fallbacks["memory_bytes"] = _memory(events, ranks)
    for name, fallback in fallbacks.items():
        tables[name] = np.where(np.isnan(tables[name]), fallback, tables[name])
    rest = np.maximum(step_s[:, None] - sum(tables[name] for name in PHASES[:-1]), 0.0)
    tables["other_s"] = np.where(np.isnan(tables["other_s"]), rest, tables["other_s"])
    return {name: _means(tables[name], buckets, ranks) for name in (*PHASES, "memory_bytes")}


def _memory(events: list[StepEvent], ranks: Sequence[int]) -> np.ndarray:
    """Return events × ranks: the memory of each rank as older logs record it."""
    by_event = [event.get("memory_bytes") for event in events]
    rows = [row if isinstance(row, list) else [] for row in by_event]
    return np.array(
        [[_number(row[rank]) if 0 <= rank < len(row) else np.nan for rank in ranks] for row in rows]
    ).reshape(len(events), len(ranks))


def _means(
    values: np.ndarray, buckets: list[list[StepEvent]], ranks: Sequence[int]
) -> dict[int, list[float | None]]:
    """Return the means of events × ranks by rank, one per bucket; None for a bucket without
    values."""
    if not buckets:
        return {rank: [] for rank in ranks}
    begins = np.cumsum([0, *map(len, buckets[:-1])])
    counts = np.add.reduceat((~np.isnan(values)).astype(np.int64), begins, axis=0)
    sums = np.add.reduceat(np.nan_to_num(values), begins, axis=0)
    means = np.round(sums / np.maximum(counts, 1), 7).astype(object)
    means[counts == 0] = None
    return dict(zip(ranks, means.T.tolist(), strict=True))


def _number(value: Any) -> float:
    if type(value) is float or type(value) is int:  # nearly always
        return value if math.isfinite(value) else math.nan
    figure = finite(value)
    return math.nan if figure is None else figure


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(f"{sum(known) / len(known):.7g}") if known else None


def _mean_step_time(events: list[StepEvent]) -> float | None:
    return _mean([finite(event.get("step_time_s")) for event in events])


def _places(run: Run) -> dict[int, JSONObject]:
    """Return the host, device and role of each rank, as the run recorded them at its start."""
    places: dict[int, JSONObject] = {}
    for row in _rank_rows(as_object(run.summary.start.get("mesh")).get("ranks")):
        place = {"host": row.get("host"), "device": row.get("device")}
        places[row["rank"]] = {**place, "role": row["role"]} if "role" in row else place
    return places


def _compression(config: JSONObject, report: JSONObject) -> JSONObject | None:
    """Return the compression method, and by which factor it reduces what is sent (None before the
    report is written)."""
    method = as_object(config.get("compression")).get("method")
    if method in (None, "none"):
        return None
    ratio = as_object(report.get("communication")).get("ratio_sent")
    return {"method": method, "ratio": finite(ratio)}
