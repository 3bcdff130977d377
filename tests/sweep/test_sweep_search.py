"""Test the search of a sweep with Optuna itself; the results of runs are written by the tests."""

import math
from pathlib import Path

from paceline.core.event_log import EventLog
from paceline.sweep.metric import Metric
from paceline.sweep.search import Search
from paceline.sweep.space import parse_space
from paceline.sweep.state import SweepRun, SweepState, load_state

METRIC = Metric("eval_loss", False)
SPACE = parse_space(["learning_rate=1e-5..1e-1:log", "lora.rank=4..16:4", "optim=adamw,sgd"])


def make_search(state: SweepState, num_trials: int, prunes: bool = True) -> Search:
    return Search(SPACE, state, METRIC, num_trials, 42, prunes)


def complete(search: Search, run: SweepRun, status: str = "done") -> None:
    """Give a run a loss that is lowest at a learning rate of 1e-3."""
    run["status"] = status
    rate = float(run["overrides"]["learning_rate"])
    run["metric"] = abs(math.log10(rate) + 3)
    search.finish(run)
    search.state.save()


def next_run(search: Search) -> SweepRun:
    run = search.next_run()
    assert run is not None
    return run


def test_suggestions_are_in_the_space_and_differ(tmp_path: Path) -> None:
    search = make_search(SweepState(tmp_path), 12)
    for number in range(1, 13):
        run = next_run(search)
        assert run["name"] == f"trial-{number:03d}"
        assert search.progress() == f"trial {number} of 12"
        assert 1e-5 <= run["overrides"]["learning_rate"] <= 1e-1
        assert run["overrides"]["lora.rank"] in (4, 8, 12, 16)
        assert run["overrides"]["optim"] in ("adamw", "sgd")
        complete(search, run)
    assert search.next_run() is None
    assert len({tuple(run["arguments"]) for run in search.runs}) == 12


def test_interrupted_search_continues_with_the_interrupted_run(tmp_path: Path) -> None:
    search = make_search(SweepState(tmp_path), 4)
    complete(search, next_run(search))
    interrupted = next_run(search)
    interrupted["status"] = "running"
    search.state.save()

    state = load_state(tmp_path)
    again = make_search(state, 4)
    run = next_run(again)
    assert run["arguments"] == interrupted["arguments"]
    assert run["name"] == "trial-002"
    complete(again, run)
    complete(again, next_run(again))
    complete(again, next_run(again))
    assert again.next_run() is None
    assert [run["name"] for run in state.runs] == [f"trial-00{number}" for number in range(1, 5)]
    assert len({tuple(run["arguments"]) for run in state.runs}) == 4


def test_run_that_is_worse_than_the_median_is_pruned(tmp_path: Path) -> None:
    search = make_search(SweepState(tmp_path), 8)
    for _ in range(3):
        run = next_run(search)
        assert not search.observe(run, 1, 2.0)
        assert not search.observe(run, 2, 1.0)
        complete(search, run)
    run = next_run(search)
    assert not search.observe(run, 1, 1.5)
    assert search.observe(run, 2, 3.0)
    assert not search.observe(run, 2, 3.0)  # after a restart, the step is evaluated again
    complete(search, run, "pruned")
    # The earlier values are also known after the command is run again.
    for done in search.runs[:3]:
        (tmp_path / done["name"]).mkdir()
        log = EventLog(tmp_path / done["name"] / "events.jsonl")
        log.emit({"type": "eval", "step": 2, "loss": 1.0})
        log.close()
    again = make_search(load_state(tmp_path), 8)
    run = next_run(again)
    assert again.observe(run, 2, 3.0)


def test_runs_outside_of_a_changed_space_do_not_count(tmp_path: Path) -> None:
    state = SweepState(tmp_path)
    inside = state.add(("learning_rate=0.001", "lora.rank=8", "optim=sgd"))
    state.add(("learning_rate=0.5", "lora.rank=8", "optim=sgd"))
    state.add(("learning_rate=0.001", "lora.rank=7", "optim=sgd"))
    state.add(("learning_rate=0.001", "lora.rank=8", "optim=lion"))
    state.add(("lora.rank=8",))
    assert make_search(state, 4).runs == [inside]


def test_search_ends_when_every_value_was_tried(tmp_path: Path) -> None:
    space = parse_space(["lora.rank=4,8"])
    state = SweepState(tmp_path)
    search = Search(space, state, METRIC, 10, 42, True)
    for _ in range(2):
        run = next_run(search)
        run["status"], run["metric"] = "done", 1.0
        search.finish(run)
    assert search.next_run() is None
    assert search.num_trials == 2
