"""`paceline compare` compares two runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import train

from paceline.cli import main


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs `one` and `two` on one and two ranks, and `other` with another
    learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    fixed = ("max_steps=3", "global_batch_size=8", "precision=32", "logging_steps=1")
    train(folder / "one", *fixed, "learning_rate=1e-3", "parallel.num_gpus=1")
    train(folder / "two", *fixed, "learning_rate=1e-3", "parallel.num_gpus=2")
    train(folder / "other", *fixed, "learning_rate=1e-2", "parallel.num_gpus=1")
    return folder


def compare(
    capsys: pytest.CaptureFixture[str], a: Path, b: Path, *options: str
) -> tuple[int, dict[str, Any]]:
    code = main(["compare", str(a), str(b), *options, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_equal_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, comparison = compare(capsys, runs / "one", runs / "one")
    assert code == 0
    assert comparison["steps"] == 3
    assert comparison["loss_max_rel_diff"] == 0
    assert comparison["first_differing_step"] is None
    assert comparison["config"] == []
    assert comparison["model_digest"]["equal"] is True


def test_other_ranks_differ_by_rounding(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, comparison = compare(capsys, runs / "one", runs / "two", "--tolerance", "1e-3")
    assert code == 0
    assert 0 <= comparison["loss_max_rel_diff"] < 1e-3
    assert comparison["model_digest"]["equal"] is False
    keys = {change["key"] for change in comparison["config"]}
    assert "parallel.num_gpus" in keys or "parallel.mode" in keys
    assert "output_dir" not in keys


def test_other_learning_rate_differs_from_the_second_step_on(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, comparison = compare(capsys, runs / "one", runs / "other")
    assert code == 1
    assert comparison["first_differing_step"] == 2
    change = {"key": "train_args.learning_rate", "a": 1e-3, "b": 1e-2}
    assert change in comparison["config"]
    assert main(["compare", str(runs / "one"), str(runs / "other")]) == 1
    printed = capsys.readouterr().out
    assert "from step 2 on" in printed
    assert "weights       not equal bit for bit" in printed


def test_digests_of_a_run_are_printed_alone(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, comparison = compare(capsys, runs / "one", runs / "two")
    assert main(["inspect", str(runs / "one"), "--digest", "--json"]) == 0
    digests = json.loads(capsys.readouterr().out)
    assert digests.keys() == {"digest", "model_digest"}
    assert digests["model_digest"] == comparison["model_digest"]["a"]
    assert main(["inspect", str(runs / "one"), "--digest"]) == 0
    assert capsys.readouterr().out.split() == [
        *("digest", digests["digest"], "model_digest", digests["model_digest"])
    ]


def test_runs_that_cannot_be_compared(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(runs / "one"), str(tmp_path)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    shutil.copytree(runs / "one", tmp_path / "cut")
    events = tmp_path / "cut" / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join(line for line in lines if json.loads(line)["type"] != "step"))
    assert main(["compare", str(runs / "one"), str(tmp_path / "cut")]) == 2
    assert "no step in common" in capsys.readouterr().err
