"""Test the curves: downsampled, exact, zoomed, after a resume, and of a very long log."""

import json
import os
import time

import numpy as np
import pytest
from event_logs import begin, emit_steps, finished, step_fields, write_long
from panels import wait_until

from paceline.core.event_log import effective_steps, read_events
from paceline.web.runs import index as index_module
from paceline.web.runs.columns import SERIES, Columns, step_row
from paceline.web.runs.index import RunIndex


def test_returns_every_step_of_a_short_run(serve, tmp_path):
    finished(tmp_path / "one")
    served = serve(tmp_path)
    series = served.get(f"/api/runs/{served.find_run_id()}/series")
    assert series["step"] == list(range(1, 21))
    assert set(series["series"]) == set(SERIES)
    loss = series["series"]["loss"]
    assert (
        loss["mean"]
        == loss["min"]
        == loss["max"]
        == [pytest.approx(9 / step, rel=1e-6) for step in range(1, 21)]
    )
    assert series["tokens"] == [4096.0 * step for step in range(1, 21)]
    assert series["series"]["tokens_per_second"]["mean"][0] == pytest.approx(4096 / 0.3, rel=1e-6)
    assert series["series"]["memory_bytes"]["mean"][0] == 1001
    assert series["series"]["traffic_bytes"]["mean"][0] == 4096
    assert (series["num_steps"], series["exact"], series["every"]) == (20, True, 1)
    assert [(event["step"], event["loss"], event["metrics"]) for event in series["evals"]] == [
        (10, 0.8, {"accuracy": 0.5}),
        (20, 0.4, {"accuracy": 0.5}),
    ]
    marks = [(mark["type"], mark["step"], mark["level"]) for mark in series["marks"]]
    assert marks[0] == ("run_start", None, "info")
    assert ("notice", None, "warning") in marks
    assert ("checkpoint", 10, "info") in marks
    assert marks[-1] == ("run_end", 20, "info")


def test_buckets_keep_mean_and_extremes(serve, tmp_path):
    log = begin(tmp_path / "one")
    losses = np.random.default_rng(0).normal(5, 1, 1000)
    for step, loss in enumerate(losses.tolist(), 1):
        log.emit({"type": "step", **step_fields(step), "loss": loss})
    served = serve(tmp_path)
    series = served.get(
        f"/api/runs/{served.find_run_id()}/series", params={"points": 10, "names": "loss"}
    )
    assert series["step"] == list(range(100, 1001, 100))
    parts = losses.reshape(10, 100)
    assert series["series"]["loss"]["mean"] == pytest.approx(parts.mean(1), rel=1e-5)
    assert series["series"]["loss"]["min"] == pytest.approx(parts.min(1), rel=1e-5)
    assert series["series"]["loss"]["max"] == pytest.approx(parts.max(1), rel=1e-5)


def test_zoom_selects_a_range_of_steps(serve, tmp_path):
    finished(tmp_path / "one", steps=40)
    served = serve(tmp_path)
    id = served.find_run_id()
    series = served.get(f"/api/runs/{id}/series", params={"start": 11, "end": 20})
    assert series["step"] == list(range(11, 21))
    assert [event["step"] for event in series["evals"]] == [20]
    assert served.get(f"/api/runs/{id}/series", params={"start": 30, "end": 20})["step"] == []
    assert served.get(f"/api/runs/{id}/series", params={"start": 1000})["step"] == []


def test_non_finite_values_are_null_and_excluded_from_buckets(serve, tmp_path):
    log = begin(tmp_path / "one")
    for step, loss in enumerate([1.0, float("nan"), 3.0, float("inf"), None, float("-inf")], 1):
        log.emit({"type": "step", **step_fields(step), "loss": loss})
    served = serve(tmp_path)
    id = served.find_run_id()
    series = served.get(f"/api/runs/{id}/series", params={"names": "loss"})
    assert series["series"]["loss"]["mean"] == [1.0, None, 3.0, None, None, None]
    series = served.get(f"/api/runs/{id}/series", params={"names": "loss", "points": 2})
    assert series["series"]["loss"] == {"mean": [2.0, None], "min": [1.0, None], "max": [3.0, None]}
    assert "step 6 is -inf" in served.get("/api/runs")["runs"][0]["problem"]


