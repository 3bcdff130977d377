"""Tests of the TensorBoard event files."""

import math
import sys
from pathlib import Path

import pytest
from test_console import make_start_event, make_step_event

from paceline.core.errors import ConfigError
from paceline.core.run_dir import RunDir
from paceline.observe.tensorboard import TensorBoardListener, check_tensorboard


def test_tensorboard_files_contain_scalars(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    listener = TensorBoardListener(tmp_path)
    evaluation = {
        "type": "eval",
        "time": 1003.0,
        "step": 3,
        "loss": 1.25,
        "metrics": {"accuracy": 0.5},
    }
    for event in (
        make_start_event(),
        make_step_event(1),
        make_step_event(2, "nan"),
        make_step_event(3, 1.0),
        evaluation,
        {"type": "run_end", "time": 1004.0, "status": "done"},
    ):
        listener(event)
    listener.close()
    assert listener.error is None
    accumulator = EventAccumulator(str(RunDir(tmp_path).root / "tensorboard"))
    accumulator.Reload()
    losses = [scalar.value for scalar in accumulator.Scalars("train/loss")]
    assert losses[0] == 1.5
    assert math.isnan(losses[1])
    assert [scalar.step for scalar in accumulator.Scalars("train/loss")] == [1, 2, 3]
    assert accumulator.Scalars("train/tokens_per_second")[0].value == 6400
    assert accumulator.Scalars("eval/loss")[0].value == 1.25
    assert accumulator.Scalars("memory/rank_1_bytes")[0].value == 3 * 2**29
    assert {"train/learning_rate", "train/grad_norm", "eval/accuracy"} <= set(
        accumulator.Tags()["scalars"]
    )


def test_missing_tensorboard_is_config_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[tensorboard\]'"):
        check_tensorboard()
