"""The routes that read one run or all of them, but for its curves and streams."""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import PlainTextResponse, Response

from paceline.core.errors import ConfigError
from paceline.core.events import Event
from paceline.core.formatting import clean, finite
from paceline.web.api.compare import differences
from paceline.web.api.machine import machine
from paceline.web.files import read_inside, tail_inside
from paceline.web.jobs.runs import OUTPUT
from paceline.web.responses import NotFound, StrictJSONResponse
from paceline.web.runs.discovery import Run
from paceline.web.runs.index import TimelineEvent, mark_of
from paceline.web.runs.log_lines import parse
from paceline.web.runs.stream import EventStream
from paceline.web.state import AppState, panel_of

router = APIRouter()
#: A report is a page of its own with a script of its own: it gets no part in this one's origin, and
#: reaches no server.
REPORT_CSP = (
    "sandbox allow-scripts; default-src 'none'; style-src 'unsafe-inline'; script-src"
    " 'unsafe-inline'; img-src data:; frame-ancestors 'self'"
)


class Note(BaseModel):
    """What a person writes on a run."""

    note: str = Field("", max_length=10_000)
    tags: list[Annotated[str, Field(min_length=1, max_length=60)]] = Field([], max_length=30)


@router.get("/api/runs")
def runs(request: Request) -> StrictJSONResponse:
    """Every run below the folder, the latest first."""
    panel = panel_of(request)
    found = panel.runs.summaries()
    return StrictJSONResponse(
        {
            "folder": panel.shown_folder,
            "token_needed": True,
            "problem": panel.runs.problem,
            "runs": found,
        }
    )


@router.get("/api/stream", response_class=EventStream)
async def list_stream(request: Request) -> Response:
    """Server-sent events ``runs``: ``{changed: [Summary], removed: [id]}``."""
    return EventStream(panel_of(request).streams.of_list)


@router.get("/api/runs/{id}")
def run(request: Request, id: str) -> StrictJSONResponse:
    """A run's summary, and all that is said once."""
    panel = panel_of(request)
    return StrictJSONResponse(detail(panel, panel.runs.get(id)))


@router.get("/api/runs/{id}/stream", response_class=EventStream)
async def run_stream(
    request: Request, id: str, after: int | None = Query(None, ge=0, le=1 << 53)
) -> Response:
    """Server-sent events ``append``, ``status``, and ``gone`` where the run was deleted."""
    panel = panel_of(request)
    return EventStream(partial(panel.streams.of_run, panel.runs.get(id), after))


@router.get("/api/runs/{id}/log")
def log(request: Request, id: str, tail: int = Query(500, ge=1, le=20_000)) -> StrictJSONResponse:
    """The newest lines: what happened, but for the steps."""
    panel = panel_of(request)
    one = panel.runs.get(id)
    lines = [
        {"time": mark.time, "level": mark.level, "text": mark.text, "step": mark.step}
        for mark in _marks(panel, one)
    ]
    if not lines:  # it has not come to its first event: what it printed
        printed = (
            (tail_inside(one.root / OUTPUT) or b"").decode("utf-8", errors="replace").splitlines()
        )
        lines = [
            {"time": None, "level": "info", "text": clean(line)[:4000], "step": None}
            for line in printed
        ]
    return StrictJSONResponse({"lines": lines[-tail:], "left_out": max(0, len(lines) - tail)})


@router.get("/api/runs/{id}/config", response_class=PlainTextResponse)
def config(request: Request, id: str) -> Response:
    """The resolved config, as YAML."""
    one = panel_of(request).runs.get(id)
    found = read_inside(one.run_dir.config)
    if found is None:
        raise NotFound(f"{one.name} has no config.yaml", fix="a run writes it when it begins")
    return Response(found, media_type="text/yaml; charset=utf-8")


@router.get("/api/runs/{id}/report", response_class=Response)
def report(request: Request, id: str) -> Response:
    """report.html, shut off from this page."""
    one = panel_of(request).runs.get(id)
    found = read_inside(one.run_dir.report_html, 64 << 20)
    if found is None:
        raise NotFound(f"{one.name} has no report.html", fix="a run writes it at its end")
    return Response(
        found,
        media_type="text/html; charset=utf-8",
        headers={"content-security-policy": REPORT_CSP},
    )


