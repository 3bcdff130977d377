"""Test that events reach browsers quickly, that many clients are possible, and that runs are not
affected."""

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
from panels import Served, wait_until

from paceline.web.runs import stream as stream_module
from paceline.web.runs.stream import SSEClient, without_ranks


@contextmanager
def open_stream(served: Served, path: str) -> Iterator[list[tuple[float, str, Any]]]:
    """Yield a list that receives the messages of a stream as (arrival time, event, data)."""
    received: list[tuple[float, str, Any]] = []
    ended = threading.Event()
    with served.client.stream("GET", path, timeout=30) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")

        def read() -> None:
            name = ""
            try:
                for line in response.iter_lines():
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
            response.extensions["network_stream"].get_extra_info("socket").shutdown(
                socket.SHUT_RDWR
            )
            reader.join(20)
            assert ended.is_set()


def events_of(received: list[tuple[float, str, Any]]) -> list[dict[str, Any]]:
    return [
        event for _, name, data in list(received) if name == "append" for event in data["events"]
    ]


def test_sends_new_events_and_status_quickly(serve, tmp_path):
    log = begin(tmp_path / "one")
    emit_steps(log, 1, 3)
    served = serve(tmp_path)
    id = served.find_run_id()
    with open_stream(served, f"/api/runs/{id}/stream") as received:
        wait_until(lambda: any(name == "status" for _, name, _ in received))
        assert events_of(received) == []  # earlier events are not sent
        emit_steps(log, 4, 4)
        wait_until(lambda: len(events_of(received)) == 1)
        arrival, _, data = next(message for message in received if message[1] == "append")
        # usually below a second; the limit allows for a loaded machine
        assert arrival - data["events"][0]["time"] < 5
        assert data["events"][0]["ranks"][0]["rank"] == 0
        assert data["bytes"] == os.path.getsize(tmp_path / "one/events.jsonl")
        assert data["dropped"] == 0
        log.emit({"type": "run_end", "status": "done", "step": 4, "reason": None, "wall_s": 1})
        wait_until(
            lambda: any(name == "status" and data["status"] == "done" for _, name, data in received)
        )


def test_stream_after_an_offset_sends_each_event_once(serve, tmp_path):
    log = begin(tmp_path / "one")
    emit_steps(log, 1, 5)
    served = serve(tmp_path)
    id = served.find_run_id()
    offset = served.get(f"/api/runs/{id}/series")["bytes"]
    assert served.get(f"/api/runs/{id}")["bytes"] == offset
    emit_steps(log, 6, 9)
    with open_stream(served, f"/api/runs/{id}/stream?after={offset}") as first:
        emit_steps(log, 10, 12)
        wait_until(lambda: len(events_of(first)) >= 7)
        with open_stream(served, f"/api/runs/{id}/stream?after={offset}") as second:
            emit_steps(log, 13, 14)
            wait_until(lambda: len(events_of(first)) >= 9 and len(events_of(second)) >= 9)
            for received in (first, second):
                assert [event["step"] for event in events_of(received)] == list(range(6, 15))


def test_sends_an_incomplete_line_once_complete(serve, tmp_path):
    begin(tmp_path / "one").close()
    served = serve(tmp_path)
    with (
        open_stream(served, f"/api/runs/{served.find_run_id()}/stream") as received,
        open(tmp_path / "one/events.jsonl", "ab", buffering=0) as handle,
    ):
        wait_until(lambda: bool(received))
        handle.write(b'{"time": 1, "type": "notice", ')
        time.sleep(0.6)
        assert events_of(received) == []
        handle.write(b'"text": "whole"}\n')
        wait_until(lambda: [event["text"] for event in events_of(received)] == ["whole"])


