"""Routes for datasets: those in the folder, uploading one, and a look at its rows."""

import contextlib
import os
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from paceline.web.api.upload import SUFFIXES, TooLarge, take_upload
from paceline.web.files import JSONObject, shown, stat_inside
from paceline.web.responses import problem
from paceline.web.runs.discovery import is_run
from paceline.web.state import Panel

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
def datasets(panel: Panel) -> JSONObject:
    """Data files below the served folder, newest first, without those that are a run's own; and the
    built-in data. ``left_out``: so many further files exist."""
    files: list[JSONObject] = [
        {
            "path": f"./{shown(os.path.relpath(path, panel.folder))}",
            "size_bytes": status.st_size,
            "modified_at": status.st_mtime,
        }
        for path in _files(panel.folder)
        if (status := stat_inside(path)) is not None
    ]
    files.sort(key=itemgetter("modified_at"), reverse=True)
    return {
        "datasets": [*files[:_MOST_SHOWN]],
        "left_out": len(files[_MOST_SHOWN:]),
        "builtin": [{"path": path, "task": task} for path, task in BUILT_IN.items()],
    }


def _files(folder: Path) -> Iterator[Path]:
    """Data files, down to some depth, but for those of runs."""
    num_folders = 0
    level = [folder]
    for _ in range(_DEPTH):
        below: list[Path] = []
        for parent in level:
            num_folders += 1
            if num_folders > _MOST_FOLDERS or (parent != folder and is_run(parent)):
                continue
            with contextlib.suppress(OSError), os.scandir(parent) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if entry.name.startswith((".", "__")):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        below.append(Path(entry.path))
                    elif entry.name not in _NOT_DATA and entry.name.lower().endswith(SUFFIXES):
                        yield Path(entry.path)
        level = below


@router.post("/api/upload", openapi_extra=_UPLOAD_FORM, response_model=None)
async def upload(request: Request, panel: Panel) -> dict[str, str | int] | Response:
    """Take in a data file, of at most 1 GiB. It never takes another file's place: ``path`` is where
    it lies."""
    try:
        path, size_bytes = await take_upload(request, panel.folder / _UPLOADS)
    except TooLarge as error:
        return problem(413, error.what, error.allowed, error.fix)
    return {"path": f"./{_UPLOADS}/{path.name}", "size_bytes": size_bytes}


@router.post("/api/preview")
async def preview(body: Preview, panel: Panel) -> JSONObject:
    """The first rows as the model will see them: ``paceline data preview --json``."""
    words = ["data", "preview", "CONFIG", "--rows", str(body.rows)]
    return await panel.verbs.run("preview", words, body.yaml)
