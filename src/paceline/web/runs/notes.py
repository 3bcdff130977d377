"""What users add to runs in the panel: a name, a note, tags, and whether a run is archived."""

import threading
from pathlib import Path
from typing import TypedDict, cast

from pydantic import JsonValue

from paceline.core.errors import ConfigError
from paceline.core.files import write_json_atomic
from paceline.web.files import as_object, json_inside, stat_inside

NOTES = ".paceline-ui.json"


class Note(TypedDict):
    """What users added to a run. ``name``: the name to show instead of its folder's, or empty."""

    name: str
    note: str
    tags: list[str]
    archived: bool


class NoteChange(TypedDict, total=False):
    """The keys of a :class:`Note` to set."""

    name: str
    note: str
    tags: list[str]
    archived: bool


class Notes:
    """The notes on runs, by the path of a run in the served folder. They are stored in a file of
    that folder; a run's own folder is never written to."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NOTES
        self._lock = threading.Lock()
        self._key: tuple[int, int] | None = None
        self._runs: JsonValue = {}

    def of(self, run: str) -> Note:
        """Return the note on a run."""
        with self._lock:
            return _note(as_object(self._read()).get(run))

    def update(self, run: str, change: NoteChange) -> None:
        """Change the note on a run.

        Raises:
            ConfigError: the file was not written by the panel, or it cannot be written.
        """
        with self._lock:
            note: Note = {**_note(as_object(self._read()).get(run)), **change}
            self._write(run, note)

    def remove(self, run: str) -> None:
        """Forget the note on a run that was deleted."""
        with self._lock:
            if run in as_object(self._read()):
                self._write(run, _note(None))

    def _write(self, run: str, note: Note) -> None:
        runs = self._read()
        if not isinstance(runs, dict):
            raise ConfigError(
                "`{path}` was not written by the panel",
                code="not-written-by-panel",
                fix="repair it, or move it away",
                path=self.path,
            )
        runs = {name: entry for name, entry in runs.items() if name != run}
        used = {key: value for key, value in note.items() if value}
        if used:
            runs[run] = cast(JsonValue, used)
        try:
            write_json_atomic(self.path, {"runs": runs})
        except OSError as error:
            raise ConfigError(
                "cannot write `{path}`: {reason}",
                code="panel-file-not-written",
                fix="free some disk space, or make the folder writable",
                path=self.path,
                reason=error.strerror,
            ) from error

    def _read(self) -> JsonValue:
        """Return the entries of the file; an object only if the panel wrote it."""
        status = stat_inside(self.path)
        key = None if status is None else (status.st_size, status.st_mtime_ns)
        if key != self._key:
            self._key = key
            self._runs = {} if key is None else (json_inside(self.path) or {}).get("runs")
        return self._runs


def _note(entry: JsonValue) -> Note:
    fields = as_object(entry)
    tags = fields.get("tags")
    return {
        "name": str(fields.get("name") or ""),
        "note": str(fields.get("note") or ""),
        "tags": [str(tag) for tag in tags] if isinstance(tags, list) else [],
        "archived": fields.get("archived") is True,
    }
