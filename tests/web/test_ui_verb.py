"""Test `paceline ui` on the command line."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from commands import start
from event_logs import finished


@contextmanager
def start_ui(*args: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    with start(*args, "--no-browser", verb="ui", cwd=cwd) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def stop(process: subprocess.Popen[str], number: int = signal.SIGINT) -> tuple[str, str]:
    process.send_signal(number)
    return process.communicate(timeout=20)


def read_startup(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def test_serves_until_ctrl_c_and_exits_with_0(tmp_path):
    finished(tmp_path / "runs" / "one")
    with start_ui("runs", "--port", "0", cwd=tmp_path) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{20,}", line)
        assert url is not None, line
        assert str(tmp_path / "runs") in line
        assert "Ctrl-C" in process.stdout.readline()
        page = httpx.get(url[0])
        assert page.status_code == 200
        assert "<script" in page.text
        base = url[0].partition("?")[0]
        assert httpx.get(f"{base}api/runs").json()["runs"][0]["name"] == "one"
        # an open stream must not delay the shutdown
        with httpx.stream("GET", f"{base}api/stream") as open_stream:
            assert open_stream.status_code == 200
            _, err = stop(process)
    assert process.returncode == 0
    assert "runs continue" in err
    assert "Traceback" not in err


def test_json_has_url_token_and_folder(tmp_path):
    with start_ui("--json", "--port=0", cwd=tmp_path) as process:
        response = read_startup(process)
        assert set(response) == {"url", "token", "folder"}
        assert response["url"].endswith(f"?token={response['token']}")
        # the default folder, which is created
        assert response["folder"] == str(tmp_path / "output")
        out, err = stop(process)
    assert out == ""
    assert "created the folder output" in err


def test_uses_the_next_port_if_one_is_in_use(tmp_path):
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        port = occupied.getsockname()[1]
        with start_ui(".", "--json", "--port", str(port), cwd=tmp_path) as process:
            url = read_startup(process)["url"]
            _, err = stop(process)
    bound_port = int(re.search(r":(\d+)/", url)[1])
    assert port < bound_port <= port + 50
    assert f"port {port} is in use; using port {bound_port}" in err


def test_open_address_prints_a_warning(tmp_path):
    with start_ui(".", "--json", "--port", "0", "--host", "0.0.0.0", cwd=tmp_path) as process:
        response = read_startup(process)
        port = re.search(r":(\d+)/", response["url"])[1]
        assert httpx.get(f"http://127.0.0.1:{port}/api/runs").status_code == 401
        with_token = {"X-Paceline-Token": response["token"]}
        assert httpx.get(f"http://127.0.0.1:{port}/api/runs", headers=with_token).status_code == 200
        _, err = stop(process)
    assert "everyone in this network" in err
    assert "the token" in err.replace("\n", " ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["missing"], "mkdir -p missing"),
        (["file.txt"], "is not a folder"),
        ([".", "--port", "70000"], "0 (any free port) to 65535"),
        ([".", "--port", "many"], "--port many"),
        ([".", "--host", "no.such.host.invalid"], "no.such.host.invalid"),
        ([".", "--host", "192.0.2.1"], "not an address of this machine"),
        ([".", "other"], "paceline ui"),
        ([".", "--prot", "80"], "paceline ui"),
    ],
)
def test_invalid_arguments_are_one_error(tmp_path, args, message):
    (tmp_path / "file.txt").touch()
    with start_ui(*args, cwd=tmp_path) as process:
        _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert message in err
    assert "Traceback" not in err


def test_server_imports_no_training_code(tmp_path):
    finished(tmp_path / "one")
    program = """
import sys
from pathlib import Path
import paceline.web.server
from paceline.web.app import create_app
from paceline.web.state import AppState
create_app(AppState(Path("."), 8765)).openapi()
heavy = {"torch", "transformers", "peft", "datasets", "sklearn"}
heavy |= {"paceline.train", "paceline.launch", "paceline.data"}
print(sorted(heavy & set(sys.modules)))
"""
    completed = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert completed.stdout.strip() == "[]", completed.stderr


def test_page_is_complete_and_needs_no_network():
    static = Path(__file__).parents[2] / "src/paceline/web/static"
    index = (static / "index.html").read_text()
    for link in re.findall(r'(?:src|href)="([^"]+)"', index):
        assert (static / link).is_file(), link
    assert not re.search(r"https?://", index)
    # the content security policy allows none of these
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=", index)


def test_static_files_are_revalidated_and_compressed(serve, tmp_path):
    served = serve(tmp_path)
    response = served.client.get("/vendor/uPlot.esm.js", headers={"Accept-Encoding": "gzip"})
    assert response.headers["content-encoding"] == "gzip"
    assert response.headers["cache-control"] == "no-cache"
    cached = served.client.get(
        "/vendor/uPlot.esm.js", headers={"If-None-Match": response.headers["etag"]}
    )
    assert cached.status_code == 304
    assert served.client.get("/api/runs").headers["cache-control"] == "no-store"


def test_killed_server_leaves_runs_unchanged(tmp_path):
    run = finished(tmp_path / "one")
    before = (run / "events.jsonl").read_bytes()
    with start_ui(".", "--json", "--port", "0", cwd=tmp_path) as process:
        url = read_startup(process)["url"]
        httpx.get(url.partition("?")[0] + "api/runs")
        process.kill()
        process.wait(20)
    assert (run / "events.jsonl").read_bytes() == before
    assert sorted(os.listdir(run)) == [
        "checkpoints",
        "config.yaml",
        "events.jsonl",
        "report.html",
        "report.json",
    ]
