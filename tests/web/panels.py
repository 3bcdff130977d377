"""Run the panel on a free port, in the way `paceline ui` does."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from paceline.core.server.binding import bind
from paceline.web.server import PanelServer
from paceline.web.state import AppState


@dataclass
class Served:
    """A running server. ``client`` uses its address and sends no token."""

    panel: AppState
    client: httpx.Client

    def get(self, path: str, **options: object) -> dict:
        response = self.client.get(path, **options)
        assert response.status_code == 200, response.text
        return response.json()

    def find_run_id(self, name: str | None = None) -> str:
        """Return the ID of the only run, or of the run with this name."""
        runs = [run for run in self.get("/api/runs")["runs"] if name in (None, run["name"])]
        assert len(runs) == 1, runs
        return runs[0]["id"]

    @property
    def with_token(self) -> dict[str, str]:
        return {"X-Paceline-Token": self.panel.token}


@contextlib.contextmanager
def serve_panel(
    folder: Path, host: str = "127.0.0.1", start_folder: Path | None = None
) -> Iterator[Served]:
    """Serve a panel for ``folder`` during the block, as if it was started in ``start_folder``
    (default: in ``folder``)."""
    folder.mkdir(parents=True, exist_ok=True)
    bound = bind(host, 0)
    panel = AppState(folder, bound.getsockname()[1], host, start_folder=start_folder or folder)
    server = PanelServer(panel)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{panel.port}", timeout=60) as client:
            yield Served(panel, client)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"


def wait_until(check: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait until ``check`` returns True, and fail after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)
