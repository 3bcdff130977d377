"""Requests to a server of vLLM, with a server that only checks the key."""

import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from raised import raises_error

from paceline.core.errors import RunError
from paceline.train.rollouts.engines.vllm_server import ask_server


class KeyHandler(BaseHTTPRequestHandler):
    """Answers requests that have the key."""

    def do_GET(self) -> None:
        has_key = self.headers.get("Authorization") == "Bearer secret"
        self.send_response(200 if has_key else 401)
        self.end_headers()
        self.wfile.write(b'{"data": []}' if has_key else b"no key")

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), KeyHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("data", [None, b"{}"], ids=["get", "post"])
def test_every_request_has_the_key(
    url: str, data: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with raises_error(RunError, code="vllm-server-failed", naming="401 no key"):
        ask_server(urllib.request.Request(f"{url}/v1/models", data))
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert ask_server(urllib.request.Request(f"{url}/v1/models", data)) == {"data": []}
