"""Test that on CUDA devices the optimizer skips updates with non-finite gradients on the device;
the host detects it one step later."""

import json
from pathlib import Path
from typing import Any

import faulty_task
import pytest
import torch
from commands import events, report, run

from paceline.checkpoint.format import name_of
from paceline.checkpoint.reader import CheckpointReader
from paceline.data.order.samples import SampleOrder

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ORDER = SampleOrder(faulty_task.SAMPLES, 16, 7)


def train(folder: Path, bad: list[int], *args: str, expect: int = 0) -> str:
    arguments = {"bad": bad, "flags": str(folder.parent)}
    settings = (
        "max_steps=14",
        "seed=7",
        "per_device_train_batch_size=16",
        "save_steps=1",
        "save_total_limit=null",
    )
    task = (
        f"task={faulty_task.__file__}:Faulty",
        f"task_args={json.dumps(arguments)}",
        "model=small",
        "dataset=none",
    )
    return run(
        *task, *settings, "parallel.num_gpus=1", f"output_dir={folder}", *args, expect=expect
    ).stderr


def read_tensors(folder: Path, step: int) -> dict[str, Any]:
    with CheckpointReader(folder / "checkpoints" / name_of(step)) as reader:
        return {
            name: reader.read(name, (0,) * len(shape), shape)
            for name, (_, shape) in reader.tensors().items()
        }


@pytest.mark.parametrize("optim", ["adamw", "sgd"])
def test_step_with_nan_gradient_is_skipped(tmp_path: Path, optim: str) -> None:
    bad = [int(ORDER.global_batch(10)[0, 1])]
    stderr = train(tmp_path / "run", bad, f"optim={optim}")
    assert "step 11: the gradient is not finite; the update is skipped" in stderr
    assert [event["step"] for event in events(tmp_path / "run", "skipped")] == [11]
    assert report(tmp_path / "run")["skipped_steps"] == 1
    before, after, later = (read_tensors(tmp_path / "run", step) for step in (10, 11, 12))
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == {"schedule/step", "data/position"}
    assert any(
        not torch.equal(tensor, after[name])
        for name, tensor in later.items()
        if name.startswith("model/")
    )


def test_too_many_skipped_steps_end_the_run(tmp_path: Path) -> None:
    bad = [int(ORDER.global_batch(step)[0, 1]) for step in (6, 7, 8)]
    stderr = train(tmp_path / "run", bad, "recovery.max_consecutive_skips=3", expect=1)
    assert "3 consecutive steps (up to step 9) had non-finite gradients" in stderr
