"""Find the runs below a folder. Each is identified by an id that cannot contain a path."""

import hashlib
import os
import threading
import time
from pathlib import Path

import numpy as np

from paceline.core.run_dir import RunDir
from paceline.web.files import shown, stat_inside
from paceline.web.jobs.runs import START
from paceline.web.responses import NotFound
from paceline.web.runs.index import IndexWorker, RunIndex, sample_overview
from paceline.web.runs.notes import Note, Notes
from paceline.web.runs.summary import RunState, RunSummary

_MAX_DEPTH = 8
_MAX_FOLDERS = 20_000
_SPARKLINE_POINTS = 60
_SHORT_LOG_BYTES = 1 << 16
_MAX_AGE_S = 0.9  # a search this recent is not repeated
_SKIPPED = {
    "checkpoints",
    "model",
    "tensorboard",
    "node_modules",
    "__pycache__",
    "venv",
    "site-packages",
}


class RunEntry(RunState, Note):
    """A run as ``GET /api/runs`` returns it. ``folder_name``: the name of its folder, which a
    ``name`` that a user gave hides."""

    id: str
    folder_name: str
    path: str


class Run:
    """The folder of a run. Creating this object reads nothing."""

    def __init__(self, folder: Path, root: Path, notes: Notes) -> None:
        self.root = root
        self.run_dir = RunDir(root)
        relative = os.path.relpath(root, folder)
        self.id = run_id(relative)
        self.path = shown(relative)
        self.name = shown(root.name)
        self.index = RunIndex(self.run_dir.events)
        self.summary = RunSummary(self.run_dir)
        self._notes = notes
        self._lock = threading.Lock()
        self._sparkline: tuple[tuple[int, int], list[float]] | None = None

    def entry(self) -> RunEntry:
        """Return the run as ``GET /api/runs`` returns it."""
        with self._lock:
            self.summary.refresh()
            state = self.summary.state()
        if state["restarts"] is None and self.index.start and not self.index.behind_bytes:
            state["restarts"] = self.index.num_restarts
        note = self._notes.of(self.path)
        return {
            **state,
            **note,
            "id": self.id,
            "name": note["name"] or self.name,
            "folder_name": self.name,
            "path": self.path,
        }

    def sparkline(self) -> list[float]:
        """Return a few values of the loss, spread evenly over the log. They are read again if the
        log has grown."""
        status = stat_inside(self.run_dir.events)
        key = (0, 0) if status is None else (status.st_ino, status.st_size)
        if self._sparkline is None or self._sparkline[0] != key:
            # Of a short log, every line is read: its lines have over a hundred bytes.
            count = key[1] // 100 if key[1] < _SHORT_LOG_BYTES else _SPARKLINE_POINTS
            losses = sample_overview(self.run_dir.events, count).rows["loss"]
            known = losses[np.isfinite(losses)]
            shown = np.linspace(0, len(known) - 1, min(len(known), _SPARKLINE_POINTS)).astype(int)
            self._sparkline = key, [float(f"{loss:.4g}") for loss in known[shown].tolist()]
        return self._sparkline[1]


def run_id(relative: str) -> str:
    """Return the id of a run, 12 hexadecimal digits, from its path below the served folder."""
    return hashlib.sha256(os.fsencode(relative)).hexdigest()[:12]


class Runs:
    """The runs of the served folder, with what was read of each. Threads may share it.

    Attributes:
        problem: why not all runs were found; None if they were.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.realpath(folder))
        self.notes = Notes(self.folder)
        self.indexer = IndexWorker()
        self.problem: str | None = None
        self._runs: dict[str, Run] = {}
        self._lock = threading.Lock()
        self._searched_at = -float("inf")

    def all(self, fresh: bool = False) -> list[Run]:
        """Return all runs. ``fresh``: search now, however recent the last search is."""
        with self._lock:
            if fresh or time.monotonic() - self._searched_at > _MAX_AGE_S:
                known = {run.root: run for run in self._runs.values()}
                runs = [
                    known.get(root) or Run(self.folder, root, self.notes) for root in self._roots()
                ]
                self._runs = {run.id: run for run in runs}
                self._searched_at = time.monotonic()
            return list(self._runs.values())

    def entries(self) -> list[RunEntry]:
        """Return all runs as ``GET /api/runs`` returns them, the latest first."""
        return sorted(
            (run.entry() for run in self.all()),
            key=lambda entry: entry["updated_at"] or entry["started_at"] or 0.0,
            reverse=True,
        )

    def get(self, id: str) -> Run:
        """Return the run with this id.

        Raises:
            NotFound: the run does not exist, or no longer.
        """
        run = self._runs.get(id)
        if run is None:  # it may have started a moment ago
            self.all(fresh=True)
            run = self._runs.get(id)
        if run is None or not is_run(run.root):
            raise NotFound(
                "run `{id}` not found",
                code="run-not-found",
                fix="it may have been moved or deleted; go back to the list of runs",
                id=id[:40],
            )
        return run

    def _roots(self) -> list[Path]:
        roots, num_folders = [], 0
        level = [self.folder]
        for _ in range(_MAX_DEPTH + 1):
            next_level: list[Path] = []
            for folder in level:
                num_folders += 1
                if num_folders > _MAX_FOLDERS:
                    break
                if _has_run_files(str(folder)):
                    roots.append(folder)
                    if folder != self.folder:
                        continue
                next_level += _folders(folder)
            level = next_level
        self.problem = None
        if num_folders > _MAX_FOLDERS:
            self.problem = (
                f"only the first {_MAX_FOLDERS:,} folders were searched for runs. Start"
                " `paceline ui` with a smaller folder"
            )
        return roots


def is_run(root: Path) -> bool:
    """Return whether a folder contains a run and is not reached through a symbolic link."""
    return _has_run_files(str(root)) and os.path.realpath(root) == str(root)


def _has_run_files(root: str) -> bool:
    """Return whether a folder has an event log or a lock, or a run was started in it from the
    panel."""
    return any(
        stat_inside(f"{root}/{name}") is not None for name in ("events.jsonl", ".lock", START)
    )


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [
        folder / name for name in sorted(names) if name not in _SKIPPED and not name.startswith(".")
    ]
