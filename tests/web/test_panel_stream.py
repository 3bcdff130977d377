"""Events on their way to browsers: soon, to many, and never at a run's cost."""

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from event_logs import begin, emit_steps, finished
from panels import Served, until

from paceline.web.runs import stream as stream_module
from paceline.web.runs.stream import SSEClient, without_ranks


@contextmanager
def listening(served: Served, path: str) -> Iterator[list[tuple[float, str, Any]]]:
    """What a stream says, as (arrival, event, data), while the block lasts."""
    received: list[tuple[float, str, Any]] = []
    ended = threading.Event()
    with served.client.stream("GET", path, timeout=30) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")

        def read() -> None:
            name = ""
            try:
                for line in answer.iter_lines():
                    if line.startswith("event: "):
                        name = line[7:]
                    elif line.startswith("data: "):
                        received.append((time.time(), name, json.loads(line[6:])))
            except Exception:  # closed below
                pass
            ended.set()

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield received
        finally:
            answer.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            reader.join(20)
            assert ended.is_set()


def events_of(received: list[tuple[float, str, Any]]) -> list[dict[str, Any]]:
    return [
        event for _, name, data in list(received) if name == "append" for event in data["events"]
    ]


def test_new_events_and_the_status_arrive_soon(serve, tmp_path):
    log = begin(tmp_path / "one")
    emit_steps(log, 1, 3)
    served = serve(tmp_path)
    id = served.the_run()
    with listening(served, f"/api/runs/{id}/stream") as received:
        until(lambda: any(name == "status" for _, name, _ in received))
        assert events_of(received) == []  # what was before is not told
        emit_steps(log, 4, 4)
        until(lambda: len(events_of(received)) == 1)
        at, _, data = next(message for message in received if message[1] == "append")
        # in earnest under a second; a laden machine gets more
        assert at - data["events"][0]["time"] < 5
        assert data["events"][0]["ranks"][0]["rank"] == 0
        assert data["bytes"] == os.path.getsize(tmp_path / "one/events.jsonl")
        assert data["dropped"] == 0
        log.emit({"type": "run_end", "status": "done", "step": 4, "reason": None, "wall_s": 1})
        until(
            lambda: any(name == "status" and data["status"] == "done" for _, name, data in received)
        )


def test_after_a_byte_no_event_is_missed_or_sent_twice(serve, tmp_path):
    log = begin(tmp_path / "one")
    emit_steps(log, 1, 5)
    served = serve(tmp_path)
    id = served.the_run()
    place = served.get(f"/api/runs/{id}/series")["bytes"]
    assert served.get(f"/api/runs/{id}")["bytes"] == place
    emit_steps(log, 6, 9)
    with listening(served, f"/api/runs/{id}/stream?after={place}") as first:
        emit_steps(log, 10, 12)
        until(lambda: len(events_of(first)) >= 7)
        with listening(served, f"/api/runs/{id}/stream?after={place}") as second:
            emit_steps(log, 13, 14)
            until(lambda: len(events_of(first)) >= 9 and len(events_of(second)) >= 9)
            for received in (first, second):
                assert [event["step"] for event in events_of(received)] == list(range(6, 15))


def test_an_incomplete_line_is_sent_when_it_is_complete(serve, tmp_path):
    begin(tmp_path / "one").close()
    served = serve(tmp_path)
    with (
        listening(served, f"/api/runs/{served.the_run()}/stream") as received,
        open(tmp_path / "one/events.jsonl", "ab", buffering=0) as handle,
    ):
        until(lambda: bool(received))
        handle.write(b'{"time": 1, "type": "notice", ')
        time.sleep(0.6)
        assert events_of(received) == []
        handle.write(b'"text": "whole"}\n')
        until(lambda: [event["text"] for event in events_of(received)] == ["whole"])


