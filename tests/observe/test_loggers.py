"""Metric loggers: each client writes locally, a resumed run continues its run at the tracker, and a
slow or failing tracker does not affect the run."""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from raised import raises_error
from test_console import make_start_event, make_step_event

from paceline.config.load import load_config
from paceline.config.packages import check_loggers
from paceline.core.errors import ConfigError
from paceline.core.run_dir import RunDir
from paceline.observe.loggers import metric_logger
from paceline.observe.loggers.base import TrackedRun
from paceline.observe.loggers.metric_logger import MetricLogger
from paceline.observe.loggers.registry import open_loggers

EVALUATION = {
    "type": "eval",
    "time": 1003.0,
    "step": 3,
    "loss": 1.25,
    "metrics": {"accuracy": 0.5},
}


def log_run(name: str, folder: Path, *losses: float | str, resumed_from: int | None = None) -> None:
    """Log the steps after ``resumed_from``, an evaluation and a report."""
    folder.mkdir(exist_ok=True)
    values = {"model": "m", "dataset": "d", "output_dir": str(folder), "report_to": [name]}
    config = load_config(None, values).config
    environment = dict(os.environ)
    (listener,) = open_loggers(config, RunDir(folder))
    start = {**make_start_event(), "resumed_from_step": resumed_from}
    start["config"] = config.model_dump(mode="json")
    listener(start)
    for step, loss in enumerate(losses, start=(resumed_from or 0) + 1):
        listener(make_step_event(step, loss))
    listener(EVALUATION)
    listener.finish({"tokens_per_second": 7.0, "status": "done", "data": {"read": 5}})
    listener.close()
    for variable in os.environ.keys() - environment.keys():  # set by a client
        del os.environ[variable]
    assert listener.error is None
    assert listener.num_dropped == 0


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_run("tensorboard", tmp_path, 1.5, "nan", 1.0)
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    losses = [scalar.value for scalar in accumulator.Scalars("train/loss")]
    assert losses[0] == 1.5
    assert math.isnan(losses[1])
    assert [scalar.step for scalar in accumulator.Scalars("train/loss")] == [1, 2, 3]
    assert accumulator.Scalars("train/tokens_per_second")[0].value == 6400
    assert accumulator.Scalars("eval/loss")[0].value == 1.25
    assert accumulator.Scalars("memory/rank_1_bytes")[0].value == 3 * 2**29
    assert accumulator.Scalars("report/data/read")[0].value == 5
    assert {"train/learning_rate", "train/grad_norm", "eval/accuracy"} <= set(
        accumulator.Tags()["scalars"]
    )


@pytest.mark.soak
def test_mlflow_run_is_continued_after_a_resume(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "trials")
    log_run("mlflow", tmp_path / "run", 1.5, 1.25)
    log_run("mlflow", tmp_path / "run", 1.0, resumed_from=2)
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("trials")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((metric.step, metric.value) for metric in history) == [
        (1, 1.5),
        (2, 1.25),
        (3, 1),
    ]
    assert run.data.metrics["eval/accuracy"] == 0.5
    assert run.data.metrics["report/tokens_per_second"] == 7.0
    assert run.data.params["train_args.max_length"] == "1024"
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")


@pytest.mark.soak
def test_trackio_run_is_continued_after_a_resume(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    log_run("trackio", tmp_path / "run", 1.5, 1.25)
    log_run("trackio", tmp_path / "run", 1.0, resumed_from=2)
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("paceline", "run")
    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(1, 1.5), (2, 1.25), (3, 1.0)]


class BlockedTracker:
    """A tracker that blocks until it is released."""

    released = threading.Event()
    id = "blocked"

    def __init__(self, run: TrackedRun) -> None:
        self.steps: list[int] = []

    def log(self, scalars: Mapping[str, float], step: int, time_s: float) -> None:
        self.released.wait()

    def finish(self, has_failed: bool) -> None:
        pass


def test_slow_tracker_blocks_nothing_and_its_dropped_records_are_reported(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(metric_logger, "_MAX_PENDING", 3)
    monkeypatch.setattr(metric_logger, "_FINISH_S", 0.5)
    BlockedTracker.released.clear()
    listener = MetricLogger("blocked", BlockedTracker, RunDir(tmp_path))
    listener(make_start_event())
    for step in range(1, 21):
        listener(make_step_event(step))
    assert 16 <= listener.num_dropped <= 17  # three wait, and the tracker may have taken one
    listener.finish({"tokens_per_second": 7.0})
    assert "blocked failed (did not finish within 0 s" in caplog.text.replace("0.5", "0")
    BlockedTracker.released.set()


def test_failing_tracker_is_reported_once(tmp_path: Path, caplog) -> None:
    def fail(run: TrackedRun) -> BlockedTracker:
        raise ConnectionError("no route to host")

    listener = MetricLogger("broken", fail, RunDir(tmp_path))
    listener(make_start_event())
    deadline = time.monotonic() + 10
    while listener.error is None and time.monotonic() < deadline:
        time.sleep(0.01)
    for step in range(1, 4):
        listener(make_step_event(step))
    listener.finish({})
    assert caplog.text.count("broken failed (no route to host); it receives no more figures") == 1
    assert not (tmp_path / "trackers.json").exists()


def test_missing_client_is_an_error_before_the_start(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    config = load_config(None, {"model": "m", "dataset": "d", "report_to": "comet_ml"}).config
    with raises_error(ConfigError, code="missing-package", naming="comet_ml"):
        check_loggers(config)


@pytest.mark.soak
def test_wandb_offline(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_run("wandb", tmp_path / "run", 1.5, 1.25)
    log_run("wandb", tmp_path / "run", 1.0, resumed_from=2)
    ids = json.loads((tmp_path / "run/trackers.json").read_text())
    folders = sorted((tmp_path / "run/wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert all(folder.name.endswith(ids["wandb"]) for folder in folders)
    content = b"".join(file.read_bytes() for file in folders[0].glob("*.wandb"))
    assert b"train/loss" in content
    assert b"eval/accuracy" in content


@pytest.mark.soak
def test_swanlab_local(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("SWANLAB_LOG_DIR", str(tmp_path / "swanlog"))
    log_run("swanlab", tmp_path / "run", 1.5, 1.25)
    content = b"".join(
        file.read_bytes() for file in (tmp_path / "swanlog").rglob("*") if file.is_file()
    )
    assert b"train/loss" in content


@pytest.mark.soak
def test_comet_offline(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("COMET_START_ONLINE", "false")
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path))
    log_run("comet_ml", tmp_path / "run", 1.5, 1.25)
    ids = json.loads((tmp_path / "run/trackers.json").read_text())
    (archive,) = tmp_path.glob("*.zip")
    assert archive.stem.startswith(ids["comet_ml"])
