"""One launcher at a time in a run's folder."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.core.event_log import EventLog
from paceline.core.log import recorded_notices
from paceline.core.run_dir import LaunchLock, RunDir, is_launching

HOLD = (
    "import sys; from pathlib import Path\nfrom paceline.core.run_dir import LaunchLock; from"
    " paceline.core.run_dir import RunDir\nwith LaunchLock(RunDir(Path(sys.argv[1]))):\n   "
    " print('held', flush=True); sys.stdin.read()"
)


def holder(folder: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def test_the_second_launcher_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
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


def test_nothing_is_left_in_a_folder_that_was_not_used(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b" / "run"
    with LaunchLock(RunDir(root)):
        assert [path.name for path in root.iterdir()] == [".launch.lock"]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with LaunchLock(RunDir(tmp_path / "mine")):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    with LaunchLock(RunDir(root)):
        (root / "config.yaml").write_text("x")
    assert [path.name for path in root.iterdir()] == ["config.yaml"]


def test_a_refused_launcher_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    with LaunchLock(RunDir(tmp_path)):
        before = (tmp_path / ".launch.lock").read_text()
        with pytest.raises(ConfigError):
            LaunchLock(RunDir(tmp_path)).__enter__()
        assert (tmp_path / ".launch.lock").read_text() == before


def test_a_lock_left_by_a_killed_process_does_not_block(tmp_path: Path) -> None:
    other = holder(tmp_path)
    with pytest.raises(ConfigError, match=f"process {other.pid} "):
        LaunchLock(RunDir(tmp_path)).__enter__()
    os.kill(other.pid, signal.SIGKILL)
    other.communicate()
    assert str(other.pid) in (tmp_path / ".launch.lock").read_text()
    assert not is_launching(RunDir(tmp_path))
    with LaunchLock(RunDir(tmp_path)):
        assert str(os.getpid()) in (tmp_path / ".launch.lock").read_text()


def test_a_run_that_has_written_its_end_is_waited_for(tmp_path: Path) -> None:
    other = holder(tmp_path)
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


def test_an_older_end_does_not_make_a_launcher_wait(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.emit({"type": "run_end", "status": "done", "step": 1})
    log.close()
    time.sleep(0.01)  # the event's time is rounded
    with LaunchLock(RunDir(tmp_path)), pytest.raises(ConfigError, match="in use"):
        LaunchLock(RunDir(tmp_path)).__enter__()


def test_of_many_launchers_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    """While launchers take, release and remove the lock in turn, no two hold it at the same
    time."""
    root, holding, max_holding, refused = tmp_path / "run", 0, 0, 0
    guard = threading.Lock()

    def contend() -> None:
        nonlocal holding, max_holding, refused
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
                    refused += 1

    threads = [threading.Thread(target=contend) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (holding, max_holding) == (0, 1)
    assert refused < 120
    assert [path for path in tmp_path.rglob("*") if path != root] == []