def test_a_late_viewer_gets_the_number_of_dropped_events(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(stream_module, "_READ_BYTES", 20_000)
    log = begin(tmp_path / "one")
    emit_steps(log, 1, 500)
    served = serve(tmp_path)
    with listening(served, f"/api/runs/{served.the_run()}/stream?after=0") as received:
        until(lambda: bool(events_of(received)))
        data = next(data for _, name, data in received if name == "append")
        assert data["dropped"] > 400
        assert data["dropped"] + len(data["events"]) == 501
        assert data["events"][-1]["step"] == 500


def test_a_burst_comes_without_the_ranks_of_most_steps():
    steps = [{"type": "step", "step": step, "ranks": [1], "loss": 1.0} for step in range(6)]
    notice = {"type": "notice", "ranks": [3]}
    bare = without_ranks([*steps, notice])
    assert ["ranks" in event for event in bare] == [False] * 5 + [True, True]
    assert without_ranks(steps[:2]) == steps[:2]


def test_a_slow_viewer_loses_the_oldest_events_and_gets_their_number():
    viewer = SSEClient()
    body = b'[{"type":"notice","text":"%s"}]' % (b"x" * 100_000)
    for number in range(100):
        viewer.put("append", body, 1, number)
        viewer.put("status", b'{"number":%d}' % number)
    sent = b"".join(iter(viewer.take, b"")).decode()
    assert len(sent) < stream_module._QUEUE_BYTES + 200_000
    data = [json.loads(line[6:]) for line in sent.splitlines() if line.startswith("data: ")]
    appended = [message for message in data if "events" in message]
    assert appended[0]["dropped"] + len(appended) == 100
    assert [message["bytes"] for message in appended] == list(range(100 - len(appended), 100))
    assert [message for message in data if "number" in message] == [
        {"number": 99}
    ]  # of states only the newest


def test_viewers_that_do_not_read_cost_bounded_memory_and_no_time(serve, tmp_path):
    import psutil

    log = begin(tmp_path / "one")
    served = serve(tmp_path)
    id = served.the_run()
    host = f"127.0.0.1:{served.panel.port}"
    request = f"GET /api/runs/{id}/stream HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    asleep = [socket.create_connection(("127.0.0.1", served.panel.port)) for _ in range(100)]
    try:
        for connection in asleep:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(request)
        with listening(served, f"/api/runs/{id}/stream") as received:
            until(lambda: bool(received))
            before = psutil.Process().memory_info().rss
            for number in range(30):
                log.notice("x" * 100_000 + str(number))
                time.sleep(0.02)
            # one reader of the log for all of them
            assert len(served.panel.streams._of_runs[id].viewers) == 101
            until(
                lambda: (
                    len(events_of(received))
                    + sum(data.get("dropped", 0) for _, _, data in list(received))
                    == 30
                )
            )
            assert psutil.Process().memory_info().rss - before < 300 << 20
    finally:
        for connection in asleep:
            connection.close()


def test_a_source_rests_when_nobody_listens(serve, tmp_path, monkeypatch):
    begin(tmp_path / "one").close()
    served = serve(tmp_path)
    id = served.the_run()
    with listening(served, f"/api/runs/{id}/stream") as received:
        until(lambda: bool(received))
    source = served.panel.streams._of_runs[id]
    until(lambda: not source.viewers and source._task.done())


def test_a_deleted_run_ends_its_stream(serve, tmp_path):
    finished(tmp_path / "one")
    served = serve(tmp_path)
    with listening(served, f"/api/runs/{served.the_run()}/stream") as received:
        until(lambda: bool(received))
        shutil.rmtree(tmp_path / "one")
        until(lambda: received[-1][1] == "gone")


def test_a_replaced_log_is_sent_from_its_start(serve, tmp_path):
    finished(tmp_path / "one")
    served = serve(tmp_path)
    with listening(served, f"/api/runs/{served.the_run()}/stream") as received:
        until(lambda: bool(received))
        (tmp_path / "one/events.jsonl").unlink()
        log = begin(tmp_path / "one")
        emit_steps(log, 1, 2)
        until(
            lambda: (
                [event["type"] for event in events_of(received)] == ["run_start", "step", "step"]
            )
        )


def test_the_list_sends_changed_and_removed_runs(serve, tmp_path):
    finished(tmp_path / "one")
    finished(tmp_path / "two")
    served = serve(tmp_path)
    removed_id = served.the_run("two")
    with listening(served, "/api/stream") as received:
        until(lambda: len(received) == 1)
        assert [entry["name"] for entry in received[0][2]["changed"]] in (
            ["one", "two"],
            ["two", "one"],
        )
        log = begin(tmp_path / "three")
        until(lambda: len(received) == 2)
        assert [entry["name"] for entry in received[1][2]["changed"]] == ["three"]
        shutil.rmtree(tmp_path / "two")
        until(lambda: any(data["removed"] == [removed_id] for _, _, data in received))
        emit_steps(log, 1, 1)
        until(lambda: received[-1][2]["changed"] and received[-1][2]["changed"][0]["step"] == 1)
        with listening(served, "/api/stream") as late:  # who comes later is told everything
            until(
                lambda: (
                    sorted(entry["name"] for _, _, data in late for entry in data["changed"])
                    == ["one", "three"]
                )
            )


def test_reading_leaves_a_run_as_it_is(serve, tmp_path):
    run = finished(tmp_path / "one")

    def state(root: Path) -> dict[str, tuple[int, int]]:
        return {
            str(path): (path.stat().st_mtime_ns, path.stat().st_size)
            for path in sorted(root.rglob("*"))
        }

    before = state(run)
    served = serve(tmp_path)
    id = served.the_run()
    for route in ("", "/series", "/ranks", "/traffic", "/log", "/config", "/report", "/csv"):
        assert served.client.get(f"/api/runs/{id}{route}").status_code == 200
    with listening(served, f"/api/runs/{id}/stream?after=0") as received:
        until(lambda: bool(events_of(received)))
    assert state(run) == before


@pytest.mark.parametrize("after", ["-1", "x", "1e3"])
def test_a_place_that_is_none_is_refused(serve, tmp_path, after):
    finished(tmp_path / "one")
    served = serve(tmp_path)
    assert (
        served.client.get(f"/api/runs/{served.the_run()}/stream?after={after}").status_code == 422
    )
