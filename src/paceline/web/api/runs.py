"""Routes that read runs: the list, one run with its log and files, streams, and comparisons."""

import os
import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TypedDict

from fastapi import APIRouter, Query
from pydantic import JsonValue
from starlette.responses import PlainTextResponse, Response

from paceline.core.errors import ConfigError
from paceline.core.events import Event
from paceline.core.formatting import clean, finite
from paceline.web.api.machine import machine
from paceline.web.files import JSONObject, as_object, read_inside, tail_inside
from paceline.web.jobs.runs import OUTPUT
from paceline.web.responses import NotFound, StrictJSONResponse
from paceline.web.runs.discovery import Run
from paceline.web.runs.index import TimelineEvent, mark_of
from paceline.web.runs.log_lines import parse
from paceline.web.runs.rollouts import Order, read_completions, rollout_steps
from paceline.web.runs.stream import EventStream
from paceline.web.runs.sweep import sweep_of
from paceline.web.state import AppState, Panel

router = APIRouter()
#: A report contains a script. The sandbox keeps it out of the panel's origin and off the network.
REPORT_CSP = (
    "sandbox allow-scripts; default-src 'none'; style-src 'unsafe-inline'; script-src"
    " 'unsafe-inline'; img-src data:; frame-ancestors 'self'"
)


class ConfigDifference(TypedDict):
    """A config key, and its value in each run by id; None if a run does not set it."""

    key: str
    values: dict[str, JsonValue]


@router.get("/api/runs")
def runs(panel: Panel) -> StrictJSONResponse:
    """Return all runs below the folder, the latest first."""
    return StrictJSONResponse(
        {
            "folder": panel.shown_folder,
            "token_needed": True,
            "problem": panel.runs.problem,
            "runs": panel.runs.entries(),
        }
    )


@router.get("/api/stream", response_class=EventStream, status_code=200)
async def list_stream(panel: Panel) -> Response:
    """Stream server-sent events ``runs``: ``{changed: [Summary], removed: [id]}``."""
    return EventStream(panel.streams.of_list)


@router.get("/api/runs/{id}")
def run(panel: Panel, id: str) -> StrictJSONResponse:
    """Return the summary of a run, and what changes rarely: config, model, checkpoints, …"""
    run = panel.runs.get(id)
    entry = run.entry()
    exact = panel.runs.indexer.ready(run.index)
    with run.index.lock:
        index = run.index
        start = (index.start if exact else None) or run.summary.start
        evals, samples = list(index.evals)[-2000:], list(index.samples)[-50:]
        checkpoints = list(index.checkpoints)[-2000:]
        memory, unreadable = index.memory, index.unreadable
    return StrictJSONResponse(
        {
            **entry,
            "config": start.get("config"),
            "derived": start.get("derived"),
            "model_info": start.get("model"),
            "data": start.get("data"),
            "sources": {
                "start": start.get("sources"),
                "newest": run.summary.newest.get("sources"),
                "fill": run.summary.newest.get("fill"),
            },
            "versions": start.get("versions"),
            "axes": start.get("axes"),
            "mesh": start.get("mesh"),
            "predicted": start.get("predicted"),
            "memory": memory.get("ranks") if memory else None,
            "checkpoints": [_checkpoint(run, event) for event in checkpoints],
            "evals": [_without_type(event) for event in evals],
            "samples": [_without_type(event) for event in samples],
            "report": run.summary.report,
            "has": {
                "report_html": read_inside(run.run_dir.report_html, 1) is not None,
                "model": run.run_dir.model.is_dir(),
                "image_processor": _reads_images(run, start.get("config")),
                "config": read_inside(run.run_dir.config, 1) is not None,
                "completions": bool(rollout_steps(run.run_dir.rollouts)),
            },
            "folder": str(run.root),
            "model_folder": str(run.run_dir.model),
            "shell": _shell(run, start.get("cwd"), start.get("output_dir")),
            "pid": start.get("pid"),
            "host": start.get("host"),
            "bytes": run.summary.position,
            "unreadable_lines": unreadable,
            "exact": exact,
        }
    )