def test_rejects_unknown_series_with_a_suggestion(serve, tmp_path):
    finished(tmp_path / "one")
    served = serve(tmp_path)
    response = served.client.get(
        f"/api/runs/{served.find_run_id()}/series", params={"names": "loss,grad_nrm"}
    )
    assert response.status_code == 400
    assert response.json()["error"]["fix"] == "did you mean `grad_norm`?"
    assert (
        served.client.get(
            f"/api/runs/{served.find_run_id()}/series", params={"points": 0}
        ).status_code
        == 422
    )


def write_resumed_log(root):
    log = begin(root)
    emit_steps(log, 1, 8)
    log.emit({"type": "eval", "step": 8, "loss": 8.0, "count": 1, "wall_s": 1, "metrics": {}})
    log.emit(
        {
            "type": "fault",
            "step": 8,
            "ranks": [1],
            "hosts": ["one"],
            "reason": "rank 1 was killed",
            "restart": 1,
        }
    )
    log.close()
    log = begin(root, resumed_from_step=4)
    log.emit({"type": "resume", "step": 4, "path": "checkpoints/step-00000004"})
    for step in range(5, 7):
        log.emit({"type": "step", **step_fields(step), "loss": 100.0 + step})
    log.emit({"type": "eval", "step": 6, "loss": 6.0, "count": 1, "wall_s": 1, "metrics": {}})
    return log


@pytest.mark.parametrize(("launcher", "same_command"), [(7, True), (8, False)])
def test_wall_time_includes_attempts_that_ended_before_a_checkpoint(
    launcher, same_command, serve, tmp_path
):
    log = begin(tmp_path / "one", launcher=7)
    emit_steps(log, 1, 2)
    log.close()
    first = next(iter(read_events(tmp_path / "one/events.jsonl")))["time"]
    time.sleep(0.05)
    log = begin(tmp_path / "one", launcher=launcher)
    emit_steps(log, 1, 4)
    served = serve(tmp_path)
    run = served.get(f"/api/runs/{served.find_run_id()}")
    assert (run["started_at"] == first) is same_command
    assert run["wall_s"] == pytest.approx(run["updated_at"] - run["started_at"])


def test_resume_hides_repeated_steps_and_keeps_marks(serve, tmp_path):
    log = write_resumed_log(tmp_path / "one")
    served = serve(tmp_path)
    id = served.find_run_id()
    series = served.get(f"/api/runs/{id}/series")
    effective = effective_steps(read_events(tmp_path / "one/events.jsonl"))
    assert series["step"] == [event["step"] for event in effective] == [1, 2, 3, 4, 5, 6]
    assert series["series"]["loss"]["mean"] == pytest.approx(
        [event["loss"] for event in effective], rel=1e-6
    )
    assert series["tokens"][-1] == 4096 * 6
    assert [event["step"] for event in series["evals"]] == [6]
    assert [mark["type"] for mark in series["marks"]] == [
        "run_start",
        "fault",
        "run_start",
        "resume",
    ]
    assert served.get(f"/api/runs/{id}")["restarts"] == 1
    assert served.get("/api/runs")["runs"][0]["step"] == 6
    emit_steps(log, 7, 7)  # events after the log was read
    log.emit({"type": "resume", "step": 2, "path": "x"})
    emit_steps(log, 3, 3)
    assert served.get(f"/api/runs/{id}/series")["step"] == [1, 2, 3]
    begin(tmp_path / "one").close()  # the run starts again
    series = served.get(f"/api/runs/{id}/series")
    assert (series["step"], series["evals"]) == ([], [])


def test_step_logged_twice_counts_once(tmp_path):
    log = begin(tmp_path)
    emit_steps(log, 1, 5)
    emit_steps(log, 3, 4)
    index = RunIndex(tmp_path / "events.jsonl")
    assert index.catch_up()
    assert index.columns.column("step").tolist() == [1, 2, 3, 4]


def test_reads_lines_split_over_chunks(tmp_path, monkeypatch):
    log = write_resumed_log(tmp_path)
    log.notice("x" * 3000)
    emit_steps(log, 7, 9)
    complete = RunIndex(tmp_path / "events.jsonl")
    complete.catch_up()
    for size in (700, 1021, 2048):
        monkeypatch.setattr(index_module, "_CHUNK_BYTES", size)
        chunked = RunIndex(tmp_path / "events.jsonl")
        assert chunked.catch_up()
        assert (
            chunked.columns.column("step").tolist()
            == complete.columns.column("step").tolist()
            == [1, 2, 3, 4, 5, 6, 7, 8, 9]
        )
        assert list(chunked.marks) == list(complete.marks)
        assert chunked.position == os.path.getsize(tmp_path / "events.jsonl")


