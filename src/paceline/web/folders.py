"""The two folders that the panel works in. Relative paths in configs start at the folder where
`paceline ui` was started; runs and uploaded files are in the served folder."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.web.files import JSONObject, shown


@dataclass(frozen=True)
class Folders:
    """Both folders, without symbolic links.

    Args:
        start: the folder where `paceline ui` was started.
        served: the folder that contains the runs.
    """

    start: Path
    served: Path

    def named(self, path: Path) -> str:
        """Return the name of a path in a config: relative if the path is below ``start``."""
        relative = os.path.relpath(path, self.start)
        return str(path) if relative.startswith("..") else f"./{relative}"

    def shown(self) -> JSONObject:
        """Return the names of both folders for the page."""
        return {"start": shown(str(self.start)), "served": shown(str(self.served))}

    def roots(self) -> Iterator[tuple[str, Path]]:
        """Yield the kind (``start`` or ``served``) of each folder, and the folder."""
        yield "start", self.start
        if self.served != self.start:
            yield "served", self.served
