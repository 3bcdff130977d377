"""A run that saves traffic tells what it measured, at its start and in its report; its bytes count
for no step."""

from pathlib import Path

import pytest
from commands import events, report, train

pytestmark = pytest.mark.alone


def test_a_compressed_run_says_whether_that_pays(tmp_path: Path) -> None:
    words = (
        "parallel.mode=ddp",
        "parallel.num_gpus=2",
        "max_steps=14",
        "compression.method=topk",
        "logging_steps=7",
    )
    done = train(tmp_path / "run", *words)
    found = report(tmp_path / "run")
    assert set(found["link"]) == {
        "latency_s",
        "bandwidth_bytes_s",
        "num_ranks",
        "residual",
        "sent_bytes",
        "wall_s",
    }
    told = found["communication"]
    assert told["method"] == "topk"
    assert told["pays"] in (True, False, None)
    assert told["steps_measured"] == 13
    assert found["traffic_bytes_per_step"]["measured"] < found["link"]["sent_bytes"]
    # counts
    assert (
        abs(
            found["traffic_bytes_per_step"]["measured"]
            - found["traffic_bytes_per_step"]["predicted"]
        )
        < 200
    )
    notices = [one["text"] for one in events(tmp_path / "run", "notice")]
    assert sum(text.startswith("link: ") and "topk sends" in text for text in notices) == 1
    assert sum(text.startswith("step 11: topk ") for text in notices) == 1
    (end,) = events(tmp_path / "run", "run_end")
    assert end["network"] in done.stderr
    assert told["why"] in end["network"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Communication" in page
    assert "Pays on this link" in page
