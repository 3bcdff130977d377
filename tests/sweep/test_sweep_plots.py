"""Test the plots of a sweep: positions on the axes, the importance of parameters, and the page."""

import json
import sys
from pathlib import Path

import pytest

from paceline.observe.report.parameters import Trial, place_trials
from paceline.sweep.importance import parameter_importance
from paceline.sweep.metric import Metric
from paceline.sweep.page import write_page
from paceline.sweep.state import SweepRun, SweepState

LOSS = Metric("eval_loss", maximize=False)


def grid(folder: Path, runs: int = 12) -> SweepState:
    """A grid in which the learning rate decides the loss, and the rank does nearly nothing."""
    state = SweepState(folder, metric=LOSS)
    for number in range(runs):
        rate, rank = (1e-4, 1e-3, 1e-2)[number % 3], (4, 8)[number % 2]
        run = state.add((f"learning_rate={rate}", f"lora.rank={rank}", f"seed={number // 6}"))
        run["status"], run["metric"] = "done", rate * 100 + rank / 1e4
    return state


def test_runs_are_placed_by_their_values() -> None:
    trials = [
        Trial("a", "done", {"train_args.learning_rate": 1e-4, "optim": "adamw", "seed": 1}, 2.0),
        Trial("b", "done", {"train_args.learning_rate": 1e-3, "optim": "lion", "seed": 1}, 1.0),
        Trial("c", "pruned", {"train_args.learning_rate": 1e-2, "optim": "sgd", "seed": 1}, 3.0),
        Trial("d", "failed", {"train_args.learning_rate": 1e-2, "optim": "sgd"}, None),
    ]
    plots = place_trials(trials, "eval_loss", maximize=False)
    assert plots is not None
    rate, optim = plots["axes"]
    assert (rate["name"], rate["is_log"], optim["is_log"]) == ("learning_rate", True, False)
    assert [tick["text"] for tick in rate["ticks"]] == ["0.0001", "0.001", "0.01"]
    assert [tick["at"] for tick in optim["ticks"]] == [0.0, 0.5, 1.0]
    assert [trial["name"] for trial in plots["trials"]] == ["b", "a", "c"]
    assert [trial["share"] for trial in plots["trials"]] == [0.0, 0.5, 1.0]
    assert plots["trials"][0]["at"] == [pytest.approx(0.5), 0.5]
    assert [trial["metric_at"] for trial in plots["trials"]] == [0.0, 0.5, 1.0]
    assert plots["trials"][0]["text"] == "learning_rate 0.001, optim lion: eval_loss 1.0000"
    highest = place_trials(trials, "accuracy", maximize=True)
    assert highest is not None
    assert highest["trials"][0]["name"] == "c"


def test_many_numbers_have_few_round_ticks() -> None:
    trials = [Trial(str(n), "done", {"dropout": n / 40, "x": 10 ** (-n / 4)}, n) for n in range(20)]
    plots = place_trials(trials, "loss", maximize=False)
    assert plots is not None
    for axis in (*plots["axes"], plots["metric"]):
        assert 2 <= len(axis["ticks"]) <= 7
        assert all(0 <= tick["at"] <= 1 for tick in axis["ticks"])
    assert [tick["text"] for tick in plots["axes"][0]["ticks"]] == ["0", "0.1", "0.2", "0.3", "0.4"]


def test_no_plots_without_results() -> None:
    assert place_trials([], "loss", maximize=False) is None
    same = [Trial(name, "done", {"rank": 8}, 1.0) for name in "ab"]
    assert place_trials(same, "loss", maximize=False) is None
    equal = [Trial(name, "done", {"rank": rank}, 1.0) for name, rank in (("a", 1), ("b", 2))]
    plots = place_trials(equal, "loss", maximize=False)
    assert plots is not None
    assert [trial["metric_at"] for trial in plots["trials"]] == [0.5, 0.5]


def test_importance_of_a_grid(tmp_path: Path) -> None:
    runs = grid(tmp_path).runs
    importance = parameter_importance(runs, LOSS)
    assert importance is not None
    assert next(iter(importance)) == "learning_rate"
    assert importance["learning_rate"] > 0.6
    assert sum(importance.values()) == pytest.approx(1, abs=1e-3)
    assert parameter_importance(runs[:3], LOSS) is None
    one_parameter: list[SweepRun] = [
        {**run, "overrides": {"seed": number}} for number, run in enumerate(runs)
    ]
    assert parameter_importance(one_parameter, LOSS) is None


def test_importance_needs_optuna(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert parameter_importance(grid(tmp_path).runs, LOSS) is None


def test_page_and_state_have_the_plots(tmp_path: Path) -> None:
    state = grid(tmp_path)
    state.importance = {"learning_rate": 0.9, "lora.rank": 0.1}
    state.save()
    stored = json.loads((tmp_path / "sweep.json").read_text())
    assert stored["metric"] == {"name": "eval_loss", "maximize": False}
    assert stored["importance"] == state.importance
    write_page(state, state.runs, LOSS)
    page = (tmp_path / "sweep.html").read_text()
    assert page.count('class="parameter-box"') == 3
    assert page.count('class="dot done') == 36
    assert page.count('class="parallel-axis"') == 4
    assert "90 %" in page
    state.runs[0]["overrides"]["lora.rank"] = "<script>"
    write_page(state, state.runs, LOSS)
    assert "rank <script>" not in (tmp_path / "sweep.html").read_text()
