"""``heartbeats.json``: where each rank is, for whoever looks from outside."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from commands import MICRO, end_by, events, start, wait_for_step

from paceline.health import heartbeats
from paceline.health.hangs import RankStatus
from paceline.health.heartbeats import HeartbeatFile


def seen(rank: int, **more: object) -> RankStatus:
    return RankStatus(
        **{
            "rank": rank,
            "host": "one",
            "pid": 7,
            "phase": "backward",
            "step": 3,
            "still_s": 2.0,
            "silent_s": 0.5,
        }
        | more
    )


def test_what_was_told_last_is_in_the_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "_EVERY_S", 0.0)
    file = HeartbeatFile(tmp_path / "heartbeats.json")
    assert not file.path.exists()
    file.tell([seen(0, waits_for="all_reduce number 12 of 2 ranks"), seen(1)])
    file.tell([seen(0)])  # shorter than what was there
    told = json.loads(file.path.read_text())
    assert [one["rank"] for one in told["ranks"]] == [0]
    assert told["ranks"][0]["phase"] == "backward"
    assert told["time"] - told["ranks"][0]["moved_at"] == pytest.approx(2.0, abs=0.1)
    assert told["time"] - told["ranks"][0]["heard_at"] == pytest.approx(0.5, abs=0.1)
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_it_is_told_now_and_then_only(tmp_path: Path) -> None:
    file = HeartbeatFile(tmp_path / "heartbeats.json")
    file.tell([seen(0)])
    file.tell([seen(0), seen(1)])
    assert len(json.loads(file.path.read_text())["ranks"]) == 1
    file.close()


def test_a_folder_that_cannot_be_written_is_no_matter(tmp_path: Path) -> None:
    file = HeartbeatFile(tmp_path / "missing" / "heartbeats.json")
    file.tell([seen(0)])
    file.close()
    (tmp_path / "heartbeats.json").symlink_to(tmp_path / "elsewhere")
    file = HeartbeatFile(tmp_path / "heartbeats.json")
    file.tell([seen(0)])
    file.close()
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.slow
def test_a_run_tells_while_it_goes_on_and_takes_the_file_away(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(
        *MICRO, f"output_dir={run}", "parallel.num_gpus=2", "max_steps=2000", "warmup_steps=1"
    )
    wait_for_step(run, 5, process)
    deadline = time.monotonic() + 60
    told: dict[str, Any] = {"ranks": []}
    # the file may be written before rank 1 has sent a heartbeat
    while len(told["ranks"]) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
        with contextlib.suppress(FileNotFoundError):
            told = json.loads((run / "heartbeats.json").read_text())
    assert [one["rank"] for one in told["ranks"]] == [0, 1]
    # they are processes of this machine
    assert {os.readlink(f"/proc/{one['pid']}/exe") for one in told["ranks"]}
    assert abs(told["time"] - time.time()) < 60
    end_by(process, signal.SIGTERM, 2)
    assert events(run, "run_end")[-1]["status"] == "stopped"
    assert not (run / "heartbeats.json").exists()
