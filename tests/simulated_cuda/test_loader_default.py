"""On an accelerator, a process collates micro-batches ahead of the step by default. It is never
forked from a rank, which uses the device."""

from pathlib import Path

import pytest
from commands import losses
from device_runs import run_on, train_on

pytestmark = pytest.mark.slow

TASK = Path(__file__).with_name("loader_task.py")


def train(device: str, folder: Path, *args: str) -> tuple[list[str], str]:
    """Train, and return the lines of the notes and standard error."""
    notes = folder.with_suffix(".notes")
    error = run_on(
        device, f"task={TASK}:LoaderTask", "model=x", "dataset=x", "max_steps=6", "eval_steps=3",
        "precision=32", "parallel.num_gpus=2", "parallel.mode=ddp", f"task_args.notes={notes}",
        "per_device_train_batch_size=4", f"output_dir={folder}", *args, verb="train",
    ).stderr  # fmt: skip
    return notes.read_text().splitlines(), error


def test_one_process_by_default(tmp_path: Path) -> None:
    lines, error = train("cuda", tmp_path / "run")
    in_rank, _ = train("cuda", tmp_path / "in-rank", "dataloader_num_workers=0")
    assert set(lines) <= {"server", "rank"}
    assert set(in_rank) == {"rank"}
    # The ranks themselves collate only what is checked before the training.
    training = lines.count("server")
    assert training >= 6 * 2 * 2
    assert lines.count("rank") == len(in_rank) - training
    assert "loader process" not in error
    assert losses(tmp_path / "run") == losses(tmp_path / "in-rank")


def test_data_that_cannot_be_copied(tmp_path: Path) -> None:
    lines, error = train("cuda", tmp_path / "run", "task_args.module=true")
    assert set(lines) == {"rank"}
    assert "without a loader process, because the dataset or the task holds a module" in " ".join(
        error.split()
    )


def test_tokens(tmp_path: Path) -> None:
    for name, count in (("auto", "auto"), ("none", "0")):
        train_on("cuda", tmp_path / name, f"dataloader_num_workers={count}", "parallel.num_gpus=1")
    assert losses(tmp_path / "auto") == losses(tmp_path / "none")
