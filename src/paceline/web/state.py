"""The state of one server, which every route can use as a parameter."""

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request
from fastapi import Path as PathParameter

from paceline.web.files import JSONObject, shown
from paceline.web.folders import Folders
from paceline.web.jobs.chat import ChatModel
from paceline.web.jobs.commands import CommandRunner
from paceline.web.jobs.planning import Planner
from paceline.web.jobs.runs import Launched, RunLauncher, started_from
from paceline.web.runs.discovery import Runs, run_id
from paceline.web.runs.stream import Streams

#: The id of a run. It cannot contain a path.
RunId = Annotated[str, PathParameter(pattern=r"^[0-9a-f]{12}$")]


@dataclass(frozen=True)
class Explanation:
    """A recording of `paceline explain`.

    Args:
        variant: the algorithm, empty if the topic has none, and the number of ranks.
    """

    variant: JSONObject
    page: bytes


@dataclass
class AppState:
    """One served folder, and the child processes of its server.

    Args:
        folder: the folder that contains the runs.
        port: the port that the server listens on.
        host: the address that the server listens on.
        token: required by every request that changes something.
        start_folder: the folder where `paceline ui` was started.
    """

    folder: Path
    port: int
    host: str = "127.0.0.1"
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    start_folder: Path = field(default_factory=Path.cwd)

    def __post_init__(self) -> None:
        self.runs = Runs(self.folder)
        self.folder = self.runs.folder
        self.shown_folder = shown(str(self.folder))
        self.streams = Streams(self.runs)
        self.folders = Folders(Path(os.path.realpath(self.start_folder)), self.folder)
        self.commands = CommandRunner(self.folders.start)
        self.planner = Planner(self.folders.start)
        self.launches = RunLauncher(self.folders)
        self.chat = ChatModel()
        #: Topic of `paceline explain` → its last recording.
        self.explanations: dict[str, Explanation] = {}

    def id_of(self, run: Path) -> str:
        return run_id(os.path.relpath(run, self.folder))

    def launched(self, id: str) -> Launched | None:
        """Return the run with this id if this server started it."""
        runs = self.launches.by_folder.values()
        return next((launched for launched in runs if self.id_of(launched.folder) == id), None)

    def run_folder(self, id: str) -> Path:
        """Return the folder of the run with this id, which may still be starting.

        Raises:
            NotFound: no run has this id.
        """
        launched = self.launched(id)
        if launched is not None and launched.folder.is_dir():
            return launched.folder
        return self.runs.get(id).root

    def config_folder(self, run_id: str | None) -> Path:
        """Return the folder at which relative paths of a config start.

        Args:
            run_id: the run that is resumed with the config; None for a new run.
        """
        if run_id is None:
            return self.folders.start
        return started_from(self.run_folder(run_id), self.folders.start)

    async def close(self) -> None:
        """End the child processes that serve this server only. Runs continue."""
        self.streams.close()
        self.runs.indexer.close()
        self.commands.close()
        self.launches.close()
        for process in (self.chat.close(), self.planner.close()):
            if process is not None:
                await process.wait()


async def _panel_of(request: Request) -> AppState:
    panel: AppState = request.app.state.panel
    return panel


#: A parameter of a route: the state of the server that received the request.
Panel = Annotated[AppState, Depends(_panel_of)]
