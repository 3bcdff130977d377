"""Test on simulated CUDA devices that the largest micro-batch of a run is tried before its first
step, and that the trial leaves no trace."""

from pathlib import Path

import pytest
from commands import events, losses
from device_runs import run_on
from safetensors.torch import load_file

from paceline.checkpoint import store
from paceline.core.files import cache_dir

pytestmark = pytest.mark.slow

TASK = Path(__file__).with_name("trial_task.py")
SIZE = "train_args.per_device_train_batch_size"


@pytest.fixture(autouse=True)
def no_history() -> None:
    """Keep the settings that worked in one test from being used in the next one."""
    (cache_dir() / "memory-settings.json").unlink(missing_ok=True)


def train(device: str, folder: Path, *args: str, max_steps: int = 8, expect: int = 0) -> list[int]:
    """Train, and return the rows of each micro-batch of rank 0 and 1."""
    notes = folder.with_suffix(".notes")
    run_on(
        device,
        f"task={TASK}:TrialTask",
        "model=x",
        "dataset=x",
        f"max_steps={max_steps}",
        "precision=32",
        "lr_scheduler_type=constant",
        "parallel.num_gpus=1",
        "parallel.mode=single",
        f"task_args.notes={notes}",
        f"output_dir={folder}",
        *args,
        verb="train",
        expect=expect,
    )
    return [int(line) for line in notes.read_text().split()]


def test_largest_micro_batch_is_tried_first_and_leaves_no_trace(tmp_path: Path) -> None:
    on_cpu = train("cpu", tmp_path / "cpu")
    on_device = train("cuda", tmp_path / "cuda")
    assert on_device[0] == max(on_cpu) > on_cpu[0]
    assert on_device[1:] == on_cpu
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-5)
    [file] = store.find(tmp_path / "cuda").glob("state-*.safetensors")
    assert load_file(file)["buffer/1.num_batches_tracked"] == 8
    # A run that resumes has no trial.
    resumed = train("cuda", tmp_path / "cuda", "--allow-config-change", max_steps=9)
    assert len(resumed) == len(on_device) + 1


def test_settings_that_do_not_fit_show_before_the_first_step(tmp_path: Path) -> None:
    args = ("task_args.batch_norm=false",)
    rows = train("cpu", tmp_path / "cpu", *args)
    limit = f"task_args.max_rows={max(rows) - 1}"
    folder = tmp_path / "cuda"
    tried = train("cuda", folder, *args, limit)
    [event] = events(folder, "memory_fallback")
    assert event["settings"][SIZE] == 2
    assert event["step"] is None
    assert tried[0] == max(rows) > tried[1]
    assert losses(folder) == pytest.approx(losses(tmp_path / "cpu"), rel=1e-5)


def test_micro_batches_of_a_model_with_batch_norm_do_not_change(tmp_path: Path) -> None:
    train("cuda", tmp_path / "run", "task_args.max_rows=1", expect=1)
    changed = [event["settings"] for event in events(tmp_path / "run", "memory_fallback")]
    assert changed == [{"parallel.cpu_offload": "optimizer"}]
