"""Test the file names in a run's folder and its lock."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.errors import RunError
from paceline.core.run_dir import RunDir, clear_debris, lock_run, propose_folder


def test_run_dir_creates_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    names = {
        path.name
        for path in (
            run.config,
            run.events,
            run.report,
            run.report_html,
            run.checkpoints,
            run.model,
        )
    }
    assert names == {
        "config.yaml",
        "events.jsonl",
        "report.json",
        "report.html",
        "checkpoints",
        "model",
    }
    assert not run.is_run()
    assert list(tmp_path.iterdir()) == []


def test_removes_temporary_files_of_killed_processes(tmp_path: Path) -> None:
    for name in (
        ".config.yaml.12.tmp",
        ".report.json.7.tmp",
        "report.json",
        ".lock",
        ".model.notes",
        ".env",
    ):
        (tmp_path / name).write_text("x")
    for name in (".model.12.tmp", ".model.12.old", "model", ".git"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("x")
    clear_debris(RunDir(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".env",
        ".git",
        ".lock",
        ".model.notes",
        "model",
        "report.json",
    ]


@pytest.mark.parametrize("name", ["config.yaml", "events.jsonl", "checkpoints"])
def test_is_run_recognizes_a_started_run(tmp_path: Path, name: str) -> None:
    run = RunDir(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    assert not run.is_run()
    (tmp_path / name).mkdir() if name == "checkpoints" else (tmp_path / name).write_text("")
    assert run.is_run()


def test_lock_rejects_a_second_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    lock = lock_run(run, wait_s=0.0)
    with pytest.raises(
        RunError, match=rf"is in use by another run \(process {os.getpid()} on .*`output_dir`"
    ):
        lock_run(run, wait_s=0.0)
    lock.close()
    run.lock.write_text("previous holder")
    lock_run(run, wait_s=0.0, sign=False).close()
    assert run.lock.read_text() == "previous holder"
    lock_run(run, wait_s=0.0).close()


def test_lock_is_released_when_its_process_ends(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from paceline.core.run_dir import RunDir,"
        " lock_run\nlock = lock_run(RunDir(Path(sys.argv[1])), 0.0); print('held', flush=True);"
        " sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(RunError, match=f"process {other.pid} "):
            lock_run(RunDir(tmp_path), wait_s=0.0)
        other.kill()
    lock_run(RunDir(tmp_path), wait_s=5.0).close()


@pytest.mark.parametrize(
    ("folder", "proposed"),
    [("run", "run-2"), ("out/run-2", "out/run-3"), (".", "run-2"), ("out/..", "out/../run-2")],
)
def test_proposed_folder_is_free(
    folder: str, proposed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert propose_folder(folder) == proposed
    Path(proposed).mkdir(parents=True)
    assert propose_folder(folder) != proposed
    assert not Path(propose_folder(folder)).exists()
