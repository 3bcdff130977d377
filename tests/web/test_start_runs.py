"""Test that runs are started, stopped and resumed through the panel."""

import json
import os
import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest
from event_logs import begin, emit_steps
from panels import wait_until
from starts import MICRO, events, post_failing_start, post_json, wait_for_status, wait_for_step

from paceline.core.processes import host_name
from paceline.web.folders import Folders
from paceline.web.jobs import runs
from paceline.web.jobs.runs import START, RunLauncher, check_name, started_from, stop


@pytest.mark.soak
def test_starts_a_run_that_finishes(serve, tmp_path):
    served = serve(tmp_path)
    started = post_json(served, "/api/start", yaml=MICRO % 6, name="first")
    assert started["name"] == "first"
    wait_until(lambda: served.get(f"/api/launches/{started['id']}")["shows"], timeout_s=120.0)
    wait_for_status(served, started["id"], "done")
    run = tmp_path / "first"
    assert len(events(run, "step")) == 6
    text = (run / "panel.yaml").read_text()
    assert "output_dir: ./first\n" in text
    assert text.replace("output_dir: ./first\n", "") == MICRO % 6
    assert "6 steps" in (run / "console.log").read_text()
    # The name is now in use, and the run is not changed.
    error = post_json(served, "/api/start", 400, yaml=MICRO % 6, name="first")["error"]
    assert "already" in error["what"]
    assert "choose another name" in error["fix"]
    exported = post_json(served, f"/api/runs/{started['id']}/export")
    assert exported == {"path": str(run / "model"), "merged": False}


@pytest.mark.soak
def test_stops_a_run_with_a_checkpoint_and_resumes_it(serve, tmp_path):
    served = serve(tmp_path)
    id = post_json(served, "/api/start", yaml=MICRO % 4000, name="long")["id"]
    wait_for_step(served, id, 2)
    pid = post_json(served, f"/api/runs/{id}/stop")["pid"]
    assert psutil.pid_exists(pid)
    assert "already stopping" in post_json(served, f"/api/runs/{id}/stop", 409)["error"]["what"]
    wait_for_status(served, id, "stopped")
    run = tmp_path / "long"
    stopped_at = events(run, "run_end")[-1]["step"]
    assert (run / "checkpoints" / f"step-{stopped_at:08d}" / "manifest.json").is_file()
    wait_until(lambda: not psutil.pid_exists(pid))
    assert "is not running" in post_json(served, f"/api/runs/{id}/stop", 400)["error"]["what"]

    last = stopped_at + 3
    shorter = served.get(f"/api/runs/{id}/resume")["yaml"].replace("4000", str(last))
    changes = post_json(served, f"/api/runs/{id}/diff", yaml=shorter)["changes"]
    assert changes == [
        {"key": "train_args.max_steps", "old": 4000, "new": last, "needs_allow": True}
    ]
    error = post_failing_start(served, f"/api/runs/{id}/resume", yaml=shorter)
    assert f"train_args.max_steps: 4000 → {last}" in error["what"]
    assert "4000" in (run / "panel.yaml").read_text()  # rejected changes are not saved
    post_json(served, f"/api/runs/{id}/resume", yaml=shorter, allow_config_change=True)
    wait_for_status(served, id, "done")
    assert events(run, "resume")[-1]["step"] == stopped_at
    assert events(run, "run_end")[-1]["step"] == last


@pytest.mark.soak
def test_returns_errors_of_the_command(serve, tmp_path):
    served = serve(tmp_path)
    error = post_failing_start(
        served,
        "/api/start",
        yaml="model: builtin:nothing\ndataset: builtin:python-docs\n",
        name="bad",
    )
    assert "`builtin:nothing`" in error["what"]
    assert "builtin:qwen2-micro" in error["allowed"]
    assert list(tmp_path.iterdir()) == []  # the name is free for the next try
    error = post_json(served, "/api/start", 400, yaml="model: m\n", name="bad")["error"]
    assert "`dataset` is missing" in error["what"]


