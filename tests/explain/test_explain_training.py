"""Test that `paceline explain ddp|zero|dp` shows the measurements of a small training run."""

from pathlib import Path

import pytest

from paceline.explain.run import ExplainOptions, Recording
from paceline.explain.topics import ddp, dp, zero


def _check_page(recording: Recording, folder: Path) -> str:
    player = recording.player
    page = recording.page()
    (folder / "page.html").write_text(page, encoding="utf-8")
    if player["kind"] == "timeline":
        assert player["times"] == sorted(player["times"])
        assert all(
            0 <= bar["start"] <= bar["end"] <= player["end"] + 1e-9 for bar in player["bars"]
        )
        assert len(player["times"]) == len(recording.captions)
        assert {bar["kind"] for bar in player["bars"]} <= set(player["colors"])
    return page


@pytest.mark.slow
def test_ddp_reduces_buckets_in_backward_order(tmp_path: Path) -> None:
    recording = ddp.record(ExplainOptions("ddp", 2, 0, ""))
    content = recording.content
    assert content["result_ok"]
    assert sum(content["buckets"]) == 8 * (512 * 512 + 512) * 4
    for rank in range(2):
        reduces = [
            span
            for span in content["spans"]
            if span["rank"] == rank and span["kind"] == "all-reduce"
        ]
        assert [span["bucket"] for span in reduces] == list(range(len(content["buckets"])))
        for span in reduces:
            fills = [
                fill
                for fill in content["fills"]
                if fill["rank"] == rank and fill["bucket"] == span["bucket"]
            ]
            assert sum(fill["bytes"] for fill in fills) == content["buckets"][span["bucket"]]
            # The all-reduce of a bucket starts when it is full, and before the end of backward
            # except for the last one.
            assert max(fill["time"] for fill in fills) <= span["start"]
        backward = next(
            span for span in content["spans"] if span["rank"] == rank and span["kind"] == "backward"
        )
        assert all(span["start"] < backward["end"] for span in reduces[:-1])
    assert 0 <= content["overlap"] <= 1
    assert "bucket 0 is full" in _check_page(recording, tmp_path)


@pytest.mark.slow
def test_dp_runs_replicas_concurrently_between_copies(tmp_path: Path) -> None:
    recording = dp.record(ExplainOptions("dp", 3, 0, ""))
    content = recording.content
    assert content["result_ok"]
    # weights to two devices, and gradients back
    assert content["copied_bytes"] == 2 * 2 * 8 * (512 * 512 + 512) * 4
    spans = {
        kind: [span for span in content["spans"] if span["kind"] == kind] for kind in dp._COLORS
    }
    assert (
        {span["rank"] for span in spans["forward"]}
        == {span["rank"] for span in spans["backward"]}
        == {0, 1, 2}
    )
    assert all(spans["copy weights"][0]["end"] <= span["start"] for span in spans["forward"])
    assert all(span["end"] <= spans["sum gradients"][0]["start"] for span in spans["backward"])
    assert "through device 0" in _check_page(recording, tmp_path)


@pytest.mark.slow
def test_zero_measurements_match_the_predictions(tmp_path: Path) -> None:
    recording = zero.record(ExplainOptions("zero", 2, 0, ""))
    content = recording.content
    assert content["result_ok"]
    sizes = {stage["mode"]: stage["ranks"][0] for stage in content["stages"]}
    assert list(sizes) == ["ddp", "zero1", "zero2", "zero3"]
    ddp = sizes["ddp"]
    for mode, kind in (("zero1", "optimizer"), ("zero2", "gradients"), ("zero3", "parameters")):
        assert sizes[mode][kind] == pytest.approx(ddp[kind] / 2, rel=0.02)
    for stage in content["stages"]:
        for kind in zero.KINDS:
            assert max(rank[kind] for rank in stage["ranks"]) == pytest.approx(
                stage["declared"][kind], rel=0.02
            )
        assert stage["traffic"] == pytest.approx(stage["declared"]["traffic"], rel=0.02)
    assert "ZeRO-3" in _check_page(recording, tmp_path)
