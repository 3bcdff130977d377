"""Notes and tags on runs. They are the panel's own, in a file of the served folder; a run is never
written to."""

import threading
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.files import write_json_atomic
from paceline.web.files import json_inside, stat_inside

FILE = ".paceline-ui.json"


class Notes:
    """By a run's path in the folder: ``{note, tags}``."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._lock = threading.Lock()
        self._key: tuple[int, int] | None = None
        self._found: dict[str, Any] = {}

    def of(self, run: str) -> dict[str, Any]:
        """Those of a run: ``note`` is a text (empty without one), ``tags`` a list of words."""
        with self._lock:
            one = self._read().get(run)
        one = one if isinstance(one, dict) else {}
        tags = one.get("tags")
        return {
            "note": str(one.get("note") or ""),
            "tags": [str(tag) for tag in tags] if isinstance(tags, list) else [],
        }

    def put(self, run: str, note: str, tags: list[str]) -> None:
        """Keep them.

        Raises:
            ConfigError: the file holds something else, or cannot be written.
        """
        with self._lock:
            runs = dict(self._read())
            if self._key is not None and not self._whole:
                raise ConfigError(
                    f"`{self.path}` is not what the panel wrote", fix="repair it, or move it away"
                )
            runs[run] = {"note": note, "tags": tags}
            if not note and not tags:
                del runs[run]
            try:
                write_json_atomic(self.path, {"runs": runs})
            except OSError as error:
                raise ConfigError(
                    f"`{self.path}` cannot be written ({error.strerror})",
                    fix="make room, or set the rights",
                ) from error

    def _read(self) -> dict[str, Any]:
        found = stat_inside(self.path)
        key = None if found is None else (found.st_size, found.st_mtime_ns)
        if key != self._key:
            self._key = key
            value = json_inside(self.path) or {}
            runs = value.get("runs")
            self._whole = isinstance(runs, dict)
            self._found = runs if isinstance(runs, dict) else {}
        return self._found