def test_skips_too_long_lines(tmp_path, monkeypatch):
    log = begin(tmp_path)
    emit_steps(log, 1, 1)
    with open(tmp_path / "events.jsonl", "ab") as handle:
        handle.write(b'{"type": "notice", "text": "' + b"x" * 50_000 + b'"}\n')
    emit_steps(log, 2, 2)
    monkeypatch.setattr(index_module, "_CHUNK_BYTES", 4096)
    monkeypatch.setattr(index_module, "_MAX_LINE_BYTES", 16384)
    index = RunIndex(tmp_path / "events.jsonl")
    assert index.catch_up()
    assert index.columns.column("step").tolist() == [1, 2]
    assert index.unreadable > 0


def test_columns_of_a_long_run_keep_every_nth_step():
    columns = Columns(max_rows=1000)
    previous = None
    for step in range(1, 10_001, 100):
        rows = []
        for number in range(step, step + 100):
            row = step_row(step_fields(number), 0, previous)
            assert row is not None
            previous = row[1], row[3]
            rows.append(row)
        columns.append(rows)
    assert columns.rows <= 1000
    assert columns.every == 16
    steps = columns.column("step")
    assert set(np.diff(steps)) == {16}
    assert columns.num_steps == 10_000
    columns.cut_after(5000)
    assert columns.column("step")[-1] <= 5000


def test_long_log_is_sampled_first_and_exact_later(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "_MAX_WAIT_BYTES", 1 << 16)
    write_long(tmp_path / "one/events.jsonl", 12_000, 4, resume_at=9000)
    served = serve(tmp_path)
    id = served.find_run_id()
    lock = served.panel.runs.get(id).index.lock
    with lock:  # blocks the background reader, so the response comes from the overview
        series = served.get(f"/api/runs/{id}/series", params={"points": 300})
        assert not series["exact"]
        assert 200 < len(series["step"]) <= 300
        assert series["step"] == sorted(set(series["step"]))
        assert series["read"] < 1
        ranks = served.get(f"/api/runs/{id}/ranks")
        assert [row["rank"] for row in ranks["ranks"]] == [0, 1, 2, 3]
    wait_until(lambda: served.get(f"/api/runs/{id}/series")["exact"])
    exact = served.get(f"/api/runs/{id}/series", params={"points": 300})
    effective = effective_steps(read_events(tmp_path / "one/events.jsonl"))
    assert exact["num_steps"] == len(effective) == 12_000
    losses = np.array([event["loss"] for event in effective])
    assert exact["series"]["loss"]["mean"] == pytest.approx(
        losses.reshape(300, 40).mean(1), rel=1e-5
    )
    assert exact["tokens"][-1] == 12_000 * 4096
    # The overview approximates the exact curve.
    approximate = np.interp(exact["step"], series["step"], series["series"]["loss"]["mean"])
    assert np.abs(approximate - exact["series"]["loss"]["mean"]).max() < 0.2


def test_memory_of_all_indexes_is_bounded(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "_MAX_MEMORY_BYTES", 1)
    for name in ("one", "two"):
        finished(tmp_path / name)
    served = serve(tmp_path)
    for name in ("one", "two", "one"):
        assert len(served.get(f"/api/runs/{served.find_run_id(name)}/series")["step"]) == 20
    num_rows = [run.index.columns.rows for run in served.panel.runs.all()]
    assert sorted(num_rows) == [0, 20]


def test_ranks_have_phases_and_the_slowest_is_reported(serve, tmp_path):
    log = begin(tmp_path / "one", ranks=4)
    emit_steps(log, 1, 50, ranks=4, slow_rank=2)
    served = serve(tmp_path)
    ranks = served.get(f"/api/runs/{served.find_run_id()}/ranks", params={"points": 5})
    assert len(ranks["step"]) == 5
    rank = ranks["ranks"][2]
    assert (rank["rank"], rank["host"], rank["device"]) == (2, "one", "cpu:2")
    assert rank["data_s"] == [pytest.approx(0.11)] * 5
    assert rank["communication_s"] == [pytest.approx(0.0)] * 5
    assert rank["memory_bytes"] == [1002.0] * 5
    assert ranks["slowest"]["rank"] == 2
    assert ranks["slowest"]["phase"] == "data"
    assert ranks["slowest"]["slower_by_s"] == pytest.approx(0.1)
    assert 0 < ranks["slowest"]["slower_by_share"] < 1
    assert ranks["lines"] == 50


