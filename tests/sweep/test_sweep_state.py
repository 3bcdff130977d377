"""Test the state file of a sweep, its runs, and its results."""

import json
from pathlib import Path

import pytest
from raised import raises_error

from paceline.core.errors import ConfigError
from paceline.sweep.grid import Grid
from paceline.sweep.metric import Metric, check_metric
from paceline.sweep.page import ranked, write_page
from paceline.sweep.scheduler import SweepSettings
from paceline.sweep.state import SweepState, load_state


def test_state_is_the_same_after_a_restart(tmp_path: Path) -> None:
    state = SweepState(tmp_path)
    first, second, third = (state.add((f"lora.rank={rank}",)) for rank in (8, 16, 64))
    first["status"], first["metric"] = "done", 2.5
    second["status"] = "running"
    third["status"] = "failed"
    state.save()
    assert [path.name for path in tmp_path.glob(".*")] == []  # no temporary file remains
    loaded = load_state(tmp_path)
    assert [run["status"] for run in loaded.runs] == ["done", "stopped", "failed"]
    assert loaded.find(("lora.rank=8.0",)) == first  # the same value in another notation
    grid = Grid(loaded.runs)
    names = []
    while (run := grid.next_run()) is not None:
        names.append((run["name"], grid.progress()))
    assert names == [("rank-16", "run 2 of 3"), ("rank-64", "run 3 of 3")]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"version": 99, "runs": []}',
        '{"version": 1, "runs": [{"name": "a"}]}',
    ],
)
def test_unusable_state_is_reported(tmp_path: Path, content: str) -> None:
    (tmp_path / "sweep.json").write_text(content)
    with raises_error(ConfigError, code="sweep-state-unreadable"):
        load_state(tmp_path)


def test_state_does_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    state = SweepState(tmp_path)
    state.add(("lora.rank=8",), "../other")
    state.save()
    with raises_error(ConfigError, code="sweep-state-unreadable"):
        load_state(tmp_path)


def test_each_run_has_its_own_folders(tmp_path: Path) -> None:
    settings = SweepSettings(None, ("max_steps=3",), tmp_path, "s3://bucket/runs")
    assert settings.overrides(["lora.rank=8"], "rank-8") == [
        "max_steps=3",
        "lora.rank=8",
        f'output_dir="{tmp_path}/rank-8"',
        'checkpoint_dir="s3://bucket/runs/rank-8"',
    ]


def test_page_escapes_values_and_lists_the_best_run_first(tmp_path: Path) -> None:
    state = SweepState(tmp_path)
    for rank, status, metric in ((8, "done", 3.0), (16, "done", 2.0), (32, "failed", None)):
        run = state.add((f"lora.rank={rank}",))
        run["status"], run["metric"] = status, metric
    state.runs[2]["error"] = "<script>alert(1)</script>"
    metric = Metric("eval_loss", False)
    assert [run["overrides"]["lora.rank"] for run in ranked(state.runs, metric)] == [16, 8, 32]
    write_page(state, state.runs, metric)
    page = (tmp_path / "sweep.html").read_text()
    assert page.index("rank-16") < page.index("rank-8<") < page.index("rank-32")
    assert "<script>alert" not in page
    assert "http://" not in page
    assert "https://" not in page


@pytest.mark.parametrize("name", ["eval_loss", "loss", "eval_f1", "f1", "train_loss"])
def test_metrics_of_the_evaluations_are_accepted(name: str) -> None:
    check_metric(Metric(name, False), True, ["loss", "f1"])
    check_metric(Metric(name, False), True, None)  # a function of the user determines the names


def test_unknown_metric_is_refused() -> None:
    with raises_error(ConfigError, code="unknown-sweep-metric") as error:
        check_metric(Metric("eval_f2", True), True, ["loss", "f1"])
    assert "eval_loss, eval_f1, train_loss, tokens_per_second" in error.value.paragraph()
    assert "did you mean `eval_f1`?" in error.value.paragraph()
    with raises_error(ConfigError, code="no-evaluation"):
        check_metric(Metric("eval_loss", False), False, None)


def test_json_has_the_documented_keys(tmp_path: Path) -> None:
    state = SweepState(tmp_path)
    result = json.loads(json.dumps(state.as_json(state.add(("lora.rank=8", "seed=1")))))
    assert result == {
        "overrides": {"lora.rank": 8, "seed": 1},
        "status": "pending",
        "metric": None,
        "output_dir": str(tmp_path / "rank-8_seed-1"),
        "time_to_first_step_s": None,
        "wall_s": None,
        "error": None,
    }
