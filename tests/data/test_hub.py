"""Datasets and configs from a local HTTP server that imitates the Hugging Face Hub."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROWS = b'{"instruction":"do","output":"done"}\n' * 20
COMMIT, BLOB = "a" * 40, "b" * 40


class _HubHandler(BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass

    def _respond(self, body: bytes, code: int = 200, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        file = {"type": "file", "path": "train.jsonl", "size": len(ROWS), "oid": BLOB}
        if self.path.startswith("/api/datasets/user/rows/tree"):
            self._respond(json.dumps([file]).encode(), Content_Type="application/json")
        elif self.path.startswith("/api/datasets/user/rows"):
            dataset_info = {
                "id": "user/rows",
                "sha": COMMIT,
                "siblings": [{"rfilename": "train.jsonl"}],
                "private": False,
                "gated": False,
            }
            self._respond(json.dumps(dataset_info).encode(), Content_Type="application/json")
        elif self.path.endswith(f"resolve/{COMMIT}/train.jsonl"):
            self._respond(ROWS, ETag=f'"{BLOB}"', X_Repo_Commit=COMMIT)
        elif self.path == "/user/pictures/resolve/main/config.json":
            body = json.dumps({"model_type": "smolvlm"}).encode()
            self._respond(body, ETag=f'"{BLOB}"', X_Repo_Commit=COMMIT)
        elif self.path.startswith("/api/datasets/"):
            self._respond(b"{}", 404, X_Error_Code="RepoNotFound")
        else:
            self._respond(b"{}", 404, X_Error_Code="EntryNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _HubHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def prepare(dataset: str, hub: ThreadingHTTPServer, cache: Path) -> str:
    code = (
        "import sys; from paceline.config.schema import Config; from paceline.data.encoding.prepare"
        " import prepare_tokens; from paceline.models.builtin import resolve_model; from"
        " paceline.core.errors import ConfigError\nconfig ="
        f" Config(model='builtin:qwen2-micro', dataset={dataset!r})\ntry: t ="
        " prepare_tokens(config, 'sft', resolve_model); print(t.num_train, t.notices)\nexcept"
        " ConfigError as error: print(error)\nprint('datasets' in sys.modules)"
    )
    return execute(code, hub, cache)


def execute(code: str, hub: ThreadingHTTPServer, cache: Path) -> str:
    """Run Python code in a process that uses the server; return what it prints."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(cache),
    }
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.slow
@pytest.mark.soak
def test_rows_of_hub_dataset_are_streamed(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    code = (
        "from paceline.config.schema import Config; from paceline.data.streaming.prepare import"
        " prepare_stream; from paceline.models.builtin import resolve_model\nconfig ="
        " Config(model='builtin:qwen2-micro', dataset='user/rows', streaming=True,"
        " train_args={'max_steps': 5})\nstream = prepare_stream(config, 'sft', resolve_model)\n"
        "samples, counts = stream.dataset.read([(0, number) for number in range(20)])\n"
        "print(len(samples), counts.read, stream.notices)"
    )
    output = execute(code, hub, tmp_path)
    assert output.startswith("20 20 ")
    assert "user/rows: 1 file on the hub" in output


@pytest.mark.slow
def test_vision_language_model_is_recognized_before_it_is_downloaded(
    hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    code = (
        "from paceline.config.schema import Config; from paceline.models.kinds import reads_images"
        "\nfor name in ('user/pictures', 'user/missing'): print(reads_images(Config(model=name,"
        " dataset='d')))"
    )
    assert execute(code, hub, tmp_path).split() == ["True", "False"]


@pytest.mark.slow
def test_dataset_is_downloaded_once_and_cached_when_hub_is_offline(
    hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    first = prepare("user/rows#7", hub, tmp_path)
    assert first.startswith("7 ")
    assert "tokenized in" in first
    second = prepare("user/rows#7", hub, tmp_path)
    assert "from the token cache" in second
    # The `datasets` library, which takes seconds to import, is not needed.
    assert second.endswith("False\n")
    assert "or it is private" in prepare("user/missing", hub, tmp_path)
    hub.shutdown()
    hub.server_close()
    third = prepare("user/rows#7", hub, tmp_path)
    assert "from the token cache" in third
    assert "using the downloaded copy" in third
