"""The uvicorn server of the panel."""

import socket

import uvicorn

from paceline.web.app import create_app
from paceline.web.state import AppState


class PanelServer(uvicorn.Server):
    """Ends the event streams before shutting down, because uvicorn waits for open responses."""

    def __init__(self, panel: AppState) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(panel), http="h11", ws="none", log_level="warning",
                access_log=False, server_header=False, timeout_graceful_shutdown=3,
            )
        )  # fmt: skip
        self.panel = panel

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.panel.streams.close()
        await super().shutdown(sockets)
