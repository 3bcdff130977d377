"""Test whether a process is alive, by its ID, its start time and the lock of a run."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from paceline.core.processes import pid_alive
from paceline.core.run_dir import RunDir, holder_alive, lock_run


def ended_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_process_is_alive_until_it_ends() -> None:
    assert pid_alive(os.getpid())
    assert not pid_alive(ended_process())
    assert not pid_alive(1 << 80)


def test_zombie_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 20
    while pid_alive(child.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not pid_alive(child.pid) or sys.platform != "linux"
    child.wait()


def test_reused_process_id_is_not_the_same_process() -> None:
    assert pid_alive(os.getpid(), time.time())
    assert not pid_alive(os.getpid(), 1.0) or sys.platform != "linux"


def test_holder_of_a_run_is_read_from_its_lock(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert holder_alive(run) is None
    with lock_run(run, 0.0):
        assert holder_alive(run) is True
    for text, expected in (
        (f"{ended_process()} on {socket.gethostname()}", False),
        ("5 on another-host", None),
        ("nonsense", None),
        ("", None),
    ):
        run.lock.write_text(text)
        assert holder_alive(run) is expected, text
    run.lock.unlink()
    run.lock.symlink_to(tmp_path / "other")
    assert holder_alive(run) is None