@router.put("/api/runs/{id}/note")
def put_note(request: Request, id: str, body: Note) -> StrictJSONResponse:
    """Keep a note and tags."""
    panel = panel_of(request)
    one = panel.runs.get(id)
    panel.runs.notes.put(one.path, body.note, list(dict.fromkeys(body.tags)))
    return StrictJSONResponse(panel.runs.notes.of(one.path))


@router.get("/api/compare")
def compare(
    request: Request, ids: str = Query(..., max_length=2000, description="comma-separated")
) -> StrictJSONResponse:
    """Several runs side by side: summaries, reports, and the keys of the config in which they
    differ."""
    panel = panel_of(request)
    wanted = list(dict.fromkeys(one.strip() for one in ids.split(",") if one.strip()))
    if not 1 <= len(wanted) <= 50:
        raise ConfigError(
            f"{len(wanted)} runs to compare", allowed="1 to 50 ids, with commas between them"
        )
    found = [panel.runs.get(id) for id in wanted]
    rows = [{**one.summary(), "report": one.digest.report} for one in found]
    configs = {one.id: _dict(one.digest.start.get("config")) for one in found}
    return StrictJSONResponse({"runs": rows, "config_differences": differences(configs)})


@router.get("/api/machine")
def read_machine() -> StrictJSONResponse:
    """This machine: processors, memory, accelerators."""
    return StrictJSONResponse(machine())


def detail(panel: AppState, one: Run) -> dict[str, Any]:
    """As ``GET /api/runs/{id}`` gives it."""
    summary = one.summary()
    exact = panel.runs.indexer.ready(one.index)
    with one.index.lock:
        index = one.index
        start = (index.start if exact else None) or one.digest.start
        evals, checkpoints, samples = (
            list(index.evals)[-2000:],
            list(index.checkpoints)[-2000:],
            list(index.samples)[-50:],
        )
        memory, unreadable = index.memory, index.unreadable
    return {
        **summary,
        "config": start.get("config"),
        "derived": start.get("derived"),
        "model_info": start.get("model"),
        "data": start.get("data"),
        "versions": start.get("versions"),
        "axes": start.get("axes"),
        "mesh": start.get("mesh"),
        "predicted": start.get("predicted"),
        "memory": memory.get("ranks") if memory else None,
        "checkpoints": [_checkpoint(one, event) for event in checkpoints],
        "evals": [_without(event, "type") for event in evals],
        "samples": [_without(event, "type") for event in samples],
        "report": one.digest.report,
        "has": {
            "report_html": read_inside(one.run_dir.report_html, 1) is not None,
            "model": (one.run_dir.root / "model").is_dir(),
            "config": read_inside(one.run_dir.config, 1) is not None,
        },
        "pid": start.get("pid"),
        "host": start.get("host"),
        "bytes": one.digest.position,
        "unreadable_lines": unreadable,
        "exact": exact,
    }


def _marks(panel: AppState, one: Run) -> list[TimelineEvent]:
    if panel.runs.indexer.ready(one.index):
        with one.index.lock:
            return list(one.index.marks)
    return one.index.overview().marks + newest_marks(one)


def newest_marks(one: Run) -> list[TimelineEvent]:
    """Of the last lines of a log that is not read yet."""
    lines = (tail_inside(one.run_dir.events) or b"").split(b"\n")
    events = [
        event
        for line in lines
        if line and (event := parse(line)) is not None and event["type"] != "step"
    ]
    return [mark_of(event, None) for event in events]


def _checkpoint(one: Run, event: Event) -> dict[str, Any]:
    path = str(event.get("path") or "")
    name = path.rstrip("/").rpartition("/")[2]
    there = bool(name) and name not in (".", "..") and (one.run_dir.checkpoints / name).is_dir()
    return {
        **_without(event, "type"),
        "name": name,
        "exists": there,
        "size_bytes": finite(event.get("size_bytes")),
    }


def _without(event: Event, *names: str) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key not in names}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
