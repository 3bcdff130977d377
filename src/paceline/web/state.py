"""What every route needs of the server it belongs to."""

import secrets
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import Request

from paceline.web.files import shown
from paceline.web.runs.discovery import Runs
from paceline.web.runs.stream import Streams


@dataclass
class AppState:
    """One served folder.

    Args:
        folder: with the runs below it, resolved.
        port: bound.
        host: bound.
        token: that whatever changes something needs.
    """

    folder: Path
    port: int
    host: str = "127.0.0.1"
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    def __post_init__(self) -> None:
        self.runs = Runs(self.folder)
        self.folder = self.runs.folder
        self.shown_folder = shown(str(self.folder))
        self.streams = Streams(self.runs)

    def close(self) -> None:
        self.streams.close()
        self.runs.close()


def panel_of(request: Request) -> AppState:
    """Of the server that a request came to."""
    panel: AppState = request.app.state.panel
    return panel
