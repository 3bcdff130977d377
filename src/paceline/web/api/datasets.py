"""Routes for datasets: list those in the folder, upload one, and preview its rows."""

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

#: Built-in datasets, and the task that each is for.
BUILT_IN = {
    "builtin:python-docs": "sft",
    "builtin:python-source": "pretrain",
    "builtin:digits": "classify",
    "builtin:clicks": "recommend",
}
_UPLOADS = "datasets"
_MAX_FILES, _MAX_FOLDERS, _MAX_DEPTH = 500, 5000, 4
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
    """A config, and the number of rows to show of each of its datasets."""

    yaml: Annotated[str, Field(max_length=1 << 20)]
    rows: int = Field(5, ge=1, le=100)


@router.get("/api/datasets")
def datasets(panel: Panel) -> JSONObject:
    """Return the data files below the served folder, newest first, without the files of runs, and
    the built-in datasets. ``left_out``: the number of files that are not listed."""
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
        "datasets": [*files[:_MAX_FILES]],
        "left_out": len(files[_MAX_FILES:]),
        "builtin": [{"path": path, "task": task} for path, task in BUILT_IN.items()],
    }


def _files(folder: Path) -> Iterator[Path]:
    """Yield the data files down to a maximum depth, except those of runs."""
    num_folders = 0
    level = [folder]
    for _ in range(_MAX_DEPTH):
        below: list[Path] = []
        for parent in level:
            num_folders += 1
            if num_folders > _MAX_FOLDERS or (parent != folder and is_run(parent)):
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
    """Store a data file of at most 1 GiB. ``path`` is its path; no existing file is replaced."""
    try:
        path, size_bytes = await take_upload(request, panel.folder / _UPLOADS)
    except TooLarge as error:
        return problem(413, error.what, error.allowed, error.fix)
    return {"path": f"./{_UPLOADS}/{path.name}", "size_bytes": size_bytes}


@router.post("/api/preview")
async def preview(body: Preview, panel: Panel) -> JSONObject:
    """Return the first rows as the model gets them (``paceline data preview --json``)."""
    args = ["data", "preview", "CONFIG", "--rows", str(body.rows)]
    return await panel.commands.run("preview", args, body.yaml)