def test_late_client_receives_the_number_of_dropped_events(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(stream_module, "_READ_BYTES", 20_000)
    log = begin(tmp_path / "one")
    emit_steps(log, 1, 500)
    served = serve(tmp_path)
    with open_stream(served, f"/api/runs/{served.find_run_id()}/stream?after=0") as received:
        wait_until(lambda: bool(events_of(received)))
        data = next(data for _, name, data in received if name == "append")
        assert data["dropped"] > 400
        assert data["dropped"] + len(data["events"]) == 501
        assert data["events"][-1]["step"] == 500


def test_burst_omits_the_ranks_of_most_steps():
    steps = [{"type": "step", "step": step, "ranks": [1], "loss": 1.0} for step in range(6)]
    notice = {"type": "notice", "ranks": [3]}
    bare = without_ranks([*steps, notice])
    assert ["ranks" in event for event in bare] == [False] * 5 + [True, True]
    assert without_ranks(steps[:2]) == steps[:2]


def test_slow_client_drops_the_oldest_events():
    client = SSEClient()
    body = b'[{"type":"notice","text":"%s"}]' % (b"x" * 100_000)
    for number in range(100):
        client.put("append", body, 1, number)
        client.put("status", b'{"number":%d}' % number)
    sent = b"".join(iter(client.take, b"")).decode()
    assert len(sent) < stream_module._QUEUE_BYTES + 200_000
    data = [json.loads(line[6:]) for line in sent.splitlines() if line.startswith("data: ")]
    appended = [message for message in data if "events" in message]
    assert appended[0]["dropped"] + len(appended) == 100
    assert [message["bytes"] for message in appended] == list(range(100 - len(appended), 100))
    assert [message for message in data if "number" in message] == [
        {"number": 99}
    ]  # only the newest status is sent


def test_idle_clients_cost_bounded_memory_and_no_time(serve, tmp_path):
    import psutil

    log = begin(tmp_path / "one")
    served = serve(tmp_path)
    id = served.find_run_id()
    host = f"127.0.0.1:{served.panel.port}"
    request = f"GET /api/runs/{id}/stream HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    idle_connections = [
        socket.create_connection(("127.0.0.1", served.panel.port)) for _ in range(100)
    ]
    try:
        for connection in idle_connections:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(request)
        with open_stream(served, f"/api/runs/{id}/stream") as received:
            wait_until(lambda: bool(received))
            before = psutil.Process().memory_info().rss
            for number in range(30):
                log.notice("x" * 100_000 + str(number))
                time.sleep(0.02)
            # all clients share one reader of the log
            assert len(served.panel.streams._of_runs[id].viewers) == 101
            wait_until(
                lambda: (
                    len(events_of(received))
                    + sum(data.get("dropped", 0) for _, _, data in list(received))
                    == 30
                )
            )
            assert psutil.Process().memory_info().rss - before < 300 << 20
    finally:
        for connection in idle_connections:
            connection.close()


def test_source_stops_without_clients(serve, tmp_path, monkeypatch):
    begin(tmp_path / "one").close()
    served = serve(tmp_path)
    id = served.find_run_id()
    with open_stream(served, f"/api/runs/{id}/stream") as received:
        wait_until(lambda: bool(received))
    source = served.panel.streams._of_runs[id]
    wait_until(lambda: not source.viewers and source._task.done())


def test_stream_ends_when_its_run_is_deleted(serve, tmp_path):
    finished(tmp_path / "one")
    served = serve(tmp_path)
    with open_stream(served, f"/api/runs/{served.find_run_id()}/stream") as received:
        wait_until(lambda: bool(received))
        shutil.rmtree(tmp_path / "one")
        wait_until(lambda: received[-1][1] == "gone")


def test_sends_a_replaced_log_from_its_start(serve, tmp_path):
    finished(tmp_path / "one")
    served = serve(tmp_path)
    with open_stream(served, f"/api/runs/{served.find_run_id()}/stream") as received:
        wait_until(lambda: bool(received))
        (tmp_path / "one/events.jsonl").unlink()
        log = begin(tmp_path / "one")
        emit_steps(log, 1, 2)
        wait_until(
            lambda: (
                [event["type"] for event in events_of(received)] == ["run_start", "step", "step"]
            )
        )


def test_list_stream_sends_changed_and_removed_runs(serve, tmp_path):
    finished(tmp_path / "one")
    finished(tmp_path / "two")
    served = serve(tmp_path)
    removed_id = served.find_run_id("two")
    with open_stream(served, "/api/stream") as received:
        wait_until(lambda: len(received) == 1)
        assert [entry["name"] for entry in received[0][2]["changed"]] in (
            ["one", "two"],
            ["two", "one"],
        )
        log = begin(tmp_path / "three")
        wait_until(lambda: len(received) == 2)
        assert [entry["name"] for entry in received[1][2]["changed"]] == ["three"]
        shutil.rmtree(tmp_path / "two")
        wait_until(lambda: any(data["removed"] == [removed_id] for _, _, data in received))
        emit_steps(log, 1, 1)
        wait_until(
            lambda: received[-1][2]["changed"] and received[-1][2]["changed"][0]["step"] == 1
        )
        with open_stream(served, "/api/stream") as late:  # a new client receives the whole list
            wait_until(
                lambda: (
                    sorted(entry["name"] for _, _, data in late for entry in data["changed"])
                    == ["one", "three"]
                )
            )


def test_reading_does_not_change_a_run(serve, tmp_path):
    run = finished(tmp_path / "one")

    def state(root: Path) -> dict[str, tuple[int, int]]:
        return {
            str(path): (path.stat().st_mtime_ns, path.stat().st_size)
            for path in sorted(root.rglob("*"))
        }

    before = state(run)
    served = serve(tmp_path)
    id = served.find_run_id()
    for route in ("", "/series", "/ranks", "/traffic", "/log", "/config", "/report", "/csv"):
        assert served.client.get(f"/api/runs/{id}{route}").status_code == 200
    with open_stream(served, f"/api/runs/{id}/stream?after=0") as received:
        wait_until(lambda: bool(events_of(received)))
    assert state(run) == before


@pytest.mark.parametrize("after", ["-1", "x", "1e3"])
def test_rejects_invalid_offset(serve, tmp_path, after):
    finished(tmp_path / "one")
    served = serve(tmp_path)
    assert (
        served.client.get(f"/api/runs/{served.find_run_id()}/stream?after={after}").status_code
        == 422
    )
