"""`heartbeats.json`: the status of each rank, for readers outside of the run."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from commands import MICRO, end_with_signal, events, start, wait_for_step

from paceline.health import heartbeats
from paceline.health.hangs import RankStatus
from paceline.health.heartbeats import HeartbeatFile


def make_status(rank: int, **overrides: object) -> RankStatus:
    return RankStatus(
        **{
            "rank": rank,
            "host": "host0",
            "pid": 7,
            "phase": "backward",
            "step": 3,
            "stalled_s": 2.0,
            "since_heartbeat_s": 0.5,
        }
        | overrides
    )


def test_file_has_only_the_latest_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "_EVERY_S", 0.0)
    file = HeartbeatFile(tmp_path / "heartbeats.json")
    assert not file.path.exists()
    file.write([make_status(0, waits_for="all_reduce number 12 of 2 ranks"), make_status(1)])
    file.write([make_status(0)])  # shorter than the previous content
    written = json.loads(file.path.read_text())
    assert [row["rank"] for row in written["ranks"]] == [0]
    assert written["ranks"][0]["phase"] == "backward"
    assert written["time"] - written["ranks"][0]["moved_at"] == pytest.approx(2.0, abs=0.1)
    assert written["time"] - written["ranks"][0]["heard_at"] == pytest.approx(0.5, abs=0.1)
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_writes_are_rate_limited(tmp_path: Path) -> None:
    file = HeartbeatFile(tmp_path / "heartbeats.json")
    file.write([make_status(0)])
    file.write([make_status(0), make_status(1)])
    assert len(json.loads(file.path.read_text())["ranks"]) == 1
    file.close()


def test_unwritable_file_and_symlink_are_ignored(tmp_path: Path) -> None:
    file = HeartbeatFile(tmp_path / "missing" / "heartbeats.json")
    file.write([make_status(0)])
    file.close()
    (tmp_path / "heartbeats.json").symlink_to(tmp_path / "target")
    file = HeartbeatFile(tmp_path / "heartbeats.json")
    file.write([make_status(0)])
    file.close()
    assert not (tmp_path / "target").exists()


@pytest.mark.slow
def test_run_writes_the_file_and_removes_it_at_the_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(
        *MICRO, f"output_dir={run}", "parallel.num_gpus=2", "max_steps=2000", "warmup_steps=1"
    )
    wait_for_step(run, 5, process)
    deadline = time.monotonic() + 60
    written: dict[str, Any] = {"ranks": []}
    # the file may be written before rank 1 has sent a heartbeat
    while len(written["ranks"]) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
        with contextlib.suppress(FileNotFoundError):
            written = json.loads((run / "heartbeats.json").read_text())
    assert [row["rank"] for row in written["ranks"]] == [0, 1]
    # the pids are those of processes on this machine
    assert {os.readlink(f"/proc/{row['pid']}/exe") for row in written["ranks"]}
    assert abs(written["time"] - time.time()) < 60
    end_with_signal(process, signal.SIGTERM, 2)
    assert events(run, "run_end")[-1]["status"] == "stopped"
    assert not (run / "heartbeats.json").exists()
