"""`train_args.profile`: traces of some steps, and the compute rate of each step."""

import gzip
import json
from pathlib import Path

import pytest
from commands import MICRO, events, report, train

from paceline.cli import main


@pytest.mark.soak
def test_each_rank_writes_a_trace_of_the_steps(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    profile = "train_args.profile={start_step: 2, num_steps: 2}"
    train(folder, "max_steps=4", "parallel.num_gpus=2", profile)
    (event,) = events(folder, "profile")
    assert (event["first_step"], event["step"], event["memory_snapshots"]) == (2, 3, [])
    assert event["traces"] == ["profile/rank-000.json.gz", "profile/rank-001.json.gz"]
    for trace in event["traces"]:
        names = [entry["name"] for entry in _trace(folder / trace) if "name" in entry]
        assert names.count("ProfilerStep#1")
        assert names.count("ProfilerStep#2")
        assert "ProfilerStep#0" not in names  # the warm-up
        assert any(name.startswith("aten::") for name in names)
    page = (folder / "report.html").read_text()
    assert 'href="profile/rank-001.json.gz"' in page
    assert "Profile of steps 2 to 3" in page
    steps = events(folder, "step")
    assert all(step["flops_per_device_s"] > 0 and step["mfu"] is None for step in steps)
    assert report(folder)["flops_per_device_s"] > 0
    assert report(folder)["peak"] is None


def _trace(path: Path) -> list[dict[str, str]]:
    with gzip.open(path) as file:
        return list(json.load(file)["traceEvents"])


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ("{start_step: 4, num_steps: 3}", "step 6 is to be recorded, and the run has 5 steps"),
        ("{start_step: 0}", "a mapping with `start_step` (a whole number of at least 1)"),
    ],
)
def test_steps_that_cannot_be_recorded_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], profile: str, message: str
) -> None:
    folder = tmp_path / "run"
    args = [f"output_dir={folder}", f"train_args.profile={profile}", "max_steps=5"]
    assert main(["sft", *MICRO, *args]) == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()
