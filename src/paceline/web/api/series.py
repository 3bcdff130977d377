"""Routes for the curves of a run: reduced to a number of points, or complete as CSV."""

import math
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Query
from starlette.responses import StreamingResponse

from paceline.core.errors import unknown_name
from paceline.core.formatting import finite
from paceline.web.files import as_object
from paceline.web.responses import StrictJSONResponse
from paceline.web.runs.columns import SERIES, step_range, thin
from paceline.web.runs.discovery import Run
from paceline.web.runs.index import IndexWorker, TimelineEvent
from paceline.web.state import Panel

router = APIRouter()
_MAX_MARKS = 2000
_MAX_EVALS = 5000
_BLOCK_ROWS = 1 << 14
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
    """Return curves between two steps in at most ``points`` buckets, with the mean, minimum and
    maximum of each bucket.

    ``exact``: the curves are computed from every step. While a long log is being read, they are
    computed from a sample. ``every``: of a very long run, one in this many steps is kept.
    """
    run, columns_shown = panel.runs.get(id), _names(names)
    index, exact = run.index, panel.runs.indexer.ready(run.index)
    if exact:
        with index.lock:
            columns = index.columns
            low, high = step_range(columns.column("step"), start, end)
            curves = thin(lambda name: columns.column(name, low, high), columns_shown, points)
            marks, evals, left_out = list(index.marks), list(index.evals), index.marks_left_out
            every, size = columns.every, index.position
            num_steps = columns.num_steps if high - low == columns.rows else (high - low) * every
    else:
        sample = index.overview()
        low, high = step_range(sample.rows["step"], start, end)
        curves = thin(lambda name: sample.rows[name][low:high], columns_shown, points)
        marks, evals, size = sample.marks, sample.evals, sample.size
        left_out, every, num_steps = 0, None, None
    marks = [mark for mark in marks if mark.type != "eval" and _within(mark.step, start, end)]
    evals = [event for event in evals if _within(event.get("step"), start, end)]
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
            "marks": [vars(mark) for mark in most_important(marks, _MAX_MARKS)],
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


@router.get("/api/sparklines")
def sparklines(
    panel: Panel, ids: str = Query(..., max_length=4000, description="comma-separated")
) -> StrictJSONResponse:
    """Return a few values of the loss of each run, for the list: ``{id: [loss, …]}``. Runs that do
    not exist are left out."""
    known = {run.id: run for run in panel.runs.all()}
    return StrictJSONResponse(
        {id: known[id].sparkline() for id in dict.fromkeys(ids.split(",")) if id in known}
    )


@router.get("/api/runs/{id}/csv")
def csv(
    panel: Panel, id: str, names: str = Query(_NAMES, description="comma-separated")
) -> StreamingResponse:
    """Return every step as a CSV row. A long log is read to its end first."""
    run, columns = panel.runs.get(id), _names(names)
    headers = {"content-disposition": f'attachment; filename="{run.id}.csv"'}
    return StreamingResponse(
        _csv_lines(run, panel.runs.indexer, columns), media_type="text/csv", headers=headers
    )


def _csv_lines(run: Run, indexer: IndexWorker, names: list[str]) -> Iterator[str]:
    columns = ["step", "time", "tokens", *names]
    indexer.finish(run.index)
    yield ",".join(columns) + "\n"
    begin = 0
    while True:
        with run.index.lock:
            rows = run.index.columns.slice(begin, min(begin + _BLOCK_ROWS, run.index.columns.rows))
        if not len(rows):
            return
        begin += len(rows)
        values = [rows[name].tolist() for name in columns]
        yield "".join(
            ",".join(_cell(value) for value in row) + "\n" for row in zip(*values, strict=True)
        )


def _cell(value: float) -> str:
    if math.isnan(value):
        return ""
    if isinstance(value, int):
        return str(value)
    return f"{value:.15g}" if value > 1e9 else f"{value:.7g}"


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in SERIES]
    if unknown:
        raise unknown_name("series", unknown[0][:60], SERIES)
    return list(dict.fromkeys(names))


def _within(step: Any, start: int | None, end: int | None) -> bool:
    number = finite(step)
    if number is None:
        return True
    return (start is None or number >= start) and (end is None or number <= end)


def most_important(marks: list[TimelineEvent], count: int) -> list[TimelineEvent]:
    """Return at most ``count`` marks in their order: errors first, then warnings, then the rest,
    the newest of each."""
    if len(marks) <= count:
        return marks
    priority = {"error": 0, "warning": 1}
    by_importance = sorted(
        range(len(marks)), key=lambda index: (priority.get(marks[index].level, 2), -index)
    )
    return [marks[index] for index in sorted(by_importance[:count])]
