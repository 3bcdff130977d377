"""The runs below a folder: found again and again, each known by an id that no path can be made
of."""

import hashlib
import os
import threading
import time
from pathlib import Path
from typing import TypedDict

from pydantic import JsonValue

from paceline.core.errors import ConfigError
from paceline.core.files import write_json_atomic
from paceline.core.run_dir import RunDir
from paceline.web.files import json_inside, shown, stat_inside
from paceline.web.jobs.runs import START
from paceline.web.responses import NotFound
from paceline.web.runs.index import IndexWorker, RunIndex
from paceline.web.runs.summary import RunState, RunSummary

NOTES = ".paceline-ui.json"
_DEPTH = 8  # folders below the served one
_FOLDERS = 20_000  # looked into in one search
_FRESH_S = 0.9  # a search this recent is not made again
_NEVER = {
    "checkpoints",
    "model",
    "tensorboard",
    "node_modules",
    "__pycache__",
    "venv",
    "site-packages",
}


class Note(TypedDict):
    """What a person wrote on a run; empty without it."""

    note: str
    tags: list[str]


class RunEntry(RunState, Note):
    """A run as ``GET /api/runs`` gives it."""

    id: str
    name: str
    path: str


class Notes:
    """Notes and tags on runs, by a run's path in the folder. They are the panel's own, in a file of
    the served folder; a run is never written to."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NOTES
        self._lock = threading.Lock()
        self._key: tuple[int, int] | None = None
        self._runs: JsonValue = {}

    def of(self, run: str) -> Note:
        """Those of a run."""
        with self._lock:
            runs = self._read()
        entry = runs.get(run) if isinstance(runs, dict) else None
        if not isinstance(entry, dict):
            return {"note": "", "tags": []}
        tags = entry.get("tags")
        return {
            "note": str(entry.get("note") or ""),
            "tags": [str(tag) for tag in tags] if isinstance(tags, list) else [],
        }

    def put(self, run: str, note: str, tags: list[str]) -> None:
        """Keep them.

        Raises:
            ConfigError: the file holds something else, or cannot be written.
        """
        with self._lock:
            runs = self._read()
            if not isinstance(runs, dict):
                raise ConfigError(
                    f"`{self.path}` is not what the panel wrote", fix="repair it, or move it away"
                )
            kept = {name: entry for name, entry in runs.items() if name != run}
            if note or tags:
                kept[run] = {"note": note, "tags": [*tags]}
            try:
                write_json_atomic(self.path, {"runs": kept})
            except OSError as error:
                raise ConfigError(
                    f"`{self.path}` cannot be written ({error.strerror})",
                    fix="make room, or set the rights",
                ) from error

    def _read(self) -> JsonValue:
        """What the file says of the runs, by path, if it is what the panel wrote."""
        status = stat_inside(self.path)
        key = None if status is None else (status.st_size, status.st_mtime_ns)
        if key != self._key:
            self._key = key
            self._runs = {} if key is None else (json_inside(self.path) or {}).get("runs")
        return self._runs


class Run:
    """One run's folder. Making one reads nothing."""

    def __init__(self, folder: Path, root: Path, notes: Notes) -> None:
        self.root = root
        self.run_dir = RunDir(root)
        self.events, self.report = self.run_dir.events, self.run_dir.report
        relative = os.path.relpath(root, folder)
        self.id = run_id(relative)
        self.path = shown(relative)
        self.name = shown(root.name)
        self.index = RunIndex(self.events)
        self.digest = RunSummary(self.run_dir)
        self._notes = notes
        self._lock = threading.Lock()

    def summary(self) -> RunEntry:
        """As ``GET /api/runs`` gives it."""
        with self._lock:
            self.digest.refresh()
            state = self.digest.summary()
        if state["restarts"] is None and self.index.num_starts and not self.index.behind_bytes:
            state["restarts"] = self.index.num_starts - 1
        return {
            "id": self.id,
            "name": self.name,
            "path": self.path,
            **state,
            **self._notes.of(self.path),
        }


def run_id(relative: str) -> str:
    """Of a run's path below the served folder: 12 hexadecimal digits."""
    return hashlib.sha256(os.fsencode(relative)).hexdigest()[:12]


class Runs:
    """Finds runs; keeps what was read of each. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.realpath(folder))
        self.notes = Notes(self.folder)
        self.indexer = IndexWorker()
        self.problem: str | None = None
        self._runs: dict[str, Run] = {}
        self._lock = threading.Lock()
        self._searched_at = -float("inf")

    def all(self, fresh: bool = False) -> list[Run]:
        """Every run there is. ``fresh``: search now, however recent the last search."""
        with self._lock:
            if fresh or time.monotonic() - self._searched_at > _FRESH_S:
                self._search()
            return list(self._runs.values())

    def summaries(self) -> list[RunEntry]:
        """Of every run, as ``GET /api/runs`` gives it; the latest first."""
        return sorted(
            (run.summary() for run in self.all()),
            key=lambda entry: entry["updated_at"] or entry["started_at"] or 0.0,
            reverse=True,
        )

    def get(self, id: str) -> Run:
        """A run that was found, and is still there.

        Raises:
            NotFound: there is none.
        """
        run = self._runs.get(id)
        if run is None:  # begun a moment ago, perhaps
            self.all(fresh=True)
            run = self._runs.get(id)
        if run is None or not is_run(run.root):
            raise NotFound(
                f"there is no run `{id[:40]}`", fix="it was moved or deleted; go back to the list"
            )
        return run

    def close(self) -> None:
        self.indexer.close()

    def _search(self) -> None:
        roots = self._roots()
        known = {run.root: run for run in self._runs.values()}
        runs = [known.get(root) or Run(self.folder, root, self.notes) for root in roots]
        self._runs = {run.id: run for run in runs}
        self._searched_at = time.monotonic()

    def _roots(self) -> list[Path]:
        found, looked_at = [], 0
        level = [self.folder]
        for _ in range(_DEPTH + 1):
            below: list[Path] = []
            for folder in level:
                looked_at += 1
                if looked_at > _FOLDERS:
                    break
                if _has_begun(str(folder)):
                    found.append(folder)
                    if folder != self.folder:
                        continue
                below += _folders(folder)
            level = below
        too_many = looked_at > _FOLDERS
        self.problem = (
            f"only the first {_FOLDERS:,} folders were searched for runs; name a smaller one"
            if too_many
            else None
        )
        return found


def is_run(root: Path) -> bool:
    """Whether a run has begun here, and the folder is reached through no link."""
    return _has_begun(str(root)) and os.path.realpath(root) == str(root)


def _has_begun(root: str) -> bool:
    """It has an event log, a lock, or was started from a panel."""
    return any(
        stat_inside(f"{root}/{name}") is not None for name in ("events.jsonl", ".lock", START)
    )


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [one.name for one in entries if one.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [
        folder / name for name in sorted(names) if name not in _NEVER and not name.startswith(".")
    ]
