"""Real runs, started, stopped and resumed through the panel."""

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
from panels import until
from starts import MICRO, ask, events, until_status, until_step

from paceline.core.processes import host_name
from paceline.web.jobs import runs
from paceline.web.jobs.runs import START, RunLauncher, check_name, started_from, stop


@pytest.mark.soak
def test_a_run_is_started_and_comes_to_its_end(serve, tmp_path):
    served = serve(tmp_path)
    started = ask(served, "/api/start", yaml=MICRO % 6, name="first")
    assert started["name"] == "first"
    until(lambda: served.get(f"/api/launches/{started['id']}")["shows"], timeout_s=120.0)
    until_status(served, started["id"], "done")
    run = tmp_path / "first"
    assert len(events(run, "step")) == 6
    text = (run / "panel.yaml").read_text()
    assert "output_dir: ./first\n" in text
    assert text.replace("output_dir: ./first\n", "") == MICRO % 6
    assert "6 steps" in (run / "console.log").read_text()
    # The name is taken now, and nothing of the run is touched.
    error = ask(served, "/api/start", 400, yaml=MICRO % 6, name="first")["error"]
    assert "already" in error["what"]
    assert "choose another name" in error["fix"]
    exported = ask(served, f"/api/runs/{started['id']}/export")
    assert exported == {"path": str(run / "model"), "merged": False}


@pytest.mark.soak
def test_a_run_is_stopped_with_a_checkpoint_and_resumed(serve, tmp_path):
    served = serve(tmp_path)
    id = ask(served, "/api/start", yaml=MICRO % 4000, name="long")["id"]
    until_step(served, id, 2)
    pid = ask(served, f"/api/runs/{id}/stop")["pid"]
    assert psutil.pid_exists(pid)
    assert "already stopping" in ask(served, f"/api/runs/{id}/stop", 409)["error"]["what"]
    until_status(served, id, "stopped")
    run = tmp_path / "long"
    stopped_at = events(run, "run_end")[-1]["step"]
    assert (run / "checkpoints" / f"step-{stopped_at:08d}" / "manifest.json").is_file()
    until(lambda: not psutil.pid_exists(pid))
    assert "is not running" in ask(served, f"/api/runs/{id}/stop", 400)["error"]["what"]

    last = stopped_at + 3
    shorter = served.get(f"/api/runs/{id}/resume")["yaml"].replace("4000", str(last))
    changes = ask(served, f"/api/runs/{id}/diff", yaml=shorter)["changes"]
    assert changes == [
        {"key": "train_args.max_steps", "old": 4000, "new": last, "needs_allow": True}
    ]
    error = ask(served, f"/api/runs/{id}/resume", 400, yaml=shorter)["error"]
    assert f"train_args.max_steps: 4000 → {last}" in error["what"]
    assert "4000" in (run / "panel.yaml").read_text()  # what was refused is not kept
    ask(served, f"/api/runs/{id}/resume", yaml=shorter, allow_config_change=True)
    until_status(served, id, "done")
    assert events(run, "resume")[-1]["step"] == stopped_at
    assert events(run, "run_end")[-1]["step"] == last


@pytest.mark.soak
def test_an_error_of_the_command_is_returned(serve, tmp_path):
    served = serve(tmp_path)
    error = ask(
        served,
        "/api/start",
        400,
        yaml="model: builtin:nothing\ndataset: builtin:python-docs\n",
        name="bad",
    )["error"]
    assert "`builtin:nothing`" in error["what"]
    assert "builtin:qwen2-micro" in error["allowed"]
    assert list(tmp_path.iterdir()) == []  # the name is free for the next try
    error = ask(served, "/api/start", 400, yaml="model: m\n", name="bad")["error"]
    assert "`dataset` is missing" in error["what"]


@pytest.mark.parametrize(
    "name", ["", "../up", "a/b", ".hidden", "a b", "x" * 101, "näme", "..", "a\n", "-rf"]
)
def test_a_name_that_leaves_the_folder_is_refused(serve, tmp_path, name):
    error = ask(serve(tmp_path / "runs"), "/api/start", 400, yaml=MICRO % 2, name=name)["error"]
    assert "not a valid name" in error["what"]
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_name_that_is_a_link_is_taken(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(runs.ConfigError, match="already"):
        check_name(tmp_path / "runs", "link")


@pytest.mark.soak
def test_a_run_outlives_the_panel(serve, tmp_path):
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
        answer = httpx.post(
            f"{url}api/start", json=body, headers={"X-Paceline-Token": started["token"]}, timeout=60
        )
        id = answer.json()["id"]
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    served = serve(folder)  # another panel: it knows the run from its files alone
    until_step(served, id, 1)
    before = served.get(f"/api/runs/{id}")["step"]
    until_step(served, id, before + 3)
    ask(served, f"/api/runs/{id}/stop")
    until_status(served, id, "stopped")


def sleeping() -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_another_process_with_the_pid_of_a_run_is_never_stopped(tmp_path):
    """The number of a run's process went to another one after the run had died."""
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
                stop(run, RunLauncher(tmp_path))
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
            stop(run, RunLauncher(tmp_path))
        assert other.poll() is None
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()


def test_a_run_of_another_host_is_left_alone(tmp_path):
    log = begin(tmp_path / "one", steps=100)
    emit_steps(log, 1, 3)
    path = tmp_path / "one" / "events.jsonl"
    path.write_text(path.read_text().replace(f'"host": "{host_name()}"', '"host": "elsewhere"'))
    with pytest.raises(runs.ConfigError, match="elsewhere"):
        stop(tmp_path / "one", RunLauncher(tmp_path))


def test_relative_paths_count_from_where_the_run_was_started(tmp_path):
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
