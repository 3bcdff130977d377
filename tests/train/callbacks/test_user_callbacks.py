"""Callbacks of the user: their hooks, requests and state, and errors in their files."""

import json
from pathlib import Path

import pytest
from commands import events
from scripted_task import config_of, final_weight, prepare, run_here, run_on_ranks

import paceline
from paceline.core.errors import ConfigError, RunError

LOSSES = {2: 3.0, 3: 2.5, 4: 1.0, 5: 1.0, 6: 2.0, 8: 1.5}
CALLS: list[str] = []


class Recorder(paceline.Callback):
    """Records its calls, evaluates and saves after step 3, and stops after step 5."""

    def __init__(self, config):
        super().__init__(config)
        self.seen = 0

    def on_train_begin(self, info, state):
        CALLS.append(f"begin {state.step} of {info.steps} on {info.rank}/{info.world_size}")
        assert info.model.weight.shape == (1,)

    def on_step_begin(self, state):
        CALLS.append(f"step {state.step + 1}")

    def on_step_end(self, result, state):
        self.seen += 1
        CALLS.append(f"end {state.step} {result.outcome} {result.figures['loss']:.0f}")
        if state.step == 3:
            self.request_evaluation()
            self.request_save()
        if state.step == 5:
            self.request_stop("five steps are enough")

    def on_evaluation_end(self, result, state):
        CALLS.append(f"evaluation {state.step} {result.loss}")

    def on_checkpoint_saved(self, step, path):
        CALLS.append(f"saved {step} {path.name}")

    def on_train_end(self, state):
        CALLS.append(f"train end {state.step}")

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state.get("seen", 0)


class RequestsOnLastRank(paceline.Callback):
    """Makes its requests on rank 1 only."""

    def on_train_begin(self, info, state):
        self.rank = info.rank

    def on_step_end(self, result, state):
        if self.rank == 1 and state.step == 3:
            self.request_stop("rank 1 asks for it")


class Unusual(paceline.Callback):
    def on_epoch_end(self, state):
        pass

    def on_step_end(self, result, state):
        raise KeyError("missing")


class WithoutJson(paceline.Callback):
    def state_dict(self):
        return {"path": Path("x")}


class Unrelated:
    pass


def callback(name: str) -> str:
    return f"{__file__}:{name}"


def test_hooks_requests_and_state(tmp_path: Path) -> None:
    CALLS.clear()
    config = config_of(
        tmp_path,
        LOSSES,
        callbacks=[callback("Recorder")],
        train_args__async_save=False,
        train_args__save_steps=0,
    )
    report = run_here(config)
    assert (report["steps"], report["stop_reason"]) == (5, "five steps are enough")
    assert final_weight(tmp_path) == 5.0
    expected = "begin 0 of 8 on 0/1, step 1, end 1 updated 0, step 2, end 2 updated -1"
    expected += ", evaluation 2 3.0, step 3, end 3 updated -2, evaluation 3 2.5"
    expected += ", saved 3 step-00000003, step 4, end 4 updated -3, evaluation 4 1.0, step 5"
    expected += ", end 5 updated -4, saved 5 step-00000005, evaluation 5 1.0, train end 5"
    assert ", ".join(CALLS) == expected
    meta = json.loads((tmp_path / "checkpoints/step-00000005/meta.json").read_text())
    assert meta["callbacks"] == {callback("Recorder"): {"seen": 5}}
    assert meta["stop_reason"] == "five steps are enough"
    # Without the callback, the run is not complete: it continues.
    CALLS.clear()
    assert prepare(config).finished is not None
    assert run_here(config | {"callbacks": []})["steps"] == 8
    assert CALLS == []


def test_errors_in_the_file_are_reported_before_the_start(tmp_path: Path) -> None:
    file = tmp_path / "broken_callbacks.py"
    file.write_text("import paceline\nx = 1 / 0\n")
    cases = {
        f"{file}:Any": r"ZeroDivisionError: division by zero .*line 2",
        f"{tmp_path}/none.py:Any": "file not found",
        callback("Recordr"): r"no class Recordr.*did you mean `Recorder`",
        callback("Unrelated"): "Unrelated is not a subclass of paceline.Callback",
        callback("WithoutJson"): r"state_dict\(\) does not return JSON",
        "Recorder": "names no class",
    }
    for text, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            prepare(config_of(tmp_path / "run", LOSSES, callbacks=[text]))
    assert not (tmp_path / "run").exists()


def test_error_in_a_hook_names_the_callback_and_the_line(tmp_path: Path, caplog) -> None:
    with pytest.raises(RunError, match=r"on_step_end of the callback .*Unusual failed: KeyError"):
        run_here(config_of(tmp_path, LOSSES, callbacks=[callback("Unusual")]))
    assert "defines on_epoch_end, which Paceline does not call; did you mean" in caplog.text


@pytest.mark.soak
def test_request_of_one_rank_counts_on_all(tmp_path: Path) -> None:
    config = config_of(tmp_path, LOSSES, callbacks=[callback("RequestsOnLastRank")])
    run_on_ranks(config, 2)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["steps"], report["stop_reason"]) == (3, "rank 1 asks for it")
    assert [event["step"] for event in events(tmp_path, "eval")] == [2, 3]


def test_example_ends_when_its_time_is_used_up(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    example = "./examples/my_callback.py:TimeBudget"
    config = config_of(tmp_path, LOSSES, callbacks=[example], task_args__max_minutes=0.0)
    report = run_here(config)
    assert (report["steps"], report["stop_reason"]) == (1, "the training took 0.0 minutes")
