"""The sweep that the compared runs belong to."""

import json
from pathlib import Path

import pytest
from event_logs import finished

from paceline.sweep.metric import Metric
from paceline.sweep.state import SweepState


def write_sweep(folder: Path) -> SweepState:
    state = SweepState(folder, metric=Metric("accuracy", maximize=True))
    for number, rank in enumerate((8, 16, 64)):
        run = state.add((f"lora.rank={rank}",))
        run["status"], run["metric"] = "done", number / 10
        finished(folder / run["name"])
    state.importance = {"lora.rank": 1.0}
    state.save()
    return state


def test_compared_runs_of_one_sweep_have_its_plots(serve, tmp_path):
    write_sweep(tmp_path / "sweep")
    finished(tmp_path / "other")
    served = serve(tmp_path)
    ids = [served.find_run_id(name) for name in ("rank-8", "rank-64")]
    sweep = served.get(f"/api/compare?ids={','.join(ids)}")["sweep"]
    assert (sweep["metric"], sweep["maximize"]) == ("accuracy", True)
    assert sweep["importance"] == {"lora.rank": 1.0}
    # Also the runs that are not compared have a link.
    assert sweep["ids"] == {
        name: served.find_run_id(name) for name in ("rank-8", "rank-16", "rank-64")
    }
    assert [trial["name"] for trial in sweep["plots"]["trials"]] == ["rank-64", "rank-16", "rank-8"]
    other = served.find_run_id("other")
    assert served.get(f"/api/compare?ids={ids[0]},{other}")["sweep"] is None
    assert served.get(f"/api/compare?ids={other}")["sweep"] is None


@pytest.mark.parametrize(
    "change",
    [
        {"runs": 5},
        {"runs": [None, {"name": 5}]},
        {"metric": "loss", "importance": [1], "version": None},
        {"metric": {"name": None, "maximize": 1}, "importance": {"a": "b"}},
    ],
)
def test_unusable_state_of_a_sweep_is_no_error(serve, tmp_path, change):
    write_sweep(tmp_path / "sweep")
    path = tmp_path / "sweep/sweep.json"
    state = json.loads(path.read_text())
    values = (10**400, float("nan"), {"a": [1]})
    for run, value in zip(state["runs"], values, strict=True):
        run["overrides"]["odd"] = value
    path.write_text(json.dumps({**state, **change}))
    served = serve(tmp_path)
    ids = [served.find_run_id(name) for name in ("rank-8", "rank-64")]
    sweep = served.get(f"/api/compare?ids={','.join(ids)}")["sweep"]
    assert sweep is None or sweep["importance"] is None
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert served.get(f"/api/compare?ids={','.join(ids)}")["sweep"] is None
