"""Routes for datasets: those in the folder, uploading one, and a look at its rows."""

import os
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from paceline.web.api.upload import SUFFIXES, TooLarge, take_upload
from paceline.web.files import shown, stat_inside
from paceline.web.jobs.context import LaunchContext
from paceline.web.responses import problem
from paceline.web.runs.discovery import is_run

router = APIRouter()

#: Data that needs no file, and the task that it is for.
BUILT_IN = {
    "builtin:python-docs": "sft",
    "builtin:python-source": "pretrain",
    "builtin:digits": "classify",
    "builtin:clicks": "recommend",
}
_UPLOADS = "datasets"
_MOST_SHOWN, _MOST_FOLDERS, _DEPTH = 500, 5000, 4
_NOT_DATA = {
    "config.json",
    "report.json",
    "panel.json",
    "events.jsonl",
    "README.md",
    "package.json",
}

_UPLOAD_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {"file": {"type": "string", "format": "binary"}},
                }
            }
        },
    }
}


class Preview(BaseModel):
    """A config, and how many rows of each of its sources to show."""

    yaml: Annotated[str, Field(max_length=1 << 20)]
    rows: int = Field(5, ge=1, le=100)


@router.get("/api/datasets")
def datasets(request: Request) -> dict[str, Any]:
    """Data files below the served folder, newest first, without those that are a run's own; and the
    built-in data. ``left_out``: so many more were found."""
    found = _files(LaunchContext.of(request).folder)
    found.sort(key=lambda one: one["modified_at"], reverse=True)
    built_in = [{"path": path, "task": task} for path, task in BUILT_IN.items()]
    return {
        "datasets": found[:_MOST_SHOWN],
        "left_out": len(found[_MOST_SHOWN:]),
        "builtin": built_in,
    }


def _files(folder: Path) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    level, looked_at = [folder], 0
    for _ in range(_DEPTH):
        below: list[Path] = []
        for one in level:
            looked_at += 1
            if looked_at > _MOST_FOLDERS or (one != folder and is_run(one)):
                continue
            out += _in_folder(one, folder, below)
        level = below
    return out


def _in_folder(here: Path, folder: Path, below: list[Path]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    try:
        entries = sorted(os.scandir(here), key=lambda one: one.name)
    except OSError:
        return out
    for entry in entries:
        if entry.name.startswith((".", "__")):
            continue
        if entry.is_dir(follow_symlinks=False):
            below.append(Path(entry.path))
        elif entry.name not in _NOT_DATA and entry.name.lower().endswith(SUFFIXES):
            about = stat_inside(Path(entry.path))
            if about is not None:
                path = os.path.relpath(entry.path, folder)
                out.append(
                    {
                        "path": f"./{shown(path)}",
                        "size_bytes": about.st_size,
                        "modified_at": about.st_mtime,
                    }
                )
    return out


@router.post("/api/upload", openapi_extra=_UPLOAD_FORM, response_model=None)
async def upload(request: Request) -> dict[str, Any] | Response:
    """Take in a data file, of at most 1 GiB. It never takes another file's place: ``path`` is where
    it lies."""
    folder = LaunchContext.of(request).folder
    try:
        path, size_bytes = await take_upload(request, folder / _UPLOADS)
    except TooLarge as error:
        return problem(413, error.what, error.allowed, error.fix)
    return {"path": f"./{_UPLOADS}/{path.name}", "size_bytes": size_bytes}


@router.post("/api/preview")
async def preview(body: Preview, request: Request) -> dict[str, Any]:
    """The first rows as the model will see them: ``paceline data preview --json``."""
    words = ["data", "preview", "CONFIG", "--rows", str(body.rows)]
    found, said = await LaunchContext.of(request).verbs.run("preview", words, body.yaml)
    return {**found, "said": said}