def _reads_images(run: Run, config: object) -> bool:
    """Return whether the trained model reads images. It has the files of its processor also if it
    was trained as a causal language model."""
    has_processor = any(run.run_dir.model.glob("*processor_config.json"))
    settings = as_object(config) if isinstance(config, Mapping) else {}
    vision = settings.get("vision")
    is_text_only = isinstance(vision, Mapping) and vision.get("text_only") is True
    return has_processor and settings.get("task") in (None, "sft") and not is_text_only


def _shell(run: Run, cwd: object, folder: object) -> dict[str, str]:
    """Return what a command about the run begins with, and the run's folder, quoted for a shell.
    The working directory is where relative paths of the config begin. Without a known one, the
    folder's path is absolute."""
    if isinstance(cwd, str) and isinstance(folder, str):
        path = os.path.join(cwd, folder)
        if os.path.isabs(cwd) and os.path.realpath(path) == os.path.realpath(run.root):
            return {"prefix": f"cd {shlex.quote(cwd)} && ", "folder": shlex.quote(folder)}
    return {"prefix": "", "folder": shlex.quote(str(run.root))}


@router.get("/api/runs/{id}/stream", response_class=EventStream, status_code=200)
async def run_stream(
    panel: Panel, id: str, after: int | None = Query(None, ge=0, le=1 << 53)
) -> Response:
    """Stream server-sent events ``append``, ``status``, and ``gone`` if the run was deleted."""
    return EventStream(partial(panel.streams.of_run, panel.runs.get(id), after))


@router.get("/api/runs/{id}/log")
def log(panel: Panel, id: str, tail: int = Query(500, ge=1, le=20_000)) -> StrictJSONResponse:
    """Return the newest lines of the log: all events except steps."""
    run = panel.runs.get(id)
    lines: list[JSONObject] = [vars(mark) for mark in _marks(panel, run)]
    if not lines:  # before its first event, a run shows what it has printed
        output = (tail_inside(run.root / OUTPUT) or b"").decode("utf-8", errors="replace")
        lines = [
            {"time": None, "level": "info", "text": clean(line)[:4000], "step": None}
            for line in output.splitlines()
        ]
    return StrictJSONResponse({"lines": lines[-tail:], "left_out": max(0, len(lines) - tail)})


@router.get("/api/runs/{id}/completions")
def completions(
    panel: Panel,
    id: str,
    step: int | None = Query(None, ge=0, le=10**15, description="default: the latest"),
    search: str = Query("", max_length=200, description="text in the prompt or the completion"),
    order: Order = "file",
    offset: int = Query(0, ge=0, le=1 << 31),
    limit: int = Query(20, ge=1, le=100),
) -> StrictJSONResponse:
    """Return the steps whose completions are stored, the latest first, and some completions of one
    of them."""
    run = panel.runs.get(id)
    steps = rollout_steps(run.run_dir.rollouts)
    shown_step = step if step is not None else steps[0] if steps else None
    page = None
    if shown_step is not None:
        page = read_completions(run.run_dir.rollouts, shown_step, search, order, offset, limit)
    if page is None:
        raise NotFound(
            "{run} has no stored completions of this step",
            code="no-stored-completions",
            fix="choose a later step: a run keeps the latest `grpo.keep_rollouts` files",
            run=run.name,
        )
    return StrictJSONResponse({"steps": steps, "step": shown_step, **page})


@router.get("/api/runs/{id}/config", response_class=PlainTextResponse)
def config(panel: Panel, id: str) -> Response:
    """Return the resolved config as YAML."""
    run = panel.runs.get(id)
    text = read_inside(run.run_dir.config)
    if text is None:
        raise NotFound(
            "{run} has no config.yaml",
            code="no-config-yet",
            fix="wait until the run has started to train",
            run=run.name,
        )
    return Response(text, media_type="text/yaml; charset=utf-8")