@pytest.mark.parametrize(
    "name", ["", "../up", "a/b", ".hidden", "a b", "x" * 101, "näme", "..", "a\n", "-rf"]
)
def test_rejects_invalid_names(serve, tmp_path, name):
    error = post_json(serve(tmp_path / "runs"), "/api/start", 400, yaml=MICRO % 2, name=name)[
        "error"
    ]
    assert "not a valid name" in error["what"]
    assert list((tmp_path / "runs").iterdir()) == []


def test_name_of_a_link_is_in_use(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(runs.ConfigError, match="already"):
        check_name(tmp_path / "runs", "link")


@pytest.mark.soak
def test_run_continues_after_the_panel_stops(serve, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "paceline",
        "ui",
        str(folder),
        "--port",
        "0",
        "--no-browser",
        "--json",
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        started = json.loads(server.stdout.readline())
        url = started["url"].partition("?")[0]
        body = {"yaml": MICRO % 4000, "name": "on"}
        response = httpx.post(
            f"{url}api/start", json=body, headers={"X-Paceline-Token": started["token"]}, timeout=60
        )
        id = response.json()["id"]
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    served = serve(folder)  # another panel: it knows the run from its files alone
    wait_for_step(served, id, 1)
    before = served.get(f"/api/runs/{id}")["step"]
    wait_for_step(served, id, before + 3)
    post_json(served, f"/api/runs/{id}/stop")
    wait_for_status(served, id, "stopped")


def sleeping() -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_never_stops_another_process_with_the_same_pid(tmp_path):
    """The process ID of a run was reused after the run had died."""
    log = begin(tmp_path / "one", steps=100)
    emit_steps(log, 1, 3)
    run = tmp_path / "one"
    other = sleeping()
    try:
        text = (run / "events.jsonl").read_text()
        began = events(run, "run_start")[0]
        text = text.replace(f'"pid": {began["pid"]}', f'"pid": {other.pid}')
        text = text.replace(f'"time": {began["time"]}', f'"time": {began["time"] - 3600}')
        (run / "events.jsonl").write_text(text)
        for locked in (False, True):
            handle = runs.lock_run(runs.RunDir(run), 0.0) if locked else None
            with pytest.raises(runs.ConfigError, match="is not running"):
                stop(run, RunLauncher(Folders(tmp_path, tmp_path)))
            if handle is not None:
                handle.close()
        (run / "events.jsonl").unlink()
        started = {
            "pid": other.pid,
            "host": host_name(),
            "cwd": str(tmp_path),
            "time": time.time() - 3600,
        }
        runs.write_json_atomic(run / START, started)
        with pytest.raises(runs.ConfigError, match="no longer exists"):
            stop(run, RunLauncher(Folders(tmp_path, tmp_path)))
        assert other.poll() is None
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()


def test_does_not_stop_a_run_on_another_host(tmp_path):
    log = begin(tmp_path / "one", steps=100)
    emit_steps(log, 1, 3)
    path = tmp_path / "one" / "events.jsonl"
    path.write_text(path.read_text().replace(f'"host": "{host_name()}"', '"host": "elsewhere"'))
    with pytest.raises(runs.ConfigError, match="elsewhere"):
        stop(tmp_path / "one", RunLauncher(Folders(tmp_path, tmp_path)))


def test_relative_paths_are_relative_to_the_start_directory(tmp_path):
    run = tmp_path / "output" / "one"
    begin(run, steps=10)
    path = run / "events.jsonl"
    output_dir = events(run, "run_start")[0].get("output_dir")
    if output_dir is None:
        path.write_text(
            path.read_text().replace(
                '"type": "run_start"', '"type": "run_start", "output_dir": "output/one"', 1
            )
        )
    else:
        path.write_text(
            path.read_text().replace(
                f'"output_dir": "{output_dir}"', '"output_dir": "output/one"', 1
            )
        )
    assert started_from(run, tmp_path / "output") == tmp_path
    assert os.path.isdir(started_from(tmp_path, tmp_path))
