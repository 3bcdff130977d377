"""``/series``, ``/csv``: the curves of a run, thinned."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from fastapi import APIRouter, Query
from starlette.responses import StreamingResponse

from paceline.core.errors import unknown_name
from paceline.core.formatting import finite
from paceline.web.files import as_object
from paceline.web.responses import StrictJSONResponse
from paceline.web.runs.columns import SERIES, thin
from paceline.web.runs.discovery import Run
from paceline.web.runs.index import IndexWorker, TimelineEvent
from paceline.web.state import Panel

router = APIRouter()
_MAX_MARKS = 2000
_MAX_EVALS = 5000
_ROWS_A_BLOCK = 1 << 14
_NAMES = ",".join(SERIES)


@router.get("/api/runs/{id}/series")
def series(
    panel: Panel,
    id: str,
    names: str = Query(_NAMES, description="comma-separated"),
    start: int | None = Query(None, ge=0, le=1 << 53, description="first step"),
    end: int | None = Query(None, ge=0, le=1 << 53, description="last step"),
    points: int = Query(1200, ge=1, le=20_000),
) -> StrictJSONResponse:
    """Curves between two steps, in at most ``points`` buckets: mean, least and greatest of each.
    ``exact``: every step that counts was read; otherwise some that are spread over the log, until
    it is. ``every``: one in so many steps is kept."""
    run, wanted = panel.runs.get(id), _names(names)
    index, exact = run.index, panel.runs.indexer.ready(run.index)
    if exact:
        with index.lock:
            columns = index.columns
            low, high = _range(columns.column("step"), start, end)
            curves = thin(lambda name: columns.column(name, low, high), wanted, points)
            marks, evals, left_out = list(index.marks), list(index.evals), index.marks_left_out
            every, size = columns.every, index.position
            num_steps = columns.num_steps if high - low == columns.rows else (high - low) * every
    else:
        seen = index.overview()
        low, high = _range(seen.rows["step"], start, end)
        curves = thin(lambda name: seen.rows[name][low:high], wanted, points)
        marks, evals, size = seen.marks, seen.evals, seen.size
        left_out, every, num_steps = 0, None, None
    marks = [one for one in marks if one.type != "eval" and _within(one.step, start, end)]
    evals = [one for one in evals if _within(one.get("step"), start, end)]
    return StrictJSONResponse(
        {
            **curves,
            "evals": [
                {
                    **{key: finite(event.get(key)) for key in ("step", "time", "loss")},
                    "metrics": as_object(event.get("metrics")),
                }
                for event in evals[-_MAX_EVALS:]
            ],
            "marks": [vars(one) for one in most_telling(marks, _MAX_MARKS)],
            "left_out": {
                "marks": left_out + max(0, len(marks) - _MAX_MARKS),
                "evals": max(0, len(evals) - _MAX_EVALS),
            },
            "num_steps": num_steps,
            "exact": exact and every == 1,
            "every": every,
            "bytes": size,
            "read": 1.0 if exact or not size else min(1.0, index.position / size),
        }
    )


@router.get("/api/runs/{id}/csv")
def csv(
    panel: Panel, id: str, names: str = Query(_NAMES, description="comma-separated")
) -> StreamingResponse:
    """Every step that counts, one a line. A long log is read to its end first."""
    run, wanted = panel.runs.get(id), _names(names)
    headers = {"content-disposition": f'attachment; filename="{run.id}.csv"'}
    return StreamingResponse(
        _csv_lines(run, panel.runs.indexer, wanted), media_type="text/csv", headers=headers
    )


def _csv_lines(run: Run, indexer: IndexWorker, names: list[str]) -> Iterator[str]:
    columns = ["step", "time", "tokens", *names]
    indexer.finish(run.index)
    yield ",".join(columns) + "\n"
    at = 0
    while True:
        with run.index.lock:
            rows = run.index.columns.slice(at, min(at + _ROWS_A_BLOCK, run.index.columns.rows))
        if not len(rows):
            return
        at += len(rows)
        values = [rows[name].tolist() for name in columns]
        yield "".join(
            ",".join(_cell(one) for one in row) + "\n" for row in zip(*values, strict=True)
        )


def _cell(value: float) -> str:
    if math.isnan(value):
        return ""
    if isinstance(value, int):
        return str(value)
    return f"{value:.15g}" if value > 1e9 else f"{value:.7g}"


def _names(given: str) -> list[str]:
    names = [name.strip() for name in given.split(",") if name.strip()]
    unknown = [name for name in names if name not in SERIES]
    if unknown:
        raise unknown_name("series", unknown[0][:60], SERIES)
    return list(dict.fromkeys(names))


def _range(steps: np.ndarray, start: int | None, end: int | None) -> tuple[int, int]:
    low = 0 if start is None else int(np.searchsorted(steps, start, side="left"))
    high = len(steps) if end is None else int(np.searchsorted(steps, end, side="right"))
    return low, max(low, high)


def _within(step: Any, start: int | None, end: int | None) -> bool:
    own = finite(step)
    return own is None or ((start is None or own >= start) and (end is None or own <= end))


def most_telling(marks: list[TimelineEvent], count: int) -> list[TimelineEvent]:
    """At most ``count`` marks, in their order: errors before warnings before the rest, the newest
    of each."""
    if len(marks) <= count:
        return marks
    rank = {"error": 0, "warning": 1}
    kept = sorted(range(len(marks)), key=lambda at: (rank.get(marks[at].level, 2), -at))[:count]
    return [marks[at] for at in sorted(kept)]