@router.get("/api/runs/{id}/report", response_class=Response)
def report(panel: Panel, id: str) -> Response:
    """Return report.html in a sandbox."""
    run = panel.runs.get(id)
    page = read_inside(run.run_dir.report_html, 64 << 20)
    if page is None:
        raise NotFound(
            "{run} has no report.html",
            code="no-report-yet",
            fix="wait until the run has ended",
            run=run.name,
        )
    return Response(
        page,
        media_type="text/html; charset=utf-8",
        headers={"content-security-policy": REPORT_CSP},
    )


@router.get("/api/compare")
def compare(
    panel: Panel, ids: str = Query(..., max_length=2000, description="comma-separated")
) -> StrictJSONResponse:
    """Return the summaries and reports of several runs, the config keys in which they differ, and
    the sweep that all of them belong to, if there is one."""
    unique_ids = list(dict.fromkeys(id.strip() for id in ids.split(",") if id.strip()))
    if not 1 <= len(unique_ids) <= 50:
        raise ConfigError(
            "cannot compare {num_unique_ids} runs",
            code="wrong-number-of-runs",
            allowed="1 to 50 comma-separated ids",
            num_unique_ids=len(unique_ids),
        )
    runs = [panel.runs.get(id) for id in unique_ids]
    entries = {run.id: run.entry() for run in runs}  # reads what is new
    configs = {run.id: as_object(run.summary.start.get("config")) for run in runs}
    rows = [
        {
            **entries[run.id],
            "report": run.summary.report,
            "dataset": configs[run.id].get("dataset"),
            "val_dataset": configs[run.id].get("val_dataset"),
        }
        for run in runs
    ]
    known = {run.root: run.id for run in panel.runs.all()}
    return StrictJSONResponse(
        {
            "runs": rows,
            "config_differences": differences(configs),
            "sweep": sweep_of([run.root for run in runs], known),
        }
    )


@router.get("/api/machine")
def read_machine() -> StrictJSONResponse:
    """Return the processors, memory and GPUs of this machine."""
    return StrictJSONResponse(machine())


def _marks(panel: AppState, run: Run) -> list[TimelineEvent]:
    if panel.runs.indexer.ready(run.index):
        with run.index.lock:
            return list(run.index.marks)
    return run.index.overview().marks + newest_marks(run)


def newest_marks(run: Run) -> list[TimelineEvent]:
    """Return the events other than steps in the last lines of a log that is not indexed yet."""
    lines = (tail_inside(run.run_dir.events) or b"").split(b"\n")
    events = [
        event
        for line in lines
        if line and (event := parse(line)) is not None and event["type"] != "step"
    ]
    return [mark_of(event, None) for event in events]


def _checkpoint(run: Run, event: Event) -> JSONObject:
    name = os.path.basename(str(event.get("path") or "").rstrip("/"))
    exists = name not in ("", ".", "..") and (run.run_dir.checkpoints / name).is_dir()
    return {
        **_without_type(event),
        "name": name,
        "exists": exists,
        "size_bytes": finite(event.get("size_bytes")),
    }


def _without_type(event: Event) -> JSONObject:
    return {key: value for key, value in as_object(event).items() if key != "type"}


_ABSENT = object()


def differences(configs: Mapping[str, JsonValue]) -> list[ConfigDifference]:
    """Return the dotted keys whose value is not the same in all configs, except the output folder,
    which always differs."""
    flat = {id: dict(_flatten(config)) for id, config in configs.items()}
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    rows: list[ConfigDifference] = []
    for key in keys:
        values = [config.get(key, _ABSENT) for config in flat.values()]
        if key != "output_dir" and any(value is _ABSENT or value != values[0] for value in values):
            rows.append({"key": key, "values": {id: flat[id].get(key) for id in flat}})
    return rows


def _flatten(config: JsonValue, prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    for key, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
