"""Test that the event log consists of complete lines, even after kills and with a full disk."""

import json
import threading
import time
from pathlib import Path
from typing import Any

from disks import mount_tmpfs

from paceline.core.event_log import EventLog, effective_steps, follow_events, read_events


def event_types(path: Path) -> list[str]:
    return [event["type"] for event in read_events(path)]


def test_writes_each_event_as_a_line_of_json(tmp_path: Path) -> None:
    received: list[dict[str, Any]] = []
    log = EventLog(tmp_path / "events.jsonl", [received.append])
    log.emit(
        {
            "type": "step",
            "step": 1,
            "loss": float("nan"),
            "ranks": [{"wait_s": float("inf")}],
            "text": "süß",
        }
    )
    log.notice("already shown", file_only=True)
    log.notice("careful", "warning")
    log.close()
    lines = [
        json.loads(line)
        for line in (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [event["type"] for event in lines] == ["step", "notice", "notice"]
    assert (lines[0]["loss"], lines[0]["ranks"], lines[0]["text"]) == (
        "nan",
        [{"wait_s": "inf"}],
        "süß",
    )
    assert lines[2]["level"] == "warning"
    assert all(abs(event["time"] - time.time()) < 600 for event in lines)
    assert [event.get("text") for event in received] == ["süß", "careful"]


def test_skips_an_incomplete_line_and_starts_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": 1, "type": "step", "step": 1}\n{"time": 2, "type": "st')
    log = EventLog(path)
    log.emit({"type": "resume", "step": 1})
    log.close()
    assert event_types(path) == ["step", "resume"]
    path.write_text("")
    EventLog(path).close()
    assert event_types(path) == []


def test_ignores_json_that_is_not_an_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('3\n[]\n{"no": "type"}\n\n{"type": "step"}\n')
    assert event_types(path) == ["step"]


def test_full_disk_drops_events_with_one_warning(tmp_path: Path) -> None:
    with mount_tmpfs(tmp_path / "small", "size=64k") as mounted:
        if not mounted:
            return
        received: list[dict[str, Any]] = []
        ballast = tmp_path / "small" / "ballast"
        path = tmp_path / "small" / "events.jsonl"
        log = EventLog(path, [received.append])
        log.emit({"type": "a"})
        ballast.write_bytes(b"x" * (64 * 1024 - 2 * 4096))
        for _ in range(3):
            log.emit({"type": "b", "text": "y" * 3000})
        assert log.lost > 0
        warnings = [event["text"] for event in received if event["type"] == "notice"]
        assert len(warnings) == 1
        assert "No space left on device" in warnings[0]
        assert str(path) in warnings[0]
        ballast.unlink()
        log.emit({"type": "c"})
        log.emit({"type": "d"})
        log.close()
        assert event_types(path)[0] == "a"
        assert event_types(path)[-2:] == ["c", "d"]


def test_follow_yields_existing_and_new_events(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    received: list[str] = []
    done = threading.Event()

    def follow() -> None:
        for event in follow_events(path, poll_s=0.01, stop=done.is_set):
            received.append(event["type"])
            if event["type"] == "run_end":
                break

    thread = threading.Thread(target=follow)
    thread.start()
    log = EventLog(path)
    log.emit({"type": "run_start"})
    log.emit({"type": "step"})
    log.emit({"type": "run_end"})
    thread.join(10)
    done.set()
    log.close()
    assert received == ["run_start", "step", "run_end"]


def test_effective_steps_excludes_repeated_steps() -> None:
    def step(number: int, loss: float) -> dict[str, Any]:
        return {"type": "step", "step": number, "loss": loss}

    first = [{"type": "run_start"}, step(1, 3.0), step(2, 2.0), step(3, 1.0)]
    resumed = [
        {"type": "run_start", "resumed_from_step": 2},
        {"type": "resume", "step": 2},
        step(3, 1.5),
    ]
    assert [(event["step"], event["loss"]) for event in effective_steps([*first, *resumed])] == [
        (1, 3.0),
        (2, 2.0),
        (3, 1.5),
    ]
    assert [
        event["step"] for event in effective_steps([*first, {"type": "run_start"}, step(1, 9.0)])
    ] == [1]
