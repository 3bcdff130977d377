"""Routes of what a config can name: the datasets and models in the panel's two folders, those that
need no file, and the models in the hub's cache. They require the token, because the folder where
`paceline ui` was started may contain more than runs. Symbolic links are not followed."""

import contextlib
import os
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path

from fastapi import APIRouter

from paceline.core.hub import cached_models
from paceline.web.api.datasets import SUFFIXES
from paceline.web.files import JSONObject, shown, stat_inside
from paceline.web.presets import BUILT_IN_DATASETS, BUILT_IN_MODELS, HUB_MODELS
from paceline.web.runs.discovery import is_run
from paceline.web.state import AppState, Panel

router = APIRouter()

_MAX_SHOWN, _MAX_FOLDERS, _MAX_DEPTH = 500, 5000, 4
_NOT_DATA = {
    "config.json",
    "report.json",
    "panel.json",
    "events.jsonl",
    "package.json",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE.md",
    "LICENSE.txt",
    "requirements.txt",
}
_WEIGHTS = (".safetensors", ".bin")
#: The folders of a run that contain its model.
_RUN_MODELS = ("model", "exported")
_NOT_SEARCHED = ("node_modules", "site-packages")


@router.post("/api/datasets")
def datasets(panel: Panel) -> JSONObject:
    """Return the data files below the two folders, newest first, without the files of runs, and the
    built-in datasets. ``left_out``: the number of files that are not listed."""
    files = [
        {**_place(panel, kind, path), "size_bytes": status.st_size, "modified_at": status.st_mtime}
        for kind, path in _below(panel, _data_files)
        if (status := stat_inside(path)) is not None
    ]
    return {
        **_newest("datasets", files),
        "folders": _searched(panel),
        "builtin": [{"path": path, "task": task} for path, task in BUILT_IN_DATASETS.items()],
    }


@router.post("/api/models")
def models(panel: Panel) -> JSONObject:
    """Return the folders with a model below the two folders, newest first, the models in the hub's
    cache, common models of the hub, and the built-in models."""
    folders = [
        {**_place(panel, kind, path), "modified_at": status.st_mtime}
        for kind, path in _below(panel, _model_folders)
        if (status := stat_inside(path / "config.json")) is not None
    ]
    cached = cached_models()
    return {
        **_newest("models", folders),
        "folders": _searched(panel),
        "cached": [{"path": name, "parameters": HUB_MODELS.get(name)} for name in cached],
        "hub": [
            {"path": name, "parameters": parameters}
            for name, parameters in HUB_MODELS.items()
            if name not in cached
        ],
        "builtin": [{"path": path, "task": task} for path, task in BUILT_IN_MODELS.items()],
    }


def _place(panel: AppState, kind: str, path: Path) -> JSONObject:
    return {"path": shown(panel.folders.named(path)), "folder": kind}


def _searched(panel: AppState) -> JSONObject:
    """Return the searched folders: one if both are the same."""
    return {kind: shown(str(root)) for kind, root in panel.folders.roots()}


def _newest(name: str, entries: list[JSONObject]) -> JSONObject:
    entries.sort(key=itemgetter("modified_at"), reverse=True)
    return {name: [*entries[:_MAX_SHOWN]], "left_out": len(entries[_MAX_SHOWN:])}


#: Returns what is listed of a folder, from its entries.
Select = Callable[[Path, list[os.DirEntry[str]]], Iterator[Path]]


def _below(panel: AppState, select: Select) -> Iterator[tuple[str, Path]]:
    """Yield what ``select`` finds in the folders down to a maximum depth, and in which of the two
    folders it is. If one of them is in the other, it is searched once."""
    roots = [root for _, root in panel.folders.roots()]
    for kind, root in panel.folders.roots():
        level, num_folders = [root], 0
        for _ in range(_MAX_DEPTH):
            below: list[Path] = []
            for folder in level:
                num_folders += 1
                if num_folders > _MAX_FOLDERS or (folder != root and folder in roots):
                    continue
                entries = _entries(folder)
                below += _subfolders(folder, entries, is_root=folder == root)
                for path in select(folder, entries):
                    yield kind, path
            level = below


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the visible entries of a folder that are no symbolic links."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        own = [
            entry
            for entry in entries
            if not entry.name.startswith((".", "__")) and not entry.is_symlink()
        ]
        return sorted(own, key=lambda entry: entry.name)
    return []


def _subfolders(folder: Path, entries: list[os.DirEntry[str]], is_root: bool) -> Iterator[Path]:
    """Yield the subfolders to search: of a run only those with its model."""
    in_run = not is_root and is_run(folder)
    for entry in entries:
        is_searched = entry.name in _RUN_MODELS if in_run else entry.name not in _NOT_SEARCHED
        if is_searched and entry.is_dir(follow_symlinks=False):
            yield Path(entry.path)


def _data_files(folder: Path, entries: list[os.DirEntry[str]]) -> Iterator[Path]:
    if is_run(folder) or _is_model(entries):
        return
    for entry in entries:
        is_data = entry.name not in _NOT_DATA and entry.name.lower().endswith(SUFFIXES)
        if is_data and entry.is_file(follow_symlinks=False):
            yield Path(entry.path)


def _model_folders(folder: Path, entries: list[os.DirEntry[str]]) -> Iterator[Path]:
    if _is_model(entries):
        yield folder


def _is_model(entries: list[os.DirEntry[str]]) -> bool:
    names = {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
    return "config.json" in names and any(name.endswith(_WEIGHTS) for name in names)
