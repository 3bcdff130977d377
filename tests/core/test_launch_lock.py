"""Test that only one launcher at a time uses a run's folder."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from raised import raises_error

from paceline.core.errors import ConfigError
from paceline.core.event_log import EventLog
from paceline.core.log import recorded_notices
from paceline.core.run_dir import LaunchLock, RunDir, is_launching

HOLD_LOCK = (
    "import sys; from pathlib import Path\nfrom paceline.core.run_dir import LaunchLock; from"
    " paceline.core.run_dir import RunDir\nwith LaunchLock(RunDir(Path(sys.argv[1]))):\n   "
    " print('held', flush=True); sys.stdin.read()"
)


def start_lock_holder(folder: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def test_second_launcher_is_rejected_with_the_first_process(tmp_path: Path) -> None:
    with LaunchLock(RunDir(tmp_path)):
        assert is_launching(RunDir(tmp_path))
        with pytest.raises(
            ConfigError, match=rf"in use by another run: process {os.getpid()} on .*`output_dir`"
        ) as error:
            LaunchLock(RunDir(tmp_path)).__enter__()
        assert Path(sys.argv[0]).name.removeprefix("__main__") in str(
            error.value
        ) or "paceline" in str(error.value)
    assert not is_launching(RunDir(tmp_path))


def test_unused_folder_is_removed(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b" / "run"
    with LaunchLock(RunDir(root)):
        assert [path.name for path in root.iterdir()] == [".launch.lock"]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    with LaunchLock(RunDir(tmp_path / "run")):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    with LaunchLock(RunDir(root)):
        (root / "config.yaml").write_text("x")
    assert [path.name for path in root.iterdir()] == ["config.yaml"]


def test_rejected_launcher_leaves_the_lock_unchanged(tmp_path: Path) -> None:
    with LaunchLock(RunDir(tmp_path)):
        before = (tmp_path / ".launch.lock").read_text()
        with pytest.raises(ConfigError):
            LaunchLock(RunDir(tmp_path)).__enter__()
        assert (tmp_path / ".launch.lock").read_text() == before


def test_lock_of_a_killed_process_does_not_block(tmp_path: Path) -> None:
    other = start_lock_holder(tmp_path)
    with pytest.raises(ConfigError, match=f"process {other.pid} "):
        LaunchLock(RunDir(tmp_path)).__enter__()
    os.kill(other.pid, signal.SIGKILL)
    other.communicate()
    assert str(other.pid) in (tmp_path / ".launch.lock").read_text()
    assert not is_launching(RunDir(tmp_path))
    with LaunchLock(RunDir(tmp_path)):
        assert str(os.getpid()) in (tmp_path / ".launch.lock").read_text()


def test_waits_for_a_finished_run_to_exit(tmp_path: Path) -> None:
    other = start_lock_holder(tmp_path)
    log = EventLog(tmp_path / "events.jsonl")
    log.emit({"type": "run_end", "status": "done", "step": 1})
    log.close()
    assert not is_launching(RunDir(tmp_path))
    timer = threading.Timer(0.3, other.communicate)
    timer.start()
    with recorded_notices() as recorder, LaunchLock(RunDir(tmp_path)):
        pass
    timer.join()
    assert recorder.messages == [f"waiting for the run in {tmp_path} to exit…"]


def test_does_not_wait_after_an_older_run_end(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.emit({"type": "run_end", "status": "done", "step": 1})
    log.close()
    time.sleep(0.01)  # the event's time is rounded
    with LaunchLock(RunDir(tmp_path)), raises_error(ConfigError, code="in-use"):
        LaunchLock(RunDir(tmp_path)).__enter__()


def test_concurrent_launchers_hold_the_lock_one_at_a_time(tmp_path: Path) -> None:
    """No two launchers hold the lock at the same time while they take, release and remove it."""
    root, holding, max_holding, rejected = tmp_path / "run", 0, 0, 0
    guard = threading.Lock()

    def contend() -> None:
        nonlocal holding, max_holding, rejected
        for _ in range(20):
            try:
                with LaunchLock(RunDir(root)):
                    with guard:
                        holding += 1
                        max_holding = max(max_holding, holding)
                    time.sleep(0.001)
                    with guard:
                        holding -= 1
            except ConfigError:
                with guard:
                    rejected += 1

    threads = [threading.Thread(target=contend) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (holding, max_holding) == (0, 1)
    assert rejected < 120
    assert [path for path in tmp_path.rglob("*") if path != root] == []
