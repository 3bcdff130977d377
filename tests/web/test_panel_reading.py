"""Test that runs are discovered and read in any state: live, finished, empty, truncated, of another
version, or deleted."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import pytest
from event_logs import begin, emit_steps, finished

from paceline.core.event_log import read_events
from paceline.core.report import REPORT_KEYS, Report
from paceline.observe.report.html import render_report
from paceline.web.api.machine import machine


def ended_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_folder_without_runs_is_an_empty_list(serve, tmp_path):
    assert serve(tmp_path / "output").get("/api/runs")["runs"] == []


def test_list_contains_the_results_of_a_finished_run(serve, tmp_path):
    finished(tmp_path / "group" / "first")
    (run,) = serve(tmp_path).get("/api/runs")["runs"]
    assert (run["name"], run["path"], run["status"]) == ("first", "group/first", "done")
    assert (run["step"], run["steps"], run["loss"], run["eval_loss"]) == (20, 20, 9 / 20, 0.4)
    assert (run["strategy"], run["world_size"], run["device"]) == ("ddp", 2, "cpu")
    assert (run["model"], run["task"]) == ("builtin:qwen2-micro", "sft")
    assert (run["wall_s"], run["tokens_per_second"], run["restarts"], run["eta_s"]) == (
        12.5,
        13653.0,
        0,
        None,
    )
    assert run["problem"] is None


def test_detail_contains_config_model_and_report(serve, tmp_path):
    finished(tmp_path / "one")
    served = serve(tmp_path)
    run = served.get(f"/api/runs/{served.find_run_id()}")
    assert run["config"]["train_args"]["seed"] == 42
    assert run["model_info"]["parameters"] == 623168
    assert run["data"]["dropped"] == {"empty": 5}
    assert [rank["device"] for rank in run["mesh"]["ranks"]] == ["cpu:0", "cpu:1"]
    assert [event["step"] for event in run["evals"]] == [10, 20]
    assert [(checkpoint["name"], checkpoint["exists"]) for checkpoint in run["checkpoints"]] == [
        ("step-00000010", True),
        ("step-00000020", True),
    ]
    assert run["report"]["wall_s"] == 12.5
    assert (run["pid"], run["exact"]) == (os.getpid(), True)


def test_time_counts_from_the_start_of_the_command(serve, tmp_path):
    begin(tmp_path / "one", command_started_at=time.time() - 100)
    (run,) = serve(tmp_path).get("/api/runs")["runs"]
    assert 100 <= run["wall_s"] < 160
    assert run["started_at"] < time.time() - 99


def test_pause_before_a_resume_is_not_counted(serve, tmp_path):
    """The commands' times are added, also in the report's page; a restart by the same launcher is
    part of its command."""
    begin(tmp_path / "one").close()
    log = tmp_path / "one/events.jsonl"
    start = json.loads(log.read_text())
    resumed = {**start, "launcher": 2, "resumed_from_step": 1}
    events = [
        {**start, "time": 110.0, "launcher": 1, "command_started_at": 100.0},
        {"type": "step", "step": 1, "time": 115.0},
        {**start, "time": 120.0, "launcher": 1, "command_started_at": 100.0},
        {"type": "step", "step": 1, "time": 150.0},
        {**resumed, "time": 5010.0, "command_started_at": 5000.0},
        {"type": "step", "step": 2, "time": 5020.0},
        {"type": "run_end", "status": "done", "step": 2, "reason": None, "time": 5025.0},
    ]
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    (run,) = serve(tmp_path).get("/api/runs")["runs"]
    assert (run["wall_s"], run["restarts"]) == (50.0 + 25.0, 1)
    assert run["started_at"] == 100.0
    report = dict.fromkeys(REPORT_KEYS) | {"wall_s": 25.0}
    page = render_report(cast(Report, report), read_events(log), "")
    assert re.search(r"1 min 15 s.*of all 2 commands", page, re.DOTALL)


@pytest.mark.parametrize(
    ("cwd", "output_dir", "expected"),
    [
        ("{root}/a b", "one", ("cd '{root}/a b' && ", "one")),
        ("{root}", "./a b/one", ("cd {root} && ", "'./a b/one'")),
        ("/etc", "one", ("", "'{root}/a b/one'")),
        ("a b", "one", ("", "'{root}/a b/one'")),
        (None, "one", ("", "'{root}/a b/one'")),
    ],
)
def test_commands_begin_where_the_run_was_started(serve, tmp_path, cwd, output_dir, expected):
    """A log that names another folder is not followed."""
    named = {} if cwd is None else {"cwd": cwd.format(root=tmp_path)}
    begin(tmp_path / "a b" / "one", **named, output_dir=output_dir)
    served = serve(tmp_path)
    shell = served.get(f"/api/runs/{served.find_run_id()}")["shell"]
    prefix, folder = (text.format(root=tmp_path) for text in expected)
    assert shell == {"prefix": prefix, "folder": folder}


def test_live_run_is_updated(serve, tmp_path):
    log = begin(tmp_path / "one", steps=100)
    emit_steps(log, 1, 3)
    served = serve(tmp_path)
    (run,) = served.get("/api/runs")["runs"]
    assert (run["status"], run["step"], run["steps"], run["tokens_per_second"]) == (
        "live",
        3,
        100,
        pytest.approx(4096 / 0.3),
    )
    emit_steps(log, 4, 9)
    (run,) = served.get("/api/runs")["runs"]
    assert run["step"] == 9
    assert run["eta_s"] is not None
    log.emit(
        {
            "type": "run_end",
            "status": "failed",
            "step": 9,
            "reason": "rank 1: out of memory",
            "wall_s": 3,
        }
    )
    (run,) = served.get("/api/runs")["runs"]
    assert (run["status"], run["problem"]) == ("failed", "rank 1: out of memory")


def test_remaining_time_changes_little_with_a_slow_step():
    from paceline.web.runs.summary import MeanStepTime

    step_time = MeanStepTime()
    assert step_time.mean_s is None
    for step in range(1, 401):
        step_time.add({"step": step, "time": 2.0 * step})
    assert step_time.mean_s == pytest.approx(2.0)
    step_time.add({"step": 401, "time": 2.0 * 401 + 60})  # with an evaluation
    assert 2.0 < step_time.mean_s < 2.5
    for step in range(402, 2402):  # the run is faster from here on
        step_time.add({"step": step, "time": 862.0 + (step - 401)})
    assert step_time.mean_s == pytest.approx(1.0, rel=0.01)


def test_epoch_is_in_the_list(serve, tmp_path):
    finished(tmp_path / "one", derived={"steps": 20, "epochs": 0.2})
    (run,) = serve(tmp_path).get("/api/runs")["runs"]
    assert (run["epoch"], run["epochs"]) == (0.2, 0.2)


def test_run_whose_process_has_ended_is_lost(serve, tmp_path):
    log = begin(tmp_path / "one", pid=ended_process())
    log.close()
    event = {**json.loads((tmp_path / "one/events.jsonl").read_text()), "time": time.time() - 60}
    (tmp_path / "one/events.jsonl").write_text(json.dumps(event) + "\n")
    (run,) = serve(tmp_path).get("/api/runs")["runs"]
    assert run["status"] == "lost"
    assert str(event["pid"]) in run["problem"]


def test_silent_run_on_another_host_is_live_with_a_problem(serve, tmp_path):
    begin(tmp_path / "one", host="another-host").close()
    event = {**json.loads((tmp_path / "one/events.jsonl").read_text()), "time": time.time() - 600}
    (tmp_path / "one/events.jsonl").write_text(json.dumps(event) + "\n")
    (run,) = serve(tmp_path).get("/api/runs")["runs"]
    assert run["status"] == "live"
    assert "another-host" in run["problem"]


def test_run_without_events_is_empty_or_waiting(serve, tmp_path):
    import socket

    for name, pid in (("ended", ended_process()), ("running", os.getpid())):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").write_text(f"{pid} on {socket.gethostname()}")
        (tmp_path / name / "events.jsonl").touch()
    served = serve(tmp_path)
    assert {run["name"]: run["status"] for run in served.get("/api/runs")["runs"]} == {
        "ended": "empty",
        "running": "waiting",
    }
    for name in ("ended", "running"):
        id = served.find_run_id(name)
        for route in ("", "/series", "/ranks", "/traffic", "/log"):
            served.get(f"/api/runs/{id}{route}")


def test_finds_a_new_run_by_its_id(serve, tmp_path):
    from paceline.web.runs.discovery import run_id

    served = serve(tmp_path)
    assert served.get("/api/runs")["runs"] == []
    finished(tmp_path / "new")
    assert served.get(f"/api/runs/{run_id('new')}")["status"] == "done"


def test_run_started_from_the_panel_is_waiting_or_failed(serve, tmp_path):
    import socket

    def write_start(name: str, pid: int) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        host = socket.gethostname()
        start = {"pid": pid, "host": host, "time": time.time(), "cwd": str(tmp_path)}
        (tmp_path / name / "panel.json").write_text(json.dumps(start))

    write_start("begins", os.getpid())
    write_start("failed", ended_process())
    (tmp_path / "failed/console.log").write_text("loading\nerror: the dataset has no rows\n")
    finished(tmp_path / "again")
    time.sleep(0.02)
    write_start("again", os.getpid())
    served = serve(tmp_path)
    runs = {run["name"]: run for run in served.get("/api/runs")["runs"]}
    assert {name: run["status"] for name, run in runs.items()} == {
        "begins": "waiting",
        "failed": "failed",
        "again": "waiting",
    }
    assert runs["failed"]["problem"] == "error: the dataset has no rows"
    lines = served.get(f"/api/runs/{runs['failed']['id']}/log")["lines"]
    assert [line["text"] for line in lines] == ["loading", "error: the dataset has no rows"]


def test_skips_and_counts_unreadable_lines(serve, tmp_path):
    log = begin(tmp_path / "one")
    emit_steps(log, 1, 2)
    with open(tmp_path / "one/events.jsonl", "ab") as handle:
        handle.write(
            b'\x00\xff no JSON\n[1, 2]\n{"type": "step", "step": "two"}\n' + b"[" * 100_000 + b"\n"
        )
        handle.write(b'{"time": 3, "type": "step", "step": 3, "lo')
    served = serve(tmp_path)
    id = served.find_run_id()
    assert served.get(f"/api/runs/{id}/series")["step"] == [1, 2]
    assert served.get(f"/api/runs/{id}")["unreadable_lines"] == 4
    with open(tmp_path / "one/events.jsonl", "ab") as handle:
        handle.write(b'ss": 0.5}\n')
    assert served.get(f"/api/runs/{id}/series")["step"] == [1, 2, 3]


def test_shows_readable_parts_of_unknown_events(serve, tmp_path):
    log = begin(
        tmp_path / "one",
        config=[1],
        derived="many",
        mesh=7,
        world_size="two",
        model="m",
        predicted=[],
    )
    emit_steps(log, 1, 2)
    log.emit({"type": "teleport", "text": "to \x1b[31mMars\x1b[0m", "level": "warning"})
    log.emit({"type": "warp", "factor": {"x": [1]}})
    log.emit({"type": "eval", "step": "ten", "loss": {"a": 1}, "metrics": 5})
    log.emit(
        {
            "type": "step",
            "step": 3,
            "loss": [1],
            "tokens": "many",
            "memory_bytes": {"a": 1},
            "ranks": {"a": 1},
            "traffic": {"x": "y"},
            "time_s": 10**400,
        }
    )
    log.emit(
        {
            "type": "step",
            "step": 4,
            "loss": 10**400,
            "ranks": [1, {"rank": "x"}, {"rank": 0, "data_s": "z"}],
        }
    )
    log.emit({"type": "checkpoint", "step": 4, "path": ["a"], "size_bytes": "big"})
    log.emit({"type": "memory", "ranks": 5})
    log.emit({"type": "resume", "step": "x"})
    log.emit({"type": ["list"]})
    with open(tmp_path / "one/events.jsonl", "ab") as handle:
        handle.write(b'{"type": "deep", "text": ' + b"[" * 900 + b"]" * 900 + b"}\n")
    served = serve(tmp_path)
    id = served.find_run_id()
    texts = {line["text"]: line["level"] for line in served.get(f"/api/runs/{id}/log")["lines"]}
    assert texts["to \ufffd[31mMars\ufffd[0m"] == "warning"
    assert 'warp: {"factor": {"x": [1]}}' in texts
    for route in ("", "/ranks", "/traffic", "/config"):
        assert served.client.get(f"/api/runs/{id}{route}").status_code == 200
    assert served.get(f"/api/runs/{id}/series")["step"] == [1, 2, 3, 4]
    assert served.get(f"/api/compare?ids={id}")["config_differences"] == []


def test_missing_or_invalid_report_is_null(serve, tmp_path):
    finished(tmp_path / "one")
    (tmp_path / "one/report.json").write_text('{"status": ')
    (tmp_path / "one/report.html").unlink()
    served = serve(tmp_path)
    id = served.find_run_id()
    assert served.get(f"/api/runs/{id}")["report"] is None
    response = served.client.get(f"/api/runs/{id}/report")
    assert response.status_code == 404
    assert "report.html" in response.json()["error"]["what"]


def test_deleted_run_is_not_found(serve, tmp_path):
    import shutil

    finished(tmp_path / "one")
    served = serve(tmp_path)
    id = served.find_run_id()
    shutil.rmtree(tmp_path / "one")
    for route in (
        "",
        "/series",
        "/ranks",
        "/traffic",
        "/log",
        "/config",
        "/report",
        "/csv",
        "/stream",
    ):
        response = served.client.get(f"/api/runs/{id}{route}")
        assert response.status_code == 404, route
        assert set(response.json()["error"]) == {"code", "what", "allowed", "fix", "values"}
    time.sleep(1)
    assert served.get("/api/runs")["runs"] == []


def test_replaced_log_is_read_again(serve, tmp_path):
    finished(tmp_path / "one")
    served = serve(tmp_path)
    id = served.find_run_id()
    assert len(served.get(f"/api/runs/{id}/series")["step"]) == 20
    (tmp_path / "one/events.jsonl").unlink()
    log = begin(tmp_path / "one")
    emit_steps(log, 1, 3)
    assert served.get(f"/api/runs/{id}/series")["step"] == [1, 2, 3]
    assert served.get(f"/api/runs/{id}")["status"] == "live"


def test_discovery_skips_checkpoints_models_hidden_folders_and_links(serve, tmp_path):
    outside = tmp_path / "outside"
    finished(outside / "secret")
    output = tmp_path / "output"
    for inner in ("a/checkpoints/x", "a/model/x", ".venv/x", ".git/x", "node_modules/x"):
        finished(output / inner)
    finished(output / "a/b/run")
    (output / "link").symlink_to(outside)
    (output / "filelink").mkdir()
    (output / "filelink/events.jsonl").symlink_to(outside / "secret/events.jsonl")
    os.mkfifo(output / "a/events.jsonl")
    assert [run["path"] for run in serve(output).get("/api/runs")["runs"]] == ["a/b/run"]


def test_discovery_has_a_maximum_depth(serve, tmp_path):
    finished(tmp_path / "/".join("abcdefgh"))
    finished(tmp_path / "x" / "/".join("abcdefgh"))
    assert [run["path"] for run in serve(tmp_path).get("/api/runs")["runs"]] == ["a/b/c/d/e/f/g/h"]


def test_shows_a_name_that_is_not_utf8(serve, tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/out\xff\n<b>"))
    begin(folder, output_dir="out").close()
    (run,) = serve(tmp_path).get("/api/runs")["runs"]
    assert run["name"].startswith("out\ufffd")
    assert serve(tmp_path).get(f"/api/runs/{run['id']}/log")["lines"]


def test_accepts_a_lone_surrogate_in_a_log(serve, tmp_path):
    log = begin(tmp_path / "one")
    log.close()
    with open(tmp_path / "one/events.jsonl", "ab") as handle:
        handle.write(
            b'{"time": 1, "type": "notice", "level": "info", "text": "half \\ud83d of one"}\n'
        )
    served = serve(tmp_path)
    assert "half" in served.get(f"/api/runs/{served.find_run_id()}/log")["lines"][-1]["text"]


def test_log_returns_the_newest_lines_and_the_number_omitted(serve, tmp_path):
    finished(tmp_path / "one")
    served = serve(tmp_path)
    log = served.get(f"/api/runs/{served.find_run_id()}/log", params={"tail": 2})
    assert [line["text"] for line in log["lines"]][-1] == "done at step 20 after 12.5 s"
    assert len(log["lines"]) == 2
    assert log["left_out"] == 5


def test_returns_the_config_unchanged(serve, tmp_path):
    finished(tmp_path / "one")
    served = serve(tmp_path)
    response = served.client.get(f"/api/runs/{served.find_run_id()}/config")
    assert response.text == (tmp_path / "one/config.yaml").read_text()
    assert response.headers["content-type"].startswith("text/yaml")


def test_compare_lists_different_keys(serve, tmp_path):
    finished(tmp_path / "one")
    finished(
        tmp_path / "two",
        config={"model": "builtin:qwen2-micro", "train_args": {"learning_rate": 0.01, "seed": 42}},
    )
    served = serve(tmp_path)
    first, second = served.find_run_id("one"), served.find_run_id("two")
    comparison = served.get("/api/compare", params={"ids": f"{first},{second}"})
    assert [run["report"]["wall_s"] for run in comparison["runs"]] == [12.5, 12.5]
    assert comparison["config_differences"] == [
        {"key": "task", "values": {first: "sft", second: None}},
        {"key": "train_args.learning_rate", "values": {first: 0.001, second: 0.01}},
    ]
    assert served.client.get("/api/compare", params={"ids": ","}).status_code == 400
    assert (
        served.client.get("/api/compare", params={"ids": f"{first},000000000000"}).status_code
        == 404
    )


def test_notes_are_stored_outside_of_runs(serve, tmp_path):
    finished(tmp_path / "one")
    before = {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "one").rglob("*"))}
    served = serve(tmp_path)
    id = served.find_run_id()
    note = {"note": "größer", "tags": ["a", "b", "a"]}
    assert (
        served.client.put(f"/api/runs/{id}/note", json=note, headers=served.with_token).status_code
        == 200
    )
    assert served.get(f"/api/runs/{id}")["tags"] == ["a", "b"]
    assert serve(tmp_path).get("/api/runs")["runs"][0]["note"] == "größer"
    assert {
        path: path.stat().st_mtime_ns for path in sorted((tmp_path / "one").rglob("*"))
    } == before
    for wrong in ({"note": "x" * 10_001}, {"tags": [""]}, {"tags": "a"}, {"note": 5}, []):
        response = served.client.put(f"/api/runs/{id}/note", json=wrong, headers=served.with_token)
        assert response.status_code == 422, wrong
        assert response.json()["error"]["what"]


def test_does_not_overwrite_invalid_notes(serve, tmp_path):
    finished(tmp_path / "one")
    (tmp_path / ".paceline-ui.json").write_text("other content")
    served = serve(tmp_path)
    response = served.client.put(
        f"/api/runs/{served.find_run_id()}/note", json={"note": "x"}, headers=served.with_token
    )
    assert response.status_code == 400
    assert (tmp_path / ".paceline-ui.json").read_text() == "other content"


def test_machine_reports_why_gpus_are_missing(serve, tmp_path):
    machine = serve(tmp_path).get("/api/machine")
    assert machine["cpu_count"] == os.cpu_count()
    assert machine["memory_bytes"] > 1 << 28
    assert (machine["gpus"] is None) == (machine["gpus_problem"] is not None)


def test_reads_only_changed_runs(serve, tmp_path, monkeypatch):
    from paceline.web.runs import summary

    for number in range(60):
        finished(tmp_path / f"run-{number}", steps=3)
    served = serve(tmp_path)
    assert len(served.get("/api/runs")["runs"]) == 60
    opened: list[Path] = []
    open_inside = summary.open_inside
    monkeypatch.setattr(
        summary, "open_inside", lambda path: opened.append(path) or open_inside(path)
    )
    log = begin(tmp_path / "run-7")
    emit_steps(log, 1, 1)
    assert len(served.get("/api/runs")["runs"]) == 60
    assert opened == [tmp_path / "run-7/events.jsonl"]


def test_omits_malformed_heartbeats(serve, tmp_path):
    run = finished(tmp_path / "one")
    served = serve(tmp_path)
    path = f"/api/runs/{served.find_run_id()}/heartbeats"
    assert served.get(path) == {"time": None, "ranks": []}
    valid = {
        "rank": 1,
        "host": "a\x1b[2J",
        "pid": 7,
        "phase": "backward",
        "step": 3,
        "heard_at": 5.5,
        "moved_at": float("nan"),
    }
    rows = [valid, {"rank": "2"}, 3, {"rank": 4, "phase": ["x"], "step": "many"}]
    (run / "heartbeats.json").write_text(json.dumps({"time": 6, "ranks": rows}))
    heartbeats = served.get(path)
    assert [row["rank"] for row in heartbeats["ranks"]] == [1, 4]
    assert (
        heartbeats["ranks"][0]["phase"],
        heartbeats["ranks"][0]["heard_at"],
        heartbeats["ranks"][0]["moved_at"],
    ) == ("backward", 5.5, None)
    assert "\x1b" not in heartbeats["ranks"][0]["host"]
    assert (heartbeats["ranks"][1]["phase"], heartbeats["ranks"][1]["step"]) == (None, None)
    for text in ("", "[1]", '{"ranks": 5}', '{"time": 1, "ranks": [{"ra'):
        (run / "heartbeats.json").write_text(text)
        assert served.get(path)["ranks"] == []


@pytest.mark.gpu
def test_machine_reports_nvidia_devices() -> None:
    import torch

    hardware = machine()
    assert hardware["gpus_problem"] is None
    assert len(hardware["gpus"]) >= torch.cuda.device_count()
    for gpu in hardware["gpus"]:
        assert gpu["name"]
        assert 0 <= gpu["utilisation"] <= 1
        assert 0 < gpu["memory_used_bytes"] <= gpu["memory_bytes"]
        assert gpu["temperature_c"] > 0
        assert gpu["power_w"] > 0