def test_ranks_of_an_older_log_have_the_recorded_values(serve, tmp_path):
    log = begin(tmp_path / "one")
    for step in range(1, 5):
        rows = [
            {"rank": 0, "data_wait_s": 0.01, "comm_wait_s": 0.2},
            {"rank": 1, "data_wait_s": 0.01, "comm_wait_s": 0.0},
        ]
        log.emit({"type": "step", **step_fields(step), "ranks": rows})
    served = serve(tmp_path)
    ranks = served.get(f"/api/runs/{served.find_run_id()}/ranks")
    assert ranks["ranks"][0]["data_s"] == [0.01] * 4
    assert ranks["ranks"][0]["communication_s"] == [0.2] * 4
    assert ranks["ranks"][0]["forward_s"] == [None] * 4
    assert ranks["ranks"][0]["other_s"] == [None] * 4
    assert ranks["ranks"][0]["memory_bytes"] == [1000.0] * 4
    assert ranks["slowest"]["rank"] == 1


def test_equally_fast_ranks_have_no_slowest(serve, tmp_path):
    log = begin(tmp_path / "one")
    emit_steps(log, 1, 5)
    served = serve(tmp_path)
    assert served.get(f"/api/runs/{served.find_run_id()}/ranks")["slowest"] is None


def test_returns_traffic_by_collective_and_the_prediction(serve, tmp_path):
    config = {"compression": {"method": "topk"}}
    log = begin(tmp_path / "one", predicted={"traffic_bytes_per_step": 4000}, config=config)
    emit_steps(log, 1, 10)
    served = serve(tmp_path)
    id = served.find_run_id()
    traffic = served.get(f"/api/runs/{id}/traffic")
    assert traffic["by_collective"] == {"all_reduce": [4000.0] * 10, "broadcast": [96.0] * 10}
    assert (traffic["predicted_bytes"], traffic["measured_bytes"]) == (4000.0, 4096.0)
    assert traffic["compression"] == {"method": "topk", "ratio": None}
    report = {
        "traffic_bytes_per_step": {"predicted": 4001, "measured": 4097},
        "communication": {"ratio_sent": 49.9},
    }
    (tmp_path / "one/report.json").write_text(json.dumps(report))
    traffic = served.get(f"/api/runs/{id}/traffic")
    assert (traffic["predicted_bytes"], traffic["measured_bytes"]) == (4001.0, 4097.0)
    assert traffic["compression"]["ratio"] == 49.9


def test_csv_has_every_effective_step(serve, tmp_path):
    write_resumed_log(tmp_path / "one")
    served = serve(tmp_path)
    response = served.client.get(
        f"/api/runs/{served.find_run_id()}/csv", params={"names": "loss,comm_wait_s"}
    )
    lines = response.text.splitlines()
    assert lines[0] == "step,time,tokens,loss,comm_wait_s"
    assert [line.split(",")[0] for line in lines[1:]] == ["1", "2", "3", "4", "5", "6"]
    assert lines[-1].split(",")[2:] == ["24576", "106", "0.1"]
    assert (
        abs(float(lines[1].split(",")[1]) - read_events(tmp_path / "one/events.jsonl")[1]["time"])
        < 1e-3
    )
    assert response.headers["content-type"].startswith("text/csv")


def test_sparklines_follow_the_loss_of_each_run(serve, tmp_path):
    finished(tmp_path / "short")
    log = begin(tmp_path / "long")
    for step in range(1, 1001):
        log.emit({"type": "step", **step_fields(step), "loss": 1000.0 / step})
    served = serve(tmp_path)
    ids = {name: served.find_run_id(name) for name in ("short", "long")}
    path = f"/api/sparklines?ids={ids['short']},{ids['long']},000000000000"
    curves = served.get(path)
    assert set(curves) == set(ids.values())
    assert curves[ids["short"]] == [float(f"{9 / step:.4g}") for step in range(1, 21)]
    assert 40 < len(curves[ids["long"]]) <= 60
    assert curves[ids["long"]] == sorted(curves[ids["long"]], reverse=True)
    emit_steps(log, 1001, 1001)
    log.emit({"type": "resume", "step": 5, "path": "checkpoints/step-00000005"})
    assert served.get(path)[ids["short"]] == curves[ids["short"]]
