"""Selection of the best model: `load_best_model_at_end`, `save_best` and `early_stopping`."""

import json
import shutil
from pathlib import Path

import pytest
from commands import events
from raised import raises_error
from scripted_task import config_of, final_weight, prepare, run_here, run_on_ranks

from paceline.checkpoint.format import step_of
from paceline.checkpoint.store import committed
from paceline.core.errors import ConfigError, RunError
from paceline.core.stop import StopFlag
from paceline.train.callbacks.selection import Selection

LOSSES = {2: 3.0, 4: 1.0, 6: 2.0, 8: 1.5}


def saved_steps(folder: Path) -> list[int]:
    return [step_of(path.name) for path in committed(folder / "checkpoints")]


def selection_of(folder: Path, step: int) -> dict[str, object]:
    meta = json.loads((folder / f"checkpoints/step-{step:08d}/meta.json").read_text())
    return meta["callbacks"]["ModelSelection"]


def test_improvements_exceed_min_delta_and_not_finite_values_never_count() -> None:
    selection = Selection("loss")
    for step, value in enumerate((float("nan"), 2.0, 1.9, 1.8, 1.0), start=1):
        selection.add(step, value, greater_is_better=False, min_delta=0.15)
        counts = selection.num_without_improvement, selection.best_step
        assert counts == [(1, None), (0, 2), (1, 3), (0, 4), (0, 5)][step - 1]
    selection.add(6, 1.0, greater_is_better=False, min_delta=0.0)
    assert (selection.best_step, selection.num_without_improvement) == (5, 1)


def test_model_has_the_best_weights_and_their_checkpoint_is_kept(tmp_path: Path) -> None:
    report = run_here(
        config_of(
            tmp_path,
            LOSSES,
            train_args__load_best_model_at_end=True,
            train_args__save_total_limit=1,
            train_args__save_steps=3,
        )
    )
    assert report["best"] == {"step": 4, "metric": "loss", "value": 1.0, "is_final": True}
    assert (report["steps"], report["final_eval_loss"]) == (8, 1.5)
    assert final_weight(tmp_path) == 4.0
    assert saved_steps(tmp_path) == [4, 8]
    assert [event["best_step"] for event in events(tmp_path, "eval")] == [2, 4, 4, 4]
    page = (tmp_path / "report.html").read_text()
    assert "Best evaluation" in page


def test_early_stopping_on_a_loss_that_is_not_finite_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nan = float("nan")
    config = config_of(
        tmp_path, LOSSES | {6: nan, 8: nan}, train_args__early_stopping={"patience": 2}
    )
    with pytest.raises(RunError, match="loss is nan at step 8, so training has diverged") as caught:
        run_here(config)
    assert "the best evaluation was at step 4" in caught.value.paragraph()
    assert not (tmp_path / "model").exists()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum("not finite" in text for text in warnings) == 2


def test_early_stopping_by_a_metric_ends_the_run_which_is_then_complete(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        LOSSES | {6: 1.2, 8: 1.1},
        train_args__early_stopping={"patience": 2},
        train_args__metric_for_best_model="eval_score",
        train_args__max_steps=20,
    )
    report = run_here(config)
    assert report["steps"] == 8
    assert report["best"] == {"step": 4, "metric": "score", "value": -1.0, "is_final": False}
    assert report["stop_reason"].startswith("early stopping: score has not improved in 2 evaluat")
    assert final_weight(tmp_path) == 8.0
    (end,) = events(tmp_path, "run_end")
    assert (end["status"], end["reason"]) == ("done", report["stop_reason"])
    assert prepare(config).finished is not None
    longer = config | {"train_args.early_stopping": {"patience": 3}}
    assert prepare(longer).finished is None
    shutil.rmtree(tmp_path / "model")  # as if the run had been killed before it wrote the model
    assert run_here(config)["steps"] == 8
    assert run_here(longer)["steps"] == 10


def test_resumed_run_selects_as_the_undisturbed_one(tmp_path: Path) -> None:
    settings = {
        "train_args__load_best_model_at_end": True,
        "train_args__early_stopping": {"patience": 3},
        "train_args__save_total_limit": None,
        "train_args__max_steps": 20,
        "train_args__save_steps": 1,
        "train_args__async_save": False,
    }
    losses = {2: 3.0, 4: 1.0, 6: 2.0, 8: 1.5, 10: 1.5, 12: 0.5}
    expected = run_here(config_of(tmp_path / "whole", losses, **settings))
    assert (expected["steps"], expected["best"]["step"]) == (10, 4)
    for step in (3, 4, 7, 8, 10):
        folder = tmp_path / f"from-{step}"
        shutil.copytree(tmp_path / "whole" / "checkpoints", folder / "checkpoints")
        for later in range(step + 1, 11):
            shutil.rmtree(folder / f"checkpoints/step-{later:08d}")
        report = run_here(config_of(folder, losses, **settings))
        assert (report["steps"], report["best"]) == (10, expected["best"])
        assert report["stop_reason"] == expected["stop_reason"]
        assert final_weight(folder) == 4.0
        assert selection_of(folder, 10) == selection_of(tmp_path / "whole", 10)


def test_evaluation_that_a_signal_prevented_is_made_up_for(tmp_path: Path) -> None:
    config = config_of(tmp_path, LOSSES, train_args__load_best_model_at_end=True)

    class StopInStep4(StopFlag):
        @property
        def wanted(self) -> bool:
            return len(events(tmp_path, "step")) == 3

    report = run_here(config, StopInStep4())
    assert (report["status"], report["steps"], report["final_eval_loss"]) == ("stopped", 4, 3.0)
    report = run_here(config)
    assert (report["steps"], report["best"]["step"]) == (8, 4)
    assert [event["step"] for event in events(tmp_path, "eval")] == [2, 4, 6, 8]
    assert final_weight(tmp_path) == 4.0


def test_unknown_metric_and_missing_validation_data_are_errors(tmp_path: Path) -> None:
    args = {"train_args__metric_for_best_model": "scor"}
    with raises_error(ConfigError, code="unknown-best-metric"):
        run_here(config_of(tmp_path, LOSSES, **args))
    config = config_of(tmp_path / "other", {}, train_args__early_stopping={})
    with raises_error(ConfigError, code="no-validation-data"):
        prepare(config)


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3", "local_sgd"])
def test_best_weights_with_each_strategy(mode: str, tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        LOSSES,
        parallel__mode=mode,
        train_args__load_best_model_at_end=True,
        train_args__per_device_train_batch_size=8,
    )
    if mode == "local_sgd":
        config["local_sgd.sync_every"] = 2
    run_on_ranks(config, 2)
    assert final_weight(tmp_path) == 4.0
    assert json.loads((tmp_path / "report.json").read_text())["best"]["is_final"]
