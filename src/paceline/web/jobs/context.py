"""What the routes that start things share: the processes of this server, and which run an id
means."""

from __future__ import annotations

import os
from pathlib import Path

from fastapi import FastAPI, Request

from paceline.web.jobs.chat import Chat
from paceline.web.jobs.commands import CommandRunner
from paceline.web.jobs.runs import Launched, RunLauncher
from paceline.web.runs.discovery import run_id


class LaunchContext:
    """One a server. ``folder``: the served one, without links in its path."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.realpath(folder))
        self.verbs = CommandRunner(self.folder)
        self.launches = RunLauncher(self.folder)
        self.chat = Chat()

    @staticmethod
    def of(request: Request) -> LaunchContext:
        state = request.app.state
        if not hasattr(state, "starting"):
            state.starting = LaunchContext(state.panel.folder)
        found: LaunchContext = state.starting
        return found

    def id_of(self, run: Path) -> str:
        return run_id(os.path.relpath(run, self.folder))

    def launched(self, id: str) -> Launched | None:
        """The run with this id, where this server started it."""
        return next((one for one in self.launches.all() if self.id_of(one.folder) == id), None)

    async def close(self) -> None:
        """End what serves this server alone. Runs go on."""
        self.verbs.close()
        worker = self.chat.close()
        if worker is not None:
            await worker.wait()


def run_folder(request: Request, id: str) -> Path:
    """Folder of the run with this id, also of one that is only starting.

    Raises:
        NotFound: there is none.
    """
    launched = LaunchContext.of(request).launched(id)
    if launched is not None and launched.folder.is_dir():
        return launched.folder
    root: Path = request.app.state.panel.runs.get(id).root
    return root


async def close(app: FastAPI) -> None:
    """As the server ends."""
    if hasattr(app.state, "starting"):
        await app.state.starting.close()
