"""A panel on a port of its own, served as `paceline ui` serves it."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from paceline.web.binding import bind
from paceline.web.server import PanelServer
from paceline.web.state import AppState


@dataclass
class Served:
    """A running server. ``client`` has its address, and no token."""

    panel: AppState
    client: httpx.Client

    def get(self, path: str, **options: object) -> dict:
        answer = self.client.get(path, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def the_run(self, name: str | None = None) -> str:
        """The id of the only run, or of the one with this name."""
        runs = [run for run in self.get("/api/runs")["runs"] if name in (None, run["name"])]
        assert len(runs) == 1, runs
        return runs[0]["id"]

    @property
    def with_token(self) -> dict[str, str]:
        return {"X-Paceline-Token": self.panel.token}


@contextlib.contextmanager
def serving(folder: Path, host: str = "127.0.0.1") -> Iterator[Served]:
    """A panel for ``folder``, as long as the block lasts."""
    folder.mkdir(parents=True, exist_ok=True)
    bound = bind(host, 0)
    panel = AppState(folder, bound.getsockname()[1], host)
    server = PanelServer(panel)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{panel.port}", timeout=60) as client:
            yield Served(panel, client)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not end"


def until(check: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for it; fail where it does not come."""
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)
