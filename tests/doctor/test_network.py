"""Test that a run with compression measures the link at the start and reports it, and that the
bytes of the measurement do not count as traffic of a step."""

from pathlib import Path

from commands import events, report, train


def test_reports_whether_compression_pays(tmp_path: Path) -> None:
    done = train(
        tmp_path / "run",
        "parallel.mode=ddp",
        "parallel.num_gpus=2",
        "max_steps=14",
        "compression.method=topk",
        "logging_steps=7",
    )
    result = report(tmp_path / "run")
    assert set(result["link"]) == {
        "latency_s",
        "bandwidth_bytes_s",
        "num_ranks",
        "residual",
        "sent_bytes",
        "wall_s",
    }
    communication = result["communication"]
    assert communication["method"] == "topk"
    assert communication["pays"] in (True, False, None)
    assert communication["steps_measured"] == 13
    traffic = result["traffic_bytes_per_step"]
    assert traffic["measured"] < result["link"]["sent_bytes"]
    # the prediction does not include the all-reduce of the counts
    assert abs(traffic["measured"] - traffic["predicted"]) < 200
    notices = [event["text"] for event in events(tmp_path / "run", "notice")]
    assert sum(text.startswith("link: ") and "topk sends" in text for text in notices) == 1
    assert sum(text.startswith("step 11: topk ") for text in notices) == 1
    (end,) = events(tmp_path / "run", "run_end")
    assert end["network"] in done.stderr
    assert communication["why"] in end["network"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Communication" in page
    assert "Pays on this link" in page
